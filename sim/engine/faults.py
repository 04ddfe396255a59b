"""What goes wrong during a run: slow chips, changing links, lost chips.

A fault that changes a chip's pace is a trace (time -> factor), so an op's end follows from its
start without an event. A fault of a link changes the network's capacity on the clock. People write
either the records below or a SimPy generator process: its yields are waits, and it records what
changes when through the ``Injector`` it is given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import Any

import msgspec
import simpy

from sim.engine.execute import Execution
from sim.errors import InputError
from sim.plan.unroll import LOCAL_STREAMS

__all__ = [
    "ChipLoss",
    "Fault",
    "Injector",
    "LinkChange",
    "Straggler",
    "Trace",
    "apply_faults",
    "faulty",
]


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """Chips that compute ``factor`` times slower from ``start`` [s] until ``stop`` [s].

    Copies between chip and host, and work of the host, keep their pace; what a server does for
    messages is its computing, also on processors that it shares with others: then its work there
    is that much larger, and so are the bytes that a report says they carried.
    """

    ranks: tuple[int, ...]
    factor: float
    start: float = 0.0
    stop: float = inf


class LinkChange(msgspec.Struct, frozen=True, kw_only=True):
    """A link whose rate is the nominal one times ``factor`` from each time [s] on."""

    link: str
    trace: tuple[tuple[float, float], ...]


class ChipLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A chip that stops at time ``at`` [s]: what it runs then never ends."""

    rank: int
    at: float


Fault = Straggler | LinkChange | ChipLoss
Process = Callable[["Injector"], Generator[Any, Any, Any]]


class Trace:
    """A pace over time: 1 until the first change, then piecewise constant.

    Args:
        changes: (time [s], factor on the pace), sorted by time; 0 stops for good.

    Attributes:
        death: [s] when the pace first is 0.
    """

    def __init__(self, changes: Sequence[tuple[float, float]]) -> None:
        self.times = [t for t, _ in changes]
        self.paces = [p for _, p in changes]
        self.death = next((t for t, p in changes if p == 0.0), inf)

    def at(self, time: float) -> float:
        """Pace at a time [s]."""
        i = bisect_right(self.times, time)
        return self.paces[i - 1] if i else 1.0

    def change(self, time: float) -> float:
        """When the pace changes next after a time [s]; inf if never."""
        i = bisect_right(self.times, time)
        return self.times[i] if i < len(self.times) else inf

    def finish(self, start: float, seconds: float) -> float:
        """When work of ``seconds`` [s] at pace 1, begun at ``start`` [s], is done; inf if never."""
        left, t = seconds, start
        i = bisect_right(self.times, start)
        while True:
            pace = self.paces[i - 1] if i else 1.0
            until = self.times[i] if i < len(self.times) else inf
            if left <= pace * (until - t) if pace else left <= 0.0:
                return t + left / pace if left else t
            if until == inf:
                return inf
            left -= pace * (until - t)
            t, i = until, i + 1


class Injector:
    """What a generator process uses to inject faults: it waits, and says what changes now.

    Attributes:
        env: a SimPy environment of the injector's own; ``yield injector.env.timeout(s)`` waits.
    """

    def __init__(self) -> None:
        self.env = simpy.Environment()
        self.found: list[Fault] = []
        self._slow: dict[int, tuple[float, float]] = {}

    def slow(self, ranks: Sequence[int], factor: float) -> None:
        """From now on these ranks compute ``factor`` times slower; 1 restores them."""
        for rank in ranks:
            self._close(rank)
            if factor != 1.0:
                self._slow[rank] = (self.env.now, factor)

    def link(self, name: str, factor: float) -> None:
        """From now on this link has ``factor`` times its nominal rate."""
        self.found.append(LinkChange(link=name, trace=((self.env.now, factor),)))

    def lose(self, rank: int) -> None:
        """This rank stops now."""
        self.found.append(ChipLoss(rank=rank, at=self.env.now))

    def _close(self, rank: int) -> None:
        if rank in self._slow:
            start, factor = self._slow.pop(rank)
            self.found.append(
                Straggler(ranks=(rank,), factor=factor, start=start, stop=self.env.now)
            )

    def record(self, process: Process, horizon: float) -> tuple[Fault, ...]:
        """Run a process by itself up to ``horizon`` [s] and return the faults it injected."""
        self.env.process(process(self))
        self.env.run(until=horizon)
        for rank in sorted(self._slow):
            start, factor = self._slow[rank]
            self.found.append(Straggler(ranks=(rank,), factor=factor, start=start))
        self._slow.clear()
        return tuple(self.found)


