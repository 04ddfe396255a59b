"""Copies of experts against counts that change: as many as the budget holds and compute hides.

A plan is made from the counts of an earlier step. With the hosts that those counts need and no
more, an expert that has become popular since has nowhere to send its tokens. A further copy costs
nothing as long as its transfer passes behind the experts' work.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.expert.layer_cost import LayerCosts, LayerTimes
from strategies.expert.lending import Lending, copies
from strategies.expert.spread_links import Wires, wires_of

__all__ = ["hidden_spares"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def hidden_spares(
    counts: Ints,
    costs: LayerCosts,
    budget: int,
    lending: Lending,
    times: LayerTimes,
    allowed: float,
) -> list[Lending]:
    """Return lendings with spare copies that nothing waits for, the most copies first.

    Spares go one by one to the expert with most tokens per host, onto the device that has least
    to do that it cannot pass on (as EPLB replicates; ties by index), until the next would be waited
    for.

    Args:
        counts: tokens of each expert from each source, shape (E, S).
        costs: of the layer. budget: copies that each device has room for.
        lending: to add to. times: of the layer with it.
        allowed: [s] that exposed transfers may grow by.
    """
    added = _spares(counts, costs, budget, lending, times, allowed)
    return [_with(lending, added[:n]) for n in dict.fromkeys((len(added), len(added) // 2)) if n]


def _with(lending: Lending, added: list[tuple[int, int]]) -> Lending:
    hosts = lending.hosts.copy()
    hosts[tuple(np.array(added).T)] = True
    return msgspec.structs.replace(lending, hosts=hosts)


def _spares(
    counts: Ints,
    costs: LayerCosts,
    budget: int,
    lending: Lending,
    times: LayerTimes,
    allowed: float,
) -> list[tuple[int, int]]:
    """(Expert, device) of each spare copy, in order."""
    hosts, room, home = lending.hosts.copy(), budget - copies(lending), lending.home
    wires, number, total = wires_of(costs), hosts.sum(axis=1), counts.sum(axis=1)
    carried = {
        int(e): wires.carried(int(home[e]), hosts[e : e + 1]) for e in np.flatnonzero(number > 1)
    }
    over = sum(carried.values(), start=0.0 * wires.carried(0, hosts[:1]))
    most = _exposed_s(costs, times, wires, over) + allowed
    found: list[tuple[int, int]] = []
    while True:
        free = ~hosts & (room > 0)
        share = np.where(free.any(axis=1), total / number, 0.0)
        e = int(np.argmax(share))
        if share[e] <= 0.0:
            return found
        fixed = np.bincount(home[number == 1], total[number == 1], room.size)
        device = int(np.argmin(np.where(free[e], fixed, np.inf)))
        hosts[e, device] = True
        now = wires.carried(int(home[e]), hosts[e : e + 1])
        over = over + now - carried.get(e, 0.0)
        if _exposed_s(costs, times, wires, over) > most:
            return found
        carried[e] = now
        number[e] += 1
        room[device] -= 1
        found.append((e, device))


def _exposed_s(costs: LayerCosts, times: LayerTimes, wires: Wires, over: Floats) -> float:
    trans, agg = wires.copied(over)
    late = np.maximum(trans - times.fec - costs.fnec_s, 0.0)
    return float((late + np.maximum(agg - times.bec - costs.bnec_s, 0.0))[0])
