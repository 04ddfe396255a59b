"""Topological order of an op graph, and the circle when there is none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.plan.graph import OpGraph

__all__ = ["find_cycle", "levels"]

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
