"""Run an op graph on SimPy's clock.

Times are carried as data: an op whose duration does not depend on what else happens gets its start
and end the moment its last predecessor is known, without an event. Only flows on shared links,
streams served by priority, chips that slow down under overlap and messages to ``on`` blocks need
the clock. So the number of events follows the number of decisions, not of ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.prices import Prices
from sim.engine.kernel import NORMAL, PICK, Kernel
from sim.engine.network import Network
from sim.errors import SimulationError
from sim.plan.graph import OpGraph

if TYPE_CHECKING:
    from sim.engine.faults import Trace

__all__ = ["Execution", "Outcome", "execute"]

Floats = NDArray[np.float64]

BY_EVENT, BY_PRIORITY = 1, 2
"""How a node starts: its start is known ahead but its end is decided on the clock, or its start is
decided on the clock too; 0 for the rest, whose times are carried as data."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did; arrays over the graph's nodes.

    Args:
        ready: [s] when the dependencies were finished. start, end: [s].
        makespan: [s] last end.
        events: calls the kernel processed. flow_changes, solves: of the network.
        link_bytes: [B] per link. link_busy: [s] per link.
        unfinished: nodes that never ended (a lost chip); empty for a normal run.
    """

    ready: Floats
    start: Floats
    end: Floats
    makespan: float
    events: int = 0
    flow_changes: int = 0
    solves: int = 0
    link_bytes: tuple[float, ...] = ()
    link_busy: tuple[float, ...] = ()
    unfinished: tuple[int, ...] = ()


class Execution:
    """One run of one graph: counters of unmet predecessors, and the times found so far.

    Args:
        graph: the op graph. prices: of its nodes.
        finish_of: (node, start) -> end, for nodes whose pace varies (stragglers); None for none.

    Attributes:
        actor, wire: of each node; ``on`` blocks add nodes while the run goes on.
        begin: nodes whose end something else decides; called at their start.
        survives: (node, end) -> False when the node's chip is gone by then; None for no loss.
        death: actor -> [s] when its chip is lost. paces: actor -> its pace over time.
    """

    def __init__(
        self,
        graph: OpGraph,
        prices: Prices,
        finish_of: Callable[[int, float], float] | None = None,
    ) -> None:
        self.graph, self.prices = graph, prices
        n = graph.num_nodes
        self.kernel = Kernel()
        self.network = Network(self.kernel, prices.link_rates)
        src = np.concatenate([graph.dep_src, graph.order_src])
        dst = np.concatenate([graph.dep_dst, graph.order_dst])
        self.after = _successors(src, dst, n)
        self.gated = _successors(graph.gate_src, graph.gate_dst, n)
        need = np.bincount(dst, minlength=n) + np.bincount(graph.gate_dst, minlength=n)
        self.need: list[int] = need.tolist()
        self.at: list[float] = [0.0] * n
        self.actor: list[int] = graph.actor.tolist()
        self.wire: list[int] = graph.wire.tolist()
        self.start: list[float] = [inf] * n
        self.end: list[float] = [inf] * n
        self.seconds: list[float] = prices.seconds.tolist()
        self.mode = bytearray(n)
        for node in prices.flows:
            self.mode[node] = BY_EVENT
        self.finish_of = finish_of
        self.begin: dict[int, Callable[[int], None]] = {}
        self.survives: Callable[[int, float], bool] | None = None
        self.death: dict[int, float] = {}
        self.paces: dict[int, Trace] = {}
        self.until = inf
        self._running: dict[int, int] = {}
        self._queues: dict[int, list[tuple[float, int]]] = {}
        self._busy: dict[int, bool] = {}
        for node in graph.priority:
            self.mode[node] = BY_PRIORITY

    def run(self, until: float | None = None) -> Outcome:
        """Run to the end, or to ``until`` [s]: what is not over by then has no end.

        Raises:
            SimulationError: ops wait for one another in a circle.
        """
        self.until = inf if until is None else until
        self.settle([], [i for i, k in enumerate(self.need) if k == 0])
        self.kernel.run_all(until)
        return self._outcome()

    def settle(self, ended: list[int], ready: list[int]) -> None:
        """Pass known times on until only ops that need the clock are left.

        Args:
            ended: nodes whose end is known and not yet passed on. ready: nodes whose predecessors
                are all known. Both lists are consumed.
        """
        end, start, at, need = self.end, self.start, self.at, self.need
        after, gated, seconds = self.after, self.gated, self.seconds
        mode, pace = self.mode, self.finish_of
        while True:
            while ready:
                node = ready.pop()
                if mode[node] == BY_PRIORITY:
                    self.kernel.call_at(at[node], self._enqueue, NORMAL, node)
                    continue
                start[node] = s = at[node]
                if mode[node]:
                    self._arm(node, s)
                else:
                    end[node] = pace(node, s) if pace else s + seconds[node]
                    ended.append(node)
                for other in gated[node]:
                    if at[other] < s:
                        at[other] = s
                    need[other] -= 1
                    if not need[other]:
                        ready.append(other)
            if not ended:
                return
            node = ended.pop()
            t = end[node]
            for other in after[node]:
                if at[other] < t:
                    at[other] = t
                need[other] -= 1
                if not need[other]:
                    ready.append(other)

    def finish(self, node: int, t: float) -> None:
        """An event-driven node ends at ``t`` [s], if its chips live to see it."""
        if self.survives and not self.survives(node, t):
            return
        self.end[node] = t
        self.settle([node], [])
        if self.mode[node] == BY_PRIORITY:
            self.kernel.call_at(t, self._free, PICK, int(self.graph.stream[node]))

    # -- ops that need the clock ----------------------------------------------------------------

    def _arm(self, node: int, t: float) -> None:
        """The node's start is known and its end is not: hand it to what decides."""
        if node in self.begin:
            self.kernel.call_at(t, self.begin[node], NORMAL, node)
            return
        first = t + self.seconds[node]
        if first < inf:
            self.kernel.call_at(first, self._launch, NORMAL, node)

    def _launch(self, node: int) -> None:
        flows = self.prices.flows[node]
        self._running[node] = len(flows)

        def done(t: float) -> None:
            self._running[node] -= 1
            if not self._running[node]:
                self.finish(node, t)

        for flow in flows:
            self.network.start(flow.links, flow.nbytes, done, cap=flow.cap)

    # -- streams served by priority -------------------------------------------------------------

    def _enqueue(self, node: int) -> None:
        stream = int(self.graph.stream[node])
        heappush(self._queues.setdefault(stream, []), (self.graph.priority[node], node))
        if not self._busy.get(stream, False):
            self.kernel.call_at(self.kernel.now, self._pick, PICK, stream)

    def _free(self, stream: int) -> None:
        self._busy[stream] = False
        self._pick(stream)

    def _pick(self, stream: int) -> None:
        """The stream is free, all completions of the instant are in: the smallest key starts."""
        queue = self._queues.get(stream)
        if not queue or self._busy.get(stream, False):
            return
        self._busy[stream] = True
        node, now = heappop(queue)[1], self.kernel.now
        self.start[node] = now
        ready = [other for other in self.gated[node] if self._open_gate(other, now)]
        self.settle([], ready)
        if node in self.prices.flows or node in self.begin:
            self._arm(node, now)
        else:
            pace = self.finish_of
            self.finish(node, pace(node, now) if pace else now + self.seconds[node])

    def _open_gate(self, node: int, t: float) -> bool:
        """One start -> start edge of the node is settled; True when it was the last to wait for."""
        self.at[node] = max(self.at[node], t)
        self.need[node] -= 1
        return not self.need[node]

    # -- result ---------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        graph = self.graph
        n = graph.num_nodes
        everything = np.array(self.end)
        everything[everything > self.until] = inf
        start, end = np.array(self.start[:n]), everything[:n]
        ready = np.zeros(graph.num_nodes)
        np.maximum.at(ready, graph.dep_dst, end[graph.dep_src])
        unfinished = np.flatnonzero(~np.isfinite(end))
        if (
            self.until == inf
            and len(unfinished)
            and not any(np.isfinite(start[unfinished]))
            and np.isfinite(end[np.isfinite(start)]).all()
        ):
            names = ", ".join(graph.label(int(i)) for i in unfinished[:3])
            raise SimulationError(
                f"{len(unfinished)} ops wait for one another and never start: {names}"
            )
        finished = everything[np.isfinite(everything)]
        uses = self.network.use() if self.prices.link_rates else ()
        return Outcome(
            ready=ready,
            start=start,
            end=end,
            makespan=float(finished.max()) if len(finished) else 0.0,
            events=self.kernel.events,
            flow_changes=2 * self.network.tiers.flows,
            solves=self.network.tiers.instants,
            link_bytes=tuple(u.nbytes for u in uses),
            link_busy=tuple(u.busy_s for u in uses),
            unfinished=tuple(unfinished.tolist()),
        )


def _successors(src: NDArray[np.int64], dst: NDArray[np.int64], n: int) -> list[tuple[int, ...]]:
    """Adjacency as tuples, in ascending order of target."""
    order = np.lexsort((dst, src))
    targets = dst[order].tolist()
    bounds = np.searchsorted(src[order], np.arange(n + 1)).tolist()
    return [tuple(targets[a:b]) for a, b in itertools.pairwise(bounds)]


def execute(graph: OpGraph, prices: Prices) -> Outcome:
    """Run a graph with fixed prices and no injected faults.

    Raises:
        SimulationError: ops wait for one another in a circle.
    """
    return Execution(graph, prices).run()
