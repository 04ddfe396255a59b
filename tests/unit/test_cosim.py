"""Replays along orders of writes, against loops written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from sklearn import datasets

from sim.errors import InputError
from strategies.data.cosim import Rule, train_async
from strategies.data.cosim_learners import (
    LeastSquares,
    Logistic,
    Network,
    Samples,
    linear_data,
    ring_data,
    smoothness,
    two_class_data,
)
from strategies.data.cosim_order import Arrival, drawn_delays, fixed_delay, stream
from strategies.data.cosim_task import Inner, Task, at_training_loss
from strategies.data.staleness import learning_rate_cap, stability_limit

LINEAR = Task(
    learner=LeastSquares(num_features=6),
    train=linear_data(60, 40, 6, seed=1)[0],
    test=linear_data(60, 40, 6, seed=1)[1],
    batch=4,
    seed=3,
)
LOGISTIC = Task(
    learner=Logistic(num_features=5, decay=0.01),
    train=two_class_data(80, 40, 5, seed=2)[0],
    test=two_class_data(80, 40, 5, seed=2)[1],
    batch=8,
    seed=4,
)
RINGS = Task(
    learner=Network(num_features=2, hidden=8, decay=1e-3),
    train=ring_data(100, 60, seed=5)[0],
    test=ring_data(100, 60, seed=5)[1],
    batch=10,
    seed=6,
)
TASKS = {"linear": LINEAR, "logistic": LOGISTIC, "network": RINGS}

# The third miniature's writes: delays 0, 1, 1, 0, 2 of workers 1 and 2.
MINIATURE = tuple(
    Arrival(*a) for a in ((4.25, 1, 0), (7.25, 2, 0), (8.5, 1, 1), (12.75, 1, 3), (14.5, 2, 2))
)


def drawn(task: Task, worker: int) -> object:
    """Function that gives the gradient on the worker's next batch."""
    rng = stream(task.seed, "batches", worker)

    def gradient(params: np.ndarray) -> np.ndarray:
        pick = rng.integers(0, task.train.num_samples, size=task.batch)
        return task.learner.gradient(params, Samples(task.train.x[pick], task.train.y[pick]))

    return gradient


def by_hand(task: Task, order: Sequence[Arrival], rate: float) -> list[np.ndarray]:
    """All versions of delayed SGD at a constant rate."""
    gradients = {a.worker: drawn(task, a.worker) for a in order}
    versions = [task.start()]
    for a in order:
        versions.append(versions[-1] - rate * gradients[a.worker](versions[a.read]))
    return versions


def one_eigenvalue(tau: int, share: float, updates: int) -> np.ndarray:
    """Distance from the optimum, start and end of the last tenth, at a share of the limit."""
    task = Task(
        learner=LeastSquares(num_features=1),
        train=Samples(np.array([[2.0]]), np.array([2.0])),
        test=Samples(np.array([[2.0]]), np.array([2.0])),
    )
    run = train_async(task, fixed_delay(updates, tau), Rule(rate=share * stability_limit(tau) / 4))
    return np.sqrt(2 * run.train)


@pytest.mark.parametrize("name", TASKS)
def test_no_delay_and_one_worker_is_plain_sgd_bit_for_bit(name: str) -> None:
    task, params = TASKS[name], TASKS[name].start()
    gradient = drawn(task, 0)
    losses = [task.learner.loss(params, task.train)]
    for _ in range(50):
        params = params - 0.1 * gradient(params)
        losses.append(task.learner.loss(params, task.train))
    run = train_async(task, fixed_delay(50, 0), Rule(rate=0.1))
    assert run.params.tobytes() == params.tobytes()
    assert run.train.tolist() == losses
    assert run.test[-1] == task.learner.loss(params, task.test)
    assert run.samples.tolist() == [task.batch * k for k in range(51)]
    scaled = train_async(task, fixed_delay(50, 0), Rule(rate=0.1, scaled=True, drop_above=0))
    assert scaled.params.tobytes() == params.tobytes()


