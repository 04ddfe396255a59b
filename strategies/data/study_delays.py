"""Fixed delays and the generalization gap: the published direction, and its confound beside it.

arXiv:2308.09430 reports that delay lowers the generalization error under a rate capped at
1/(20 mu (tau + 1)). A capped run also trains less per update. So each delay is trained three times:
late under its own cap, without delay at the same low rate, and late at the rate that the largest
delay allows. The first is also read where all delays have reached one training loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.data.cosim import Rule, train_async
from strategies.data.cosim_learners import smoothness
from strategies.data.cosim_order import fixed_delay
from strategies.data.cosim_task import Task, Training, at_training_loss
from strategies.data.staleness import Bound, learning_rate_cap, rate_limits
from strategies.data.staleness_bounds import Quadratic, convex

__all__ = ["TAUS", "DelayRow", "fixed_delays"]

TAUS = (0, 4, 8, 16, 32)
Floats = NDArray[np.float64]


class DelayRow(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Runs at one fixed delay; losses and gaps are means over tasks.

    A gap is test minus train loss, less that of the first parameters, which know no sample: the
    same mean with less of the luck of the draw.

    Args:
        tau: [updates]. rate: mean cap over tasks. limits: of the rate, at the mean smoothness.
        bound: stability-based estimate of the gap in units of L^2 / smoothness.
        updates: (E,) of the curves. train, gap: (E,) at the cap. prompt_train, prompt_gap: (E,)
            without delay at the same rate. level_gap: (E,) late at the cap of the largest delay.
        at_loss_gap, at_loss_updates: late under its cap, where it reaches the loss that all reach;
            means over tasks.
    """

    tau: int
    rate: float
    limits: tuple[Bound, ...]
    bound: Bound
    updates: NDArray[np.int64]
    train: Floats
    gap: Floats
    prompt_train: Floats
    prompt_gap: Floats
    level_gap: Floats
    at_loss_gap: float
    at_loss_updates: float


def fixed_delays(
    tasks: Sequence[Task], taus: Sequence[int] = TAUS, *, updates: int, every: int = 20
) -> tuple[DelayRow, ...]:
    """Train every task at every fixed delay, with one worker.

    Args:
        tasks: of one kind and unlike seeds. taus: delays [updates], the smallest first; the first
            is the prompt run. updates: T of each run. every: updates between points.

    Raises:
        InputError: no task, or delays that do not grow.
    """
    if not tasks or not taus or list(taus) != sorted(set(taus)):
        raise InputError("one task at least, and delays that grow", key="taus", found=str(taus))
    curves = [smoothness(t.learner, t.start(), t.train) for t in tasks]

    def runs(tau: int, cap_tau: int) -> list[Training]:
        order = fixed_delay(updates, tau)
        return [
            train_async(task, order, Rule(rate=learning_rate_cap(mu, cap_tau)), every=every)
            for task, mu in zip(tasks, curves, strict=True)
        ]

    late = {tau: runs(tau, tau) for tau in taus}
    goals = [max(float(late[tau][i].train.min()) for tau in taus) for i in range(len(tasks))]
    mean = float(np.mean(curves))
    rows = []
    for tau in taus:
        slow, level = runs(taus[0], tau), runs(tau, taus[-1])
        there = _at(late[tau], goals)
        quadratic = Quadratic(
            rate=learning_rate_cap(1.0, tau), updates=updates, samples=tasks[0].train.num_samples
        )
        rows.append(
            DelayRow(
                tau=tau,
                rate=float(np.mean([learning_rate_cap(mu, tau) for mu in curves])),
                limits=rate_limits(mean, tau),
                bound=convex(quadratic, tau),
                updates=late[tau][0].updates,
                train=_mean([r.train for r in late[tau]]),
                gap=_mean([_gap(r) for r in late[tau]]),
                prompt_train=_mean([r.train for r in slow]),
                prompt_gap=_mean([_gap(r) for r in slow]),
                level_gap=_mean([_gap(r) for r in level]),
                at_loss_gap=there[0],
                at_loss_updates=there[1],
            )
        )
    return tuple(rows)


def _mean(curves: Sequence[Floats]) -> Floats:
    return np.asarray(np.mean(np.stack(curves), axis=0), np.float64)


def _gap(run: Training) -> Floats:
    return np.asarray(run.test - run.train - (run.test[0] - run.train[0]))


def _at(runs: Sequence[Training], goals: Sequence[float]) -> tuple[float, float]:
    """Mean gap and updates where each run first reaches its goal."""
    gaps, updates = [], []
    for run, goal in zip(runs, goals, strict=True):
        at = at_training_loss(run, goal)
        assert at is not None  # the goal is a loss that every run has
        gaps.append(at.test - at.train - float(run.test[0] - run.train[0]))
        updates.append(at.updates)
    return float(np.mean(gaps)), float(np.mean(updates))
