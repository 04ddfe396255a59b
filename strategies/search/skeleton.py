"""The op graph of a pipeline without its times, as arrays in topological levels.

The same ops and orders as sim.plan lowers a chain of cells to (compute in schedule order, one
transfer per boundary and microbatch, the gather behind it, receive buffers), written down directly
from the schedule, so that one skeleton serves every plan of its shape. A property test holds the
times it leads to against the lowered graph.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimulationError
from sim.plan.schedules import SCHEDULES, Order

__all__ = ["ROWS", "Shape", "Skeleton", "schedule_order", "skeleton"]

Ints = NDArray[np.int64]

ROWS = ("forward", "backward", "weight", "send_f", "send_b", "gather_f", "gather_b")
"""Families of durations; a node's duration row is family * number of virtual stages + stage."""
F, B, W, SEND_F, SEND_B, GATHER_F, GATHER_B = range(7)


class Shape(NamedTuple):
    """What two plans share when they share a skeleton.

    Args:
        schedule: name in sim.plan.schedules. num_stages: positions. num_microbatches: of a replica.
        chunks: virtual stages per position. split_backward: B as I then W.
        blocking_sends: compute waits for the sends listed before it.
        buffers: receive buffers per directed pair, 0 for rendezvous.
    """

    schedule: str = "1f1b"
    num_stages: int = 1
    num_microbatches: int = 1
    chunks: int = 1
    split_backward: bool = False
    blocking_sends: bool = False
    buffers: int = 2

    @property
    def splits(self) -> bool:
        """True when the weight gradient is an op of its own."""
        return self.split_backward or self.schedule == "zb-h1"


class Skeleton:
    """Nodes sorted by level; node 0 is a source at time 0.

    Attributes:
        shape: see there. virtual: number of virtual stages V.
        row: (N,) duration row of each node, -1 for the source.
        ends: (N, E) predecessors whose end a node waits for, 0 for none.
        gate_gather, gate_compute: (N,) node whose start releases the buffer, with and without a
            gather behind the transfer; 0 for none.
        position: (N,) pipeline position of the receiver of a transfer, else of the node.
        levels: level i is nodes levels[i] to levels[i + 1].
        gradient: (V,) node that completes each virtual stage's gradient.
        last: (P,) last compute node of each position.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.virtual = shape.num_stages * shape.chunks
        build = _Build(shape)
        ends, gates = build.edges()
        rank = _levels(build.count, ends, gates)
        order = np.argsort(rank, kind="stable")
        number = np.empty(build.count, np.int64)
        number[order] = np.arange(build.count)
        self.levels = np.searchsorted(rank[order], np.arange(1, int(rank.max()) + 2))
        self.row = build.row[order]
        self.position = build.position[order]
        self.ends = _table(build.count, ends, number)
        self.gate_gather = np.zeros(build.count, np.int64)
        self.gate_compute = np.zeros(build.count, np.int64)
        gather, compute, target = gates
        self.gate_gather[number[target]] = number[gather]
        self.gate_compute[number[target]] = number[compute]
        self.gradient = number[build.gradient]
        self.last = number[build.last]


class _Build:
    """Numbers the nodes of one shape and lists their edges."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        p, m = shape.num_stages, shape.num_microbatches
        self.virtual = v = p * shape.chunks
        self.order = [np.array(x, np.int64) for x in _codes(schedule_order(shape))]
        count = 1
        self.node = np.zeros((7, v, m), np.int64)
        rows: list[Ints] = [np.array([-1])]
        where: list[Ints] = [np.array([0])]
        for position, slots in enumerate(self.order):
            kind, stage, mb = slots.T
            self.node[kind, stage, mb] = np.arange(count, count + len(slots))
            rows.append(kind * v + stage)
            where.append(np.full(len(slots), position))
            count += len(slots)
        for family in range(SEND_F, GATHER_B + 1):
            forward = family in (SEND_F, GATHER_F)
            stages = np.arange(v - 1) if family in (SEND_F, GATHER_B) else np.arange(1, v)
            made = np.arange(count, count + len(stages) * m).reshape(-1, m)
            self.node[family, stages] = made
            receiver = stages if family >= GATHER_F else stages + (1 if forward else -1)
            rows.append(np.repeat(family * v + stages, m))
            where.append(np.repeat(receiver % p, m))
            count += made.size
        self.count, self.row, self.position = count, np.concatenate(rows), np.concatenate(where)
        done = W if shape.splits else B
        self.gradient = self.node[done].max(axis=1)
        self.last = np.array([self.node[tuple(s[-1])] for s in self.order])

    def edges(self) -> tuple[Ints, tuple[Ints, Ints, Ints]]:
        """(end -> start) edges, shape (E, 2); and (gather, compute, target) of buffer gates."""
        found: list[Ints] = []
        gates: list[tuple[Ints, Ints, Ints]] = []
        slot = np.zeros(self.count, np.int64)
        for slots in self.order:
            nodes = self.node[tuple(slots.T)]
            slot[nodes] = np.arange(len(nodes))
            found.append(np.stack([nodes[:-1], nodes[1:]], 1))
        inbox: list[list[tuple[Ints, Ints]]] = [[] for _ in range(self.shape.num_stages)]
        for sender, slots in enumerate(self.order):
            for receiver, sends, nodes in self._streams(sender, slots):
                consumer, gather = self._received(sends)
                found += [
                    np.stack([sends, gather], 1),
                    np.stack([gather, consumer], 1),
                    np.stack([sends[:-1], sends[1:]], 1),
                    np.stack([nodes, sends], 1),
                ]
                # Every built-in schedule consumes in the order in which its neighbour sends.
                place = slot[consumer]
                inbox[receiver].append((gather, place))
                gates.append(self._buffer_gates(sends, gather, consumer))
                found.append(self._rendezvous(receiver, sends, place))
                found.append(self._blocking(sender, sends, slot[nodes]))
        for streams in inbox:
            if streams:
                gathers = np.concatenate([g for g, _ in streams])
                place = np.concatenate([x for _, x in streams])
                listed = gathers[np.argsort(place, kind="stable")]
                found.append(np.stack([listed[:-1], listed[1:]], 1))
        empty = np.zeros(0, np.int64)
        joined = [np.concatenate([g[i] for g in gates] or [empty]) for i in range(3)]
        return np.concatenate(found), (joined[0], joined[1], joined[2])

    def _streams(self, sender: int, slots: Ints) -> list[tuple[int, Ints, Ints]]:
        """(receiver, transfers, what they wait for) of each directed pair, in list order."""
        p, v = self.shape.num_stages, self.virtual
        if p == 1:
            return []
        kind, stage, mb = slots.T
        found = []
        for code, family, step in ((F, SEND_F, 1), (B, SEND_B, -1)):
            mine = (kind == code) & (stage + step >= 0) & (stage + step < v)
            if mine.any():
                sends = self.node[family, stage[mine], mb[mine]]
                found.append(((sender + step) % p, sends, self.node[code, stage[mine], mb[mine]]))
        return found

    def _received(self, sends: Ints) -> tuple[Ints, Ints]:
        """The compute op that consumes each transfer, and the gather before it."""
        family, stage = np.divmod(self.row[sends], self.virtual)
        first = self.node[family, stage, 0]
        mb = sends - first
        target = np.where(family == SEND_F, stage + 1, stage - 1)
        consumer = self.node[np.where(family == SEND_F, F, B), target, mb]
        return consumer, self.node[np.where(family == SEND_F, GATHER_F, GATHER_B), target, mb]

    def _buffer_gates(self, sends: Ints, gather: Ints, consumer: Ints) -> tuple[Ints, Ints, Ints]:
        n = self.shape.buffers
        if n == 0 or len(sends) <= n:
            empty = np.zeros(0, np.int64)
            return empty, empty, empty
        return gather[:-n], consumer[:-n], sends[n:]

    def _rendezvous(self, receiver: int, sends: Ints, place: Ints) -> Ints:
        """Without buffers a transfer waits for the receiver's compute listed before its RECV."""
        if self.shape.buffers:
            return np.zeros((0, 2), np.int64)
        listed = self.node[tuple(self.order[receiver].T)]
        later = place > 0
        return np.stack([listed[place[later] - 1], sends[later]], 1)

    def _blocking(self, sender: int, sends: Ints, slots: Ints) -> Ints:
        """Blocking sends: the sender's next compute op waits for them."""
        listed = self.node[tuple(self.order[sender].T)]
        more = slots + 1 < len(listed)
        if not self.shape.blocking_sends or not more.any():
            return np.zeros((0, 2), np.int64)
        return np.stack([sends[more], listed[slots[more] + 1]], 1)


