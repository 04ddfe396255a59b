"""Orders of writes from delay models."""

from __future__ import annotations

import numpy as np
import pytest

from sim.errors import InputError
from strategies.data.cosim import Rule, train_async
from strategies.data.cosim_learners import LeastSquares, linear_data
from strategies.data.cosim_order import (
    Arrival,
    check_order,
    delay_table,
    drawn_delays,
    fixed_delay,
    published_delays,
    published_protocol,
    stream,
)
from strategies.data.cosim_task import Task

TRAIN, TEST = linear_data(60, 40, 6, seed=1)
TASK = Task(learner=LeastSquares(num_features=6), train=TRAIN, test=TEST, batch=4, seed=3)


def test_fixed_delay() -> None:
    order = fixed_delay(5, 2, seconds=0.5)
    assert [(a.time, a.worker, a.read) for a in order] == [
        (0.5, 0, 0),
        (1.0, 0, 0),
        (1.5, 0, 0),
        (2.0, 0, 1),
        (2.5, 0, 2),
    ]


@pytest.mark.parametrize("kind", ["geometric", "uniform"])
def test_drawn_delays_have_their_mean_and_their_seed(kind: str) -> None:
    order = drawn_delays(4000, 6.0, seed=2, kind=kind)
    assert delay_table(order).mean == pytest.approx(6.0, rel=0.05)
    assert order == drawn_delays(4000, 6.0, seed=2, kind=kind)
    assert order != drawn_delays(4000, 6.0, seed=3, kind=kind)
    if kind == "uniform":
        assert delay_table(order).max == 12


@pytest.mark.parametrize(("delay", "per_step"), [(4, 4.0), (8, 2.0), (16, 1.0), (32, 0.5)])
def test_pushes_per_step_of_the_published_protocol(delay: int, per_step: float) -> None:
    order = published_protocol([delay] * 16, 320)
    assert len(order) / 320 == per_step
    times = [a.time for a in order]
    assert max(times.count(t) for t in set(times)) == max(1, 16 // delay)


def test_published_protocol_by_hand() -> None:
    delays, rate = [2, 1, 3], 0.05
    order = published_protocol(delays, 12, seconds=2.0)
    streams = [stream(TASK.seed, "batches", w) for w in range(3)]
    params, pulled = np.zeros(6), [np.zeros(6)] * 3
    for t in range(12):
        total, pushing = np.zeros(6), [i for i in range(3) if (t - i) % delays[i] == 0]
        for i in pushing:
            pick = streams[i].integers(0, 60, size=4)
            total += TASK.learner.gradient(pulled[i], TRAIN.take(pick))
        params = params - rate * total
        for i in pushing:
            pulled[i] = params
    run = train_async(TASK, order, Rule(rate=rate))
    np.testing.assert_allclose(run.params, params, rtol=1e-12)
    assert run.times[-1] == 24.0


def test_delays_drawn_once_as_published() -> None:
    delays = published_delays(400, 8, seed=1)
    assert delays[:2] == (8, 1) and set(delays) == set(range(1, 9))
    assert delays == published_delays(400, 8, seed=1) != published_delays(400, 8, seed=2)
    order = published_protocol(delays, 64)
    steps = {w: [a.time for a in order if a.worker == w] for w in range(16)}
    assert all(set(np.diff(steps[w])) == {delays[w]} for w in range(16))
    with pytest.raises(InputError):
        published_delays(1, 4, seed=0)


def test_streams_are_told_apart_by_seed_and_name() -> None:
    draws = {
        tuple(stream(*key).integers(0, 2**62, size=2))
        for key in ((1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", 1), (1,))
    }
    assert len(draws) == 6
    assert stream(1, "a").normal() == stream(1, "a").normal()


@pytest.mark.parametrize(
    "order",
    [
        (),
        (Arrival(1.0, 0, 1),),
        (Arrival(1.0, 0, -1),),
        (Arrival(1.0, 0, 0), Arrival(0.5, 0, 0)),
    ],
)
def test_orders_that_are_none(order: tuple[Arrival, ...]) -> None:
    with pytest.raises(InputError):
        check_order(order)


def test_the_protocol_refuses_no_delay() -> None:
    with pytest.raises(InputError):
        published_protocol([0, 1], 4)
    with pytest.raises(InputError):
        published_protocol([], 4)
