"""Prove that programs do what segments and ZeRO stages say, where memory is counted accordingly.

A segment whose optimizer is on the host needs no memory for it on the chip; so its gradient must
leave, be applied there, and its parameters come back. Ops are told by their kinds' streams and
memory effects, so kinds that a strategy registers count as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from sim.errors import PlanError
from sim.plan.deps import of_experts, resolve, segment_of
from sim.plan.flat import flatten
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.plan.placement import Cell, Segment
from sim.plan.plan import Plan
from sim.plan.program import Program
from sim.plan.wiring import Wiring

__all__ = ["prove_hosted"]

Key = tuple[int, str]
READS = ("F", "B", "I")
"""Kinds that read parameters."""


def prove_hosted(plan: Plan, programs: Iterable[Program], wiring: Wiring) -> None:
    """Check the ops of every segment that lives elsewhere, and of replicas that share.

    Proves: where the optimizer is on the host, a copy of the gradient to the host, behind a
    backward or a sum, stands before an update there, and a copy back to the chip behind it where
    parameters do not live on the host as well; where those do, every pass waits for a fetch of its
    segment, or for a gather that does, and fetches wait for what updated it; on NVMe, updates and
    fetches wait for reads, and writes for updates. Under ZeRO-2 and 3 every microbatch's gradient
    is summed, under ZeRO-3 every pass waits for a gather, under ZeRO-1 and 2 updates for one.

    Raises:
        PlanError: what is missing, with the rank and the segment.
    """
    zero = plan.mathematics.zero
    for program in programs:
        cell = wiring.cell_of.get(program.ranks[0]) if program.ranks else None
        away = [s for s in plan.placement.segments_of(cell) if s.offload] if cell else []
        if cell is None or not (zero or away):
            continue
        mine = _Mine(program, wiring, cell)
        if not any(op.kind == "F" for op in mine.ops):
            continue
        for s in away:
            _of_segment(mine, s)
        if zero and (plan.placement.num_replicas > 1 or cell.cp > 1):
            _shared(mine, zero)


class _Mine:
    """A program with its dependencies.

    Attributes:
        ops, streams: in list order. key: (stage, segment) of each. of: its inverse.
        deps: (position, distance) of each op. later: what ops of a later step wait for.
    """

    def __init__(self, program: Program, wiring: Wiring, cell: Cell) -> None:
        flat = flatten(program)
        self.rank, self.ops, self.streams = program.ranks[0], flat.ops, flat.streams
        self.deps = resolve(flat, wiring.stages(self.rank))
        self.key: list[Key] = [
            (wiring.stage_of(op, self.rank), segment_of(op.label)) for op in self.ops
        ]
        self.of: dict[Key, list[int]] = defaultdict(list)
        for i, key in enumerate(self.key):
            self.of[key].append(i)
        self.later = {j for deps in self.deps for j, distance in deps if distance}

    def on(self, key: Key, stream: str, gather: bool | None = None) -> list[int]:
        """Positions of a segment's ops on a stream; only those that gather or only others."""
        found = [i for i in self.of[key] if self.streams[i] == stream]
        if gather is None:
            return found
        return [i for i in found if (KINDS[self.ops[i].kind].memory == "gather") == gather]

    def waits(self, i: int, for_any: Collection[int]) -> bool:
        """Whether an op depends directly on one of some, in whatever step."""
        return any(j in for_any for j, _ in self.deps[i])

    def reaches(self, i: int, any_of: Collection[int]) -> bool:
        """Whether one of some ops is an ancestor of an op, in the same step."""
        seen, stack = {i}, [i]
        while stack:
            for j, distance in self.deps[stack.pop()]:
                if j in any_of and not distance:
                    return True
                if not distance and j not in seen:
                    seen.add(j)
                    stack.append(j)
        return False

    def missing(self, what: str, key: Key, says: str) -> PlanError:
        """The error that something of a segment is missing."""
        name = f"segment {key[1]} of stage {key[0]}" if key[1] else f"stage {key[0]}"
        return PlanError(
            f"rank {self.rank}: {name} has {says}, and no op does that", key="programs",
            found="none", expected=what,
        )  # fmt: skip


