"""Synchronous, asynchronous, stale synchronous and local training on one machine, side by side.

Every way is a plan of the same draft and runs through the same engine. The order of updates that
comes out then drives real training of a small learner, so loss, delays and seconds belong to one
run. The learner stands in for the job's model: the seconds are those of the model on the machine,
the losses are the learner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sim.engine.faults import Fault
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.problem import Problem
from strategies.data.cosim import train_async
from strategies.data.cosim_local import Fragments, Outer, train_streaming, train_sync
from strategies.data.cosim_task import Inner, Task, Training, at_training_loss
from strategies.data.delayed import rule_of
from strategies.data.study_timing import WAYS, Timing, Way, part_steps, timing_of

__all__ = ["Outcome", "common_loss", "outcome_of", "study", "summary", "train"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A way, simulated and trained at the ``rate`` of the grid that ended lowest."""

    timing: Timing
    rate: float
    training: Training

    @property
    def name(self) -> str:
        """Of the way."""
        return self.timing.way.name


def train(task: Task, timing: Timing, rate: float, *, points: int = 60) -> Training:
    """Train the task as a way would, on its simulated times.

    Args:
        task: what is trained. timing: of the way. rate: eta, of the inner steps where there are.
        points: of the curve, about.
    """
    way = timing.way
    if way.served:
        every = max(1, len(timing.order) // points)
        return train_async(task, timing.order, rule_of(way.served, rate), every=every)
    if way.local is None:
        every = max(1, len(timing.ends) // points)
        return train_sync(task, timing.ends, timing.workers, rate, every=every)
    knobs, part = way.local, part_steps(way)
    cut = Fragments(count=knobs.fragments)
    if knobs.overlap:
        cut = Fragments(count=knobs.fragments, overlap=part, mix=way.mix)
    steps = np.arange(1, part * len(timing.ends) + 1)
    turns = part * np.arange(len(timing.ends) + 1)
    return train_streaming(
        task,
        np.interp(steps, turns, (0.0, *timing.ends)).tolist(),
        timing.workers,
        Inner(rate=rate, steps=knobs.inner),
        Outer(
            rate=way.outer_rate,
            momentum=way.outer_momentum if knobs.momentum else 0.0,
            bits=knobs.bits if knobs.bits < 32 else 0,
        ),
        cut,
        every=part,
    )


def outcome_of(task: Task, timing: Timing, rates: Sequence[float]) -> Outcome:
    """Train at every rate and keep the one with the lowest mean training loss in the last fifth.

    Raises:
        InputError: all rates diverge.
    """
    found = [(train(task, timing, rate), rate) for rate in rates]
    kept = [(t, r) for t, r in found if not t.diverged]
    if not kept:
        raise InputError("every rate diverges", key="rates", found=str(list(rates)))
    training, rate = min(kept, key=lambda x: _late_loss(x[0]))
    return Outcome(timing=timing, rate=rate, training=training)


def _late_loss(training: Training) -> float:
    return float(training.train[training.times >= 0.8 * training.times[-1]].mean())


def study(
    problem: Problem,
    draft: PlanDraft,
    task: Task,
    ways: Sequence[Way] = WAYS,
    *,
    seconds: float,
    rates: Sequence[float],
    faults: Sequence[Fault] = (),
) -> tuple[Outcome, ...]:
    """Simulate and train every way for the same simulated time.

    Args:
        problem: cluster, model, job; inexact plans allowed. draft: synchronous, equal replicas.
        task: what is really trained. ways: what is compared.
        seconds: [s] of simulated time. rates: each way takes its best. faults: e.g. a slow chip.

    Raises:
        InputError: see ``timing_of`` and ``outcome_of``.
    """
    return tuple(
        outcome_of(task, timing_of(problem, draft, w, seconds=seconds, faults=faults), rates)
        for w in ways
    )


def common_loss(outcomes: Sequence[Outcome]) -> float:
    """The lowest training loss that every way reaches."""
    return max(float(o.training.train.min()) for o in outcomes)


def summary(outcomes: Sequence[Outcome], loss: float | None = None) -> list[dict[str, Any]]:
    """One row per way: speed, delay, and losses where ways are alike in one thing.

    Columns end in what is alike: ``end`` the simulated time, ``updates`` the number of updates
    (the smallest final one; an update of a server is one worker's gradient, a round is all of
    them), ``samples`` the samples used, ``loss`` the training loss. ``gap`` is test minus train.
    Between points of a curve values lie on a straight line, which is coarse where a round is long.

    Args:
        outcomes: of ``study``. loss: training loss to compare at; None for ``common_loss``.

    Returns:
        Rows; nan where a way never gets to the loss, delays 0 for rounds.
    """
    goal = common_loss(outcomes) if loss is None else loss
    updates = min(int(o.training.updates[-1]) for o in outcomes)
    samples = min(int(o.training.samples[-1]) for o in outcomes)
    rows = []
    for o in outcomes:
        t, late = o.training, o.timing.delays
        at = at_training_loss(t, goal)
        row: dict[str, Any] = {
            "way": o.name,
            "rate": o.rate,
            "updates/s": o.timing.updates_per_s,
            "samples/s": o.timing.samples_per_s,
            "WAN B/sample": o.timing.wan_bytes_per_sample,
            "mean delay": late.mean if late else 0.0,
            "max delay": late.max if late else 0,
            "train end": float(t.train[-1]),
            "gap end": float(t.test[-1] - t.train[-1]),
        }
        for name, axis, value in (
            ("updates", t.updates, updates),
            ("samples", t.samples, samples),
        ):
            row[f"train {name}"] = float(np.interp(value, axis, t.train))
            row[f"gap {name}"] = float(np.interp(value, axis, t.test - t.train))
        row["s to loss"] = at.time if at else float("nan")
        row["test loss"] = at.test if at else float("nan")
        row["gap loss"] = at.test - at.train if at else float("nan")
        rows.append(row)
    return rows
