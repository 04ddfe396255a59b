"""What each rank does at every instant of a step: one sweep over the runs of all actors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sim.plan.unroll import LOCAL_STREAMS, stream_of
from sim.report.busy import is_communication
from sim.report.explain_parts import (
    BARRIER,
    BUBBLE,
    CONTENTION,
    OpParts,
    Parts,
    Window,
    contention_of,
    in_order,
)
from sim.report.wires import WireTexts

__all__ = ["parts_of_ranks"]

Floats = NDArray[np.float64]


def parts_of_ranks(parts: OpParts, window: Window) -> list[Parts]:
    """Return the parts of each actor of the graph [s], per step; they add up to the step time.

    Args:
        parts: of the run. window: see there.
    """
    ops = _Rows(parts, window)
    late = [contention_of(name) for name in ops.channels]
    names = in_order((*parts.names, *ops.channels, *late, BARRIER, BUBBLE))
    index = {n: i for i, n in enumerate(names)}
    actors = len(parts.graph.actors)
    total = np.zeros((actors, len(names)))
    computes = ops.channel == ops.COMPUTE
    seconds = (ops.end - ops.start)[computes]
    for p, name in enumerate(parts.names):
        share = parts.shares[p, ops.node[computes]]
        np.add.at(total[:, index[name]], ops.actor[computes], seconds * share)
    _idle(ops, window, total, index)
    total /= window.steps
    return [
        {n: float(row[i]) for n, i in index.items() if row[i] > 0.0} for row in total
    ]  # fmt: skip


class _Rows:
    """Who does what when, cut at the window's edges; arrays, shape (S,).

    Attributes:
        actor, start, end, node: node -1 for instances of ``on`` blocks. weight: members of a folded
            row on one rank of the actor. late: share of a row that is contention.
        channel: ``COMPUTE``, or index into ``channels``, names of parts.
        level: of each channel; while a lower one runs the others do not count.
    """

    COMPUTE = -1

    def __init__(self, parts: OpParts, window: Window) -> None:
        graph, outcome = parts.graph, parts.run.outcome
        number: dict[tuple[int, str], int] = {}
        rows: list[tuple[int, float, float, int, int, float]] = []
        weights = _Weights(parts)
        levels = {"wire": 0, "host": 1, "barrier": 2}
        stop = np.where(np.isfinite(outcome.end), outcome.end, window.stop)
        inside = np.isfinite(outcome.start) & (stop > window.start) & (outcome.start < window.stop)
        for node in np.flatnonzero(inside).tolist():
            stream, wire = parts.stream(node), int(graph.wire[node])
            channel = self.COMPUTE
            if stream != "compute":
                if stream == "wire" and not is_communication(graph.ops[node].kind):
                    stream = "host"
                channel = number.setdefault((levels[stream], parts.part_of(node)), len(number))
            own = [int(graph.actor[node])] if wire < 0 else sorted(graph.wires[wire].actors)
            times = (outcome.start[node], stop[node])
            rows += [(a, *times, node, channel, weights.of(wire, a)) for a in own]
        actor_of = {a.rank: i for i, a in enumerate(graph.actors)}
        for h in parts.run.handled:
            end = h.end if np.isfinite(h.end) else window.stop
            if end > window.start and h.start < window.stop:
                wired = stream_of(h.op) not in LOCAL_STREAMS
                level = 0 if wired else 1
                channel = number.setdefault((level, parts.of_handled(h)), len(number))
                own = [h.rank, h.sender] if wired else [h.rank]
                rows += [(actor_of[r], h.start, end, -1, channel, 1.0) for r in own]
        table = np.array(rows, np.float64).reshape(-1, 6).T
        self.actor, self.node, self.channel = table[[0, 3, 4]].astype(np.int64)
        self.weight = table[5]
        self.start = np.maximum(table[1], window.start)
        self.end = np.minimum(table[2], window.stop)
        self.channels = tuple(name for _, name in number)
        self.level = np.array([level for level, _ in number], np.int64)
        late = np.zeros(graph.num_nodes + 1)
        for name, share in zip(parts.names, parts.shares, strict=True):
            if name.startswith(CONTENTION):
                late[:-1] += share
        self.late = late[self.node]


class _Weights:
    """How many transfers or collectives of a folded wire one rank of an actor takes part in."""

    def __init__(self, parts: OpParts) -> None:
        self.graph, self.wiring = parts.graph, parts.run.layout.wiring
        self.pieces = WireTexts(parts.graph).count
        self.known: dict[tuple[int, int], float] = {}

    def of(self, wire: int, actor: int) -> float:
        """1 for what is no wire."""
        if wire < 0:
            return 1.0
        if (wire, actor) not in self.known:
            self.known[wire, actor] = self._count(wire, actor)
        return self.known[wire, actor]

    def _count(self, number: int, actor: int) -> float:
        wire, ranks = self.graph.wires[number], self.graph.actors[actor].ranks
        if wire.end is not None:
            return max(1.0, float(self.pieces[number]) / len(ranks))
        classes, wiring = self.graph.classes, self.wiring
        alike = [
            g
            for role in wire.roles
            for g in wiring.of_rank.get((ranks[0], role), ())
            if tuple(sorted(classes[r] for r in wiring.groups[g])) == wire.classes
        ]
        return float(max(1, len(set(alike))))


def _idle(ops: _Rows, window: Window, total: Floats, index: Mapping[str, int]) -> None:
    """Add what runs while an actor's compute stream is idle, and the bubble, to ``total``."""
    actors, n, rows = len(total), len(ops.channels), len(ops.actor)
    edge = np.full(actors, n)
    who = np.concatenate([ops.actor, np.arange(actors)])
    begin = np.concatenate([ops.start, np.full(actors, window.start)])
    stop = np.concatenate([ops.end, np.full(actors, window.stop)])
    what = np.concatenate([ops.channel, edge])
    weight = np.concatenate([ops.weight, np.ones(actors)])
    late = np.concatenate([ops.late, np.zeros(actors)])
    time, who2 = np.concatenate([begin, stop]), np.concatenate([who, who])
    sign = np.repeat([1.0, -1.0], rows + actors)
    order = np.lexsort((time, who2))
    time, who2, sign = time[order], who2[order], sign[order]
    what, late, weight = (np.concatenate([x, x])[order] for x in (what, late, weight))
    gap = np.diff(time, append=time[-1:])
    gap[:-1][who2[1:] != who2[:-1]] = 0.0

    def running(mine: NDArray[np.bool_], share: Floats | float = 1.0) -> Floats:
        found: Floats = np.cumsum(np.where(mine, sign * weight * share, 0.0))
        return found

    idle = running(what == ops.COMPUTE) < 0.5
    for level in range(3):
        mine = [c for c in range(n) if ops.level[c] == level]
        counts = [running(what == c) for c in mine]
        active = [count > 0.5 for count in counts]
        several = np.maximum(np.sum(active, axis=0), 1.0) if mine else 1.0
        for c, count, on in zip(mine, counts, active, strict=True):
            share = gap * (idle & on) / several
            over = np.clip(running(what == c, late) / np.maximum(count, 1.0), 0.0, 1.0)
            over[over < 1e-9] = 0.0
            np.add.at(total[:, index[ops.channels[c]]], who2, share * (1.0 - over))
            np.add.at(total[:, index[contention_of(ops.channels[c])]], who2, share * over)
        if mine:
            idle = idle & ~np.any(active, axis=0)
    np.add.at(total[:, index[BUBBLE]], who2, gap * idle)
