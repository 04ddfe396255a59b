"""The built-in lowering: a generator and passes that turn a placement into programs.

Each pass is a plain function (variants, plan, args) -> variants. A variant is the op list of one
step for all cells that need the same list: same pipeline position, number of microbatches and
recomputation. Further passes come from the entry-point group ``hetlab.lowering``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import msgspec

from sim.errors import PlanError
from sim.plan.deps import EXPERTS, resolve
from sim.plan.flat import flatten
from sim.plan.kinds import KINDS
from sim.plan.op import Dep, Op
from sim.plan.placement import Boundary, Placement
from sim.plan.plan import Call, Plan
from sim.plan.program import STEPS, Block, Program, parse_program
from sim.plan.schedules import SCHEDULES, Order, explicit_order, num_microbatches

__all__ = ["PASSES", "Variant", "expand", "standard_calls"]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One op list.

    Args:
        position: pipeline position. microbatches: of the replicas that run it.
        recompute: what F keeps. gather: True when received tensors are re-assembled over tp.
        ranks: who runs it. ops: one step.
    """

    position: int
    microbatches: int
    recompute: str
    gather: bool
    ranks: tuple[int, ...]
    ops: tuple[Op, ...] = ()


SAVES = {"none": "all", "selective": "selective", "full": "inputs"}
"""What F keeps under each recomputation policy."""

Pass = Callable[[list[Variant], Plan, dict[str, Any]], list[Variant]]


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


