"""Lowering passes for pipeline transfers: where SEND and RECV stand, and whether they block."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import msgspec

from sim.plan.deps import resolve
from sim.plan.flat import flatten
from sim.plan.kinds import KINDS
from sim.plan.op import Dep, Op
from sim.plan.placement import Boundary, Placement
from sim.plan.plan import Plan
from sim.plan.variant import Variant, program_of

__all__ = ["blocking_p2p", "blocking_sends", "transfers"]


def transfers(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """SEND behind its producer; RECV before its consumer, in the order in which the sender sends.

    On one directed pair the receiver lists its RECVs in the sender's order, so a RECV moves up to
    the place of any later one that is consumed before it.
    """
    placement = plan.placement
    position = {s.stage: s.cell for s in placement.segments}
    chunked = len(placement.stages) > placement.num_stages
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


def blocking_sends(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """Compute waits for the sends before it: the next compute op names them as dependencies.

    The implied dependencies of that op must then be written too, so they are read off first.
    """
    out = []
    for v in variants:
        hosted = frozenset(s.stage for s in plan.placement.segments if s.cell == v.position)
        flat = flatten(program_of(v, False))
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


def blocking_p2p(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """One call at a time: a send or receive blocks its rank until the transfer is over.

    Neighbours that exchange would both send first and wait for ever, so odd positions receive
    first (as DeepSpeed's pipeline engine does).
    """
    out = []
    exchanges = _exchanges(variants, plan.placement)
    for v in variants:
        ops = list(v.ops)
        if v.position % 2:
            for i in range(len(ops) - 1):
                sent, got = (_crossing(op, plan.placement) for op in ops[i : i + 2])
                if ops[i].kind.startswith("RECV") or not (sent and got):
                    continue
                if (v.microbatches, got, sent) in exchanges:
                    ops[i], ops[i + 1] = ops[i + 1], ops[i]
        hosted = frozenset(s.stage for s in plan.placement.segments if s.cell == v.position)
        flat = flatten(program_of(msgspec.structs.replace(v, ops=tuple(ops)), False))
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


_Crossing = tuple[str, int, int, int, str]


def _crossing(op: Op, placement: Placement) -> _Crossing | None:
    """What a SEND or RECV carries: way, microbatch, both ends and name of its boundary."""
    if op.kind not in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        return None
    source = op.kind in ("SEND_F", "RECV_B")
    for b in placement.boundaries:
        if b.name == op.label and op.stage == (b.src if source else b.dst):
            return op.kind[-1], op.mb, b.src, b.dst, b.name
    return None


def _exchanges(
    variants: list[Variant], placement: Placement
) -> set[tuple[int, _Crossing, _Crossing]]:
    """(microbatches, sent, received) where an even position sends and right then receives."""
    found = set()
    for v in variants:
        for op, after in itertools.pairwise(v.ops if v.position % 2 == 0 else ()):
            if op.kind.startswith("SEND") and after.kind.startswith("RECV"):
                sent, got = _crossing(op, placement), _crossing(after, placement)
                if sent and got:
                    found.add((v.microbatches, sent, got))
    return found
