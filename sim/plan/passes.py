"""The built-in lowering: a generator and passes that turn a placement into programs.

Each pass is a plain function (variants, plan, args) -> variants. A variant is the op list of one
step for all cells that need the same list: same pipeline position, number of microbatches and
recomputation. Further passes come from the entry-point group ``hetlab.lowering``.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any

import msgspec

from sim.errors import PlanError
from sim.plan.arguments import Arguments, check_call, takes
from sim.plan.deps import EXPERTS
from sim.plan.op import Dep, Op
from sim.plan.p2p import blocking_p2p, blocking_sends, transfers
from sim.plan.placement import CellOffload, Recompute
from sim.plan.plan import Call, Plan
from sim.plan.program import Program, parse_program
from sim.plan.schedules import SCHEDULES, Order, explicit_order, num_microbatches
from sim.plan.variant import Pass, Variant, program_of

__all__ = ["MAX_MICROBATCHES", "PASSES", "SAVES", "expand", "find_pass", "standard_calls"]

MAX_MICROBATCHES = 100_000
"""Most microbatches, and chunks, that are laid out."""

SAVES = {"none": "all", "selective": "selective", "full": "inputs"}
"""What F keeps under each recomputation policy."""


class ScheduleArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``name`` of a schedule and its ``chunks`` per position, or an ``order`` written out."""

    name: str = "1f1b"
    chunks: Annotated[int, msgspec.Meta(ge=1, le=MAX_MICROBATCHES)] = 2
    order: tuple[str, ...] = ()


class GradientArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Virtual stages with routed ``experts``, and those that share a parameter (``tied``)."""

    experts: tuple[int, ...] = ()
    tied: tuple[int, ...] = ()


@takes(ScheduleArguments)
def _schedule(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """The compute order of each position: a named schedule's, or one written out."""
    name = args.get("name", "1f1b")
    if args.get("order"):
        return _explicit(variants, explicit_order(args["order"]))
    if name not in SCHEDULES:
        raise PlanError(
            "unknown schedule", key="lowering", found=name, expected=" ".join(sorted(SCHEDULES))
        )
    extra = (args.get("chunks", 2),) if name == "interleaved" else ()
    orders = {
        m: SCHEDULES[name](plan.placement.num_stages, m, *extra)
        for m in {v.microbatches for v in variants}
    }
    return [
        msgspec.structs.replace(
            v, ops=tuple(_compute(v, slot) for slot in orders[v.microbatches][v.position])
        )
        for v in variants
    ]


def _explicit(variants: list[Variant], order: Order) -> list[Variant]:
    other = [v for v in variants if v.microbatches != num_microbatches(order)]
    if other or len(order) != 1 + max((v.position for v in variants), default=-1):
        raise PlanError(
            "the written schedule does not fit the pipeline",
            key="lowering.schedule.order",
            found=f"{len(order)} rows, {num_microbatches(order)} microbatches",
            expected="one row per position, and the microbatches of every replica",
        )
    return [
        msgspec.structs.replace(v, ops=tuple(_compute(v, slot) for slot in order[v.position]))
        for v in variants
    ]


def _compute(variant: Variant, slot: tuple[str, int, int]) -> Op:
    kind, stage, mb = slot
    keeps = variant.recompute != "none"
    if kind == "F":
        return Op(kind=kind, stage=stage, mb=mb, saves=SAVES[variant.recompute])
    return Op(
        kind=kind, stage=stage, mb=mb, recompute="inner" if keeps and kind in ("B", "I") else ""
    )


