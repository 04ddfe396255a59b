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

__all__ = ["find_cycle", "levels", "longest_path"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def levels(graph: OpGraph) -> list[Ints]:
    """Nodes in topological levels; nodes on a cycle are in none.

    Returns:
        Arrays of node numbers; every edge goes from a lower to a higher level.
    """
    src = np.concatenate([graph.dep_src, graph.order_src, graph.gate_src])
    dst = np.concatenate([graph.dep_dst, graph.order_dst, graph.gate_dst])
    order = np.argsort(src, kind="stable")
    targets, bounds = dst[order], np.searchsorted(src[order], np.arange(graph.num_nodes + 1))
    need = np.bincount(dst, minlength=graph.num_nodes)
    found = []
    front = np.flatnonzero(need == 0)
    while len(front):
        found.append(front)
        hit = (
            np.concatenate([targets[bounds[k] : bounds[k + 1]] for k in front])
            if len(front)
            else front
        )
        np.subtract.at(need, hit, 1)
        front = np.unique(hit[need[hit] == 0]) if len(hit) else hit
    return found


def find_cycle(graph: OpGraph) -> list[int]:
    """Nodes that can never start because they wait for one another; [] when there are none."""
    placed = levels(graph)
    done = np.zeros(graph.num_nodes, bool)
    for level in placed:
        done[level] = True
    left = np.flatnonzero(~done)
    if not len(left):
        return []
    src = np.concatenate([graph.dep_src, graph.order_src, graph.gate_src])
    dst = np.concatenate([graph.dep_dst, graph.order_dst, graph.gate_dst])
    inside = ~done[src] & ~done[dst]
    before = {int(b): int(a) for a, b in zip(src[inside], dst[inside], strict=True)}
    node, seen = int(left[0]), []
    while node not in seen:
        seen.append(node)
        node = before[node]
    return seen[seen.index(node) :][::-1]


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
