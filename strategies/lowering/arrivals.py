"""How parameters reach a pass: updated ones of the step before, gathers, fetches from the host.

Parameters on the host pass through one ring of buffers in both directions: a fetched segment leaves
its buffer with its pass, an updated one with the copy that takes it back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import msgspec

from sim.plan.deps import segment_of
from sim.plan.op import Dep, Op
from sim.plan.placement import Segment
from strategies.lowering.cut import Cut, ended
from strategies.lowering.kinds import FETCH_B, FETCH_F

__all__ = ["add_fetches", "add_gathers", "wait_for_updates"]

PASSES = ("F", "B", "I")
"""Kinds that read parameters; a W reads none."""
GATHERS = ("UNSHARD", "UNSHARD_B")


def wait_for_updates(cut: Cut) -> None:
    """Let the next step's first forward of a segment wait for its updated parameters."""
    arrivals = {(op.stage, op.label): op for op in cut.ops if op.kind == "H2D"}
    for op in cut.ops:
        arrival = arrivals.pop((op.stage, op.label), None) if op.kind == "F" else None
        if arrival is not None:
            cut.extra[op.name].append(Dep(arrival.name, 1))
    if cut.settings.whole:
        first = next(op for op in cut.ops if op.kind == "F")
        cut.extra[first.name] += ended(cut.ops)


def add_gathers(cut: Cut) -> None:
    """ZeRO-3 (Rajbhandari et al. 2020, section 5.3): gather a segment's parameters for each pass.

    Each as early as a buffer may be free, behind the update of the step before.
    """

    def gather(use: Op, s: Segment) -> list[Op]:
        kind = "UNSHARD" if use.kind == "F" else "UNSHARD_B"
        source = "H2D" if "optimizer" in s.offload else "OPT"
        updated = () if "parameters" in s.offload else (Dep(cut.op(source, s).name, 1),)
        gathers = cut.each_group(kind, s, mb=use.mb)
        return [msgspec.structs.replace(op, deps=updated) for op in gathers]

    passes = [i for i, op in enumerate(cut.ops) if op.kind in PASSES and op.stage in cut.gathered]
    _bring(cut, passes, gather)


def add_fetches(cut: Cut) -> None:
    """Fetch parameters that live on the host, each as early as a buffer may be free.

    A fetch serves a pass, or the gather that makes the shards whole. Where the chip updates them,
    the updated copy takes a buffer too: from the update, which finds the master weights on the
    chip, until it is back. Without master weights the update needs what is on the host, so it is
    fetched once more unless it is still there.
    """
    named = cut.named
    away = {key for key, s in named.items() if "parameters" in s.offload}
    back = {key for key in away if "optimizer" not in named[key].offload}

    def fetch(use: Op, s: Segment) -> list[Op]:
        if use.kind == "OPT" and cut.settings.masters:
            return []
        kind = FETCH_F.name if use.kind in ("F", "UNSHARD") else FETCH_B.name
        source = "OPT" if "optimizer" in s.offload else "D2H"
        made = cut.op(kind, s, mb=use.mb, priority=cut.key(s, kind))
        return [msgspec.structs.replace(made, deps=(Dep(cut.op(source, s).name, 1),))]

    def uses(op: Op) -> bool:
        key = (op.stage, segment_of(op.label))
        if op.kind in ("OPT", "D2H"):
            return key in back
        return key in away and op.kind in (GATHERS if op.stage in cut.gathered else PASSES)

    _bring(cut, [i for i, op in enumerate(cut.ops) if uses(op)], fetch)


def _bring(cut: Cut, users: list[int], make: Callable[[Op, Segment], list[Op]]) -> None:
    """List what brings parameters before the ops that use them, through a ring of buffers.

    Consecutive uses of one segment share a buffer: the last block's forward and backward.

    Args:
        cut: whose ops. users: positions of the uses, rising.
        make: (first use, its segment) -> the ops that bring it, with their other dependencies;
            none where the first use itself fills the buffer.
    """
    named = cut.named
    holds: list[list[int]] = []
    whose = [(op.stage, segment_of(op.label)) for op in cut.ops]
    for i in users:
        if holds and whose[holds[-1][-1]] == whose[i]:
            holds[-1].append(i)
        else:
            holds.append([i])
    slots = cut.plan.placement.parameter_buffers
    listed: dict[int, list[Op]] = defaultdict(list)
    for k, uses in enumerate(holds):
        op = cut.ops[uses[0]]
        # The ring goes round: the first slots were left in a step before.
        steps, before = divmod(k - slots, len(holds))
        free = [
            *(Dep(name, -steps) for name in _last_uses(cut, holds[before])),
            *(ended(cut.ops) if cut.settings.whole and k < slots else ()),
        ]
        brings = make(op, named[whose[uses[0]]])
        if not brings:
            cut.extra[op.name] += free
            continue
        for use in uses:
            if cut.ops[use].kind != "D2H":
                cut.extra[cut.ops[use].name] += [Dep(b.name) for b in brings]
        listed[holds[k - slots][-1] if k >= slots else -1] += [
            msgspec.structs.replace(b, deps=tuple(dict.fromkeys([*(b.deps or ()), *free])))
            for b in brings
        ]
    ops = list(listed[-1])
    for i, op in enumerate(cut.ops):
        ops += [op, *listed[i]]
    cut.ops = ops


def _last_uses(cut: Cut, hold: list[int]) -> list[str]:
    """Uses with which a buffer is left: the last pass, or all gathers, whose streams differ."""
    names = [cut.ops[i].name for i in hold]
    return names if cut.ops[hold[-1]].kind in GATHERS else names[-1:]