def _of_segment(mine: _Mine, s: Segment) -> None:
    key = (s.stage, s.name)
    updates = [i for i in mine.of[key] if mine.ops[i].kind == "OPT"]
    fetches = mine.on(key, "h2d", gather=True)
    if "optimizer" in s.offload:
        _updated_away(mine, key, updates, back="parameters" not in s.offload)
    if "parameters" in s.offload:
        says = "its parameters on the host"
        gathers = {i for i in mine.on(key, "group") if mine.waits(i, fetches)}
        for i in _readers(mine, key):
            if not mine.waits(i, {*fetches, *gathers}):
                raise mine.missing(f"a fetch for {mine.ops[i].name}", key, says)
        sources = updates
        if "optimizer" not in s.offload:
            sources = [i for i in mine.on(key, "d2h") if mine.reaches(i, updates)]
        for i in fetches:
            if not mine.waits(i, sources):
                raise mine.missing(f"{mine.ops[i].name} behind the update before it", key, says)
    if "nvme" in s.offload:
        _on_drive(mine, key, updates, fetches)


def _updated_away(mine: _Mine, key: Key, updates: list[int], back: bool) -> None:
    says = "its optimizer on the host"
    made = {i for i in mine.of[key] if mine.ops[i].kind in ("B", "W", "REDUCE_GRAD")}
    copies = {i for i in mine.on(key, "d2h") if mine.reaches(i, made)}
    if not updates or any(
        mine.streams[i] != "host" or not mine.reaches(i, copies) for i in updates
    ):
        raise mine.missing("OPT on the stream host, behind a D2H of the gradient", key, says)
    if not back:
        return
    landed = {i for i in mine.on(key, "h2d") if mine.reaches(i, set(updates))}
    if not landed & mine.later:
        raise mine.missing("an H2D behind OPT that the next step waits for", key, says)


def _on_drive(mine: _Mine, key: Key, updates: list[int], fetches: list[int]) -> None:
    says = "its states on NVMe"
    reads, writes = set(mine.on(key, "nvme_read")), mine.on(key, "nvme_write")
    for i in (*updates, *fetches):
        if not mine.waits(i, reads):
            raise mine.missing(f"a read from NVMe before {mine.ops[i].name}", key, says)
    if not any(mine.reaches(i, set(updates)) for i in writes):
        raise mine.missing("a write to NVMe behind OPT", key, says)


def _readers(mine: _Mine, key: Key) -> list[int]:
    return [i for i in mine.of[key] if mine.ops[i].kind in READS]


def _shared(mine: _Mine, zero: int) -> None:
    """Replicas sum each microbatch's gradient; they gather for passes, or after updates."""
    says = f"what replicas share under ZeRO-{zero}"
    for key in {k for k, op in zip(mine.key, mine.ops, strict=True) if op.kind == "F"}:
        stage = [*mine.of[key], *(mine.of[key[0], ""] if key[1] else ())]
        gathers = [i for i in stage if _gathers(mine.ops[i], mine.streams[i])]
        if zero == 3:
            # Routed experts are gathered apart where other ranks hold them.
            experts = [i for i in gathers if of_experts(mine.ops[i].label)]
            apart = [experts, [i for i in gathers if i not in experts]] if experts else [gathers]
            for i in _readers(mine, key):
                if not all(mine.waits(i, some) for some in apart):
                    raise mine.missing(f"a gather for {mine.ops[i].name}", key, says)
        elif not any(mine.ops[i].mb < 0 for i in gathers):
            raise mine.missing("UNSHARD of the updated parameters", key, says)
        summed = {mine.ops[i].mb for i in stage if mine.ops[i].kind == "REDUCE_GRAD"}
        lacks = {mine.ops[i].mb for i in _readers(mine, key)} - summed
        if zero >= 2 and lacks:
            raise mine.missing(f"REDUCE_GRAD of microbatch {min(lacks)}", key, says)


def _gathers(op: Op, stream: str) -> bool:
    return KINDS[op.kind].memory == "gather" and stream not in ("h2d", "nvme_read")
