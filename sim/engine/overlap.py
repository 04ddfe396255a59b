"""Compute and communication that share a chip slow each other by profiled factors.

While both run on one chip, its compute ops go at 1 / compute_slowdown and the communication at
1 / comm_slowdown of their own pace. So both become fluid: an op has work left, and every start or
end on its chip re-prices what else runs there.

A slow-down lowers what a transfer's own chips can move, so it costs time only where they set the
pace: bytes that wait for a link which others use, too, go no slower than that link lets them. That
holds alike for flows, whose caps sink, and for formulas, which stand for several equal streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from sim.cost.prices import FlowSpec
from sim.engine.execute import BY_EVENT, BY_PRIORITY, Execution
from sim.engine.kernel import NORMAL, URGENT
from sim.engine.link import Flow

__all__ = ["Overlap"]


class _Job:
    """An op that runs: work left [s at full pace], pace, and when that was last true.

    Its own pace at full speed is ``room`` times what the links grant; ``after`` is (left, room) of
    what follows.
    """

    __slots__ = (
        "actors", "after", "compute", "flows", "left", "node", "pace", "room", "since", "version",
    )  # fmt: skip

    def __init__(
        self, node: int, actors: tuple[int, ...], compute: bool, left: float, now: float
    ) -> None:
        self.node, self.actors, self.compute, self.left = node, actors, compute, left
        self.since, self.pace, self.version = now, 1.0, 0
        self.room = 1.0
        self.after: tuple[float, float] | None = None
        self.flows: list[tuple[Flow, float, float]] = []


class Overlap:
    """Slow-down of overlapping compute and communication; create it before the run starts.

    Args:
        run: the execution.
        factors: actor -> (compute slow-down, communication slow-down), both >= 1.
    """

    def __init__(self, run: Execution, factors: Mapping[int, tuple[float, float]]) -> None:
        self.run = run
        self.factors = {a: f for a, f in factors.items() if max(f) > 1.0}
        self.compute: dict[int, dict[int, _Job]] = {a: {} for a in self.factors}
        self.comm: dict[int, dict[int, _Job]] = {a: {} for a in self.factors}
        graph = run.graph
        names = graph.stream_names
        for node in range(graph.num_nodes):
            wire = int(graph.wire[node])
            actors = graph.wires[wire].actors if wire >= 0 else {int(graph.actor[node])}
            busy = run.seconds[node] > 0.0 or node in run.prices.flows
            on_compute = wire < 0 and names[graph.stream[node]][1] == "compute"
            free = run.mode[node] != BY_PRIORITY and node not in run.begin
            if free and busy and (wire >= 0 or on_compute) and not actors.isdisjoint(self.factors):
                run.mode[node] = BY_EVENT
                run.begin[node] = self._begin

    def _begin(self, node: int) -> None:
        run, graph = self.run, self.run.graph
        wire = int(graph.wire[node])
        actors = sorted(graph.wires[wire].actors) if wire >= 0 else [int(graph.actor[node])]
        mine = tuple(a for a in actors if a in self.factors)
        now = run.kernel.now
        left = run.finish_of(node, now) - now if run.finish_of else run.seconds[node]
        job = _Job(node, mine, wire < 0, left, now)
        if node in run.prices.alone and node not in run.prices.flows:
            fixed, own = run.prices.alone[node]
            job.left, job.after = fixed, (left - fixed, (left - fixed) / own)
        for a in mine:
            (self.compute if job.compute else self.comm)[a][node] = job
        self._reprice(mine)
        self._arm(job)

    def _pace(self, job: _Job) -> float:
        others = self.comm if job.compute else self.compute
        slow = [self.factors[a][0 if job.compute else 1] for a in job.actors if others[a]]
        return min(job.room / max(slow, default=1.0), 1.0)

    def _reprice(self, actors: tuple[int, ...]) -> None:
        """Everything that runs on these chips gets the pace that now holds."""
        now = self.run.kernel.now
        for a in actors:
            for job in (*self.compute[a].values(), *self.comm[a].values()):
                pace = self._pace(job)
                if pace == job.pace:
                    continue
                job.left = max(0.0, job.left - (now - job.since) * job.pace)
                job.since, job.pace = now, pace
                if job.flows:
                    for flow, cap, own in job.flows:
                        self.run.network.set_cap(flow, cap if pace == 1.0 else own * pace)
                else:
                    self._arm(job)

    def _arm(self, job: _Job) -> None:
        job.version += 1
        if job.left < inf:
            t = job.since + job.left / job.pace
            self.run.kernel.call_at(
                max(t, self.run.kernel.now), self._due, URGENT, (job, job.version)
            )

    def _due(self, what: tuple[_Job, int]) -> None:
        job, version = what
        if version != job.version:
            return
        specs = self.run.prices.flows.get(job.node, ())
        if job.after:
            (job.left, job.room), job.after = job.after, None
            job.since, job.pace = self.run.kernel.now, self._pace(job)
            self._arm(job)
        elif specs and not job.flows:
            job.left = inf
            self.run.kernel.call_at(self.run.kernel.now, self._launch, NORMAL, (job, specs))
        else:
            self._end(job)

    def _launch(self, what: tuple[_Job, tuple[FlowSpec, ...]]) -> None:
        """The fixed part is over: the bytes move, each member at its own cap times the pace."""
        job, specs = what
        run, waiting = self.run, [len(what[1])]
        rates = run.prices.link_rates
        alone_s = run.prices.alone.get(job.node, (0.0, 0.0))[1]

        def done(_: float) -> None:
            waiting[0] -= 1
            if not waiting[0]:
                self._end(job)

        for spec in specs:
            cap = min([spec.cap, *(rates[link] for link, _ in spec.links)])
            own = min(cap, spec.nbytes / alone_s) if alone_s else cap
            now = cap if job.pace == 1.0 else own * job.pace
            flow = run.network.start(spec.links, spec.nbytes, done, cap=now)
            job.flows.append((flow, cap, own))

    def _end(self, job: _Job) -> None:
        for a in job.actors:
            del (self.compute if job.compute else self.comm)[a][job.node]
        self._reprice(job.actors)
        self.run.finish(job.node, self.run.kernel.now)
