"""Max-plus longest path over the op graph: the fast path without contention, and the oracle.

Start of a node = max over finish -> start edges of the source's end and over start -> start edges
of the source's start; end = start + seconds. Equal to the event engine when contention, overlap
slow-down and priorities are off (Baccelli et al. 1992, chapter 2: event graphs are linear there).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimulationError
from sim.plan.graph import OpGraph
from sim.plan.order import find_cycle, levels

__all__ = ["longest_path"]

Floats = NDArray[np.float64]


def longest_path(graph: OpGraph, seconds: Floats) -> tuple[Floats, Floats]:
    """Start and end of every node.

    Args:
        graph: the op graph. seconds: [s] per node, shape (N,) or (K, N) for K price lists at once.

    Returns:
        start [s] and end [s], shaped as ``seconds``.

    Raises:
        SimulationError: the graph has a cycle.
    """
    placed = levels(graph)
    if sum(map(len, placed)) != graph.num_nodes:
        names = " <- ".join(graph.label(k) for k in find_cycle(graph)[:4])
        raise SimulationError(f"ops wait for one another in a circle: {names}")
    rank = np.zeros(graph.num_nodes, np.int64)
    for i, level in enumerate(placed):
        rank[level] = i
    start = np.zeros(np.shape(seconds))
    end = start.copy()
    finish = np.stack(
        [
            np.concatenate([graph.dep_src, graph.order_src]),
            np.concatenate([graph.dep_dst, graph.order_dst]),
        ]
    )
    finish = finish[:, np.argsort(rank[finish[1]], kind="stable")]
    gate = np.stack([graph.gate_src, graph.gate_dst])
    gate = gate[:, np.argsort(rank[gate[1]], kind="stable")]
    cut = np.searchsorted(rank[finish[1]], np.arange(len(placed) + 1))
    gut = np.searchsorted(rank[gate[1]], np.arange(len(placed) + 1))
    for i, level in enumerate(placed):
        a, b = cut[i], cut[i + 1]
        np.maximum.at(start.T, finish[1, a:b], end.T[finish[0, a:b]])
        a, b = gut[i], gut[i + 1]
        np.maximum.at(start.T, gate[1, a:b], start.T[gate[0, a:b]])
        end.T[level] = start.T[level] + np.asarray(seconds).T[level]
    return start, end
