"""Gradients and updates by segment, and what updates wait for."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from sim.plan.op import Dep, Op, Ref
from sim.plan.placement import Segment
from strategies.lowering.cut import Cut

__all__ = ["CLIPPING", "Clipping", "SPECULATION", "add_norm", "add_updates"]

Clipping = Literal["none", "per-block", "previous-norm", "speculate", "global"]
CLIPPING: tuple[Clipping, ...] = get_args(Clipping)
"""What an update waits for: nothing, and nothing is clipped; nothing; the norm of the step before;
nothing, but a failed check is rolled back; the norm of all gradients of its own step."""
SPECULATION = "speculation"
"""Table of late amounts under "speculate": "rollback" 2 in a step whose check fails, for updates
are undone and made again, else 0; "forward" 2 in the step after, whose forward has to be repeated,
else 1; shares stand for means."""
NORM = "norm"
"""Label of the HOST op that finds the norm, or checks it: it reads all gradients on the host."""
ROLLBACK = "rollback"
"""Label of the HOST op that undoes the updates on the host and makes them again."""


def add_updates(cut: Cut) -> None:
    """Put what follows the backward ops of each segment in place of the stage's own tail."""
    old = cut.ops
    reduced = {op.stage for op in old if op.kind == "REDUCE_GRAD"}
    updated_whole = {op.stage for op in old if op.kind == "UNSHARD"} - cut.gathered
    last = {(op.stage, op.label): i for i, op in enumerate(old) if op.kind in ("B", "W")}
    waiting: list[Op] = []
    late: list[Op] = []
    sent: list[str] = []
    summed: list[list[str]] = []
    cut.ops = []
    for i, op in enumerate(old):
        if op.kind in ("REDUCE_GRAD", "OPT", "UNSHARD"):
            continue
        cut.ops.append(op)
        if op.kind not in ("B", "W"):
            continue
        s, sources = cut.named[op.stage, op.label], [op.name]
        final = last[op.stage, op.label] == i
        if final:
            # Updates on the chip stand behind the next backward, so as not to wait for a reduce.
            cut.ops += waiting
            waiting = []
        if s.stage in cut.sharded:
            sources = _sum_of_one(cut, s, op, summed)
        elif final and s.stage in reduced:
            sums = cut.each_group("REDUCE_GRAD", s)
            cut.ops += sums
            sources = [x.name for x in sums]
        if not final:
            continue
        updated = _update(cut, s, sources, s.stage in updated_whole)
        if "optimizer" in s.offload:
            _ring(cut, s, op, sent)
            cut.ops += updated[:2]
            late += updated[2:]
        elif cut.settings.clipping == "global" or s.stage in cut.sharded:
            # Sums queue up behind gathers; an update among the backwards would wait with them.
            late += updated
        elif s.stage in reduced:
            waiting = updated
        else:
            cut.ops += updated
    cut.ops += [*waiting, *late]


def _sum_of_one(cut: Cut, s: Segment, op: Op, summed: list[list[str]]) -> list[str]:
    """ZeRO-2 (Rajbhandari et al. 2020, section 5.2): sum a microbatch's gradient into its shards.

    The sums of a segment share a stream, so the last one ends last. A backward takes a buffer that
    an earlier gradient has left.
    """
    slots = cut.plan.placement.gradient_buffers
    if len(summed) >= slots:
        cut.extra[op.name] += [Dep(name) for name in summed[-slots]]
    sums = cut.each_group("REDUCE_GRAD", s, op.name, mb=op.mb)
    cut.ops += sums
    summed.append([x.name for x in sums])
    return summed[-1]


def _update(cut: Cut, s: Segment, sources: list[str], gathers: bool) -> list[Op]:
    """The update of a segment whose gradient ``sources`` complete."""
    key = cut.key(s)
    if "optimizer" in s.offload:
        copy = cut.op("D2H", s, *sources, priority=key)
        update = cut.op("OPT", s, copy.name, stream="host", priority=key)
        found = [copy, update]
        if "parameters" not in s.offload:
            found.append(cut.op("H2D", s, update.name, priority=key))
        cut.ready.append(copy.name)
    else:
        cut.ready += sources
        found = [cut.op("OPT", s, *sources)]
        if "parameters" in s.offload:
            after = found[-1].name
            found.append(cut.op("D2H", s, after, amount="parameters", priority=key))
    if gathers:
        found += cut.each_group("UNSHARD", s, found[-1].name)
    return found


def _ring(cut: Cut, s: Segment, op: Op, sent: list[str]) -> None:
    """With one microbatch a gradient takes a buffer that an earlier one has left."""
    slots = cut.plan.placement.gradient_buffers
    if cut.one and len(sent) >= slots:
        cut.extra[op.name].append(Dep(sent[-slots]))
    sent.append(cut.op("D2H", s).name)


def add_norm(cut: Cut) -> None:
    """Add the norm of all gradients, and who waits for it.

    The host adds up the squares of what landed there; the chip's share is a by-product of its
    backward, and the sum over ranks is free.
    """
    clipping = cut.settings.clipping
    if clipping in ("none", "per-block"):
        return
    updates = [op for op in cut.ops if op.kind == "OPT"]
    stage, deps = min(cut.hosted), tuple(Dep(name) for name in cut.ready)
    key = float(len(cut.order)) if cut.settings.priority else None
    norm = Op(kind="HOST", stage=stage, label=NORM, deps=deps, amount="gradients", priority=key)
    if not any(op.stream == "host" for op in updates):
        if clipping == "global":
            _wait(cut, deps)
    elif clipping == "global":
        # The norm comes before every update in the list, as it does in time, and what an update
        # sends to the host stays right behind it: the next may wait for its buffer.
        moved = [op for op in cut.ops if op.kind == "OPT" or op.amount == "parameters"]
        rest = [op for op in cut.ops if op.kind != "OPT" and op.amount != "parameters"]
        at = 1 + max(i for i, op in enumerate(rest) if op.name in cut.ready)
        cut.ops = [*rest[:at], norm, *moved, *rest[at:]]
        _wait(cut, (Dep(norm.name),))
    else:
        at = 1 + max(i for i, op in enumerate(cut.ops) if op.name in cut.ready)
        cut.ops.insert(at, norm)
        if clipping == "speculate":
            _roll_back(cut, norm, updates)
        else:
            _wait(cut, (Dep(norm.name, 1),))


def _wait(cut: Cut, deps: tuple[Dep, ...]) -> None:
    """Every update waits for these as well."""
    cut.ops = [
        msgspec.structs.replace(op, deps=tuple(dict.fromkeys([*(op.deps or ()), *deps])))
        if op.kind == "OPT"
        else op
        for op in cut.ops
    ]


def _roll_back(cut: Cut, norm: Op, updates: list[Op]) -> None:
    """Updates run before the check; the next backward waits until none is to be undone."""
    undo = Op(
        kind="HOST",
        stage=norm.stage,
        label=ROLLBACK,
        deps=(Dep(norm.name), *(Dep(op.name) for op in updates)),
        amount="updates",
        ref=Ref(SPECULATION, "rollback"),
        priority=norm.priority,
    )
    cut.ops.append(undo)
    first = next(op for op in cut.ops if op.kind in ("B", "I"))
    cut.extra[first.name].append(Dep(undo.name, 1))
