"""Real training along the order of a simulated plan: loss against simulated seconds."""

from __future__ import annotations

import numpy as np
import pytest

from sim.engine.faults import ChipLoss, Straggler
from sim.engine.simulate import Run, simulate
from strategies.data.cosim import train_async
from strategies.data.cosim_learners import Network, ring_data
from strategies.data.cosim_local import train_sync
from strategies.data.cosim_order import round_ends
from strategies.data.cosim_task import Task, at_training_loss
from strategies.data.delayed import DelayedKnobs, rule_of
from strategies.data.delayed_runs import delays_of, order_of
from tests.unit.delayed_cases import plan_of, problem_of

TRAIN, TEST = ring_data(120, 80, seed=5)
TASK = Task(learner=Network(num_features=2, hidden=6), train=TRAIN, test=TEST, batch=10, seed=6)
SLOW = Straggler(ranks=(0,), factor=4.0)


def run_of(variant: str, steps: int) -> Run:
    problem = problem_of([3.0, 3.1, 2.9, 3.0], rate=8e7, update=0.01)
    return simulate(plan_of(problem, variant=variant), problem, steps=steps, faults=[SLOW])


def test_a_straggler_holds_up_synchronous_training_only() -> None:
    served = run_of("server", 120)
    late = train_async(TASK, order_of(served), rule_of(DelayedKnobs(), 0.1), every=20)
    in_step = train_sync(TASK, round_ends(run_of("allreduce", 120)), [0, 1, 2, 3], 0.1)
    goal = 0.9 * float(in_step.train[0])
    first, second = at_training_loss(late, goal), at_training_loss(in_step, goal)
    assert first is not None and second is not None and first.time < second.time
    assert np.isfinite(late.train).all() and not late.diverged


def test_the_same_seed_trains_the_same_way() -> None:
    order = order_of(run_of("server", 20))
    first, second = (train_async(TASK, order, rule_of(DelayedKnobs(), 0.1)) for _ in range(2))
    assert order == order_of(run_of("server", 20))
    assert first.train.tobytes() == second.train.tobytes()
    assert first.times.tolist() == [0.0, *(a.time for a in order)]


def test_rules_of_arithmetic() -> None:
    run = run_of("server", 20)
    order = order_of(run)
    late = [t - a.read for t, a in enumerate(order)]
    scaled = train_async(TASK, order, rule_of(DelayedKnobs(rule="scaled"), 0.1))
    np.testing.assert_allclose(scaled.rates, [0.1 / (1 + tau) for tau in late])
    bound = delays_of(run).max - 1
    dropped = train_async(TASK, order, rule_of(DelayedKnobs(rule="drop", bound=bound), 0.1))
    assert 0 < sum(r == 0.0 for r in dropped.rates) < len(order)
    capped = train_async(
        TASK, order, rule_of(DelayedKnobs(rule="capped", bound=7), 0.1, smoothness=2.0)
    )
    np.testing.assert_allclose(capped.rates, 1 / (20 * 2.0 * 8))
    same = train_async(TASK, order, rule_of(DelayedKnobs(), 0.1))
    compensated = train_async(TASK, order, rule_of(DelayedKnobs(rule="compensated"), 0.1))
    assert compensated.train[-1] != pytest.approx(same.train[-1], rel=1e-9)


def test_training_goes_on_when_a_worker_is_lost() -> None:
    problem = problem_of([3.0] * 3, rate=8e7, update=0.01)
    lost = ChipLoss(rank=1, at=20.0)
    run = simulate(plan_of(problem), problem, steps=15, faults=[lost])
    order = order_of(run)
    count = {w: sum(a.worker == w for a in order) for w in range(3)}
    assert count[0] == count[2] == 15 and 0 < count[1] < 10
    assert train_async(TASK, order, rule_of(DelayedKnobs(), 0.1)).times[-1] == run.makespan
