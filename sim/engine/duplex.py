"""Copies from a chip to its host slow the copies that run to the chip at the same time."""

from __future__ import annotations

from collections import Counter

from sim.engine.execute import BY_EVENT, BY_PRIORITY, Execution
from sim.engine.kernel import NORMAL, URGENT

__all__ = ["Duplex"]


class Duplex:
    """While an op of ``prices.slows`` runs, its link has a share of its rate left.

    Create it before the run starts. The ops themselves keep their pace.

    Args:
        run: the execution.
    """

    def __init__(self, run: Execution) -> None:
        self.run = run
        self.running: Counter[int] = Counter()
        for node in run.prices.slows:
            busy = run.seconds[node] > 0.0 or node in run.prices.flows
            if busy and node not in run.begin:
                run.begin[node] = self._begin
                if run.mode[node] != BY_PRIORITY:
                    run.mode[node] = BY_EVENT

    def _set(self, node: int, change: int) -> None:
        link, share = self.run.prices.slows[node]
        self.running[link] += change
        rate = self.run.prices.link_rates[link]
        self.run.network.set_capacity(link, rate * share if self.running[link] else rate)

    def _begin(self, node: int) -> None:
        run = self.run
        self._set(node, 1)
        now = run.kernel.now
        end = run.finish_of(node, now) if run.finish_of else now + run.seconds[node]
        if node in run.prices.flows:
            run.kernel.call_at(end, self._launch, NORMAL, node)
        else:
            run.kernel.call_at(end, self._end, URGENT, node)

    def _launch(self, node: int) -> None:
        waiting = [len(self.run.prices.flows[node])]

        def done(_: float) -> None:
            waiting[0] -= 1
            if not waiting[0]:
                self._end(node)

        for flow in self.run.prices.flows[node]:
            self.run.network.start(flow.links, flow.nbytes, done, cap=flow.cap)

    def _end(self, node: int) -> None:
        self._set(node, -1)
        self.run.finish(node, self.run.kernel.now)
