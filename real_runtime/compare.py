"""A run beside the simulation of its plan, op by op. Imports no torch.

Rows of both span tables are joined by op, rank, peer and microbatch, and each op's duration is the
median over steps. A collective is one op for all members: it lasts from its last member's start to
the last end, so that waiting for members counts for nobody; so does the first OPT of a step, which
sums the gradient's norm over all ranks where it is measured. Measured ends of transfers are upper
bounds (``real_runtime.record``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from real_runtime.compare_run import RunFacts
from real_runtime.spreads import Spread, wide_spreads
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.spans import Spans, span_name

__all__ = [
    "Comparison", "Key", "KindRow", "OpRow", "compare", "durations", "line_up",
]  # fmt: skip

STEPS = 8
"""Steps simulated of a plan without BARRIER."""


class Key(NamedTuple):
    """What is the same op in two tables."""

    kind: str
    stream: str
    op: str
    rank: int
    peer: int
    microbatch: int
    number: int


class OpRow(msgspec.Struct, frozen=True, kw_only=True):
    """One op of a step.

    Args:
        name: as in programs. kind, stage, rank, peer, microbatch: see Spans; -1 for none.
        compute: it runs on the compute stream. members: ranks that it occupies.
        predicted_s, measured_s: [s] medians over steps. measured_low_s, measured_high_s: quartiles.
        steps: measured.
    """

    name: str
    kind: str
    stage: int
    rank: int
    peer: int
    microbatch: int
    compute: bool
    members: int
    predicted_s: float
    measured_s: float
    measured_low_s: float
    measured_high_s: float
    steps: int

    @property
    def off_s(self) -> float:
        """Predicted less measured [s]."""
        return self.predicted_s - self.measured_s


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    """All ops of a kind.

    Args:
        kind: of the ops. ops: of a step. predicted_s, measured_s: [s] of a step, mean over ranks.
        predicted_over_measured: their ratio, None where nothing was measured.
        predicted_share, measured_share: of the step time.
        upper_bound: measured ends are upper bounds.
    """

    kind: str
    ops: int
    predicted_s: float
    measured_s: float
    predicted_over_measured: float | None
    predicted_share: float
    measured_share: float
    upper_bound: bool = False


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A run beside its plan.

    Args:
        plan, plan_hash, version: of the plan. cluster: that it was simulated on.
        ranks, dtype, device, seed: of the run.
        predicted_step_time_s, measured_step_time_s: [s] the latter a median.
        measured_step_low_s, measured_step_high_s: [s] quartiles. steps: measured.
        kinds: by measured share. ops: by distance, the largest first.
        only_predicted, only_measured: names of ops that the other table lacks.
        wide: numbers of the cluster whose measurement spread widely.
        only_first: what was measured is the run's first and only step, which warms up.
    """

    plan: str
    plan_hash: str
    version: str
    cluster: str
    ranks: int
    dtype: str
    device: str
    seed: int
    predicted_step_time_s: float
    measured_step_time_s: float
    measured_step_low_s: float
    measured_step_high_s: float
    steps: int
    kinds: tuple[KindRow, ...]
    ops: tuple[OpRow, ...]
    only_predicted: tuple[str, ...] = ()
    only_measured: tuple[str, ...] = ()
    wide: tuple[Spread, ...] = ()
    only_first: bool = False


def compare(plan: Plan, problem: Problem, run: RunFacts, plan_hash: str = "") -> Comparison:
    """Simulate a plan and put the run beside it.

    Args:
        plan, problem: to simulate. run: to compare with.
        plan_hash: of the plan that ran, where ``plan`` was moved to another cluster.
    """
    from sim.engine.simulate import simulate
    from sim.report.metrics import pace_of
    from sim.report.record import spans_of_run

    simulated = spans_of_run(
        simulate(plan, problem, steps=1 if plan.barrier else STEPS, fold=False, seed=run.seed)
    )
    predicted_s = pace_of(simulated, barrier=plan.barrier).step_time_s
    low, middle, high = np.percentile(run.step_times_s, (25, 50, 75)).tolist()
    ops, only_predicted, only_measured = line_up(simulated, run.spans)
    return Comparison(
        plan=plan.name, plan_hash=plan_hash or plan.hash, version=plan.version,
        cluster=problem.machine.name, ranks=run.ranks, dtype=run.dtype, device=run.device,
        seed=run.seed, predicted_step_time_s=predicted_s, measured_step_time_s=middle,
        measured_step_low_s=low, measured_step_high_s=high, steps=len(run.step_times_s),
        kinds=_kinds(ops, run.ranks, predicted_s, middle), ops=ops,
        only_predicted=only_predicted, only_measured=only_measured,
        wide=wide_spreads(problem.documents["cluster"]), only_first=run.only_first,
    )  # fmt: skip


