"""A variant on its way through the pass ``segments``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from sim.plan.deps import experts_label, resolve
from sim.plan.flat import flatten
from sim.plan.op import Dep, Op
from sim.plan.placement import Segment
from sim.plan.plan import Plan
from sim.plan.variant import Variant, program_of
from strategies.lowering.kinds import FETCH_B

__all__ = ["Cut", "Settings", "ended", "spelled_out"]


def ended(ops: Iterable[Op]) -> list[Dep]:
    """What ends the step before, of a step's ops."""
    kinds = ("OPT", "H2D", "D2H", "HOST", "UNSHARD")
    return [Dep(op.name, 1) for op in ops if op.kind in kinds and op.mb < 0]


def spelled_out(variant: Variant, hosted: frozenset[int]) -> tuple[Op, ...]:
    """Return a variant's ops with the implied dependencies written.

    Args:
        variant: one list of ops. hosted: virtual stages of its position.
    """
    ops = variant.ops
    found = resolve(flatten(program_of(variant, False)), hosted)
    return tuple(
        msgspec.structs.replace(op, deps=tuple(Dep(ops[j].name, d) for j, d in deps))
        for op, deps in zip(ops, found, strict=True)
    )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the pass, see strategies.lowering.segments."""

    priority: bool = True
    clipping: str = "none"
    whole: bool = False
    masters: bool = True
    experts: frozenset[str] = frozenset()


class Cut:
    """One variant on its way through the pass.

    Attributes:
        variant, plan, settings: given.
        segments: of every virtual stage of this position, in order of the forward.
        hosted: virtual stages of this position. one: a step has one microbatch.
        ops: the list so far. extra: dependencies of an op, by its name, beside the implied ones.
        named: segments by (virtual stage, name).
        order: number of each segment of this position, in the order of the forward.
        ready: ops that complete a gradient for its update.
        sharded: virtual stages whose gradients are summed per microbatch (ZeRO-2 and 3).
    """

    def __init__(self, variant: Variant, plan: Plan, settings: Settings) -> None:
        self.variant, self.plan, self.settings = variant, plan, settings
        self.segments: dict[int, list[Segment]] = defaultdict(list)
        for s in plan.placement.segments_at(variant.position, variant.offload, variant.recompute):
            self.segments[s.stage].append(s)
        self.hosted = frozenset(self.segments)
        self.one = variant.microbatches == 1
        self.ops: list[Op] = []
        self.extra: dict[str, list[Dep]] = defaultdict(list)
        self.named = {(s.stage, s.name): s for mine in self.segments.values() for s in mine}
        mine = [(s.stage, s.name) for stage in sorted(self.hosted) for s in self.segments[stage]]
        self.order = {key: i for i, key in enumerate(mine)}
        self.ready: list[str] = []
        reduced = frozenset(op.stage for op in variant.ops if op.kind == "REDUCE_GRAD")
        self.sharded = reduced if plan.mathematics.zero >= 2 else frozenset[int]()

    @property
    def gathered(self) -> frozenset[int]:
        """Virtual stages whose parameters are gathered for each pass (ZeRO-3)."""
        return self.sharded if self.plan.mathematics.zero == 3 else frozenset()

    def key(self, segment: Segment, kind: str = "") -> float | None:
        """What the forward needs first comes first; what this backward needs, before all that."""
        if not self.settings.priority:
            return None
        place = self.order[segment.stage, segment.name]
        return float(-1 - place if kind == FETCH_B.name else place)

    def op(self, kind: str, s: Segment, *deps: str, **fields: Any) -> Op:
        """An op of a segment; without ``deps`` with the implied ones."""
        written = tuple(Dep(d) for d in deps) if deps else None
        return Op(kind=kind, stage=s.stage, label=s.name, deps=written, **fields)

    def each_group(self, kind: str, s: Segment, *deps: str, mb: int = -1) -> list[Op]:
        """A collective of a segment's parameters, and one of its routed experts'.

        The second only where experts are spread over replicas: they meet in other groups.
        """
        found = [self.op(kind, s, *deps, mb=mb)]
        if f"{s.stage}[{s.name}]" in self.settings.experts:
            label = experts_label(s.name)
            found.append(msgspec.structs.replace(found[0], label=label, group="edp"))
        return found

    def finish(self) -> Variant:
        """Return the variant with the list, the extra dependencies written out."""
        v = msgspec.structs.replace(self.variant, ops=tuple(self.ops))
        written = []
        for op, whole in zip(v.ops, spelled_out(v, self.hosted), strict=True):
            extra = self.extra.get(op.name)
            if extra:
                deps = tuple(dict.fromkeys([*(whole.deps or ()), *extra]))
                op = msgspec.structs.replace(op, deps=deps)
            written.append(op)
        return msgspec.structs.replace(v, ops=tuple(written))
