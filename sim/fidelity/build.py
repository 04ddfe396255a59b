"""Settings of a run -> the problem and the draft that describe it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec

from sim.errors import InputError
from sim.fidelity.chips import cluster_of
from sim.fidelity.settings import Settings
from sim.fidelity.skip import Skip
from sim.hardware.catalog import Catalog
from sim.plan.draft import (
    CellKnobs,
    DataKnobs,
    ExpertKnobs,
    PipelineKnobs,
    PlanDraft,
    TensorKnobs,
    split_layers,
)
from sim.problem import Problem, load_problem, problem_hash

__all__ = ["draft_of", "microbatches_of", "problem_of", "with_batch"]


def microbatches_of(s: Settings) -> int:
    """Microbatches of the fullest replica; under interleaving a multiple of the positions."""
    count = math.ceil(s.gbs / (s.mbs * s.dp))
    return math.ceil(count / s.pp) * s.pp if s.vpp > 1 else count


def problem_of(
    s: Settings, catalog: Catalog, microbatches: int, changes: dict[str, Any] | None = None
) -> Problem:
    """Return the problem of a run.

    Args:
        s: its settings. catalog: where profiles lie.
        microbatches: of each replica, which fixes the global batch.
        changes: accelerator numbers of the software stack, by profile name.

    Raises:
        Skip: no profile of a chip. InputError: a document is wrong.
    """
    cluster = cluster_of(s.chips, catalog)
    if changes:
        names = {n["accelerator"] for site in cluster["sites"] for n in site["nodes"]}
        cluster["accelerators"] = {k: v for k, v in changes.items() if k in names}
    job: dict[str, Any] = {
        "global_batch": microbatches * s.mbs * s.dp,
        "sequence_length": s.seq,
        "dtype": s.dtype,
        "optimizer": "adamw",
        "flash_attention": s.flash,
    }
    return load_problem(cluster, s.config, job, catalog=catalog)


def with_batch(problem: Problem, global_batch: int) -> Problem:
    """Return a problem with another global batch, on the same machine.

    What is remembered of a machine, as prices of its collectives, then serves both.
    """
    documents = problem.documents | {
        "job": problem.documents["job"] | {"global_batch": global_batch}
    }
    return msgspec.structs.replace(
        problem,
        job=msgspec.structs.replace(problem.job, global_batch=global_batch),
        documents=documents,
        hash=problem_hash(documents),
    )


def draft_of(s: Settings, problem: Problem, microbatches: int) -> PlanDraft:
    """Return the plan of a run: ranks in order of tensor, context, data and pipeline index.

    Args:
        s: its settings. problem: of it. microbatches: of each replica.

    Raises:
        Skip: more virtual stages than the model has blocks to fill.
    """
    size = s.tp * s.cp
    cells = tuple(
        CellKnobs(
            stage=stage, replica=r, tp=s.tp, cp=s.cp, recompute=s.recompute,  # type: ignore[arg-type]
            chips=tuple(range((stage * s.dp + r) * size, (stage * s.dp + r + 1) * size)),
        )
        for stage in range(s.pp)
        for r in range(s.dp)
    )  # fmt: skip
    zero = s.zero if s.dp > 1 else min(s.zero, 1 if s.cp > 1 else 0)
    if zero >= 2 and s.ep > 1:
        zero = 1
    return PlanDraft(
        cells=cells,
        pipeline=PipelineKnobs(
            schedule="interleaved" if s.vpp > 1 else "1f1b",
            chunks=s.vpp,
            cuts=_cuts(s, problem),
            microbatch=s.mbs,
            blocking_p2p=s.blocking and s.pp > 1,
            whole_boundaries=s.blocking,
        ),
        data=DataKnobs(microbatches=(microbatches,) * s.dp, zero=zero),
        tensor=TensorKnobs(sequence_parallel=s.sequence_parallel),
        expert=ExpertKnobs(ep=s.ep),
    )


def _cuts(s: Settings, problem: Problem) -> tuple[int, ...]:
    """Block where each virtual stage starts, and the number of blocks."""
    layers, blocks = problem.model.num_layers, problem.model.blocks
    virtual = s.pp * s.vpp
    if virtual == 1:
        return ()
    ends = [i for i, b in enumerate(blocks) if i and b.layer != blocks[i - 1].layer]
    starts = [*ends[:layers], len(blocks) - 1]  # first block of each layer, then the head
    if s.layers_per_stage:
        if len(s.layers_per_stage) != virtual:
            raise Skip(f"{len(s.layers_per_stage)} stages in the notes, {virtual} in the columns")
        units, before = s.layers_per_stage, s.before
    elif layers % virtual == 0:
        return (0, *(starts[layers // virtual * v] for v in range(1, virtual)), len(blocks))
    else:
        units, before = _ends_lighter(layers, virtual), 1
    cuts = [0]
    for done in itertools.accumulate(units[:-1]):
        at = min(max(done - before, 0), layers)
        cuts.append(max(starts[at], cuts[-1] + 1))
    if cuts[-1] >= len(blocks) or any(a >= b for a, b in itertools.pairwise(cuts)):
        raise Skip(f"{layers} layers do not fill {virtual} virtual stages")
    return (*cuts, len(blocks))


def _ends_lighter(layers: int, virtual: int) -> tuple[int, ...]:
    """Layers per stage with embedding and head counted as one each."""
    try:
        return split_layers(layers + 2, virtual)
    except InputError:
        raise Skip(f"{layers} layers do not fill {virtual} virtual stages") from None
