"""Bounds of offloading on random machines, models, knobs and choices."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.problem import Problem, load_problem
from strategies.lowering.updates import CLIPPING
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.bounds import bounds_of
from strategies.offload.program import Choice
from tests.unit.offload_cases import spacing

CHIPS = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H20")


def case(
    layers: list[int],
    replicas: int,
    m: int,
    rate: int,
    update: float,
    schedule: str,
    zero: int,
    dtype: str = "bf16",
) -> tuple[Problem, PlanDraft]:
    """A GPT with so many layers on each position, a node of unlike chips for each."""
    node: dict[str, Any] = {
        "chips": replicas,
        "fabric": "nvlink3",
        "pcie": {"rate": f"{rate} GB/s"},
        "host": {
            "update": f"{update} ns",
            "memory_bandwidth": "100 GB/s",
            "flops": "1 TFLOP/s",
        },
        "host_memory": "440 GB",
        "count": 1,
        "nics": {"profile": "ib_hdr_200g"},
    }
    nodes = [{"accelerator": name, **node} for name in CHIPS[: len(layers)]]
    config = {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": sum(layers),
        "n_head": 16,
        "vocab_size": 8192,
        "n_positions": 1024,
        "tie_word_embeddings": False,
    }
    job = {
        "global_batch": m * replicas,
        "sequence_length": 1024,
        "microbatch": 1,
        "dtype": dtype,
        "gradient_dtype": dtype,
        "limits": {"allow_inexact": True},
    }
    cluster = {"name": "any", "sites": [{"name": "hall", "nodes": nodes}]}
    problem = load_problem(cluster, config, job)
    blocks = problem.model.blocks
    firsts = [sum(layers[:s]) for s in range(1, len(layers))]
    cuts = [next(i for i, b in enumerate(blocks) if b.layer == x) for x in firsts]
    draft = PlanDraft(
        cells=tuple(
            CellKnobs(stage=s, replica=r, chips=(s * replicas + r,))
            for s in range(len(layers))
            for r in range(replicas)
        ),
        pipeline=PipelineKnobs(cuts=(0, *cuts, len(blocks)), microbatch=1, schedule=schedule),
        data=DataKnobs(microbatches=(m,) * replicas, zero=zero),
    )
    return problem, draft


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_step_beats_its_bound(data: st.DataObject) -> None:
    def any_of(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    replicas = any_of(1, 1, 2)
    problem, start = case(
        data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)),
        replicas,
        any_of(1, 2, 3),
        any_of(2, 8, 25, 60),
        any_of(0.02, 0.1, 0.4, 1.5),
        any_of("1f1b", "gpipe", "zb-h1"),
        any_of(0, 3) if replicas > 1 else 0,
        any_of("bf16", "fp32"),
    )
    base = AutoHeteKnobs(
        priority=any_of(True, False),
        clipping=any_of(*CLIPPING),
        whole_steps=any_of(False, True),
        parameter_buffers=any_of(1, 2, 3),
        gradient_buffers=any_of(1, 2),
        outer=any_of(False, True),
    )
    bounds = bounds_of(problem, start, base)
    choice: Choice = tuple(
        (any_of(*range(c)), any_of(*range(p)), any_of(*range(o))) for c, p, o in bounds.sizes
    )
    at = [[np.asarray(count) for count in counts] for counts in choice]
    assert spacing(problem, start, base, choice) >= float(bounds.step(at)) * (1 - 1e-9)
