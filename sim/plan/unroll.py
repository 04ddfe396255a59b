"""Unroll one program into op instances of one rank: the local half of the op graph.

Issue rule: list order is issue order, every op is issued at once, so on a rank only three things
order ops: dependencies, the stream's list order, and what blocks the issuer.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from sim.errors import PlanError
from sim.plan.flat import Flat, Layout
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.plan.program import STEPS

__all__ = ["LOCAL_STREAMS", "Template", "stream_of", "unroll"]

LOCAL_STREAMS = ("compute", "host", "d2h", "h2d", "nvme_read", "nvme_write")

Ints = NDArray[np.int64]
Prefix = tuple[int, ...]


class Template:
    """Op instances of one rank, numbered in list order; arrays over them unless said.

    Attributes:
        static: position in Flat.ops. step: logical iteration of the outermost repeat.
        piece: piece index of a transfer or of a group.
        dep_src, dep_dst: dependency edges. order_src, order_dst: edges of stream order, blocking
            issuer and barriers.
        slots: (number of a talker, piece) -> its instances in list order.
        consumer: the first instance that depends on this one, where it stands on a pair; else -1.
        compute_before: last compute instance listed before it, where it stands on a pair; else -1.
        priority: instances on a local stream that is served by priority.
    """

    def __init__(self, unroller: _Unroller) -> None:
        u = unroller
        self.static, self.step, self.piece = _array(u.static), _array(u.step), _array(u.piece)
        self.dep_src, self.dep_dst = _array(u.dep_src), _array(u.dep_dst)
        self.order_src, self.order_dst = _array(u.order_src), _array(u.order_dst)
        self.priority = u.priority
        n = len(self.static)
        pair = np.array([s == "pair" for s in u.flat.streams], bool)[self.static]
        self.compute_before = np.full(n, -1, np.int64)
        self.compute_before[pair] = u.compute_before
        self.consumer = np.full(n, n, np.int64)
        np.minimum.at(self.consumer, self.dep_src, self.dep_dst)
        self.consumer[~pair | (self.consumer == n)] = -1
        self.slots = self._slots(u.flat)

    def _slots(self, flat: Flat) -> dict[tuple[int, int], Ints]:
        talk = np.array(flat.talk, np.int64)[self.static]
        on_wire = np.flatnonzero(talk >= 0)
        width = 1 + int(self.piece.max(initial=0))
        code = talk[on_wire] * width + self.piece[on_wire]
        order = np.argsort(code, kind="stable")
        codes, first = np.unique(code[order], return_index=True)
        parts = np.split(on_wire[order], first[1:])
        return {divmod(c, width): nodes for c, nodes in zip(codes.tolist(), parts, strict=False)}


def _array(values: list[int]) -> Ints:
    return np.array(values, np.int64)


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
    return Template(_Unroller(flat, deps, pieces, steps, async_compute))


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
        self.flat, self.pieces, self.steps = flat, pieces, steps
        self.async_compute = async_compute
        self.static: list[int] = []
        self.step: list[int] = []
        self.piece: list[int] = []
        self.dep_src: list[int] = []
        self.dep_dst: list[int] = []
        self.order_src: list[int] = []
        self.order_dst: list[int] = []
        self.compute_before: list[int] = []
        self.priority: dict[int, float] = {}
        self.deps = deps
        # Turn of some repeats -> op -> its last instances in that turn.
        self.turns: dict[Prefix, dict[int, list[int]]] = defaultdict(dict)
        paths = set(flat.paths)
        self.common = {(p, q): _common(p, q) for p in paths for q in paths}
        self.depths = sorted(set(self.common.values()))
        self.prioritised = {
            stream
            for op, stream in zip(flat.ops, flat.streams, strict=True)
            if op.priority is not None and stream in LOCAL_STREAMS
        }
        self.tail: dict[str, int] = {}
        self.blocker = -1
        self.fence = -1
        self.fenced: set[str] = set()
        self.now = 0
        self._layout(flat.layout, ())

    def _layout(self, layout: Layout, counters: Prefix) -> None:
        for item in layout:
            if isinstance(item, int):
                self._op(item, counters)
            else:
                number, inner = item
                count = self.flat.counts[number]
                for k in range(self.steps if count == STEPS else count):
                    self._layout(inner, (*counters, k))

    def _op(self, position: int, counters: Prefix) -> None:
        op = self.flat.ops[position]
        logical = counters
        if op.carried:
            if not counters:
                raise PlanError(f"^{op.carried} {op.name} stands outside any repeat")
            if counters[-1] < op.carried:
                return
            logical = (*counters[:-1], counters[-1] - op.carried)
        self.now = logical[0] if logical else self.now
        sources = self._sources(position, logical)
        first, pieces = len(self.static), self.pieces[position]
        mine = list(range(first, first + pieces))
        for node in mine:
            self.static.append(position)
            self.step.append(self.now)
            self.piece.append(node - first)
            self.dep_src += sources
            self.dep_dst += [node] * len(sources)
            self._order(node, op, self.flat.streams[position])
        for depth in self.depths:
            self.turns[logical[:depth]][position] = mine or sources
        if mine and op.kind == "BARRIER":
            self.fence, self.fenced = mine[-1], set()

    def _order(self, node: int, op: Op, stream: str) -> None:
        if op.kind == "BARRIER":
            for before in range(max(self.fence, 0), node):
                self._after(before, node)
            return
        local = stream in LOCAL_STREAMS
        if local:
            if stream in self.prioritised:
                self.priority[node] = op.priority if op.priority is not None else 0.0
            elif stream in self.tail:
                self._after(self.tail[stream], node)
        if self.fence >= 0 and (
            not local or stream in self.prioritised or stream not in self.fenced
        ):
            self._after(self.fence, node)
            self.fenced.add(stream)
        if stream == "pair":
            self.compute_before.append(self.tail.get("compute", -1))
        if not self.async_compute and self.blocker >= 0:
            self._after(self.blocker, node)
        if local:
            self.tail[stream] = node
            if stream == "compute":
                self.blocker = node

    def _after(self, before: int, node: int) -> None:
        self.order_src.append(before)
        self.order_dst.append(node)

    def _sources(self, position: int, logical: Prefix) -> list[int]:
        """Instances the op depends on: per named target the latest one that fits."""
        flat = self.flat
        mine = flat.paths[position]
        best: dict[int, list[int]] = {}
        for target, distance in self.deps[position]:
            common = self.common[mine, flat.paths[target]]
            prefix = logical[:common]
            if distance and not common:
                raise PlanError(
                    f"{flat.ops[position].name} counts iterations of a repeat it is not in",
                    found=f"@{distance}",
                )
            if distance:
                prefix = (*prefix[:-1], prefix[-1] - distance)
            hit = self.turns[prefix].get(target)
            # One name may stand in prologue, body and epilogue: the latest instance counts.
            name = flat.same[target]
            if hit and (name not in best or best[name][-1] < hit[-1]):
                best[name] = hit
        return [n for hit in best.values() for n in hit]


def _common(mine: Prefix, theirs: Prefix) -> int:
    """How many of the outermost repeats hold both."""
    pairs = zip(mine, theirs, strict=False)
    return sum(1 for _ in takewhile(lambda p: p[0] == p[1], pairs))
