"""How much each link carried and how long it was busy."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.engine.simulate import Run

__all__ = ["LinkLoad", "link_loads", "link_use"]

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
    spans: dict[int, list[tuple[float, float]]] = {}
    for node, carried in prices.carried.items():
        if not np.isfinite(outcome.end[node]):
            continue
        interval = (float(outcome.start[node]), float(outcome.end[node]))
        for link, size in carried:
            nbytes[link] += size
            spans.setdefault(link, []).append(interval)
    for link, intervals in spans.items():
        busy[link] += _union(intervals)
    return nbytes, busy


def _union(intervals: list[tuple[float, float]]) -> float:
    total, until = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