def schedule_order(shape: Shape) -> Order:
    """Compute order of every position, with B split where the shape says so.

    Raises:
        InputError: the schedule does not take this shape.
    """
    extra = (shape.chunks,) if shape.schedule == "interleaved" else ()
    order = SCHEDULES[shape.schedule](shape.num_stages, shape.num_microbatches, *extra)
    if not shape.split_backward:
        return order
    return [
        [s for k, v, i in slots for s in ([("I", v, i), ("W", v, i)] if k == "B" else [(k, v, i)])]
        for slots in order
    ]


def _codes(order: Order) -> list[list[tuple[int, int, int]]]:
    code = {"F": F, "B": B, "I": B, "W": W}
    return [[(code[k], v, i) for k, v, i in slots] for slots in order]


def _levels(count: int, ends: Ints, gates: tuple[Ints, Ints, Ints]) -> Ints:
    """Topological level of every node; the source is level 0.

    Raises:
        SimulationError: the schedule deadlocks with these buffers.
    """
    src = np.concatenate([ends[:, 0], gates[0], gates[1]])
    dst = np.concatenate([ends[:, 1], gates[2], gates[2]])
    order = np.argsort(src, kind="stable")
    targets, bounds = dst[order], np.searchsorted(src[order], np.arange(count + 1))
    need = np.bincount(dst, minlength=count)
    rank = np.full(count, -1, np.int64)
    rank[0] = 0
    front = np.flatnonzero(need == 0)
    front = front[front > 0]
    level = 0
    while len(front):
        level += 1
        rank[front] = level
        sizes = bounds[front + 1] - bounds[front]
        first = np.repeat(bounds[front] - np.append(0, np.cumsum(sizes)[:-1]), sizes)
        hit = targets[first + np.arange(sizes.sum())]
        np.subtract.at(need, hit, 1)
        front = np.unique(hit[need[hit] == 0])
    if (rank < 0).any():
        raise SimulationError("the schedule waits for itself with these receive buffers")
    return rank


def _table(count: int, ends: Ints, number: Ints) -> Ints:
    """Predecessors of every node as columns, padded with the source."""
    src, dst = number[ends[:, 0]], number[ends[:, 1]]
    order = np.argsort(dst, kind="stable")
    src, dst = src[order], dst[order]
    first = np.searchsorted(dst, np.arange(count))
    column = np.arange(len(dst)) - first[dst]
    table = np.zeros((count, int(column.max()) + 1 if len(column) else 1), np.int64)
    table[dst, column] = src
    return table


@lru_cache(maxsize=64)
def skeleton(shape: Shape) -> Skeleton:
    """Build the skeleton of a shape, kept for the shapes asked last.

    Raises:
        InputError: the schedule does not take this shape.
        SimulationError: it deadlocks with these buffers.
    """
    return Skeleton(shape)