def line_up(
    predicted: Spans, measured: Spans
) -> tuple[tuple[OpRow, ...], tuple[str, ...], tuple[str, ...]]:
    """Join two span tables op by op.

    Returns:
        Rows of the ops in both, the largest distance first, and the names of those in one only.
    """
    left, _ = durations(predicted)
    right, rows = durations(measured)
    found = []
    for key in right.keys() & left.keys():
        low, middle, high = np.percentile(right[key], (25, 50, 75)).tolist()
        name, stage, compute, members = rows[key]
        found.append(
            OpRow(
                name=name, kind=key.kind, stage=stage, rank=key.rank, peer=key.peer,
                microbatch=key.microbatch, compute=compute, members=members,
                predicted_s=float(np.median(left[key])), measured_s=middle,
                measured_low_s=low, measured_high_s=high, steps=len(right[key]),
            )
        )  # fmt: skip
    found.sort(key=lambda r: (-abs(r.off_s), r.name, r.rank))
    only_left = sorted({f"{k.kind} {k.op or k.stream}" for k in left.keys() - right.keys()})
    only_right = sorted({f"{k.kind} {k.op or k.stream}" for k in right.keys() - left.keys()})
    return tuple(found), tuple(only_left), tuple(only_right)


def durations(
    spans: Spans,
) -> tuple[dict[Key, list[float]], dict[Key, tuple[str, int, bool, int]]]:
    """Return what each op took [s] in each step; and its name, stage, if it computes, its ranks."""
    names = ("kind", "stream", "op", "rank", "peer", "microbatch", "step", "stage", "part",
             "segment", "group", "end_s")  # fmt: skip
    table = zip(*(spans[n].tolist() for n in names), _starts(spans), strict=True)
    times: dict[tuple[int, Key], list[tuple[float, float]]] = defaultdict(list)
    about: dict[Key, tuple[str, int, bool, int]] = {}
    seen: dict[tuple[int, str, int], int] = defaultdict(int)
    for kind, stream, op, rank, peer, mb, step, stage, part, segment, group, end, start in table:
        if group:
            # The n-th op of a member list is the same for all members, whatever program lists it.
            number = seen[step, stream, rank]
            seen[step, stream, rank] += 1
            key = Key(kind, stream, "", -1, -1, mb, number)
        else:
            key = Key(kind, stream if peer >= 0 else "", op, rank, peer, mb, 0)
        times[step, key].append((start, end))
        members = len(times[step, key]) if group else 1 + (peer >= 0)
        text = span_name(kind, stage, mb, part, segment) + (f" {group}" if group else "")
        about.setdefault(key, (text, stage, stream == "compute", members))
        if group:
            about[key] = (about[key][0], *about[key][1:3], members)
    found: dict[Key, list[float]] = defaultdict(list)
    for (_, key), both in times.items():
        found[key].append(max(max(e for _, e in both) - max(s for s, _ in both), 0.0))
    return found, about


def _starts(spans: Spans) -> list[float]:
    """Starts [s]; the first OPT of a rank and measured step starts when the last rank's does."""
    found = spans.columns["start_s"].copy()
    update = spans.where("kind", lambda k: k == "OPT")
    first: dict[int, dict[int, int]] = defaultdict(dict)
    for i in np.flatnonzero(update & spans.where("source", lambda s: s == "measured")).tolist():
        step, rank = int(spans.columns["step"][i]), int(spans.columns["rank"][i])
        if found[i] < found[first[step].setdefault(rank, i)]:
            first[step][rank] = i
    for rows in first.values():
        index = list(rows.values())
        found[index] = found[index].max()
    starts: list[float] = found.tolist()
    return starts


def _kinds(
    ops: Sequence[OpRow], ranks: int, predicted_step_s: float, measured_step_s: float
) -> tuple[KindRow, ...]:
    of_kind: dict[str, list[OpRow]] = defaultdict(list)
    for row in ops:
        of_kind[row.kind].append(row)
    found = []
    for kind, rows in of_kind.items():
        # A transfer is its sender's; a collective occupies every member.
        weights = [1 if r.peer >= 0 else r.members for r in rows]
        predicted = sum(w * r.predicted_s for w, r in zip(weights, rows, strict=True)) / ranks
        measured = sum(w * r.measured_s for w, r in zip(weights, rows, strict=True)) / ranks
        found.append(
            KindRow(
                kind=kind, ops=len(rows), predicted_s=predicted, measured_s=measured,
                predicted_over_measured=predicted / measured if measured else None,
                predicted_share=predicted / predicted_step_s,
                measured_share=measured / measured_step_s,
                upper_bound=rows[0].peer >= 0,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda k: (-k.measured_share, k.kind)))
