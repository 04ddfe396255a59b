"""Which knobs differ between two plans, and what one of them by itself is worth."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from sim.errors import HetlabError
from sim.plan.lower import amounts_of, boundaries_of
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.document import StageRow
from sim.report.explain_edits import placed, sound
from sim.report.explain_fit import short_cells
from sim.report.metrics import pace_of_run
from sim.report.record import spans_of_run
from sim.report.report import Report
from sim.report.settled import simulate_settled

__all__ = ["Knob", "knobs_between", "knobs_of_plan"]

GENERATED = ("schedule", "split_backward", "blocking_sends", "blocking_p2p")
"""Lowering calls that the schedule's knob stands for."""


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """A knob that differs.

    Args:
        name: of it. this, other: its values. alone_s: [s] that the other plan's step gains when
            only this knob takes this plan's value, None where it cannot change by itself.
        alone_fits: whether the other plan then still fits, None where it is not known.
    """

    name: str
    this: str
    other: str
    alone_s: float | None = None
    alone_fits: bool | None = None


def knobs_of_plan(report: Report) -> dict[str, str]:
    """Return the knobs of a simulated plan, in words; equal stages are written once."""
    plan, head = report.run.layout.plan, report.plan_document()
    placement, maths, stages = plan.placement, plan.mathematics, head.stages
    used = Counter(
        kind for cell in placement.cells for kind in [cell.accelerator] * len(cell.ranks)
    )
    chips = ", ".join(f"{n} {kind or 'chips'}" for kind, n in sorted(used.items()))
    away = Counter("+".join(s.offload) for s in placement.segments if s.offload)
    written = [c for c in plan.lowering if c.name not in (*GENERATED, "transfers", "gradients")]
    return {
        "cluster": _name(plan, "cluster"),
        "model": str(plan.problem.get("model_name", "")),
        "job": _name(plan, "job"),
        "chips": chips,
        "placement": _each(stages, lambda s: _unlike(c.accelerator or "chip" for c in s.cells)),
        "chip numbers": ",".join(map(str, placement.chips)) or "in order",
        "pp": str(placement.num_stages),
        "dp": str(placement.num_replicas),
        "tp": _each(stages, lambda s: _unlike(str(c.tp) for c in s.cells)),
        "cp": _each(stages, lambda s: _unlike(str(c.cp) for c in s.cells)),
        "ep": str(placement.ep),
        "schedule": head.schedule or "written out op by op",
        "transfers": _transfers(plan),
        "cuts": _each(stages, lambda s: f"{s.layers} layers"),
        "microbatch": str(maths.microbatch),
        "microbatches": _runs([str(n) for n in placement.microbatches]),
        "recompute": _each(stages, lambda s: _unlike(c.recompute for c in s.cells)),
        "zero": str(maths.zero),
        "offload": ", ".join(f"{what} of {n} segments" for what, n in away.items()) or "nothing",
        "sequence parallel": "yes" if maths.sequence_parallel else "no",
        "buffers": str(plan.buffers),
        "barrier": "yes" if plan.barrier else "no",
        "passes": ", ".join(f"{c.name} {c.args or ''}".strip() for c in written) or "none",
    }


def knobs_between(report: Report, other: Report) -> tuple[Knob, ...]:
    """Return the knobs that differ; where both are plans of one problem, with what each is worth.

    Args:
        report: of this plan. other: of the plan it is held against.
    """
    mine, theirs = knobs_of_plan(report), knobs_of_plan(other)
    differ = [name for name in mine if mine[name] != theirs[name]]
    if "placement" in differ or "chips" in differ:
        differ = [name for name in differ if name != "chip numbers"]
    this, base = report.run.layout.plan, other.run.layout.plan
    same = this.problem_hash == base.problem_hash and report.problem is not None
    found = []
    for name in differ:
        alone: tuple[float | None, bool | None] = (None, None)
        if same and report.problem is not None:
            alone = _alone(name, this, other, report.problem)
        found.append(
            Knob(
                name=name,
                this=mine[name],
                other=theirs[name],
                alone_s=alone[0],
                alone_fits=alone[1],
            )
        )
    return tuple(found)


def _alone(
    name: str, this: Plan, other: Report, problem: Problem
) -> tuple[float | None, bool | None]:
    """Step time of the other plan with one knob of this plan, less its own [s]; if it fits."""
    base = other.run.layout.plan
    if name not in _SWAPS:
        return None, None
    changed = _SWAPS[name](base, this, problem)
    if changed is None or changed == base or not sound(changed, problem):
        return None, None
    try:
        run = simulate_settled(changed, problem)
        pace = pace_of_run(run, spans_of_run(run))
        fits = not short_cells(changed, problem) if other.memory else None
    except HetlabError:
        return None, None
    return pace.step_time_s - other.metrics.step_time_s, fits


# -- one knob of a plan in another --------------------------------------------------------------


def _schedule(base: Plan, this: Plan, _: Problem) -> Plan | None:
    """The generator and what varies it; both must have as many virtual stages."""
    if not (base.lowering and this.lowering) or _shape(base) != _shape(this):
        return None
    mine = [c for c in this.lowering if c.name in ("schedule", "split_backward")]
    rest = [c for c in base.lowering if c.name not in ("schedule", "split_backward")]
    return msgspec.structs.replace(base, lowering=(*mine, *rest))


