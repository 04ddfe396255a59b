"""Unroll one program into op instances of one rank: the local half of the op graph.

Issue rule: list order is issue order, every op is issued at once, so on a rank only three things
order ops: dependencies, the stream's list order, and what blocks the issuer.
"""

from __future__ import annotations

from collections import defaultdict

from sim.errors import PlanError
from sim.plan.deps import Flat
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.plan.program import STEPS

__all__ = ["LOCAL_STREAMS", "Template", "unroll"]

LOCAL_STREAMS = ("compute", "host", "d2h", "h2d")


class Template:
    """Op instances of one rank, numbered in list order.

    Attributes:
        static: position of each instance in Flat.ops. step: logical iteration of the outermost
            repeat. piece: piece index of a transfer or of a group.
        deps: (source, target) instance pairs of dependencies.
        order: (source, target) pairs of stream order, blocking issuer and barriers.
        slots: static position -> instances in list order, piece by piece.
        consumer: RECV instance -> the first instance that depends on it.
        compute_before: RECV instance -> last compute instance listed before it, or -1.
        priority: instances on a local stream that is served by priority.
    """

    __slots__ = (
        "compute_before",
        "consumer",
        "deps",
        "order",
        "piece",
        "priority",
        "slots",
        "static",
        "step",
    )

    def __init__(self) -> None:
        self.static: list[int] = []
        self.step: list[int] = []
        self.piece: list[int] = []
        self.deps: list[tuple[int, int]] = []
        self.order: list[tuple[int, int]] = []
        self.slots: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.consumer: dict[int, int] = {}
        self.compute_before: dict[int, int] = {}
        self.priority: dict[int, float] = {}


def stream_of(op: Op) -> str:
    """The op's stream: its own, or its kind's."""
    return op.stream or KINDS[op.kind].stream


def unroll(
    flat: Flat,
    deps: list[list[tuple[int, int]]],
    pieces: list[int],
    steps: int,
    async_compute: bool = True,
) -> Template:
    """Lay out ``steps`` steps of a program.

    Args:
        flat: the program. deps: from sim.plan.deps.resolve.
        pieces: how many instances each static op has on this rank; an op with none (a collective
            of a rank that is alone) passes its dependencies on.
        steps: repetitions of ``repeat(steps)`` blocks.
        async_compute: False when compute blocks the issuer.

    Raises:
        PlanError: a dependency can never be satisfied.
    """
    return _Unroller(flat, deps, pieces, steps, async_compute).run()


class _Unroller:
    """Walks the layout once and appends instances."""

    def __init__(
        self,
        flat: Flat,
        deps: list[list[tuple[int, int]]],
        pieces: list[int],
        steps: int,
        async_compute: bool,
    ) -> None:
        self.flat, self.static_deps, self.pieces, self.steps = flat, deps, pieces, steps
        self.async_compute = async_compute
        self.out = Template()
        self.last: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self.prioritised = {
            stream_of(op)
            for op in flat.ops
            if op.priority is not None and stream_of(op) in LOCAL_STREAMS
        }
        self.tail: dict[str, int] = {}
        self.blocker = -1
        self.fence = -1
        self.fenced: set[str] = set()
        self.since: list[int] = []
        self.now = 0

    def run(self) -> Template:
        self._layout(self.flat.layout, ())
        return self.out

    def _layout(self, layout: list[tuple[object, ...]], counters: tuple[int, ...]) -> None:
        for item in layout:
            if item[0] == "op":
                self._op(item[1], counters)  # type: ignore[arg-type]
            else:
                count = self.flat.counts[item[1]]  # type: ignore[call-overload]
                for k in range(self.steps if count == STEPS else count):
                    self._layout(item[2], (*counters, k))  # type: ignore[arg-type]

    def _op(self, position: int, counters: tuple[int, ...]) -> None:
        op = self.flat.ops[position]
        logical = counters
        if op.carried:
            if not counters:
                raise PlanError(f"^{op.carried} {op.name} stands outside any repeat")
            if counters[-1] < op.carried:
                return
            logical = (*counters[:-1], counters[-1] - op.carried)
        self.now = logical[0] if logical else self.now
        sources = self._sources(position, op, logical)
        stream = stream_of(op)
        out = self.out
        mine = []
        for piece in range(self.pieces[position]):
            node = len(out.static)
            mine.append(node)
            out.static.append(position)
            out.step.append(self.now)
            out.piece.append(piece)
            out.slots[position, piece].append(node)
            out.deps += [(s, node) for s in sources]
            for s in sources:
                out.consumer.setdefault(s, node)
            self._order(node, op, stream)
        alone = not mine
        for j in range(len(logical) + 1):
            self.last[position, logical[:j]] = sources if alone else mine
        if alone:
            return
        if op.kind == "BARRIER":
            self.fence, self.fenced, self.since = mine[-1], set(), []
        else:
            self.since += mine

    def _order(self, node: int, op: Op, stream: str) -> None:
        order = self.out.order
        if op.kind == "BARRIER":
            order += [(s, node) for s in self.since]
            if self.fence >= 0:
                order.append((self.fence, node))
            return
        if stream in LOCAL_STREAMS:
            if stream in self.prioritised:
                self.out.priority[node] = op.priority if op.priority is not None else 0.0
            elif stream in self.tail:
                order.append((self.tail[stream], node))
        if self.fence >= 0 and (
            stream not in LOCAL_STREAMS or stream in self.prioritised or stream not in self.fenced
        ):
            order.append((self.fence, node))
            self.fenced.add(stream)
        if stream == "pair":
            self.out.compute_before[node] = self.tail.get("compute", -1)
        if not self.async_compute and self.blocker >= 0:
            order.append((self.blocker, node))
        if stream in LOCAL_STREAMS:
            self.tail[stream] = node
            if stream == "compute":
                self.blocker = node

    def _sources(self, position: int, op: Op, logical: tuple[int, ...]) -> list[int]:
        """Instances the op depends on: per named target the latest one that fits."""
        mine = self.flat.paths[position]
        best: dict[int, list[int]] = {}
        for target, distance in self.static_deps[position]:
            theirs = self.flat.paths[target]
            common = 0
            while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
                common += 1
            prefix = logical[:common]
            if common:
                prefix = (*prefix[:-1], prefix[-1] - distance)
            elif distance:
                raise PlanError(
                    f"{op.name} counts iterations of a repeat it is not in", found=f"@{distance}"
                )
            hit = self.last.get((target, prefix))
            if hit is None:
                continue
            # One name may stand in prologue, body and epilogue: the latest instance counts.
            name = self.flat.same[target]
            if hit and (name not in best or best[name][-1] < hit[-1]):
                best[name] = hit
        return [n for hit in best.values() for n in hit]