@pytest.mark.parametrize("tau", [0, 1, 4, 8, 16, 32])
@pytest.mark.parametrize("name", TASKS)
def test_a_fixed_delay_is_the_delayed_loop_bit_for_bit(name: str, tau: int) -> None:
    task, rng = TASKS[name], stream(TASKS[name].seed, "batches", 0)
    history, params = [task.start()], task.start()
    for t in range(60):
        pick = rng.integers(0, task.train.num_samples, size=task.batch)
        batch = Samples(task.train.x[pick], task.train.y[pick])
        params = params - 0.02 * task.learner.gradient(history[max(0, t - tau)], batch)
        history.append(params)
    run = train_async(task, fixed_delay(60, tau), Rule(rate=0.02), every=7)
    assert run.params.tobytes() == params.tobytes()
    assert run.delays.tolist() == [min(t, tau) for t in range(60)] == run.stale.tolist()
    assert run.updates.tolist() == [0, *range(7, 60, 7), 60]


@pytest.mark.parametrize("name", TASKS)
def test_two_workers_along_the_order_of_the_miniature(name: str) -> None:
    task = TASKS[name]
    run = train_async(task, MINIATURE, Rule(rate=0.05))
    versions = by_hand(task, MINIATURE, 0.05)
    assert run.params.tobytes() == versions[-1].tobytes()
    assert run.train.tolist() == [task.learner.loss(v, task.train) for v in versions]
    assert run.times.tolist() == [0.0, 4.25, 7.25, 8.5, 12.75, 14.5]
    assert run.delays.tolist() == [0, 1, 1, 0, 2]


@pytest.mark.parametrize("tau", [0, 1, 4, 8, 16, 32])
def test_the_run_is_stable_below_the_limit_of_the_theory_and_not_above(tau: int) -> None:
    updates = 600 * (tau + 1)
    below, above = (one_eigenvalue(tau, share, updates) for share in (0.98, 1.02))
    tenth, period = updates // 10, 8 * tau + 4

    def peak(sizes: np.ndarray, at: int) -> float:
        return float(sizes[at : at + period].max())

    assert peak(below, 9 * tenth) < 0.5 * peak(below, tenth)
    assert peak(above, 9 * tenth) > 2.0 * peak(above, tenth)


@pytest.mark.parametrize("tau", [1, 4, 16])
def test_the_run_shrinks_as_the_companion_matrix_says(tau: int) -> None:
    sizes = one_eigenvalue(tau, 0.9, 1500)
    polynomial = np.zeros(tau + 2)
    polynomial[:2], polynomial[-1] = (1.0, -1.0), 0.9 * stability_limit(tau)
    radius = np.abs(np.roots(polynomial)).max()
    period = 8 * tau + 4
    early, late = sizes[200 : 200 + 4 * period].max(), sizes[600 : 600 + 4 * period].max()
    assert (late / early) ** (1 / 400) == pytest.approx(radius, rel=2e-3)


def test_step_over_one_plus_tau() -> None:
    order = drawn_delays(40, 3.0, seed=8)
    run = train_async(LINEAR, order, Rule(rate=0.1, scaled=True))
    rates = [0.1 / (1 + t - a.read) for t, a in enumerate(order)]
    assert run.rates.tolist() == rates
    assert run.rate_sum[-1] == pytest.approx(sum(rates))
    gradient, versions = drawn(LINEAR, 0), [LINEAR.start()]
    for rate, a in zip(rates, order, strict=True):
        versions.append(versions[-1] - rate * gradient(versions[a.read]))
    assert run.params.tobytes() == versions[-1].tobytes()


def test_cap_by_the_largest_delay() -> None:
    mu = smoothness(LINEAR.learner, LINEAR.start(), LINEAR.train)
    hessian = LINEAR.train.x.T @ LINEAR.train.x / LINEAR.train.num_samples
    assert mu == pytest.approx(np.linalg.eigvalsh(hessian).max(), rel=1e-6)
    rule = Rule(rate=0.1, smoothness=mu, tau_max=8)
    run = train_async(LINEAR, fixed_delay(30, 8), rule)
    cap = learning_rate_cap(mu, 8)
    assert run.rates.tolist() == [cap] * 30
    assert run.params.tobytes() == by_hand(LINEAR, fixed_delay(30, 8), cap)[-1].tobytes()
    low = Rule(rate=0.5 * cap, smoothness=mu, tau_max=8)
    assert low.capped_rate == 0.5 * cap