def _recompute(base: Plan, this: Plan, _: Problem) -> Plan | None:
    modes = {c.recompute for c in this.placement.cells}
    if not _same_grid(base, this):
        if len(modes) > 1 or any(s.recompute for s in base.placement.segments):
            return None
        (mode,) = modes
        every = [msgspec.structs.replace(c, recompute=mode) for c in base.placement.cells]
        return placed(base, cells=tuple(every))
    pairs = zip(base.placement.cells, this.placement.cells, strict=True)
    cells = tuple(msgspec.structs.replace(b, recompute=t.recompute) for b, t in pairs)
    return placed(base, cells=cells)


def _cuts(base: Plan, this: Plan, problem: Problem) -> Plan | None:
    placement = this.placement
    whole = not any(s.name for s in (*base.placement.segments, *placement.segments))
    if not whole or _shape(base) != _shape(this):
        return None
    changed = placed(
        base, segments=placement.segments,
        boundaries=boundaries_of(problem.model, placement.segments),
    )  # fmt: skip
    tied = [c.args.get("tied") for c in (*base.lowering, *this.lowering) if c.name == "gradients"]
    own = amounts_of(problem, changed.placement, base.mathematics.microbatch)
    return msgspec.structs.replace(changed, amounts=own) if len(set(map(str, tied))) == 1 else None


def _microbatch(base: Plan, this: Plan, problem: Problem) -> Plan | None:
    old, new = base.mathematics.microbatch, this.mathematics.microbatch
    counts = base.placement.microbatches
    if base.tables or any(n * old % new for n in counts):
        return None
    changed = placed(base, microbatches=tuple(n * old // new for n in counts))
    return msgspec.structs.replace(
        changed,
        mathematics=msgspec.structs.replace(base.mathematics, microbatch=new),
        amounts=base.amounts | amounts_of(problem, changed.placement, new),
    )


def _microbatches(base: Plan, this: Plan, _: Problem) -> Plan | None:
    """Other shares of the batch for the same replicas."""
    mine, theirs = this.placement.microbatches, base.placement.microbatches
    if len(mine) != len(theirs) or sum(mine) != sum(theirs):
        return None
    return placed(base, microbatches=mine)


def _zero(base: Plan, this: Plan, _: Problem) -> Plan | None:
    if max(base.mathematics.zero, this.mathematics.zero) > 1:
        return None
    return _math(base, zero=this.mathematics.zero)


def _sequence(base: Plan, this: Plan, _: Problem) -> Plan | None:
    return _math(base, sequence_parallel=this.mathematics.sequence_parallel)


def _chips(base: Plan, this: Plan, _: Problem) -> Plan | None:
    return placed(base, chips=this.placement.chips) if _same_grid(base, this) else None


def _buffers(base: Plan, this: Plan, _: Problem) -> Plan | None:
    return msgspec.structs.replace(base, buffers=this.buffers)


def _barrier(base: Plan, this: Plan, _: Problem) -> Plan | None:
    return msgspec.structs.replace(base, barrier=this.barrier) if base.lowering else None


_SWAPS: dict[str, Callable[[Plan, Plan, Problem], Plan | None]] = {
    "schedule": _schedule, "recompute": _recompute, "cuts": _cuts, "microbatch": _microbatch,
    "microbatches": _microbatches, "zero": _zero, "sequence parallel": _sequence,
    "chip numbers": _chips, "buffers": _buffers, "barrier": _barrier,
}  # fmt: skip


def _math(plan: Plan, **fields: object) -> Plan:
    return msgspec.structs.replace(
        plan, mathematics=msgspec.structs.replace(plan.mathematics, **fields)
    )


def _shape(plan: Plan) -> list[int]:
    """Position of each virtual stage."""
    return [s.cell for s in plan.placement.stages]


def _same_grid(base: Plan, this: Plan) -> bool:
    def grid(plan: Plan) -> list[tuple[object, ...]]:
        cells = plan.placement.cells
        return [(c.stage, c.replica, c.ranks, c.accelerator, c.tp, c.cp) for c in cells]

    return grid(base) == grid(this)


# -- words --------------------------------------------------------------------------------------


def _name(plan: Plan, part: str) -> str:
    """The document's name, with a hash of its content."""
    document = plan.problem.get(part)
    if document is None:
        return ""
    digest = hashlib.sha256(msgspec.json.encode(document, order="sorted")).hexdigest()[:8]
    return f"{document.get('name', '')} {digest}".strip()


def _transfers(plan: Plan) -> str:
    found = [c.name.replace("_", " ") for c in plan.lowering if c.name in GENERATED[2:]]
    found += ["whole boundaries"] * plan.placement.whole_boundaries
    return ", ".join(found) or "overlapped"


def _each(stages: tuple[StageRow, ...], text: Callable[[StageRow], str]) -> str:
    return _runs([text(s) for s in stages], " | ")


def _unlike(texts: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(texts))


def _runs(texts: list[str], between: str = ", ") -> str:
    """Texts with equal neighbours written once; one text where all are equal."""
    runs: list[tuple[str, int]] = []
    for text in texts:
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    if len(runs) == 1:
        return runs[0][0]
    return between.join(f"{n} x {text}" if n > 1 else text for text, n in runs)
