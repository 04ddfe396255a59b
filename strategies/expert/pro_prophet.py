"""Pro-Prophet's planner: lend the hottest expert of the fullest device to nearly everybody, repeat.

Algorithm 1 of arXiv:2411.10003 as printed there, not as its released code has it: the code counts
improvements by one where the paper keeps the length of the best list, forgets excluded devices in
its loads, and starts from received tokens that never travelled.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.expert.layer_cost import LayerCosts, nodes_of, predicted_of, times_of
from strategies.expert.lending import Lending, copies, shares, static

__all__ = ["RELEASED_ALPHA", "planned", "pro_prophet"]

LEAST_GAIN = 1e-12
"""A list that is better by less, relatively, is rounded otherwise and not better."""
RELEASED_ALPHA = 3.0
"""Tolerance of the balance test in the released code; the paper gives none."""


def pro_prophet(
    counts: NDArray[np.int64],
    costs: LayerCosts,
    budget: int,
    *,
    alpha: float = RELEASED_ALPHA,
    excluded: int = 0,
    scheduled: bool = True,
) -> Lending:
    """Return the best prefix of the greedy list of lent experts; see :func:`planned`."""
    return planned(counts, costs, budget, alpha, excluded, scheduled)[0]


def planned(
    counts: NDArray[np.int64],
    costs: LayerCosts,
    budget: int,
    alpha: float,
    excluded: int,
    scheduled: bool,
) -> tuple[Lending, float]:
    """Return the best prefix of the greedy list of lent experts and its predicted time [s].

    With several experts per device the fullest device's hottest expert that is not lent yet is
    taken, and the search ends where it has none; with one this is the paper's "used before, stop".

    Args:
        counts: tokens of each expert from each source, shape (E, S).
        costs: of the layer. budget: copies that each device has room for.
        alpha: balanced when the fullest and the emptiest device differ by less than alpha means.
        excluded: n, devices that do not get a lent expert: those with the fewest tokens for it.
        scheduled: cost of eq. 8, with hidden copies and sums; else of eq. 6.
    """
    num_experts, num_devices = counts.shape
    lending, nodes = static(num_experts, num_devices), nodes_of(costs)
    best, best_s = lending, float("inf")
    lent = np.zeros(num_experts, bool)
    tolerance = alpha * counts.sum() / num_devices
    while True:
        placed = shares(counts, lending, nodes)
        seconds = predicted_of(costs, times_of(costs, placed, lending), scheduled)
        if seconds < best_s * (1.0 - LEAST_GAIN):
            best, best_s = lending, seconds
        load = placed.work.sum(axis=0)
        if load.max() - load.min() < tolerance:
            return best, best_s
        fullest = int(np.argmax(load))
        own = np.flatnonzero((lending.home == fullest) & ~lent)
        if not own.size:
            return best, best_s
        expert = int(own[np.argmax(placed.work[own, fullest])])
        lent[expert] = True
        hosts = lending.hosts.copy()
        hosts[expert] = True
        others = np.flatnonzero(np.arange(num_devices) != fullest)
        fewest = others[np.argsort(counts[expert, others], kind="stable")[:excluded]]
        hosts[expert, fewest] = False
        lending = msgspec.structs.replace(lending, hosts=hosts)
        if copies(lending).max() > budget:
            return best, best_s
