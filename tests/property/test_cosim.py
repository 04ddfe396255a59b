"""Replays along any order: no version is lost, every rule keeps its bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strategies.data.cosim import Rule, train_async
from strategies.data.cosim_learners import LeastSquares, linear_data
from strategies.data.cosim_local import Outer, quantise, train_local, train_sync
from strategies.data.cosim_order import Arrival, delay_table, published_protocol, stream
from strategies.data.cosim_task import Inner, Task, at_training_loss

TRAIN, TEST = linear_data(30, 20, 3, seed=1)
TASK = Task(learner=LeastSquares(num_features=3), train=TRAIN, test=TEST, batch=2, seed=3)


@st.composite
def orders(draw: st.DrawFn) -> tuple[Arrival, ...]:
    length = draw(st.integers(1, 25))
    order, now = [], 0.0
    for t in range(length):
        now += draw(st.sampled_from([0.0, 0.5, 2.0]))
        order.append(Arrival(now, draw(st.integers(0, 3)), draw(st.integers(0, t))))
    return tuple(order)


@given(orders(), st.booleans(), st.sampled_from([0.0, 0.5]), st.sampled_from([None, 0, 3]))
def test_any_order_and_rule_against_a_loop_that_keeps_all_versions(
    order: tuple[Arrival, ...], scaled: bool, compensation: float, drop: int | None
) -> None:
    rule = Rule(rate=0.05, scaled=scaled, compensation=compensation, drop_above=drop)
    run = train_async(TASK, order, rule)
    streams = {w: stream(TASK.seed, "batches", w) for w in range(4)}
    versions, changed = [TASK.start()], []
    for t, a in enumerate(order):
        pick = streams[a.worker].integers(0, 30, size=2)
        g = TASK.learner.gradient(versions[a.read], TRAIN.take(pick))
        age = sum(changed[a.read : t])
        changed.append(drop is None or age <= drop)
        if compensation:
            g = g + compensation * g * g * (versions[-1] - versions[a.read])
        rate = (0.05 / (1 + age) if scaled else 0.05) if changed[-1] else 0.0
        versions.append(versions[-1] - rate * g)
        assert run.stale[t] == age and run.rates[t] == rate
    np.testing.assert_array_equal(run.params, versions[-1])
    np.testing.assert_array_equal(run.train, [TASK.learner.loss(v, TRAIN) for v in versions])


@given(orders(), st.integers(0, 3))
def test_slack_never_lets_a_worker_lead_by_more(order: tuple[Arrival, ...], slack: int) -> None:
    run = train_async(TASK, order, Rule(rate=0.01, slack=slack), every=100)
    clock = {a.worker: 0 for a in order}
    for t, (a, rate) in enumerate(zip(order, run.rates.tolist(), strict=True)):
        unfinished = {b.worker for b in order[t:]}
        lead = clock[a.worker] - min(clock[w] for w in unfinished)
        assert (rate > 0.0) == (lead <= slack)
        clock[a.worker] += rate > 0.0
    loose = train_async(TASK, order, Rule(rate=0.01, slack=len(order)), every=100)
    assert (loose.rates == 0.01).all()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_the_published_protocol_pushes_once_per_delay(delays: list[int], steps: int) -> None:
    order_of = [[t for t in range(steps) if (t - i) % d == 0] for i, d in enumerate(delays)]
    if not any(order_of):
        return
    table = delay_table(published_protocol(delays, steps))
    assert table.worker_updates == {i: len(o) for i, o in enumerate(order_of) if o}
    assert table.mean == pytest.approx(
        sum(table.worker_mean[w] * n for w, n in table.worker_updates.items())
        / sum(table.worker_updates.values())
    )


@given(st.integers(1, 4), st.integers(1, 12), st.floats(0.01, 0.2))
def test_one_local_step_is_in_step_for_any_number_of_workers(
    workers: int, rounds: int, rate: float
) -> None:
    times = list(np.arange(1.0, rounds + 1))
    local = train_local(TASK, times, range(workers), Inner(rate=rate, steps=1), Outer())
    in_step = train_sync(TASK, times, range(workers), rate)
    np.testing.assert_allclose(local.train, in_step.train, rtol=1e-9)


@given(st.floats(0.0, 1.0))
def test_the_place_of_a_loss_is_on_the_curve(share: float) -> None:
    run = train_sync(TASK, list(np.arange(1.0, 30.0)), range(3), 0.1)
    loss = float(run.train.min() + share * (run.train[0] - run.train.min()))
    at = at_training_loss(run, loss)
    assert at is not None and at.train == pytest.approx(loss)
    assert np.interp(at.time, run.times, run.train) == pytest.approx(loss)
    assert (run.train[run.times < at.time] > loss - 1e-12).all()


@example([5e-324], 8)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(2, 12))
def test_quantise_is_odd_and_near(values: list[float], bits: int) -> None:
    x = np.array(values)
    found = quantise(x, bits)
    np.testing.assert_array_equal(quantise(-x, bits), -found)
    step = np.abs(x).max() / (2 ** (bits - 1) - 1)
    assert np.abs(found - x).max() <= 0.5 * step * (1 + 1e-9) + 1e-320
