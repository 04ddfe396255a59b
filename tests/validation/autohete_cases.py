"""AutoHete's published results (arXiv:2503.01890, by a third-party digest of it), and ours.

Found: GPT-like models of 2B to 22B with hidden sizes 2048 to 8192 and 20 to 42 layers, sequence
1024, global batch 8, one node of 4 x A100-40GB with 440 GB. Not found: the sizes of each model.
``MODELS`` is our guess within those limits. Our choices: heads of 128, feed-forward 4 h, tied
vocabulary of 50304, gradients of 2 B, microbatch = batch of a chip, no fused attention, no dropout.

bf16 stands in for the paper's fp16: same bytes, same peak. fp16 would skip a step whose gradients
overflow, and what the paper does then is not known.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypedDict

from sim.cost.ledger import BAND
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.problem import Problem, load_problem

__all__ = ["BASELINES", "Given", "MODELS", "PUBLISHED", "SCHEDULER", "case"]

MODELS: dict[str, tuple[int, int]] = {
    "2B": (2048, 40),
    "4B": (4096, 20),
    "6B": (4096, 30),
    "8B": (4096, 40),
    "10B": (5120, 32),
    "12B": (5120, 38),
    "15B": (6144, 33),
    "18B": (6144, 40),
    "20B": (8192, 25),
    "22B": (8192, 27),
}
"""Our guesses: name -> (hidden size, layers), with 12 h^2 parameters a layer."""

BASELINES = ("zero-offload", "patrickstar", "stronghold")
SCHEDULER = "no priority"
PUBLISHED: dict[int, dict[str, tuple[float, float]]] = {
    1: {
        "zero-offload": (1.85, 2.08),
        "patrickstar": (1.63, 1.91),
        "stronghold": (1.32, 1.41),
        SCHEDULER: (1.16, 1.24),
    },
    4: {
        "zero-offload": (2.23, 2.67),
        "patrickstar": (1.65, 1.79),
        "stronghold": (1.44, 1.52),
        SCHEDULER: (1.21, 1.30),
    },
}
"""Chips -> rival -> (average, largest) ratio of AutoHete's throughput to it, as published."""


class Given(TypedDict, total=False):
    """Arguments of ``case`` apart from the model's sizes."""

    chips: int
    batch: int
    memory: float
    update_ns: float
    zero: int
    flash: bool
    efficiency: float
    gradients: str


@cache
def case(
    hidden: int,
    layers: int,
    *,
    chips: int = 1,
    batch: int = 8,
    memory: float = 40.0,
    update_ns: float = 0.5,
    zero: int = 0,
    flash: bool = False,
    efficiency: float = 0.869,
    gradients: str = "bf16",
) -> tuple[Problem, PlanDraft]:
    """A model on a number of chips of the paper's node.

    Args:
        hidden, layers: of the model. chips: data-parallel. batch: global [sequences].
        memory: up to which a predicted peak fits [GB]; chips are given ``BAND`` more, which plans
            leave free otherwise. update_ns: what the host takes for a parameter [ns].
        zero: ZeRO stage. flash: scores never reach memory.
        efficiency: share of the peak that large products reach; the profile's is the best shape.
        gradients: dtype of gradients.
    """
    node: dict[str, Any] = {
        "profile": "a100_40gb_offload",
        "chips": chips,
        "host": {"update": f"{update_ns} ns"},
    }
    cluster = {
        "name": f"{chips} x A100-40GB",
        "accelerators": {
            "A100-SXM4-40GB": {
                "memory": f"{memory * (1 + BAND)} GB",
                "gemm_efficiency": efficiency,
            }
        },
        "sites": [{"name": "hall", "nodes": [node]}],
    }
    model = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": hidden // 128,
        "vocab_size": 50304,
        "n_positions": 1024,
        "tie_word_embeddings": True,
    }
    job = {
        "global_batch": batch,
        "sequence_length": 1024,
        "microbatch": batch // chips,
        "gradient_dtype": gradients,
        "flash_attention": flash,
    }
    draft = PlanDraft(
        cells=tuple(CellKnobs(stage=0, replica=r, chips=(r,)) for r in range(chips)),
        pipeline=PipelineKnobs(microbatch=batch // chips),
        data=DataKnobs(microbatches=(1,) * chips, zero=zero),
    )
    return load_problem(cluster, model, job), draft
