"""The difference between two plans' step times, by the parts of both."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sim.report.explain_knobs import Knob, knobs_between
from sim.report.explain_parts import Parts, in_order
from sim.report.report import Report

__all__ = ["Difference", "PartDifference", "difference"]


class PartDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One part of two steps [s]: ``difference_s`` is this plan's less the other's."""

    part: str
    this_s: float
    other_s: float
    difference_s: float


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """This plan against another.

    Args:
        plan, plan_hash: of the other. step_time_s: [s] its own. difference_s: this less the other.
        parts, path_parts: by part, mean over ranks and critical path; each adds up to
            ``difference_s``. knobs: that differ.
        note: why the seconds are not of equal work, or "".
    """

    plan: str
    plan_hash: str
    step_time_s: float
    difference_s: float
    parts: tuple[PartDifference, ...]
    path_parts: tuple[PartDifference, ...]
    knobs: tuple[Knob, ...]
    note: str = ""


def difference(this: tuple[Report, Parts, Parts], other: tuple[Report, Parts, Parts]) -> Difference:
    """Attribute the difference of two step times.

    Args:
        this, other: report, parts of the mean over ranks and parts of the critical path.
    """
    report, base = this[0], other[0]
    plan = base.run.layout.plan
    return Difference(
        plan=plan.name,
        plan_hash=plan.hash,
        step_time_s=base.metrics.step_time_s,
        difference_s=report.metrics.step_time_s - base.metrics.step_time_s,
        parts=_by_part(this[1], other[1]),
        path_parts=_by_part(this[2], other[2]),
        knobs=knobs_between(report, base),
        note=_note(report, base),
    )


def _by_part(this: Mapping[str, float], other: Mapping[str, float]) -> tuple[PartDifference, ...]:
    rows = []
    for name in in_order((*this, *other)):
        a, b = this.get(name, 0.0), other.get(name, 0.0)
        rows.append(PartDifference(part=name, this_s=a, other_s=b, difference_s=a - b))
    return tuple(rows)


def _note(report: Report, base: Report) -> str:
    a, b = report.basis.tokens_per_step, base.basis.tokens_per_step
    if abs(a - b) <= 1e-9 * max(a, b):
        return ""
    return (
        f"a step of this plan holds {a:,.0f} tokens, one of the other {b:,.0f}: the seconds are "
        "not of equal work"
    )
