"""Prove on the op graph that every gradient is whole before it is reduced and applied, once."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from sim.errors import PlanError
from sim.plan.deps import segment_of
from sim.plan.op import Op
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
    the stage (and segment) in that step, a reduction of one microbatch after that microbatch's; on
    a rank with other replicas some sum over replicas stands between the backward and the update,
    and where sums are per microbatch, one of every microbatch. Where a step repeats passes and
    update, each turn's update belongs to its own turn. Workers that step by themselves sum over
    their own replicas, and all of them meet once per step.

    Raises:
        PlanError: the first rule that is broken, with the rank and the op.
    """
    turns = _Turns(graph)
    _once(graph, turns)
    ancestors = _Ancestors(graph)
    backward, by_part = _backward(graph), _parts(graph)
    for node, op in enumerate(graph.ops):
        if op.kind not in ("OPT", "REDUCE_GRAD") or graph.step[node] != 0:
            continue
        mine = [k for a in _takers(graph, node) for k in backward[a, _microbatch(op)]]
        wanted = [k for k in mine if _fits(graph, k, node) and turns.meet(k, node)]
        if _microbatch(op) >= 0 and not wanted:
            raise PlanError(
                f"{graph.label(node)} sums what no backward makes",
                key="programs",
                expected=f"a backward of microbatch {op.mb}",
            )
        before = ancestors.direct(node)
        if op.kind == "OPT" or not before.issuperset(wanted):
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
        if op.kind == "OPT" and wanted:
            parts = [k for k in by_part[int(graph.actor[node])] if _fits(graph, k, node)]
            bare = _bare(graph, wiring, node, wanted, parts, before)
            if bare:
                raise PlanError(
                    f"{graph.label(node)} applies a gradient that is never reduced over the "
                    "replicas",
                    key="programs",
                    found=f"no sum of {graph.ops[bare[0]].name}",
                    expected="REDUCE_GRAD before OPT",
                )
    if wiring.placement.workers and not any(
        op.kind != "BARRIER" and graph.wire[k] >= 0 and "dp" in graph.wires[graph.wire[k]].roles
        for k, op in enumerate(graph.ops)
    ):
        raise PlanError(
            "workers that step by themselves never exchange anything",
            key="placement.workers",
            expected="a collective over all replicas",
        )


class _Turns:
    """Which turn of a repeat inside the first step a node belongs to."""

    def __init__(self, graph: OpGraph) -> None:
        self.turn: dict[int, int] = {}
        self._key: dict[int, tuple[int, int, int]] = {}
        self._count: Counter[tuple[int, int, int]] = Counter()
        self._passes: Counter[int] = Counter()
        for node in np.flatnonzero(graph.step == 0).tolist():
            op, actor = graph.ops[node], int(graph.actor[node])
            key = (actor, int(graph.static[node]), int(graph.piece[node]))
            self._key[node], self.turn[node] = key, self._count[key]
            self._count[key] += 1
            if op.kind in ("B", "W"):
                self._passes[actor] = max(self._passes[actor], self._count[key])

    def meet(self, a: int, b: int) -> bool:
        """Whether two nodes stand in the same turn, or in unlike repeats."""
        unlike = self._count[self._key[a]] != self._count[self._key[b]]
        return unlike or self.turn[a] == self.turn[b]

    def first(self, node: int) -> bool:
        """False for later turns of an op that is repeated no more often than backward passes."""
        actor = self._key[node][0]
        return not self.turn[node] or self.turn[node] >= max(1, self._passes[actor])


def _once(graph: OpGraph, turns: _Turns) -> None:
    count: Counter[tuple[object, ...]] = Counter()
    numbers: dict[tuple[object, ...], set[bool]] = defaultdict(set)
    for node, op in enumerate(graph.ops):
        if op.kind in ("OPT", "REDUCE_GRAD") and node in turns.turn and turns.first(node):
            key = (
                int(graph.actor[node]), int(graph.step[node]), int(graph.piece[node]),
                op.kind, op.stage, op.part, op.label, int(graph.wire[node]),
            )  # fmt: skip
            each = _microbatch(op)
            count[*key, each] += 1
            # A microbatch's gradient is part of the whole one.
            numbers[key].add(each >= 0)
            if count[*key, each] > 1 or len(numbers[key]) > 1:
                what = "applied" if op.kind == "OPT" else "reduced"
                raise PlanError(
                    f"{graph.label(node)}: a gradient is {what} twice in a step",
                    key="programs",
                    found=op.name,
                    expected="once",
                )


def _takers(graph: OpGraph, node: int) -> set[int]:
    """Actors whose gradients an update or a sum takes."""
    wire = int(graph.wire[node])
    return graph.wires[wire].actors if wire >= 0 else {int(graph.actor[node])}


def _parts(graph: OpGraph) -> dict[int, list[int]]:
    """Sums of one microbatch's gradient in the first step, per actor that takes part."""
    found: dict[int, list[int]] = defaultdict(list)
    for node, op in enumerate(graph.ops):
        if _microbatch(op) >= 0 and graph.step[node] == 0:
            for actor in _takers(graph, node):
                found[actor].append(node)
    return found


def _microbatch(op: Op) -> int:
    """The microbatch whose gradient alone a sum takes, -1 for all of a step."""
    return op.mb if op.kind == "REDUCE_GRAD" else -1


def _backward(graph: OpGraph) -> dict[tuple[int, int], list[int]]:
    """Ops that complete gradients in the first step, per actor and microbatch, or -1 for all."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for node, op in enumerate(graph.ops):
        if op.kind in ("B", "W") and graph.step[node] == 0:
            for mb in {op.mb, -1}:
                found[int(graph.actor[node]), mb].append(node)
    return found


def _fits(graph: OpGraph, backward: int, update: int) -> bool:
    """Whether the update applies the gradient of this backward: same stage, same segment.

    An update whose label is no segment of the backward passes applies all of the stage; a sum of
    one microbatch takes that one only.
    """
    a, b = graph.ops[backward], graph.ops[update]
    if _microbatch(b) >= 0 and a.mb != b.mb:
        return False
    if a.stage >= 0 and b.stage >= 0 and a.stage != b.stage:
        return False
    mine, own = segment_of(a.label), segment_of(b.label)
    return not (mine and own) or mine == own


def _bare(
    graph: OpGraph,
    wiring: Wiring,
    node: int,
    wanted: list[int],
    parts: list[int],
    before: set[int],
) -> list[int]:
    """Backwards of ``wanted`` whose gradient reaches no other replica before the update.

    Where some microbatch has a sum of its own (``parts``), every one needs its own; otherwise some
    sum among the ancestors will do.
    """
    rank = graph.actors[graph.actor[node]].rank
    cell = wiring.cell_of.get(rank)
    role, experts = ("local", "local_edp") if wiring.placement.workers else ("dp", "edp")
    if cell is None or not wiring.of_rank.get((rank, role)):
        return []
    sums = [
        k
        for k in before
        if graph.ops[k].kind in SUMS
        and graph.wire[k] >= 0
        and not graph.wires[graph.wire[k]].roles.isdisjoint(REACHES | {role, experts})
    ]
    if parts:
        mine = [k for k in parts if k in before and k in sums]
        return [b for b in wanted if not any(_fits(graph, b, k) for k in mine)]
    return [] if sums else wanted


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

    def direct(self, node: int) -> set[int]:
        """Direct predecessors of a node."""
        return set(self.before[self.bounds[node] : self.bounds[node + 1]])

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
