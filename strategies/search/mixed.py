"""One plan with replicas on unlike accelerators: its layers, its step time, its draft."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.collective import collective_cost
from sim.model.amounts import dtype_bytes
from sim.plan.draft import CellKnobs, DataKnobs, PlanDraft, TensorKnobs
from sim.problem import Problem
from strategies.search.costs import Costs
from strategies.search.drafts import pipeline_knobs
from strategies.search.recurrence import Ready, Sync, run_pipeline, synchronise
from strategies.search.slab import RECOMPUTE, Slab
from strategies.search.split import split_min_max
from strategies.search.wires import hold_up, stage_cells

__all__ = ["MixedPlan", "common_layers", "draft_of_mixed", "mixed_seconds"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class MixedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of this family.

    Args:
        parts: one slab of one row per pool (its dp, m, tp, recomputation and the common layers).
        seconds: [s] exact, messages in step. bound: [s] total work over total speed.
    """

    parts: tuple[Slab, ...]
    seconds: float
    bound: float


def common_layers(costs: Costs, slabs: list[Slab]) -> Ints | None:
    """Common layers per stage: the slowest pool's work counts, every pool's memory limits."""
    shards = sum(s.dp for s in slabs)
    times = [costs.layer_times(s) for s in slabs]
    most = np.minimum.reduce([costs.most_layers(s, shards=shards) for s in slabs])
    unit = np.maximum.reduce([t[0] for t in times])
    extra = np.maximum.reduce([t[1] for t in times])
    layers, possible = split_min_max(costs.passes.num_layers, unit, extra, most)
    return layers if possible[0] else None


def mixed_seconds(costs: Costs, placed: list[Slab]) -> float:
    """Step time [s]: every pool's passes, then one sum over all replicas."""
    ready = [run_pipeline(s.shape, costs.times(s)) for s in placed]
    gradient = np.maximum.reduce([r.gradient for r in ready])
    sums = [costs.sync(s, shards=sum(x.dp for x in placed)) for s in placed]
    reduce, unshard = _sums(costs, placed)
    queued = _queued(costs, placed)
    ends = []
    for r, own in zip(ready, sums, strict=True):
        sync = Sync(
            reduce=reduce, reduce_experts=0 * reduce, update=own.update, unshard=unshard,
            unshard_experts=0 * reduce, embed=own.embed, barrier=own.barrier,
            queued=queued,
        )  # fmt: skip
        ends.append(float(synchronise(Ready(gradient, r.free), sync)[0]))
    return max(ends)


def _sums(costs: Costs, placed: list[Slab]) -> tuple[Floats, Floats]:
    """Gradient sums and gathered parameters of every stage over all replicas [s]."""
    problem, passes = costs.problem, costs.passes
    low, high = placed[0].ranges()
    stages = placed[0].num_stages
    zero, job = placed[0].knobs.zero, problem.job
    fine = max(int(s.tp[0, 0]) for s in placed)
    share = fine if costs.in_step else 1
    dense, experts = passes.table.rank_params(passes.starts[low], passes.starts[high], fine, 1)
    reduce, unshard = np.zeros((1, stages)), np.zeros((1, stages))
    for p in range(stages):
        chips = [cell[0] for cell in _cells(placed, p)]
        elements = float((dense + experts)[0, p])
        kind = "reduce_scatter" if zero else "all_reduce"
        width = elements * dtype_bytes(job.reduction_dtype)
        machine = problem.machine
        reduce[0, p] = collective_cost(machine, kind, chips, width, share=share).seconds
        if zero:
            nbytes = elements * job.param_bytes
            unshard[0, p] = collective_cost(
                machine, "all_gather", chips, nbytes, share=share
            ).seconds
    return reduce, unshard


def _cells(placed: list[Slab], stage: int) -> list[tuple[int, ...]]:
    """Cells of a stage, all pools'."""
    found: list[tuple[int, ...]] = []
    for s in placed:
        tp, stages = int(s.tp[0, 0]), s.num_stages
        found += stage_cells(s.pools[0], tp, stages, s.dp, stage, False).chips
    return found


def _queued(costs: Costs, placed: list[Slab]) -> NDArray[np.bool_]:
    """Where the sums of a stage leave through a NIC of the next stage's, shape (1, P)."""
    if not costs.in_step:
        return np.zeros((1, placed[0].num_stages), np.bool_)
    nics = [costs.wires.nics(_cells(placed, p)) for p in range(placed[0].num_stages)]
    found = [hold_up(a, b) for a, b in itertools.pairwise(nics)]
    return np.array([[*found, False]])


def draft_of_mixed(problem: Problem, plan: MixedPlan) -> PlanDraft:
    """Write a plan of this family down as a draft."""
    knobs = plan.parts[0].knobs
    stages = plan.parts[0].num_stages
    cells: list[CellKnobs] = []
    for p in range(stages):
        replica = 0
        for s in plan.parts:
            tp = int(s.tp[0, 0])
            for chips in stage_cells(s.pools[0], tp, stages, s.dp, p, False).chips:
                mode = RECOMPUTE[int(s.recompute[0, 0])]
                cells.append(
                    CellKnobs(stage=p, replica=replica, chips=chips, tp=tp, recompute=mode)
                )
                replica += 1
    name = " | ".join(
        f"{s.pools[0].name} dp {s.dp} x tp{int(s.tp[0, 0])}"
        + (f" {RECOMPUTE[int(s.recompute[0, 0])]}" if s.recompute[0, 0] else "")
        + f" x {s.num_microbatches} microbatches"
        for s in plan.parts
    )
    return PlanDraft(
        name=f"{name}, pp {stages}",
        cells=tuple(cells),
        pipeline=pipeline_knobs(
            problem, plan.parts[0].layers[0].tolist(), knobs, plan.parts[0].microbatch
        ),
        data=DataKnobs(
            microbatches=tuple(s.num_microbatches for s in plan.parts for _ in range(s.dp)),
            zero=knobs.zero,
        ),
        tensor=TensorKnobs(sequence_parallel=knobs.sequence_parallel),
        knobs={"search": msgspec.to_builtins(knobs._asdict())},
    )
