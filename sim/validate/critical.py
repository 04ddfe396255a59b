"""The critical path of a simulated step: what decides its length."""

from __future__ import annotations

import numpy as np

from sim.engine.simulate import Run

__all__ = ["critical_path"]


def critical_path(run: Run) -> list[tuple[int, float]]:
    """Return the nodes that decide the makespan with the seconds each adds, last first.

    A node starts when its last predecessor ends, or when the op that frees its buffer starts.
    Walking back along those, what each adds is the distance of two starts, so it sums to the
    makespan (Baccelli et al. 1992, chapter 2: in max-plus the makespan is the heaviest path).
    """
    graph, start, end = run.layout.graph, run.outcome.start, run.outcome.end
    source = np.concatenate([graph.dep_src, graph.order_src, graph.gate_src])
    target = np.concatenate([graph.dep_dst, graph.order_dst, graph.gate_dst])
    met = np.concatenate([end[graph.dep_src], end[graph.order_src], start[graph.gate_src]])
    order = np.argsort(target, kind="stable")
    source, met, target = source[order], met[order], target[order]
    node = int(np.argmax(end))
    until, found = float(end[node]), []
    while True:
        found.append((node, until - float(start[node])))
        until = float(start[node])
        a, b = np.searchsorted(target, [node, node + 1])
        if a == b or until <= 0.0:
            return found
        node = int(source[a + int(np.argmax(met[a:b]))])