def _transfers(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """SEND behind its producer; RECV before its consumer, in the order in which the sender sends.

    On one directed pair the receiver lists its RECVs in the sender's order, so a RECV moves up to
    the place of any later one that is consumed before it.
    """
    placement = plan.placement
    position = {s.stage: s.cell for s in placement.segments}
    chunked = len(placement.segments) > placement.num_stages
    leaving: dict[tuple[str, int], list[tuple[Boundary, int]]] = defaultdict(list)
    for b in placement.boundaries:
        if position[b.src] != position[b.dst]:
            leaving["F", b.src].append((b, position[b.dst]))
            if b.gradient:
                leaving["B", b.dst].append((b, position[b.src]))
    sends: dict[tuple[int, int, int, int], list[Op]] = defaultdict(list)
    listed: dict[tuple[int, int], bool] = {}
    for v in variants:
        first = (v.position, v.microbatches) not in listed
        listed[v.position, v.microbatches] = True
        for op in v.ops if first else ():
            for send, peer in _sends_of(op, leaving, chunked):
                sends[v.microbatches, v.position, peer, send.channel].append(send)
    out = []
    for v in variants:
        receives = _receives(v, placement, sends)
        ops: list[Op] = []
        for i, op in enumerate(v.ops):
            for recv in receives[i]:
                ops.append(recv)
                if v.gather:
                    label = recv.kind[-1].lower()
                    ops.append(Op(kind="ALL_GATHER", stage=recv.stage, mb=recv.mb, label=label))
            ops.append(op)
            ops += [send for send, _ in _sends_of(op, leaving, chunked)]
        out.append(msgspec.structs.replace(v, ops=tuple(ops)))
    return out


def _sends_of(
    op: Op, leaving: dict[tuple[str, int], list[tuple[Boundary, int]]], chunked: bool
) -> list[tuple[Op, int]]:
    """SENDs behind a compute op, each with the pipeline position of its receiver.

    Args:
        op: the compute op. leaving: boundaries by ("F" or "B", sending stage), with that position.
        chunked: gradients go over a channel of their own.
    """
    if op.kind not in ("F", "B", "I"):
        return []
    way = "F" if op.kind == "F" else "B"
    channel = int(chunked and way == "B")
    return [
        (Op(kind=f"SEND_{way}", stage=op.stage, mb=op.mb, label=b.name, channel=channel), peer)
        for b, peer in leaving.get((way, op.stage), ())
    ]


def _receives(
    variant: Variant,
    placement: Placement,
    sends: dict[tuple[int, int, int, int], list[Op]],
) -> list[list[Op]]:
    """RECVs to list before each compute op of the variant."""
    of_end = {("SEND_F", b.src, b.name): b.dst for b in placement.boundaries}
    of_end |= {("SEND_B", b.dst, b.name): b.src for b in placement.boundaries}
    slot: dict[tuple[str, int, int], int] = {}
    for i, op in enumerate(variant.ops):
        slot.setdefault(("F" if op.kind == "F" else "B", op.stage, op.mb), i)
    before: list[list[Op]] = [[] for _ in variant.ops]
    for (m, _, peer, channel), listed in sends.items():
        if m != variant.microbatches or peer != variant.position:
            continue
        latest = len(variant.ops)
        placed: list[tuple[int, Op]] = []
        for send in reversed(listed):
            forward = send.kind == "SEND_F"
            stage = of_end[send.kind, send.stage, send.label]
            latest = min(latest, slot["F" if forward else "B", stage, send.mb])
            kind = "RECV_F" if forward else "RECV_B"
            placed.append(
                (latest, Op(kind=kind, stage=stage, mb=send.mb, label=send.label, channel=channel))
            )
        for i, recv in reversed(placed):
            before[i].append(recv)
    return before


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
        for stage in sorted(last):
            if stage in tied:
                ops.append(_tied(stage, ops, replicated))
        for stage in sorted(last):
            ops.append(_optimizer(stage, ops, stage in tied))
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


def _tied(stage: int, ops: list[Op], replicated: bool) -> Op:
    """First and last stage add up the gradient of the parameter they share (tied embedding)."""
    last = next(op for op in reversed(ops) if op.stage == stage and op.kind in ("B", "W"))
    source = f"{stage}REDUCE_GRAD" if replicated else last.name
    return Op(kind="ALL_REDUCE", stage=stage, label="embed", group="embed", deps=(Dep(source),))


def _optimizer(stage: int, ops: list[Op], tied: bool) -> Op:
    if not tied:
        return Op(kind="OPT", stage=stage)
    reduces = [Dep(op.name) for op in ops if op.stage == stage and op.kind == "REDUCE_GRAD"]
    return Op(kind="OPT", stage=stage, deps=(*reduces, Dep(f"{stage}ALL_REDUCE[embed]")))


def _blocking_sends(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """Compute waits for the sends before it: the next compute op names them as dependencies.

    The implied dependencies of that op must then be written too, so they are read off first.
    """
    out = []
    for v in variants:
        hosted = frozenset(s.stage for s in plan.placement.segments if s.cell == v.position)
        flat = flatten(_program(v, False))
        found = resolve(flat, hosted)
        waiting: list[str] = []
        ops: list[Op] = []
        for i, op in enumerate(v.ops):
            if op.kind.startswith("SEND"):
                waiting.append(op.name)
            elif op.kind in ("F", "B", "I", "W") and waiting:
                deps = tuple(Dep(flat.ops[j].name, d) for j, d in found[i])
                op = msgspec.structs.replace(op, deps=deps + tuple(Dep(n) for n in waiting))
                waiting = []
            ops.append(op)
        out.append(msgspec.structs.replace(v, ops=tuple(ops)))
    return out


def _blocking_p2p(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """One call at a time: a send or receive blocks its rank until the transfer is over.

    Neighbours that exchange would both send first and wait for ever, so odd positions receive
    first (as DeepSpeed's pipeline engine does).
    """
    out = []
    for v in variants:
        ops = list(v.ops)
        if v.position % 2:
            for i in range(len(ops) - 1):
                if ops[i].kind.startswith("SEND") and ops[i + 1].kind.startswith("RECV"):
                    ops[i], ops[i + 1] = ops[i + 1], ops[i]
        hosted = frozenset(s.stage for s in plan.placement.segments if s.cell == v.position)
        flat = flatten(_program(msgspec.structs.replace(v, ops=tuple(ops)), False))
        found = resolve(flat, hosted)
        last = -1
        for i, op in enumerate(flat.ops):
            if KINDS[op.kind].stream not in ("compute", "pair"):
                continue
            deps = dict.fromkeys(found[i])
            if last >= 0:
                deps[last, 0] = None
            last = i
            names = tuple(Dep(flat.ops[j].name, d) for j, d in deps)
            ops[i] = msgspec.structs.replace(op, deps=names)
        out.append(msgspec.structs.replace(v, ops=tuple(ops)))
    return out


PASSES: dict[str, Pass] = {
    "schedule": _schedule,
    "split_backward": _split_backward,
    "transfers": _transfers,
    "gradients": _gradients,
    "blocking_sends": _blocking_sends,
    "blocking_p2p": _blocking_p2p,
}
VERSIONS = dict.fromkeys(PASSES, 1)


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


def _find(call: Call) -> Pass:
    if call.name in PASSES:
        if call.version > VERSIONS[call.name]:
            raise PlanError(
                f"lowering pass {call.name} of a newer version",
                key="lowering",
                found=f"version {call.version}",
                expected=f"at most {VERSIONS[call.name]}",
            )
        return PASSES[call.name]
    for entry in entry_points(group="hetlab.lowering"):
        if entry.name == call.name:
            found: Pass = entry.load()
            return found
    raise PlanError(
        "a lowering pass of this plan is not installed",
        key="lowering",
        found=call.name,
        expected="one of " + " ".join(sorted(PASSES)),
    )


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
        variants = _find(call)(variants, plan, call.args)
    return explicit + tuple(
        _program(v, plan.barrier and plan.placement.num_ranks > 1) for v in variants
    )


def _variants(plan: Plan) -> list[Variant]:
    placement = plan.placement
    found: dict[tuple[int, int, str, bool], list[int]] = defaultdict(list)
    for cell in placement.cells:
        m = placement.microbatches[cell.replica] if placement.microbatches else 1
        sliced = not (plan.mathematics.sequence_parallel or placement.whole_boundaries)
        gather = cell.tp > 1 and sliced
        found[cell.stage, m, cell.recompute, gather].extend(cell.ranks)
    return [
        Variant(position=s, microbatches=m, recompute=r, gather=g, ranks=tuple(ranks))
        for (s, m, r, g), ranks in found.items()
    ]


def _program(variant: Variant, barrier: bool) -> Program:
    ops = variant.ops + ((Op(kind="BARRIER"),) if barrier else ())
    return Program(ranks=variant.ranks, blocks=(Block(form="repeat", items=ops, count=STEPS),))
