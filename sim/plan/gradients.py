"""Prove on the op graph that every gradient is whole before it is reduced and applied, once."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from sim.errors import PlanError
from sim.plan.opgraph import OpGraph
from sim.plan.wiring import Wiring

__all__ = ["prove_updates"]

SUMS = ("REDUCE_GRAD", "ALL_REDUCE", "REDUCE_SCATTER", "REDUCE_EXPERT", "ALL_TO_ALL", "PUSH")
"""Kinds that can carry a gradient to other replicas."""

REACHES = frozenset({"dp", "ep", "edp", "world"})
"""Roles of groups that reach other replicas (or the other context-parallel ranks)."""


def prove_updates(graph: OpGraph, wiring: Wiring) -> None:
    """Check reductions and updates of the first step of a graph.

    Proves: a gradient is reduced once and applied once per step; both come after every backward of
    the stage (and segment) in that step; on a rank with other replicas some sum over replicas
    stands between the backward and the update.

    Raises:
        PlanError: the first rule that is broken, with the rank and the op.
    """
    _once(graph)
    ancestors = _Ancestors(graph)
    backward = _backward(graph)
    for node, op in enumerate(graph.ops):
        if op.kind not in ("OPT", "REDUCE_GRAD") or graph.step[node] != 0:
            continue
        mine = backward[int(graph.actor[node])]
        wanted = [k for k in mine if _fits(graph, k, node)]
        before = ancestors.of(node)
        missing = [k for k in wanted if k not in before]
        if missing:
            what = "updates" if op.kind == "OPT" else "is summed"
            raise PlanError(
                f"{graph.label(node)} {what} before all of its gradient is there",
                key="programs",
                found=f"{graph.ops[missing[0]].name} may still run",
                expected="a dependency on it",
            )
        if op.kind == "OPT" and wanted and not _summed(graph, wiring, node, before):
            raise PlanError(
                f"{graph.label(node)} applies a gradient that is never reduced over the replicas",
                key="programs",
                expected="REDUCE_GRAD before OPT",
            )


def _once(graph: OpGraph) -> None:
    count: Counter[tuple[object, ...]] = Counter()
    for node, op in enumerate(graph.ops):
        if op.kind in ("OPT", "REDUCE_GRAD"):
            key = (
                int(graph.actor[node]), int(graph.step[node]), int(graph.piece[node]),
                op.kind, op.stage, op.part, op.label, int(graph.wire[node]),
            )  # fmt: skip
            count[key] += 1
            if count[key] > 1:
                what = "applied" if op.kind == "OPT" else "reduced"
                raise PlanError(
                    f"{graph.label(node)}: a gradient is {what} twice in a step",
                    key="programs",
                    found=op.name,
                    expected="once",
                )


def _backward(graph: OpGraph) -> dict[int, list[int]]:
    """Ops that complete gradients in the first step, per actor."""
    found: dict[int, list[int]] = defaultdict(list)
    for node, op in enumerate(graph.ops):
        if op.kind in ("B", "W") and graph.step[node] == 0:
            found[int(graph.actor[node])].append(node)
    return found


def _fits(graph: OpGraph, backward: int, update: int) -> bool:
    """Whether the update applies the gradient of this backward: same stage, same segment.

    An update whose label is no segment of the backward passes applies all of the stage.
    """
    a, b = graph.ops[backward], graph.ops[update]
    if a.stage >= 0 and b.stage >= 0 and a.stage != b.stage:
        return False
    return not (a.label and b.label) or a.label == b.label


def _summed(graph: OpGraph, wiring: Wiring, node: int, before: set[int]) -> bool:
    """Whether a sum that reaches another replica is among the op's ancestors."""
    rank = graph.actors[graph.actor[node]].rank
    cell = wiring.cell_of.get(rank)
    if cell is None or not wiring.of_rank.get((rank, "dp")):
        return True
    return any(
        graph.ops[k].kind in SUMS
        and graph.wire[k] >= 0
        and not graph.wires[graph.wire[k]].roles.isdisjoint(REACHES)
        for k in before
    )


class _Ancestors:
    """Predecessors of nodes over dependencies and stream order, across ranks."""

    def __init__(self, graph: OpGraph) -> None:
        src = np.concatenate([graph.dep_src, graph.order_src])
        dst = np.concatenate([graph.dep_dst, graph.order_dst])
        order = np.argsort(dst, kind="stable")
        self.before: list[int] = src[order].tolist()
        self.bounds: list[int] = np.searchsorted(
            dst[order], np.arange(graph.num_nodes + 1)
        ).tolist()

    def of(self, node: int) -> set[int]:
        """All ancestors of a node."""
        seen: set[int] = set()
        stack = [node]
        while stack:
            last = stack.pop()
            for k in self.before[self.bounds[last] : self.bounds[last + 1]]:
                if k not in seen:
                    seen.add(k)
                    stack.append(k)
        return seen
