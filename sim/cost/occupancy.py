"""Activation memory over time, from the times of a run's ops."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from sim.cost.ledger import knobs_of
from sim.cost.memory import TERMS, stage_memory_terms
from sim.cost.offload import segment_terms
from sim.errors import SimulationError
from sim.model.amounts import block_table
from sim.plan.deps import of_experts
from sim.plan.graph import OpGraph
from sim.plan.op import Op
from sim.plan.plan import Plan
from sim.plan.wiring import Wiring
from sim.problem import Problem
from sim.spec.job import Recompute

__all__ = ["memory_over_time"]

Floats = NDArray[np.float64]

MODES: dict[str, Recompute] = {"all": "none", "selective": "selective", "inputs": "full"}
"""What is not kept, by what an F saves."""


def memory_over_time(
    graph: OpGraph,
    wiring: Wiring,
    plan: Plan,
    problem: Problem,
    start: Floats,
    end: Floats,
) -> list[tuple[Floats, Floats]]:
    """Return the memory of every actor's rank over a run.

    A forward holds what it keeps from its start, a recomputation (R) the rest from its start; B, or
    W where the backward is split, gives both back at its end. At one instant what is given back
    counts before what is taken. All other terms of the ledger stand all the time.

    Args:
        graph, wiring, plan, problem: of the run. start, end: [s] per node.

    Returns:
        Per actor (t [s], bytes [B]): bytes hold from t on; both empty for ranks outside cells.

    Raises:
        SimulationError: an activation is given back that was never kept.
    """
    changes: list[list[tuple[float, int, float]]] = [[] for _ in graph.actors]
    held: dict[tuple[int, int, int, str, int, int], float] = defaultdict(float)
    kept = _Kept(wiring, plan, problem, graph)
    split = {(int(graph.actor[k]), op.stage) for k, op in enumerate(graph.ops) if op.kind == "W"}
    for node in np.lexsort((np.arange(graph.num_nodes), start)).tolist():
        op, actor = graph.ops[node], int(graph.actor[node])
        if op.kind not in ("F", "R", "B", "W"):
            continue
        rank = graph.actors[actor].rank
        if rank not in wiring.cell_of:
            continue
        key = (actor, op.stage, op.mb, op.label, op.part, int(graph.step[node]))
        if op.kind in ("F", "R"):
            nbytes = kept.of(op, rank)
            held[key] += nbytes
            changes[actor].append((float(start[node]), 1, nbytes))
        elif (op.kind == "W") == ((actor, op.stage) in split):
            if key not in held:
                raise SimulationError(f"{graph.label(node)} frees what no forward kept")
            changes[actor].append((float(end[node]), 0, -held.pop(key)))
    found = []
    for who, rows in zip(graph.actors, changes, strict=True):
        if who.rank not in wiring.cell_of:
            found.append((np.zeros(0), np.zeros(0)))
            continue
        rows = sorted(row for row in rows if np.isfinite(row[0]))  # others never ran
        times = np.array([0.0, *(t for t, _, _ in rows)])
        sizes = np.cumsum([kept.static(who.rank), *(x for _, _, x in rows)])
        found.append((times, sizes))
    return found


class _Kept:
    """What a forward keeps and what stands all the time, once per distinct op and cell."""

    def __init__(self, wiring: Wiring, plan: Plan, problem: Problem, graph: OpGraph) -> None:
        self.wiring, self.plan, self.problem = wiring, plan, problem
        job = problem.job
        self.table = block_table(problem.model, job.sequence_length, job.activation_bytes)
        self._gap = {n: a.allocator_gap for n, a in problem.machine.accelerators.items()}
        self._known: dict[tuple[object, ...], float] = {}
        self._parts: dict[tuple[int, str], int] = {}
        for op in {id(o): o for o in graph.ops}.values():
            if op.part >= 0:
                at = (op.stage, op.label)
                self._parts[at] = max(self._parts.get(at, 1), op.part + 1)

    def of(self, op: Op, rank: int) -> float:
        """Bytes that this F keeps, or this R adds to it, allocator gap included [B].

        What a segment keeps counts with the part of it that is not its experts'.
        """
        if of_experts(op.label):
            return 0.0
        cell = self.wiring.cell_of[rank]
        stage = self.wiring.stage_of(op, rank)
        parts = self._parts.get((op.stage, op.label), 1) if op.part >= 0 else 1
        key = (cell.stage, cell.accelerator, cell.tp, cell.cp, cell.recompute)
        key = (*key, stage, op.label, op.kind, op.saves, parts)  # type: ignore[assignment]
        if key not in self._known:
            knobs = knobs_of(self.plan, cell)
            mode: Recompute = cell.recompute
            if op.kind == "F":
                mode = MODES[op.saves]
            mine = [s for s in self.plan.placement.segments if s.stage == stage]
            named = [s for s in mine if s.name == op.label]
            total = 0.0
            for s in named if op.label and named else mine:
                keeps = self._per_token(s.blocks, mode, knobs.tp, knobs.sequence_parallel)
                if op.kind == "R":
                    whole = self._per_token(s.blocks, "none", knobs.tp, knobs.sequence_parallel)
                    dropped = "full" if mode == "none" else mode
                    keeps = whole - self._per_token(
                        s.blocks, dropped, knobs.tp, knobs.sequence_parallel
                    )
                total += keeps
            tokens = knobs.microbatch * self.table.sequence_length / knobs.cp / parts
            gap = 1 + self._gap[cell.accelerator]
            self._known[key] = total * tokens * gap
        return self._known[key]

    def _per_token(
        self, blocks: tuple[int, int], mode: Recompute, tp: int, sequence_parallel: bool
    ) -> float:
        return float(self.table.kept_per_token(*blocks, mode, tp, sequence_parallel))

    def static(self, rank: int) -> float:
        """All terms but the activations of a rank's cell [B]."""
        cell = self.wiring.cell_of[rank]
        m = self.plan.placement.microbatches
        key = (cell.stage, cell.accelerator, cell.tp, cell.cp, cell.recompute)
        key = (*key, cell.offload, m[cell.replica] if m else 1)  # type: ignore[assignment]
        if key not in self._known and any(s.name for s in self.plan.placement.segments):
            knobs = knobs_of(self.plan, cell)
            found = segment_terms(self.plan, self.problem, cell, (), knobs)
            self._known[key] = sum(found.values())
        elif key not in self._known:
            mine = [s.blocks for s in self.plan.placement.segments if s.cell == cell.stage]
            accelerator = self.problem.machine.accelerators[cell.accelerator]
            low, high = np.array(mine).T
            terms = stage_memory_terms(
                self.table,
                self.problem.job,
                accelerator,
                low,
                high,
                np.zeros(len(mine)),
                knobs_of(self.plan, cell),
            )
            self._known[key] = float(sum(terms[name] for name in TERMS))
        return self._known[key]
