"""Late amounts in a report: how unevenly work fell on ranks, and what transfers for it took."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.engine.simulate import Run
from sim.plan.flat import flatten
from sim.plan.kinds import KINDS
from sim.plan.op import Op, Ref
from sim.report.links import union
from sim.report.spans import Spans
from sim.units import format_quantity

__all__ = ["LateKind", "LateUse", "late_texts", "late_use"]

Floats = NDArray[np.float64]


class LateKind(msgspec.Struct, frozen=True, kw_only=True):
    """Ops of one kind with late amounts, in a step of one rank; the mean over ranks.

    Args:
        kind: of the ops. busy_s: [s] some of them ran. exposed_s: [s] of it in which the rank's
            compute stream was idle.
    """

    kind: str
    busy_s: float
    exposed_s: float


class LateUse(msgspec.Struct, frozen=True, kw_only=True):
    """Work that falls unevenly on the members of groups, as tables say.

    Args:
        load_max: fullest member over the mean, the mean over steps and work. load_max_p95: its 95th
            percentile. load_spread: standard deviation over members relative to the mean.
        kinds: of transfers and host work with late amounts.
    """

    load_max: float
    load_max_p95: float
    load_spread: float
    kinds: tuple[LateKind, ...] = ()


def late_use(run: Run, spans: Spans) -> LateUse | None:
    """Return what late amounts made of a run, None where no work differs between members.

    Args:
        run: simulated. spans: of it.
    """
    if not run.layout.plan.tables:
        return None
    ops = [op for p in run.layout.programs for op in flatten(p).ops if op.ref is not None]
    loads = [v for ref in _refs(ops, "compute") for v in _vectors(run, ref)]
    if not loads:
        return None
    most = np.array([v.max() / v.mean() for v in loads])
    spread = np.array([v.std() / v.mean() for v in loads])
    moved = {op.kind: None for op in ops if KINDS[op.kind].cost != "compute"}
    return LateUse(
        load_max=float(most.mean()),
        load_max_p95=float(np.percentile(most, 95)),
        load_spread=float(spread.mean()),
        kinds=tuple(_kind(kind, spans, run.layout.steps) for kind in moved),
    )


def _refs(ops: list[Op], cost: str) -> list[Ref]:
    return list({op.ref: None for op in ops if op.ref and KINDS[op.kind].cost == cost})


def _vectors(run: Run, ref: Ref) -> list[Floats]:
    """Values over the members in each step; those that are no vectors, or all 0, left out."""
    values = [run.layout.tables.value(ref, step) for step in range(run.layout.steps)]
    found = [np.asarray(v, np.float64) for v in values]
    return [v for v in found if v.ndim == 1 and v.any()]


def _kind(kind: str, spans: Spans, steps: int) -> LateKind:
    rank, start, end = (spans.columns[k] for k in ("rank", "start_s", "end_s"))
    late = spans.where("kind", kind.__eq__)
    compute = spans.where("stream", lambda s: s == "compute")
    busy = exposed = total = 0.0
    for r in np.unique(rank[compute]).tolist():
        weight = float(spans.columns["weight"][compute & (rank == r)][0])
        mine, other = late & (rank == r), compute & (rank == r)
        both = mine | other
        total += weight
        busy += weight * union(start[mine], end[mine])
        exposed += weight * (union(start[both], end[both]) - union(start[other], end[other]))
    least = 1e-12 * float(end.max(initial=0.0)) * total
    return LateKind(
        kind=kind,
        busy_s=busy / total / steps,
        exposed_s=exposed / total / steps if exposed > least else 0.0,
    )


def late_texts(late: LateUse) -> list[tuple[str, str]]:
    """The section as (name, text)."""
    rows = [
        (
            "uneven work",
            f"fullest {late.load_max:.2f} times the mean (95 %: {late.load_max_p95:.2f}), "
            f"spread {late.load_spread:.2f} of it",
        )
    ]
    for row in late.kinds:
        text = f"{format_quantity(row.busy_s, 'seconds', 3)} a step"
        if row.busy_s:
            exposed = format_quantity(row.exposed_s, "seconds", 3)
            text += f", exposed {exposed}" if row.exposed_s else ", hidden by compute"
        rows.append((row.kind, text))
    return rows
