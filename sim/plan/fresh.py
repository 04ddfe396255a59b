"""Prove on the op graph that an exact plan computes with the newest parameters."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from sim.errors import PlanError
from sim.plan.deps import EXPERTS
from sim.plan.opgraph import OpGraph
from sim.plan.order import levels

__all__ = ["prove_fresh"]


def prove_fresh(graph: OpGraph) -> None:
    """Check that forwards of the second step wait for every update of the first of their segment.

    Args:
        graph: of an exact plan, two steps at least.

    Raises:
        PlanError: a forward may start before such an update, so gradients are applied late.
    """
    updates: dict[tuple[int, int], list[int]] = defaultdict(list)
    bit: dict[int, int] = {}
    for node in np.flatnonzero(graph.step == 0).tolist():
        op = graph.ops[node]
        if op.kind == "OPT":
            bit[node] = len(bit)
            updates[int(graph.actor[node]), op.stage].append(node)
    seen = _before(graph, bit)
    for node in np.flatnonzero(graph.step == 1).tolist():
        op = graph.ops[node]
        if op.kind != "F":
            continue
        for update in updates.get((int(graph.actor[node]), op.stage), ()):
            label = graph.ops[update].label
            mine = not label or not op.label or label in (EXPERTS, op.label)
            if mine and not seen[node] >> bit[update] & 1:
                raise PlanError(
                    f"{graph.label(node)} may run without {graph.label(update)}, so that update is "
                    "late",
                    key="exact",
                    found="true",
                    expected="false with a reason, or a dependency on the update",
                )


def _before(graph: OpGraph, bit: dict[int, int]) -> list[int]:
    """Per node, which numbered nodes are among its ancestors, as bits."""
    src = np.concatenate([graph.dep_src, graph.order_src])
    dst = np.concatenate([graph.dep_dst, graph.order_dst])
    order = np.argsort(src, kind="stable")
    targets = dst[order].tolist()
    bounds = np.searchsorted(src[order], np.arange(graph.num_nodes + 1)).tolist()
    seen = [0] * graph.num_nodes
    for level in levels(graph):
        for node in level.tolist():
            own = seen[node] | (1 << bit[node] if node in bit else 0)
            if own:
                for other in targets[bounds[node] : bounds[node + 1]]:
                    seen[other] |= own
    return seen