def faulty(faults: Sequence[Fault], num_ranks: int) -> list[tuple[Any, ...]]:
    """Per rank, the faults it has: ranks with different ones must not fold.

    Raises:
        InputError: a fault names a rank that does not exist, or has an impossible number.
    """
    found: list[tuple[Any, ...]] = [() for _ in range(num_ranks)]
    for fault in faults:
        if isinstance(fault, LinkChange):
            if not all(0 <= x < inf for change in fault.trace for x in change):
                raise InputError(
                    "a link trace needs times and factors >= 0", key="faults", found=fault.link
                )
            continue
        ranks = fault.ranks if isinstance(fault, Straggler) else (fault.rank,)
        if isinstance(fault, Straggler):
            _check_straggler(fault)
        elif not fault.at >= 0:
            raise InputError(
                "a chip is lost at a time >= 0", key="faults", found=f"rank {fault.rank}@{fault.at}"
            )
        for rank in ranks:
            if not 0 <= rank < num_ranks:
                raise InputError(
                    "a fault names a rank the plan lacks",
                    key="faults",
                    found=str(rank),
                    expected=f"0 to {num_ranks - 1}",
                )
            found[rank] = (*found[rank], fault)
    return found


def _check_straggler(fault: Straggler) -> None:
    if not 0 < fault.factor < inf:
        raise InputError(
            "a straggler needs a factor > 0, and finite", key="faults", found=str(fault.factor)
        )
    if not 0 <= fault.start <= fault.stop:
        raise InputError(
            "a straggler is slow from a time >= 0 on, until a later one",
            key="faults",
            found=f"{fault.start} s to {fault.stop} s",
        )


def _traces(faults: Sequence[Fault]) -> dict[int, Trace]:
    """Pace of each faulty rank: overlapping stragglers multiply, a lost chip is at pace 0."""
    points: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for fault in faults:
        if isinstance(fault, Straggler):
            for rank in fault.ranks:
                points[rank].append((fault.start, fault.stop, 1.0 / fault.factor))
        elif isinstance(fault, ChipLoss):
            points[fault.rank].append((fault.at, inf, 0.0))
    traces = {}
    for rank, spans in points.items():
        times = sorted({t for a, b, _ in spans for t in (a, b) if t < inf})
        changes = []
        for t in times:
            pace = 1.0
            for a, b, p in spans:
                pace *= p if a <= t < b else 1.0
            changes.append((t, pace))
        traces[rank] = Trace(changes)
    return traces


def apply_faults(run: Execution, faults: Sequence[Fault]) -> None:
    """Make an execution suffer the faults; call before it starts.

    Raises:
        InputError: a link has no flows to slow down, or is unknown.
    """
    graph, prices = run.graph, run.prices
    by_actor: dict[int, Trace] = {}
    traces = _traces(faults)
    for index, actor in enumerate(graph.actors):
        if actor.rank in traces:
            by_actor[index] = traces[actor.rank]
    if by_actor:
        actors, seconds = run.actor, run.seconds
        death = {a: t.death for a, t in by_actor.items() if t.death < inf}
        wires = [frozenset(w.actors) for w in graph.wires]
        wire_of = run.wire
        aside = _aside(run)

        def pace(node: int, start: float) -> float:
            slowed = wire_of[node] < 0 and node not in aside
            trace = by_actor.get(actors[node]) if slowed else None
            end = trace.finish(start, seconds[node]) if trace else start + seconds[node]
            return end if survives(node, end) else inf

        def survives(node: int, end: float) -> bool:
            members = wires[wire_of[node]] if wire_of[node] >= 0 else (actors[node],)
            return all(end <= death[a] for a in members if a in death)

        run.finish_of, run.survives, run.death, run.paces = pace, survives, death, by_actor
    names = {name: i for i, name in enumerate(prices.link_names)}
    for fault in faults:
        if isinstance(fault, LinkChange):
            if fault.link not in names:
                raise InputError(
                    "a fault names a link that no flow uses",
                    key="faults",
                    found=fault.link,
                    expected=", ".join(sorted(names)[:8]),
                )
            index = names[fault.link]
            for t, factor in fault.trace:
                run.kernel.call_at(t, _set_rate(run, index, factor))


def _aside(run: Execution) -> frozenset[int]:
    """Ops of programs on a local stream other than the chip's compute."""
    graph = run.graph
    streams = {
        i
        for i, (_, name) in enumerate(graph.stream_names)
        if name in LOCAL_STREAMS and name != "compute"
    }
    return frozenset(k for k, s in enumerate(graph.stream.tolist()) if s in streams)


def _set_rate(run: Execution, link: int, factor: float) -> Callable[[Any], None]:
    rate = run.prices.link_rates[link] * factor

    def change(_: Any) -> None:
        run.network.set_capacity(link, rate)

    return change