@takes(Arguments)
def _split_backward(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """B as I then W: the send of the input gradient runs under W (H2, overlapped P2P)."""

    def split(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        out: list[Op] = []
        for op in ops:
            if op.kind == "B":
                out += [
                    msgspec.structs.replace(op, kind="I"),
                    Op(kind="W", stage=op.stage, mb=op.mb),
                ]
            else:
                out.append(op)
        return tuple(out)

    return [msgspec.structs.replace(v, ops=split(v.ops)) for v in variants]


@takes(GradientArguments)
def _gradients(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """REDUCE_GRAD behind a stage's last gradient; OPT at the end, then what OPT must share."""
    replicated = plan.placement.num_replicas > 1 or any(c.cp > 1 for c in plan.placement.cells)
    experts = set(args.get("experts", ()))
    tied = args.get("tied", ())
    out = []
    for v in variants:
        last = {op.stage: i for i, op in enumerate(v.ops) if op.kind in ("B", "W")}
        ops: list[Op] = []
        for i, op in enumerate(v.ops):
            ops.append(op)
            if replicated and last.get(op.stage) == i and op.kind in ("B", "W"):
                ops.append(Op(kind="REDUCE_GRAD", stage=op.stage))
                if op.stage in experts:
                    ops.append(Op(kind="REDUCE_GRAD", stage=op.stage, label=EXPERTS, group="edp"))
        shared = [stage for stage in sorted(last) if stage in tied]
        if shared:
            ops.append(_tied(shared, ops, replicated))
        for stage in sorted(last):
            ops.append(_optimizer(stage, ops, shared[-1] if stage in shared else -1))
        if plan.mathematics.zero and replicated:
            for stage in sorted(last):
                updated = (Dep(f"{stage}OPT"),)
                ops.append(Op(kind="UNSHARD", stage=stage, deps=updated))
                if stage in experts:
                    ops.append(
                        Op(kind="UNSHARD", stage=stage, label=EXPERTS, group="edp", deps=updated)
                    )
        out.append(msgspec.structs.replace(v, ops=tuple(ops)))
    return out


def _tied(stages: list[int], ops: list[Op], replicated: bool) -> Op:
    """The positions add up the gradient of the parameter they share (tied embedding), each once.

    Args:
        stages: virtual stages of this position that hold it, growing; the op is the last one's.
        ops: of the position so far. replicated: replicas have added up theirs before.
    """
    sources = []
    for stage in stages:
        last = next(op for op in reversed(ops) if op.stage == stage and op.kind in ("B", "W"))
        sources.append(Dep(f"{stage}REDUCE_GRAD" if replicated else last.name))
    return Op(
        kind="ALL_REDUCE", stage=stages[-1], label="embed", group="embed", deps=tuple(sources)
    )


def _optimizer(stage: int, ops: list[Op], tied: int) -> Op:
    """The update of a stage; ``tied`` is the stage whose op adds up what it shares, -1 for none."""
    if tied < 0:
        return Op(kind="OPT", stage=stage)
    reduces = [Dep(op.name) for op in ops if op.stage == stage and op.kind == "REDUCE_GRAD"]
    return Op(kind="OPT", stage=stage, deps=(*reduces, Dep(f"{tied}ALL_REDUCE[embed]")))


PASSES: dict[str, Pass] = {
    "schedule": _schedule,
    "split_backward": _split_backward,
    "transfers": takes(Arguments)(transfers),
    "gradients": _gradients,
    "blocking_sends": takes(Arguments)(blocking_sends),
    "blocking_p2p": takes(Arguments)(blocking_p2p),
}


def standard_calls(
    schedule: str,
    chunks: int,
    split_backward: bool,
    blocking_sends: bool,
    experts: tuple[int, ...],
    tied: tuple[int, ...],
    order: tuple[str, ...] = (),
    blocking_p2p: bool = False,
) -> tuple[Call, ...]:
    """The calls that lower a pipeline of cells.

    Args:
        schedule, chunks: generator.
        split_backward, blocking_sends, blocking_p2p: passes to add.
        experts: virtual stages with routed experts whose gradients reduce over "edp".
        tied: virtual stages that share a parameter.
        order: rows of a schedule written out, which then replaces the named one.
    """
    written = {"order": list(order)} if order else {}
    calls = [Call("schedule", 1, {"name": schedule, "chunks": chunks, **written})]
    if split_backward:
        calls.append(Call("split_backward"))
    calls += [
        Call("transfers"),
        Call("gradients", 1, {"experts": list(experts), "tied": list(tied)}),
    ]
    if blocking_sends:
        calls.append(Call("blocking_sends"))
    if blocking_p2p:
        calls.append(Call("blocking_p2p"))
    return tuple(calls)


def find_pass(call: Call) -> Pass:
    """Return the pass that a call names.

    Raises:
        PlanError: it is not installed, or takes no such version or arguments.
    """
    found = PASSES.get(call.name) or _installed(call.name)
    if found is None:
        raise PlanError(
            "a lowering pass of this plan is not installed",
            key="lowering",
            found=call.name,
            expected="one of " + " ".join(sorted(PASSES)),
        )
    check_call(call, found)
    return found


@cache
def _installed(name: str) -> Pass | None:
    for entry in entry_points(group="hetlab.lowering"):
        if entry.name == name:
            found: Pass = entry.load()
            return found
    return None


def expand(plan: Plan) -> tuple[Program, ...]:
    """All programs of a plan: the explicit ones, and the lowered ones of all other ranks.

    Raises:
        PlanError: a pass is not installed, or an explicit program is malformed.
    """
    explicit = tuple(parse_program(p.text, p.ranks) for p in plan.programs)
    covered = {r for p in explicit for r in p.ranks}
    if not plan.lowering:
        return explicit
    variants = [v for v in _variants(plan) if not covered.issuperset(v.ranks)]
    for call in plan.lowering:
        variants = find_pass(call)(variants, plan, call.args)
    return explicit + tuple(
        program_of(v, plan.barrier and plan.placement.num_ranks > 1) for v in variants
    )


def _variants(plan: Plan) -> list[Variant]:
    placement = plan.placement
    found: dict[tuple[int, int, Recompute, CellOffload, bool], list[int]] = defaultdict(list)
    for cell in placement.cells:
        m = placement.microbatches[cell.replica] if placement.microbatches else 1
        sliced = not (plan.mathematics.sequence_parallel or placement.whole_boundaries)
        gather = cell.tp > 1 and sliced
        found[cell.stage, m, cell.recompute, cell.offload, gather].extend(cell.ranks)
    return [
        Variant(position=s, microbatches=m, recompute=r, offload=o, gather=g, ranks=tuple(ranks))
        for (s, m, r, o, g), ranks in found.items()
    ]