def test_drop_counts_the_age_in_applied_updates() -> None:
    run = train_async(LINEAR, MINIATURE, Rule(rate=0.05, drop_above=0))
    # Write 1 is one applied update old and left out; write 2 read version 1, which nothing has
    # changed since; write 4 read version 2 and two updates came in between.
    assert run.stale.tolist() == [0, 1, 0, 0, 2]
    assert run.delays.tolist() == [0, 1, 1, 0, 2]
    assert run.rates.tolist() == [0.05, 0.0, 0.05, 0.05, 0.0]
    assert run.samples.tolist() == [0, 4, 4, 8, 12, 12]
    assert run.train[2] == run.train[1] and run.train[5] == run.train[4]
    one, params = drawn(LINEAR, 1), LINEAR.start()
    for _ in range(3):
        params = params - 0.05 * one(params)
    assert run.params.tobytes() == params.tobytes()


@pytest.mark.parametrize("slack", [0, 1, 2, 5])
def test_slack_bounds_the_lead_of_what_is_applied(slack: int) -> None:
    rng = stream(9, "who")
    workers = [*rng.choice(3, size=120, p=[0.7, 0.2, 0.1]), 0, 1, 2]
    order = [Arrival(float(t), int(w), t) for t, w in enumerate(workers)]
    run = train_async(LINEAR, order, Rule(rate=0.01, slack=slack))
    clock, left = [0, 0, 0], [workers.count(w) for w in range(3)]
    leads = []
    for w, rate in zip(workers, run.rates.tolist(), strict=True):
        lead = clock[w] - min(clock[v] for v in range(3) if left[v])
        left[w] -= 1
        assert (rate > 0.0) is (lead <= slack)
        if rate:
            leads.append(lead)
            clock[w] += 1
    assert max(leads) == slack and (run.rates == 0.0).any()


def test_no_slack_is_rounds_in_which_every_worker_counts_once() -> None:
    workers = [0, 0, 1, 0, 1, 2, 2, 1, 0, 0, 2]
    order = [Arrival(float(t), w, t) for t, w in enumerate(workers)]
    run = train_async(LINEAR, order, Rule(rate=0.01, slack=0))
    passed = [(t, w) for t, (w, r) in enumerate(zip(workers, run.rates, strict=True)) if r]
    assert passed == [(0, 0), (2, 1), (5, 2), (6, 2), (7, 1), (8, 0), (9, 0), (10, 2)]


def test_slack_of_an_ended_worker_does_not_hold_the_others() -> None:
    order = [Arrival(0.0, 0, 0)] + [Arrival(1.0 + t, 1, t + 1) for t in range(10)]
    assert (train_async(LINEAR, order, Rule(rate=0.01, slack=0)).rates > 0.0).all()


def test_delay_compensation() -> None:
    order = fixed_delay(20, 3)
    run = train_async(LOGISTIC, order, Rule(rate=0.2, compensation=0.7))
    gradient, versions = drawn(LOGISTIC, 0), [LOGISTIC.start()]
    for a in order:
        g = gradient(versions[a.read])
        g = g + 0.7 * g * g * (versions[-1] - versions[a.read])
        versions.append(versions[-1] - 0.2 * g)
    assert run.params.tobytes() == versions[-1].tobytes()
    assert run.params.tobytes() != by_hand(LOGISTIC, order, 0.2)[-1].tobytes()


def test_delayed_nesterov_as_the_sheet_writes_it() -> None:
    order, rule = fixed_delay(20, 2), Rule(rate=0.02, momentum=0.6, buffer=4)
    gradient, versions = drawn(LINEAR, 0), [LINEAR.start()]
    m = acc = np.zeros(6)
    for t, a in enumerate(order, start=1):
        g = gradient(versions[a.read])
        theta, acc = versions[-1] - 0.02 * g / 4, acc + g
        if t % 4 == 0:
            m = 0.6 * m + acc / 4
            theta, acc = theta - 0.02 * 0.6 * m, np.zeros(6)
        versions.append(theta)
    run = train_async(LINEAR, order, rule)
    np.testing.assert_allclose(run.params, versions[-1], rtol=1e-12)


def test_local_steps_along_an_order() -> None:
    run = train_async(LINEAR, MINIATURE, Rule(rate=1.0), inner=Inner(rate=0.05, steps=3))
    gradients = {w: drawn(LINEAR, w) for w in (1, 2)}
    versions = [LINEAR.start()]
    for a in MINIATURE:
        local = versions[a.read]
        for _ in range(3):
            local = local - 0.05 * gradients[a.worker](local)
        versions.append(versions[-1] - 1.0 * (versions[a.read] - local))
    assert run.params.tobytes() == versions[-1].tobytes()
    assert run.samples[-1] == 5 * 3 * 4 and run.rate_sum[-1] == pytest.approx(5 * 3 * 0.05)


