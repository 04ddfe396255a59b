"""How much each link carried, and what that cost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from sim.engine.simulate import Run
from sim.hardware.machine import Machine

__all__ = ["LinkLoad", "egress_of", "link_loads", "loads_of_run"]


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


def loads_of_run(run: Run) -> tuple[LinkLoad, ...]:
    """Loads of a simulation: flows as the network counted them, formula-priced ops as spans.

    An op that a formula priced puts its bytes on every link it names and keeps it busy from start
    to end; overlapping spans, of flows too, count once at most up to the whole run.
    """
    prices, outcome = run.prices, run.outcome
    names = prices.link_names
    nbytes = np.zeros(len(names))
    busy = np.zeros(len(names))
    if outcome.link_bytes:
        nbytes += np.array(outcome.link_bytes)
        busy += np.array(outcome.link_busy)
    spans: dict[int, list[tuple[float, float]]] = {}
    for node, links in prices.wires.items():
        if not np.isfinite(outcome.end[node]):
            continue
        size = 0.0 if prices.nbytes is None else float(prices.nbytes[node])
        for link in links:
            nbytes[link] += size
            interval = (float(outcome.start[node]), float(outcome.end[node]))
            spans.setdefault(link, []).append(interval)
    for link, intervals in spans.items():
        busy[link] += _union(intervals)
    return link_loads(names, nbytes.tolist(), busy.tolist(), outcome.makespan)


def _union(intervals: list[tuple[float, float]]) -> float:
    total, until = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def egress_of(loads: Sequence[LinkLoad], machine: Machine) -> float:
    """Price [USD] of the bytes that crossed priced links."""
    price = {link.name: link.price_per_byte for link in machine.links}
    return sum(load.nbytes * price.get(load.name, 0.0) for load in loads)
