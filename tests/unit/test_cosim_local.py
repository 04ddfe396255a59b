"""Rounds: synchronous SGD, local SGD, DiLoCo, streaming DiLoCo, against loops written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sim.errors import InputError
from strategies.data.cosim import Rule, train_async
from strategies.data.cosim_learners import LeastSquares, Network, Samples, linear_data, ring_data
from strategies.data.cosim_local import (
    Fragments,
    Outer,
    quantise,
    train_local,
    train_streaming,
    train_sync,
)
from strategies.data.cosim_order import fixed_delay, stream
from strategies.data.cosim_task import Inner, Task

TRAIN, TEST = linear_data(60, 40, 6, seed=1)
RINGS = ring_data(120, 80, seed=5)
TASK = Task(learner=LeastSquares(num_features=6), train=TRAIN, test=TEST, batch=4, seed=3)
WHOLE = Task(learner=LeastSquares(num_features=6), train=TRAIN, test=TEST)
SPLIT = Task(learner=LeastSquares(num_features=6), train=TRAIN, test=TEST, split=True)
NETWORK = Task(
    learner=Network(num_features=2, hidden=6), train=RINGS[0], test=RINGS[1], batch=10, seed=6
)
DILOCO = Outer(rate=0.7, momentum=0.9)


def seconds(n: int) -> list[float]:
    return [0.5 * (k + 1) for k in range(n)]


@pytest.mark.parametrize("task", [TASK, NETWORK], ids=["linear", "network"])
def test_one_worker_in_step_is_the_order_without_delay_bit_for_bit(task: Task) -> None:
    alone = train_sync(task, seconds(40), [0], 0.1)
    order = train_async(task, fixed_delay(40, 0, seconds=0.5), Rule(rate=0.1))
    for field in ("times", "updates", "samples", "train", "test", "params", "delays"):
        assert getattr(alone, field).tobytes() == getattr(order, field).tobytes(), field


def test_workers_in_step_take_the_mean_of_their_gradients() -> None:
    run = train_sync(TASK, seconds(10), [0, 2, 5], 0.1)
    streams, params = [stream(TASK.seed, "batches", w) for w in (0, 2, 5)], np.zeros(6)
    for _ in range(10):
        picks = [rng.integers(0, 60, size=4) for rng in streams]
        params = params - 0.1 * np.mean(
            [TASK.learner.gradient(params, TRAIN.take(p)) for p in picks], axis=0
        )
    np.testing.assert_allclose(run.params, params, rtol=1e-12)
    assert run.samples.tolist() == [12 * k for k in range(11)]


def test_equal_shares_in_step_are_the_whole_set() -> None:
    parts = train_sync(SPLIT, seconds(20), range(4), 0.2)
    whole = train_sync(WHOLE, seconds(20), [0], 0.2)
    np.testing.assert_allclose(parts.params, whole.params, rtol=1e-10)
    assert parts.samples.tolist() == whole.samples.tolist()


def test_one_local_step_and_the_mean_is_in_step() -> None:
    local = train_local(TASK, seconds(20), range(3), Inner(rate=0.1, steps=1), Outer())
    np.testing.assert_allclose(
        local.params, train_sync(TASK, seconds(20), range(3), 0.1).params, rtol=1e-10
    )
    assert local.samples[-1] == 20 * 3 * 4 and local.rate_sum[-1] == pytest.approx(2.0)


def test_diloco_by_hand() -> None:
    inner = Inner(rate=0.05, steps=3, steps_of={1: 5})
    run = train_local(TASK, seconds(8), [0, 1], inner, DILOCO)
    streams, theta, m = [stream(TASK.seed, "batches", w) for w in (0, 1)], np.zeros(6), np.zeros(6)
    for _ in range(8):
        ways = []
        for rng, steps in zip(streams, (3, 5), strict=True):
            own = theta
            for _ in range(steps):
                pick = rng.integers(0, 60, size=4)
                own = own - 0.05 * TASK.learner.gradient(own, TRAIN.take(pick))
            ways.append(theta - own)
        mean = (ways[0] + ways[1]) / 2
        m = 0.9 * m + mean
        theta = theta - 0.7 * (mean + 0.9 * m)
    np.testing.assert_allclose(run.params, theta, rtol=1e-12)
    assert run.samples[-1] == 8 * (3 + 5) * 4


def test_diloco_of_one_worker_is_delayed_nesterov_without_delay() -> None:
    inner = Inner(rate=0.05, steps=4)
    rounds = train_local(TASK, seconds(12), [0], inner, DILOCO)
    order = train_async(TASK, fixed_delay(12, 0), Rule(rate=0.7, momentum=0.9), inner=inner)
    np.testing.assert_allclose(order.params, rounds.params, rtol=1e-10)


def test_adamw_by_hand() -> None:
    inner = Inner(rate=0.01, steps=2, optimizer="adamw", decay=0.1)
    run = train_local(WHOLE, seconds(6), [0], inner, Outer())
    params, m, v = np.zeros(6), np.zeros(6), np.zeros(6)
    for k in range(1, 13):
        g = WHOLE.learner.gradient(params, TRAIN)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        step = (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)
        params = params * (1 - 0.01 * 0.1) - 0.01 * step
    np.testing.assert_allclose(run.params, params, rtol=1e-9)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_one_fragment_is_diloco_bit_for_bit(bits: int) -> None:
    inner, outer = Inner(rate=0.05, steps=4), Outer(rate=0.7, momentum=0.9, bits=bits)
    rounds = train_local(NETWORK, seconds(9), range(3), inner, outer)
    times = [0.125 * (k + 1) for k in range(36)]
    streaming = train_streaming(NETWORK, times, range(3), inner, outer, Fragments())
    for field in ("times", "updates", "samples", "train", "test", "params"):
        assert getattr(streaming, field).tobytes() == getattr(rounds, field).tobytes(), field


@pytest.mark.parametrize("overlap", [1, 2])
def test_fragments_by_hand(overlap: int) -> None:
    """Overlap 2 is the distance: an answer is used just before the next fragment leaves."""
    inner, cut = Inner(rate=0.05, steps=4), Fragments(count=2, overlap=overlap, mix=0.25)
    run = train_streaming(TASK, seconds(17), [0, 1], inner, Outer(rate=0.8), cut)
    streams = [stream(TASK.seed, "batches", w) for w in (0, 1)]
    theta, own = np.zeros(6), [np.zeros(6), np.zeros(6)]
    on_wire, left = None, 0
    for k in range(1, 18):
        for w in (0, 1):
            pick = streams[w].integers(0, 60, size=4)
            own[w] = own[w] - 0.05 * TASK.learner.gradient(own[w], TRAIN.take(pick))
        if on_wire and k - left == overlap:
            part, mean = on_wire
            theta = theta.copy()
            theta[part] -= 0.8 * mean
            for w in (0, 1):
                own[w][part] = 0.25 * own[w][part] + 0.75 * theta[part]
            on_wire = None
        if k % 2 == 0:
            part = slice(0, 3) if k % 4 == 2 else slice(3, 6)
            on_wire, left = (part, np.mean([theta[part] - p[part] for p in own], axis=0)), k
    np.testing.assert_allclose(run.params, theta, rtol=1e-12)
    assert len(run.rates) == 9 - overlap and run.times.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 8.5]


def test_a_worker_that_keeps_its_own_values_never_hears_the_others() -> None:
    cut = Fragments(count=2, mix=1.0)
    inner = Inner(rate=0.05, steps=2)
    run = train_streaming(TASK, seconds(40), [0], inner, Outer(), cut, every=1)
    plain = train_sync(TASK, seconds(40), [0], 0.05)
    # Both halves of the shared parameters follow the worker, one local step apart.
    np.testing.assert_allclose(run.params[3:], plain.params[3:], rtol=1e-10)
    assert not np.allclose(run.params[:3], plain.params[:3], rtol=1e-6, atol=0)


def test_fewer_bits_are_further_from_the_exact_run() -> None:
    inner = Inner(rate=0.05, steps=5)

    def end(bits: int) -> np.ndarray:
        return train_local(
            TASK, seconds(20), range(4), inner, Outer(rate=0.7, momentum=0.9, bits=bits)
        ).params

    away = [float(np.linalg.norm(end(bits) - end(0))) for bits in (4, 8, 16)]
    assert away[0] > away[1] > away[2] > 0.0


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantise(bits: int) -> None:
    values = np.random.default_rng(1).normal(size=200)
    found = quantise(values, bits)
    scale = np.abs(values).max() / (2 ** (bits - 1) - 1)
    assert np.abs(found - values).max() <= 0.5 * scale * (1 + 1e-12)
    assert len(np.unique(np.rint(found / scale))) <= 2**bits - 1
    np.testing.assert_allclose(quantise(found, bits), found, rtol=1e-12)
    assert quantise(values, 0) is values
    assert not quantise(np.zeros(3), bits).any()


def test_the_low_communication_ways_learn() -> None:
    start = NETWORK.learner.loss(NETWORK.start(), RINGS[1])
    inner = Inner(rate=0.2, steps=20)
    diloco = train_local(NETWORK, seconds(40), range(4), inner, DILOCO, every=10)
    cut = Fragments(count=4, overlap=2, mix=0.5)
    times = [0.05 * (k + 1) for k in range(800)]
    streaming = train_streaming(
        NETWORK, times, range(4), inner, Outer(rate=0.7, momentum=0.9, bits=8), cut
    )
    assert start > 0.6
    assert diloco.test[-1] < 0.2 and streaming.test[-1] < 0.2


def test_divergence_ends_the_run_and_is_said() -> None:
    times = seconds(5000)
    inner = Inner(rate=5.0, steps=2)
    cut = Fragments(count=2)
    runs = [
        train_sync(TASK, times, [0], 5.0, every=1000),
        train_local(TASK, times, [0], inner, Outer(), every=1000),
        train_streaming(TASK, times, [0], inner, Outer(), cut, every=1000),
    ]
    assert all(run.diverged and run.times[-1] < times[-1] for run in runs)


@pytest.mark.parametrize(
    "cut",
    [
        Fragments(count=3),
        Fragments(count=8),
        Fragments(count=2, overlap=3),
        Fragments(mix=1.5),
        Fragments(count=0),
    ],
)
def test_fragments_that_do_not_fit(cut: Fragments) -> None:
    with pytest.raises(InputError):
        train_streaming(TASK, seconds(4), [0], Inner(rate=0.1, steps=4), Outer(), cut)


def test_arguments_that_are_none() -> None:
    with pytest.raises(InputError):
        train_sync(TASK, [1.0, 0.5], [0], 0.1)
    with pytest.raises(InputError):
        train_sync(TASK, [], [0], 0.1)
    with pytest.raises(InputError):
        Inner(rate=0.1, steps=0)
    for wrong in ({"rate": 0.0}, {"momentum": 1.0}, {"bits": 1}, {"bits": -2}):
        with pytest.raises(InputError):
            Outer(**wrong)
    few = Task(
        learner=LeastSquares(num_features=1),
        train=Samples(np.ones((2, 1)), np.ones(2)),
        test=Samples(np.ones((2, 1)), np.ones(2)),
        split=True,
    )
    with pytest.raises(InputError):
        train_sync(few, [1.0], range(3), 0.1)
