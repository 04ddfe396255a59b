"""How much each link carried and how long it was busy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.prices import FlowSpec
from sim.engine.simulate import Run
from sim.report.delays import Delays
from sim.report.writes import worker_of, writes_of

__all__ = ["LinkLoad", "bytes_per_update", "link_loads", "link_use", "union"]

Floats = NDArray[np.float64]


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one directed link over a whole run.

    Args:
        name: of the link. nbytes: [B] carried ("bytes" in documents).
        busy_fraction: share of the run in which it carried something (0..1).
    """

    name: str
    nbytes: float = msgspec.field(name="bytes")
    busy_fraction: float


def link_loads(
    names: Sequence[str], nbytes: Sequence[float], busy_s: Sequence[float], makespan_s: float
) -> tuple[LinkLoad, ...]:
    """Loads of the links that carried bytes, busiest first, then by name.

    Args:
        names: per link. nbytes: [B] per link. busy_s: [s] per link. makespan_s: [s] of the run.
    """
    found = []
    for name, size, busy in zip(names, nbytes, busy_s, strict=True):
        if size > 0:
            fraction = min(1.0, busy / makespan_s) if makespan_s else 0.0
            found.append(LinkLoad(name=name, nbytes=float(size), busy_fraction=fraction))
    return tuple(sorted(found, key=lambda x: (-x.busy_fraction, -x.nbytes, x.name)))


def link_use(run: Run) -> tuple[Floats, Floats]:
    """Bytes and busy time of every link of a simulation.

    Flows count as the network saw them. Bytes that no flow carries (formula-priced ops, links that
    can never bind) stand on their link from start to end of their op; such ops that overlap keep it
    busy once.

    Args:
        run: from sim.engine.simulate.

    Returns:
        nbytes [B] and busy [s] per link index, shape (K,).
    """
    prices, outcome = run.prices, run.outcome
    nbytes, busy = np.zeros(len(prices.link_names)), np.zeros(len(prices.link_names))
    if outcome.link_bytes:
        nbytes += np.array(outcome.link_bytes)
        busy += np.array(outcome.link_busy)
    # Nodes of one message share what they carry, and many links carry the same messages.
    nodes_of: dict[int, list[int]] = {}
    for node, carried in prices.carried.items():
        if np.isfinite(outcome.end[node]):
            nodes_of.setdefault(id(carried), []).append(node)
    messages_on: dict[int, list[int]] = {}
    for message, nodes in nodes_of.items():
        for link, size in prices.carried[nodes[0]]:
            nbytes[link] += size * len(nodes)
            messages_on.setdefault(link, []).append(message)
    known: dict[tuple[int, ...], float] = {}
    for link, messages in messages_on.items():
        key = tuple(messages)
        if key not in known:
            nodes = [node for message in messages for node in nodes_of[message]]
            known[key] = union(outcome.start[nodes], outcome.end[nodes])
        busy[link] += known[key]
    return nbytes, busy


def union(start: Floats, end: Floats) -> float:
    """Length of the union of intervals [s]; arrays, shape (N,)."""
    order = np.argsort(start)
    begin, until = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate([begin[:1], until[:-1]])
    return float(np.maximum(0.0, until - np.maximum(begin, before)).sum())


def bytes_per_update(run: Run, delays: Delays) -> dict[int, float]:
    """Bytes that one update puts on each link [B]: of each worker by its share of the updates.

    Args:
        run: of a plan with servers. delays: of the window whose rates count.
    """
    prices, graph, end = run.prices, run.layout.graph, run.outcome.end
    found: dict[int, dict[int, float]] = {w: defaultdict(float) for w in delays.worker_rates}

    def add(rank: int, flows: Iterable[FlowSpec], more: Iterable[tuple[int, float]] = ()) -> None:
        of = found.get(worker_of(run, rank), {})
        for flow in flows:
            for link, members in flow.links:
                of[link] = of.get(link, 0.0) + members * flow.nbytes
        for link, nbytes in more:
            of[link] = of.get(link, 0.0) + nbytes

    for node in sorted({*prices.flows, *prices.carried}):
        if np.isfinite(end[node]):
            rank = graph.actors[graph.actor[node]].rank
            add(rank, prices.flows.get(node, ()), prices.carried.get(node, ()))
    for h in run.handled:
        if np.isfinite(h.end) and (h.op, h.rank, h.sender) in prices.answers:
            add(h.sender, prices.answers[h.op, h.rank, h.sender][1])
    count = Counter(writes_of(run).worker.tolist())
    total: dict[int, float] = defaultdict(float)
    for worker, links in found.items():
        share = delays.worker_rates[worker] / delays.updates_per_s / count[worker]
        for link, nbytes in links.items():
            total[link] += share * nbytes
    return dict(total)
