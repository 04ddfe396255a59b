"""Copies of experts against counts that change: as many as the budget holds and compute hides.

A plan is made from the counts of an earlier step. With the hosts that those counts need and no
more, an expert that has become popular since has nowhere to send its tokens. A further copy costs
nothing as long as its transfer passes behind the experts' work.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.expert.layer_cost import LayerCosts, LayerTimes, transfer_s
from strategies.expert.lending import Lending, copies

__all__ = ["hidden_spares"]

Ints = NDArray[np.int64]
_MOST = 2
"""Most spare copies, times the devices."""


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
    to do that it cannot pass on (as EPLB replicates; ties by index).

    Args:
        counts: tokens of each expert from each source, shape (E, S).
        costs: of the layer. budget: copies that each device has room for.
        lending: to add to. times: of the layer with it.
        allowed: [s] that exposed transfers may grow by.
    """
    added = _spares(counts, budget, lending)
    most = _exposed_s(costs, times, lending) + allowed
    few, many = 0, len(added)
    while few < many:
        middle = (few + many + 1) // 2
        if _exposed_s(costs, times, _with(lending, added[:middle])) <= most:
            few = middle
        else:
            many = middle - 1
    return [_with(lending, added[:n]) for n in dict.fromkeys((few, few // 2)) if n]


def _with(lending: Lending, added: list[tuple[int, int]]) -> Lending:
    hosts = lending.hosts.copy()
    hosts[tuple(np.array(added).T)] = True
    return msgspec.structs.replace(lending, hosts=hosts)


def _exposed_s(costs: LayerCosts, times: LayerTimes, lending: Lending) -> float:
    trans, agg = transfer_s(costs, lending)
    return max(0.0, trans - times.fec - costs.fnec_s) + max(0.0, agg - times.bec - costs.bnec_s)


def _spares(counts: Ints, budget: int, lending: Lending) -> list[tuple[int, int]]:
    """(Expert, device) of each spare copy, in order."""
    hosts, room = lending.hosts.copy(), budget - copies(lending)
    total = counts.sum(axis=1)
    found: list[tuple[int, int]] = []
    while len(found) < _MOST * room.size:
        free = ~hosts & (room > 0)
        number = hosts.sum(axis=1)
        share = np.where(free.any(axis=1), total / number, 0.0)
        expert = int(np.argmax(share))
        if share[expert] <= 0.0:
            break
        fixed = np.bincount(lending.home[number == 1], total[number == 1], room.size)
        device = int(np.argmin(np.where(free[expert], fixed, np.inf)))
        hosts[expert, device] = True
        room[device] -= 1
        found.append((expert, device))
    return found
