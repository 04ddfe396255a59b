"""From a row of a slab to a PlanDraft: cells on chips, cuts, knobs."""

from __future__ import annotations

import itertools

import msgspec

from sim.plan.draft import (
    CellKnobs,
    DataKnobs,
    ExpertKnobs,
    PipelineKnobs,
    PlanDraft,
    TensorKnobs,
)
from sim.problem import Problem
from strategies.pipeline.partition import unit_starts
from strategies.search.slab import RECOMPUTE, Knobs, Slab
from strategies.search.wires import stage_cells

__all__ = ["cuts_of", "draft_of", "name_of"]


def cuts_of(problem: Problem, layers: list[int]) -> tuple[int, ...]:
    """Block index where each virtual stage starts, and the number of blocks."""
    starts = unit_starts(problem.model)
    return tuple(starts[c] for c in itertools.accumulate(layers, initial=0))


def name_of(slab: Slab, row: int = 0) -> str:
    """A candidate's groups in words, e.g. "V100 3 x tp4 + T4 1 x tp4 full, dp 1"."""
    parts = []
    for g, pool in enumerate(slab.pools):
        mode = RECOMPUTE[int(slab.recompute[row, g])]
        parts.append(
            f"{pool.name} {int(slab.pp[row, g])} x tp{int(slab.tp[row, g])}"
            + (f" {mode}" if mode != "none" else "")
        )
    extra = f" ep {slab.ep}" if slab.ep > 1 else ""
    return " + ".join(parts) + f", dp {slab.dp}{extra}"


def draft_of(problem: Problem, slab: Slab, row: int = 0) -> PlanDraft:
    """Write a candidate down as a draft.

    Args:
        problem: what it is for. slab: with layers. row: which candidate.
    """
    k = slab.knobs
    cells, stage = [], 0
    for g, pool in enumerate(slab.pools):
        tp, pp = int(slab.tp[row, g]), int(slab.pp[row, g])
        for index in range(pp):
            chips = stage_cells(pool, tp, pp, slab.dp, index, k.scatter).chips
            cells += [
                CellKnobs(
                    stage=stage,
                    replica=r,
                    chips=chips[r],
                    tp=tp,
                    recompute=RECOMPUTE[int(slab.recompute[row, g])],
                )
                for r in range(slab.dp)
            ]
            stage += 1
    return PlanDraft(
        name=name_of(slab, row),
        cells=tuple(cells),
        pipeline=pipeline_knobs(problem, slab.layers[row].tolist(), k, slab.microbatch),
        data=DataKnobs(microbatches=(slab.num_microbatches,) * slab.dp, zero=k.zero),
        tensor=TensorKnobs(sequence_parallel=k.sequence_parallel),
        expert=ExpertKnobs(ep=slab.ep),
        knobs={"search": msgspec.to_builtins(k._asdict())},
    )


def pipeline_knobs(
    problem: Problem, layers: list[int], knobs: Knobs, microbatch: int
) -> PipelineKnobs:
    """Pipeline knobs of a candidate with these layers per virtual stage."""
    return PipelineKnobs(
        schedule=knobs.schedule,
        chunks=knobs.chunks,
        cuts=cuts_of(problem, layers),
        microbatch=microbatch,
        split_backward=knobs.split_backward,
    )
