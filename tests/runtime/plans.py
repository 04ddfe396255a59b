"""Small plans for real processes: a tiny decoder, a cluster of processors, drafts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sim.plan.draft import CellKnobs, DataKnobs, ExpertKnobs, PipelineKnobs, PlanDraft, TensorKnobs
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem

SEQUENCE, BATCH = 12, 8

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "initializer_range": 0.2,
}  # fmt: skip
CLUSTER: dict[str, Any] = {
    "name": "processors",
    "profiles": {
        "accelerators": [
            {
                "name": "CPU", "memory": "4 GiB", "memory_bandwidth": "10 GB/s",
                "peaks": {"fp32": "50 GFLOP/s", "bf16": "50 GFLOP/s"},
            }
        ]
    },
    "sites": [
        {
            "name": "here",
            "nodes": [
                {
                    "accelerator": "CPU", "chips": 4, "count": 1,
                    "fabric": {"rate": "4 GB/s", "latency": "20 us"},
                    "nics": {"rate": "10 Gb/s", "latency": "20 us"},
                }
            ],
        }
    ],
}  # fmt: skip


def problem_of(**model: Any) -> Problem:
    job = {"global_batch": BATCH, "sequence_length": SEQUENCE, "dtype": "fp32"}
    return load_problem(CLUSTER, CONFIG | model, job)


def draft_of(
    tp: list[list[int]],
    microbatches: tuple[int, ...] = (4,),
    recompute: str = "none",
    zero: int = 0,
    sequence_parallel: bool = False,
    ep: int = 1,
    **pipeline: Any,
) -> PlanDraft:
    """A draft; ``tp[stage][replica]`` is the cell's tensor-parallel size."""
    cells, chip = [], 0
    for stage, row in enumerate(tp):
        for replica, size in enumerate(row):
            chips = tuple(range(chip, chip + size))
            chip += size
            cells.append(
                CellKnobs(stage=stage, replica=replica, chips=chips, tp=size, recompute=recompute)
            )
    total = sum(microbatches)
    pipeline.setdefault("microbatch", BATCH // total)
    return PlanDraft(
        cells=tuple(cells),
        pipeline=PipelineKnobs(**pipeline),
        data=DataKnobs(microbatches=microbatches, zero=zero),
        expert=ExpertKnobs(ep=ep),
        tensor=TensorKnobs(sequence_parallel=sequence_parallel),
    )


def plan_of(problem: Problem, tp: list[list[int]], **knobs: Any) -> Plan:
    """A lowered plan; cuts default to an even split of the blocks."""
    chunks, stages = knobs.get("chunks", 1), len(tp)
    virtual = chunks * stages
    blocks = len(problem.model.blocks)
    if virtual > 1:
        even = tuple(round(i * blocks / virtual) for i in range(virtual + 1))
        knobs.setdefault("cuts", even)
    return lower(problem, draft_of(tp, **knobs))


def write_tokens(folder: Path, vocab: int = 61, count: int = 400) -> Path:
    path = folder / "tokens.npy"
    np.save(path, np.random.default_rng(7).integers(0, vocab, count, dtype=np.uint16))
    return path
