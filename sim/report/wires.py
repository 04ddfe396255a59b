"""Streams, groups and peers of spans, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.plan.graph import OpGraph, Wire
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.plan.wiring import DEFAULT_ROLE

__all__ = ["WireTexts", "compact_ranks", "encode"]

Ints = NDArray[np.int64]


def encode(texts: Sequence[str]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Texts as codes, and the distinct texts that they stand for."""
    number: dict[str, int] = {}
    codes = np.array([number.setdefault(t, len(number)) for t in texts], np.int32)
    return codes, tuple(number)


class WireTexts:
    """Streams, groups, peers and weights of rows, worked out once per wire."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.members = np.array([len(a.ranks) for a in graph.actors], np.int64)
        actor_of_class = {graph.classes[a.rank]: a for a in graph.actors}
        first = {
            int(w): int(n) for w, n in zip(*np.unique(graph.wire, return_index=True), strict=True)
        }
        n = len(graph.wires)
        self.peer, self.count = np.full(n + 1, -1, np.int64), np.zeros(n + 1, np.int64)
        self.text, self.group = [""] * (n + 1), [""] * (n + 1)
        for w, wire in enumerate(graph.wires):
            if wire.end is not None:
                receiver = actor_of_class[wire.classes[1]]
                sender = actor_of_class[wire.classes[0]]
                self.peer[w] = receiver.rank
                # A boundary is cut in as many pieces as the larger side has ranks.
                self.count[w] = max(len(sender.ranks), len(receiver.ranks))
                self.text[w] = f"{wire.end.src}->{wire.end.dst}" + _channel(graph, first, w)
            else:
                self.group[w] = _group_text(wire, graph.ops[first[w]] if w in first else None)
                self.text[w] = self.group[w] + _channel(graph, first, w)

    def peers(self, nodes: Ints) -> Ints:
        """Representative of each transfer's receiver, -1 for everything else."""
        return self.peer[self.graph.wire[nodes]]

    def weights(self, nodes: Ints, actors: Ints) -> Ints:
        """Members that have such a row: of the actor, or pieces of a transfer."""
        count = self.count[self.graph.wire[nodes]]
        return np.where(count > 0, count, self.members[actors])

    def groups(self, nodes: Ints) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """Role and members of each collective, "" for everything else."""
        codes, names = encode(self.group)
        return codes[self.graph.wire[nodes]], names

    def streams(self, nodes: Ints, actors: Ints) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """The wire's text, or the name of the rank-local stream."""
        graph = self.graph
        local = [name if actor >= 0 else "" for actor, name in graph.stream_names]
        codes, names = encode([*self.text, *local])
        wire = graph.wire[nodes]
        rows = np.where(wire >= 0, wire, len(self.text) + graph.stream[nodes])
        return codes[rows], names


def _channel(graph: OpGraph, first: Mapping[int, int], w: int) -> str:
    channel = graph.ops[first[w]].channel if w in first else 0
    return f" channel {channel}" if channel else ""


def _group_text(wire: Wire, op: Op | None) -> str:
    role = "+".join(sorted(wire.roles))
    if op is not None and KINDS[op.kind].stream == "group":
        named = op.group or DEFAULT_ROLE.get(op.kind, "tp")
        role = named if named in wire.roles else role
    return f"{role} {compact_ranks(wire.group)}"


def compact_ranks(ranks: Sequence[int]) -> str:
    """Write an ordered member list with runs of equal distance folded.

    >>> compact_ranks((0, 1, 2, 3, 8)), compact_ranks((0, 8, 16, 24)), compact_ranks((5, 3))
    ('0-3,8', '0-24/8', '5,3')
    """
    parts = []
    i = 0
    while i < len(ranks):
        j = i + 1
        gap = ranks[j] - ranks[i] if j < len(ranks) else 0
        while gap > 0 and j + 1 < len(ranks) and ranks[j + 1] - ranks[j] == gap:
            j += 1
        if gap > 0 and j - i >= 2:
            parts.append(f"{ranks[i]}-{ranks[j]}" + (f"/{gap}" if gap > 1 else ""))
            i = j + 1
        else:
            parts.append(str(ranks[i]))
            i += 1
    return ",".join(parts)