def test_same_seed_same_curve_and_another_seed_another_one() -> None:
    order = drawn_delays(30, 2.0, seed=1)
    first, again = (train_async(RINGS, order, Rule(rate=0.1)) for _ in range(2))
    assert first.train.tobytes() == again.train.tobytes()
    other = Task(**{**{f: getattr(RINGS, f) for f in RINGS.__struct_fields__}, "seed": 7})
    assert train_async(other, order, Rule(rate=0.1)).train.tobytes() != first.train.tobytes()


def test_a_workers_batches_do_not_depend_on_rules_or_other_workers() -> None:
    only = [a for a in MINIATURE if a.worker == 1]
    alone = train_async(LINEAR, [Arrival(a.time, 1, 0) for a in only], Rule(rate=0.05))
    both = train_async(LINEAR, [Arrival(a.time, a.worker, 0) for a in MINIATURE], Rule(rate=0.05))
    second = drawn(LINEAR, 2)
    rest = sum(second(LINEAR.start()) for _ in range(2))
    np.testing.assert_allclose(both.params, alone.params - 0.05 * rest, rtol=1e-12)


def test_divergence_ends_the_run_and_is_said() -> None:
    run = train_async(LINEAR, fixed_delay(20_000, 8), Rule(rate=5.0), every=1000)
    assert run.diverged and len(run.rates) < 20_000
    assert run.updates[-1] == len(run.rates)


def test_where_a_run_reaches_a_loss() -> None:
    run = train_async(LINEAR, fixed_delay(200, 2, seconds=0.5), Rule(rate=0.05))
    loss = float(0.3 * run.train[0] + 0.7 * run.train[-1])
    point = at_training_loss(run, loss)
    assert point is not None and point.train == pytest.approx(loss)
    j = int(np.argmax(run.train <= loss))
    assert run.times[j - 1] <= point.time <= run.times[j]
    assert point.time == pytest.approx(0.5 * point.updates)
    assert at_training_loss(run, -1.0) is None
    start = at_training_loss(run, float(run.train[0]) + 1.0)
    assert start is not None and start.time == 0.0


@pytest.mark.parametrize("name", TASKS)
def test_gradients_against_differences(name: str) -> None:
    task = TASKS[name]
    rng = np.random.default_rng(0)
    params = task.start() + 0.3 * rng.normal(size=task.start().shape)
    found = task.learner.gradient(params, task.train)
    for i in range(len(params)):
        step = np.zeros_like(params)
        step[i] = 1e-5
        ahead, behind = (task.learner.loss(params + s * step, task.train) for s in (1, -1))
        assert found[i] == pytest.approx((ahead - behind) / 2e-5, abs=1e-8)


def test_training_learns() -> None:
    linear = train_async(LINEAR, fixed_delay(400, 4), Rule(rate=0.05), every=100)
    assert linear.train[-1] < 0.2 * linear.train[0]
    network = train_async(RINGS, fixed_delay(1500, 4), Rule(rate=0.3), every=500)
    assert network.test[-1] < 0.3 < 0.6 < network.test[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.0},
        {"rate": 0.1, "smoothness": 1.0},
        {"rate": 0.1, "tau_max": 1},
        {"rate": 0.1, "momentum": 1.0},
        {"rate": 0.1, "buffer": 0},
    ],
)
def test_rules_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Rule(**wrong)


def test_samples_that_are_none() -> None:
    with pytest.raises(InputError):
        Samples(np.zeros((3, 2)), np.zeros(2))


@pytest.mark.parametrize("bundled", ["load_diabetes", "load_breast_cancer"])
def test_real_data(bundled: str) -> None:
    x, y = getattr(datasets, bundled)(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    real = bundled == "load_diabetes"
    y = (y - y.mean()) / y.std() if real else y.astype(float)
    learner = (LeastSquares if real else Logistic)(num_features=x.shape[1])
    task = Task(
        learner=learner, train=Samples(x[::2], y[::2]), test=Samples(x[1::2], y[1::2]), batch=16
    )
    mu = smoothness(learner, task.start(), task.train)
    run = train_async(task, fixed_delay(2000, 4), Rule(rate=0.05 / mu), every=500)
    assert run.train[-1] < 0.8 * run.train[0] and run.test[-1] < 0.8 * run.test[0]
