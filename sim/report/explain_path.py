"""The critical path of a run: back from its end, each op to what let it start.

An op started because a dependency, the op before it on its stream, or the op that freed its receive
buffer was over (``sim.plan.graph``); on a stream served by priority, because the stream was free.
What an ``on`` block does started because a message arrived. So the intervals of a path follow one
another without a gap, and their lengths add up to the time they explain: the longest path of an
event graph (Baccelli et al. 1992, chapter 2), with the durations of the run, contention included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engine.handled import Handled
from sim.engine.simulate import Run
from sim.plan.kinds import MESSAGES
from sim.plan.unroll import stream_of

__all__ = ["Interval", "critical_path"]

Ints = NDArray[np.int64]

TOLERANCE = 1e-10
"""Times this close, relative to the run's length, are one instant: of equal ranks any may be last,
and rounding must not choose among them."""


class Interval(NamedTuple):
    """A stretch of a critical path.

    Args:
        start, end: [s]. node: of the graph, -1 for none.
        handled: index into ``Run.handled``, -1 for none. Neither of both: nothing that the graph
            knows was running (a lost chip lets others go on).
    """

    start: float
    end: float
    node: int = -1
    handled: int = -1


class _Cause(NamedTuple):
    """What let an op start.

    Args:
        at: [s] when it ended, or began. order: the smallest is preferred.
        node, handled: as in Interval. as_it_is: it began then (it freed a buffer), or it is the way
            of a PULL to who answers it.
    """

    at: float
    order: tuple[int, ...]
    node: int = -1
    handled: int = -1
    as_it_is: bool = False

    @property
    def key(self) -> tuple[int, int, bool]:
        return self.node, self.handled, self.as_it_is


Seen = set[tuple[int, int, bool]]


def critical_path(
    run: Run, start: float, stop: float, order: Sequence[int] = ()
) -> tuple[Interval, ...]:
    """Return the path that ends at ``stop``, cut off at ``start``, in order of time.

    Args:
        run: simulated. start, stop: [s] of the time to explain; some op ends at ``stop``.
        order: per actor a number; of several causes at one instant the path stays with its rank,
            else goes to the smallest. () for actors in their order.
    """
    return _Walk(run, order).back(start, stop)


class _Walk:
    def __init__(self, run: Run, order: Sequence[int]) -> None:
        self.run, self.graph = run, run.layout.graph
        graph, outcome = self.graph, run.outcome
        self.start, self.end = outcome.start, outcome.end
        self.order = list(order) or list(range(len(graph.actors)))
        self.actor_of = {a.rank: i for i, a in enumerate(graph.actors)}
        self.tolerance = TOLERANCE * max(outcome.makespan, 1e-300)
        n = graph.num_nodes
        self.deps = _sources(graph.dep_src, graph.dep_dst, n)
        self.orders = _sources(graph.order_src, graph.order_dst, n)
        self.gates = _sources(graph.gate_src, graph.gate_dst, n)
        self.on_stream: dict[int, list[int]] = defaultdict(list)
        for node in graph.priority:
            self.on_stream[int(graph.stream[node])].append(node)
        self.handled = run.handled
        self.handled_end = np.array([h.end for h in run.handled], np.float64)
        sent = [n for n, op in enumerate(graph.ops) if op.kind in MESSAGES]
        ends = [(n, graph.wires[graph.wire[n]].end) for n in sent]
        rows = [(n, e.src, e.dst, graph.ops[n].kind == "PULL") for n, e in ends if e is not None]
        self.messages = np.array(rows, np.int64).reshape(-1, 4).T

    def back(self, start: float, stop: float) -> tuple[Interval, ...]:
        """Follow the causes from the last op that ends at ``stop``."""
        found: list[Interval] = []
        seen: Seen = set()
        at, cause = stop, self._last(stop)
        while at > start and cause is not None:
            cause = self._answered(cause)
            seen.add(cause.key)
            before, began = self._before(cause, seen)
            begin = max(start, min(at, began if before is None else before.at))
            if begin < at:
                found.append(Interval(begin, at, cause.node, cause.handled))
            at = begin
            if before is None and at - start > self.tolerance:
                before = self._latest(at, seen)
                begin = start if before is None else max(start, before.at)
                found.append(Interval(begin, at))
                at = begin
            cause = before
        if at > start and found:
            found[-1] = found[-1]._replace(start=start)
        return tuple(reversed(found))

    # -- causes ---------------------------------------------------------------------------------

    def _last(self, stop: float) -> _Cause | None:
        nodes = np.flatnonzero(np.abs(self.end - stop) <= self.tolerance).tolist()
        ends = [self._of_node(n, stop, -1, 0) for n in nodes]
        ends += [self._of_handled(k, stop, -1) for k in self._handled_at(stop)]
        # What is listed last ends a step: its BARRIER, where it has one.
        static = self.graph.static
        return min(
            ends,
            key=lambda c: (0 if c.handled >= 0 else 1, -int(static[c.node]), c.order),
            default=None,
        )

    def _before(self, cause: _Cause, seen: Seen) -> tuple[_Cause | None, float]:
        """What let an op start, and when that was."""
        if cause.handled >= 0:
            return self._before_handled(cause.handled, seen)
        node, graph = cause.node, self.graph
        actor = int(graph.actor[node])
        causes = [
            self._of_node(n, float(self.end[n]), actor, rank)
            for rank, edges in enumerate((self.deps, self.orders))
            for n in edges(node)
        ]
        if node in graph.priority:
            stream = self.on_stream[int(graph.stream[node])]
            causes += [self._of_node(n, float(self.end[n]), actor, 2) for n in stream]
        causes += [
            self._of_node(n, float(self.start[n]), actor, 3, as_it_is=True)
            for n in self.gates(node)
        ]
        began = float(self.start[node])
        return self._nearest(causes, began, seen), began

    def _before_handled(self, k: int, seen: Seen) -> tuple[_Cause | None, float]:
        mine = self.handled[k]
        actor = self.actor_of[mine.rank]
        causes = [
            self._of_handled(j, self.handled[j].end, actor)
            for j in self._handled_at(mine.start)
            if j != k and _may_wait(mine, self.handled[j])
        ]
        nodes, _, to, pull = self.messages
        arrived = (to == mine.rank) & (pull == 0)
        arrived &= np.abs(self.end[nodes] - mine.start) <= self.tolerance
        for n, src in self.messages[:2, arrived].T.tolist():
            relation = 4 if src == mine.sender else 5
            causes.append(self._of_node(n, float(self.end[n]), actor, relation))
        found = self._nearest(causes, mine.start, seen)
        return found or self._asked(mine), mine.start

    def _nearest(self, causes: list[_Cause], began: float, seen: Seen) -> _Cause | None:
        at_once = [c for c in causes if abs(c.at - began) <= self.tolerance and c.key not in seen]
        return min(at_once, key=lambda c: c.order, default=None)

    def _latest(self, at: float, seen: Seen) -> _Cause | None:
        """What ended last before an instant that no end explains."""
        nodes = np.flatnonzero(self.end <= at)
        for n in nodes[np.argsort(-self.end[nodes], kind="stable")].tolist():
            if (n, -1, False) not in seen:
                return self._of_node(n, float(self.end[n]), -1, 0)
        return None

    # -- one op ---------------------------------------------------------------------------------

    def _of_node(
        self, node: int, at: float, actor: int, relation: int, *, as_it_is: bool = False
    ) -> _Cause:
        graph = self.graph
        mine, op = int(graph.actor[node]), graph.ops[node]
        moved = 0 if mine == actor else 1 + self.order[mine]
        # Of ops that end at once the one listed last is nearest to the op that waits.
        place = (-op.stage, -op.mb, -op.part, int(graph.piece[node]), node)
        return _Cause(at, (moved, relation, *place), node=node, as_it_is=as_it_is)

    def _of_handled(self, k: int, at: float, actor: int) -> _Cause:
        mine = self.actor_of[self.handled[k].rank]
        moved = 0 if mine == actor else 1 + self.order[mine]
        return _Cause(at, (moved, 0, k), handled=k)

    def _answered(self, cause: _Cause) -> _Cause:
        """A PULL ends with its answer: that instance in place of it."""
        if cause.node < 0 or cause.as_it_is or self.graph.ops[cause.node].kind != "PULL":
            return cause
        end = self.graph.wires[self.graph.wire[cause.node]].end
        for k in self._handled_at(float(self.end[cause.node])):
            h = self.handled[k]
            mine = end is not None and (h.sender, h.rank) == (end.src, end.dst)
            if mine and h.op.kind.startswith("SEND"):
                return self._of_handled(k, cause.at, -1)
        return cause

    def _asked(self, answer: Handled) -> _Cause | None:
        """The way of the last PULL of an instance's sender that left before it started."""
        nodes, src, dst, pull = self.messages
        left = (src == answer.sender) & (dst == answer.rank) & (pull == 1)
        mine = nodes[left & (self.start[nodes] <= answer.start + self.tolerance)]
        if not len(mine):
            return None
        last = int(mine[np.argmax(self.start[mine])])
        return _Cause(answer.start, (), node=last, as_it_is=True)

    def _handled_at(self, t: float) -> list[int]:
        found: list[int] = np.flatnonzero(np.abs(self.handled_end - t) <= self.tolerance).tolist()
        return found


def _may_wait(one: Handled, other: Handled) -> bool:
    """Whether an instance waits for another: same stream, same block, or a write that it reads."""
    return one.rank == other.rank and (
        stream_of(one.op) == stream_of(other.op)
        or other.index == one.index - 1
        or (bool(other.op.writes) and one.op.reads == "latest")
    )


def _sources(src: Ints, dst: Ints, n: int) -> Callable[[int], list[int]]:
    """Node -> sources of its edges."""
    order = np.argsort(dst, kind="stable")
    sources, bounds = src[order], np.searchsorted(dst[order], np.arange(n + 1))

    def of(node: int) -> list[int]:
        found: list[int] = sources[bounds[node] : bounds[node + 1]].tolist()
        return found

    return of
