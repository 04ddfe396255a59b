"""What an op graph is: nodes, edges, the actors that run them and the wires they use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.plan.op import Op
from sim.plan.wiring import End

__all__ = ["Actor", "OpGraph", "Wire"]

Ints = NDArray[np.int64]


class Actor:
    """A class of ranks that behave alike, run once.

    Attributes:
        rank: the representative. ranks: all members. program: index into the programs.
        first, last: its node interval before SEND and RECV are joined.
    """

    __slots__ = ("first", "last", "program", "rank", "ranks")

    def __init__(self, rank: int, ranks: tuple[int, ...], program: int) -> None:
        self.rank, self.ranks, self.program = rank, ranks, program
        self.first = self.last = 0


class Wire:
    """What a transfer or collective node runs over.

    Attributes:
        kind: "pair" or "group".
        end: representative end of a pair.
        group: representative members. share: of the tensor, or of the stage's parameters.
        classes: class of the sender and receiver (pair), or sorted classes of the members.
        actors: actor indices that take part.
    """

    __slots__ = ("actors", "classes", "end", "group", "kind", "roles", "share")

    def __init__(
        self,
        kind: str,
        end: End | None,
        group: tuple[int, ...],
        share: tuple[int, int],
        classes: tuple[int, ...],
        roles: frozenset[str] = frozenset(),
    ) -> None:
        self.kind, self.end, self.group, self.share = kind, end, group, share
        self.classes, self.roles = classes, roles
        self.actors: set[int] = set()


class OpGraph:
    """See the module. All arrays are over nodes unless said.

    Attributes:
        ops: static op of each node. actor: actor of each node (the sender of a transfer).
        static: position of each node's op in the flat list of its actor's program.
        step: step number. piece: piece index. wire: index into wires, -1 for local ops.
        stream: stream number; stream_names: (actor or -1, name) of each stream.
        dep_src, dep_dst: dependency edges. order_src, order_dst: stream order edges.
        gate_src, gate_dst: the target starts no earlier than the source starts.
        priority: node -> key, for streams that are served by priority.
        actors, wires, classes: see there; classes[rank] is the rank's class.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.actor: Ints = np.zeros(0, np.int64)
        self.static: Ints = self.actor
        self.step: Ints = self.actor
        self.piece: Ints = self.actor
        self.wire: Ints = self.actor
        self.stream: Ints = self.actor
        self.stream_names: list[tuple[int, str]] = []
        self.dep_src = self.dep_dst = self.order_src = self.order_dst = self.actor
        self.gate_src = self.gate_dst = self.actor
        self.priority: dict[int, float] = {}
        self.actors: list[Actor] = []
        self.wires: list[Wire] = []
        self.classes: list[int] = []
        self.steps = 0
        self.handlers: dict[int, dict[str, tuple[Op, ...]]] = {}

    @property
    def num_nodes(self) -> int:
        """Number of op instances."""
        return len(self.ops)

    def label(self, node: int) -> str:
        """The node for people: rank and op."""
        rank = self.actors[self.actor[node]].rank
        return f"rank {rank} {self.ops[node].name} step {self.step[node]}"
