"""Plans of the small GPT under ZeRO."""

from __future__ import annotations

from typing import Any

from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.uniform import layer_cuts
from sim.problem import Problem
from strategies.compose import compose
from tests.unit.test_offload import LAYERS

LAYER = 12 * 1024**2 + 13 * 1024
"""Parameters of a layer of the small GPT."""


def sharded(
    given_: Problem,
    zero: int,
    *,
    stages: int = 1,
    chunks: int = 1,
    schedule: str = "1f1b",
    buffers: int = 0,
    **offload: Any,
) -> Plan:
    """Equal cells on all chips of a machine, with or without offloading."""
    blocks, chips = given_.model.blocks, given_.machine.num_chips
    virtual = stages * chunks
    replicas, m = chips // stages, given_.job.global_batch * stages // chips
    draft = PlanDraft(
        cells=tuple(
            CellKnobs(stage=s, replica=r, chips=(r * stages + s,))
            for s in range(stages)
            for r in range(replicas)
        ),
        pipeline=PipelineKnobs(
            cuts=layer_cuts(given_.model, (LAYERS // virtual,) * virtual),
            schedule="interleaved" if chunks > 1 else schedule,
            chunks=chunks,
        ),
        data=DataKnobs(microbatches=(m,) * replicas),
    )
    assert draft.pipeline.cuts[-1] == len(blocks)
    choices: list[tuple[str, Any]] = [("zero", {"stage": zero, "buffers": buffers})]
    if offload:
        choices.insert(len(offload) % 2, ("offload", offload))
    return lower(given_, compose(given_, choices, start=draft))
