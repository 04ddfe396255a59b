"""What the pass ``lend`` needs to know of a variant: its layers of experts, ops and their names."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from sim.plan.deps import of_experts, resolve, segment_of
from sim.plan.flat import flatten
from sim.plan.op import Dep, Op
from sim.plan.placement import Segment
from sim.plan.plan import Plan
from sim.plan.variant import Variant, program_of

__all__ = ["FORWARD", "PASSES", "Key", "Layers", "in_order"]

PASSES = ("F", "R", "B", "I", "W")
FORWARD = ("F", "R")

Key = tuple[int, str]
"""Virtual stage and name of a segment."""


class Layers:
    """A variant's ops with all dependencies written, and its layers of routed experts.

    Attributes:
        ops: with their dependencies. segments: of each virtual stage, in order of the forward.
        moe: segments with experts -> what their keys in tables begin with, in that order.
        after, before: segment with experts -> the next one of its stage, and the one before.
        first, last_forward, last: stage -> microbatch of its first and last forward and of its last
            backward. saves: (stage, microbatch, label) -> what that forward keeps.
        split: whether the backward is split into I and W.
    """

    def __init__(self, variant: Variant, plan: Plan, experts: Mapping[str, str]) -> None:
        placement = plan.placement
        self.segments: dict[int, list[Segment]] = defaultdict(list)
        for s in placement.segments_at(variant.position, variant.offload, variant.recompute):
            self.segments[s.stage].append(s)
        named = [(s.stage, s.name) for mine in self.segments.values() for s in mine]
        keys = {key: experts.get(f"{key[0]}[{key[1]}]") for key in named}
        self.moe = {key: prefix for key, prefix in keys.items() if prefix is not None}
        self.after: dict[Key, Key] = {}
        for stage in self.segments:
            mine = [key for key in self.moe if key[0] == stage]
            self.after |= dict(itertools.pairwise(mine))
        self.before = {b: a for a, b in self.after.items()}
        self.ops = _explicit(variant, frozenset(self.segments))
        self.split = any(op.kind == "W" for op in self.ops)
        self.saves = {(op.stage, op.mb, op.label): op.saves for op in self.ops if op.kind == "F"}
        forwards = [(op.stage, op.mb) for op in self.ops if op.kind == "F"]
        backwards = [(op.stage, op.mb) for op in self.ops if op.kind in ("B", "I")]
        self.first = dict(reversed(forwards))
        self.last_forward = dict(forwards)
        self.last = dict(backwards)

    def cut(self, op: Op) -> list[Op]:
        """A pass as the passes of its segments; of one segment it is already."""
        if op.label:
            return [op]
        mine = self.segments[op.stage]
        order = mine if op.kind in FORWARD else mine[::-1]
        return [msgspec.structs.replace(op, label=s.name, deps=()) for s in order]

    def updated(self, key: Key) -> list[Dep]:
        """What makes the experts of a segment new and whole, in the step before."""
        stage, name = key

        def makes(op: Op) -> bool:
            whole = op.kind == "UNSHARD" and of_experts(op.label)
            return op.mb < 0 and (whole or op.kind in ("OPT", "H2D"))

        mine = [op for op in self.ops if op.stage == stage and segment_of(op.label) in ("", name)]
        return [Dep(op.name, 1) for op in mine if makes(op)]

    def keeps(self, op: Op) -> str:
        """What the forward behind a pass of a segment keeps."""
        kept = self.saves.get((op.stage, op.mb, op.label))
        return kept or self.saves.get((op.stage, op.mb, ""), "all")


def _explicit(variant: Variant, hosted: frozenset[int]) -> list[Op]:
    """The ops, implied dependencies written out."""
    ops = variant.ops
    found = resolve(flatten(program_of(variant, False)), hosted)
    return [
        msgspec.structs.replace(
            op, deps=tuple(dict.fromkeys(Dep(ops[j].name, d) for j, d in found[i]))
        )
        for i, op in enumerate(ops)
    ]


def in_order(ops: list[Op]) -> list[Op]:
    """The list, but an op that waits for a later one of its step comes right behind that one."""
    names = {op.name for op in ops}
    listed: set[str] = set()
    parked: list[Op] = []
    found: list[Op] = []

    def ready(op: Op) -> bool:
        return all(d.distance or d.name in listed or d.name not in names for d in op.deps or ())

    for op in ops:
        parked.append(op)
        while True:
            free = next((x for x in parked if ready(x)), None)
            if free is None:
                break
            parked.remove(free)
            found.append(free)
            listed.add(free.name)
    return found + parked
