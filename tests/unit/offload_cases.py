"""Small models on small machines for tests of offloading."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

from sim.engine.simulate import simulate
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.problem import Problem, load_problem
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.program import Choice
from strategies.offload.units import plan_with

__all__ = ["gpt", "spacing", "two"]


@cache
def gpt(
    memory: float,
    replicas: int = 1,
    m: int = 1,
    layers: int = 3,
    update: str = "0.4 ns",
    zero: int = 0,
) -> tuple[Problem, PlanDraft]:
    """A small GPT on chips of this memory [GB]."""
    node = {
        "accelerator": "A100-SXM4-80GB",
        "chips": replicas,
        "fabric": "nvlink3",
        "pcie": {"rate": "25 GB/s"},
        "host": {"update": update},
        "host_memory": "440 GB",
        "count": 1,
    }
    config = {
        "model_type": "gpt2",
        "n_embd": 2048,
        "n_layer": layers,
        "n_head": 16,
        "vocab_size": 8192,
        "n_positions": 1024,
    }
    job = {
        "global_batch": 4 * replicas * m,
        "sequence_length": 1024,
        "microbatch": 4,
        "gradient_dtype": "bf16",
        "limits": {"allow_inexact": True},
    }
    cluster = {
        "name": "one",
        "accelerators": {"A100-SXM4-80GB": {"memory": f"{memory} GB"}},
        "sites": [{"name": "hall", "nodes": [node]}],
    }
    draft = PlanDraft(
        cells=tuple(CellKnobs(stage=0, replica=r, chips=(r,)) for r in range(replicas)),
        pipeline=PipelineKnobs(microbatch=4),
        data=DataKnobs(microbatches=(m,) * replicas, zero=zero),
    )
    return load_problem(cluster, config, job), draft


@cache
def two(
    memory: tuple[float, float] = (80.0, 80.0),
    first: int = 2,
    m: int = 2,
    pcie: tuple[bool, bool] = (True, True),
    replicas: int = 1,
    layers: int = 4,
) -> tuple[Problem, PlanDraft]:
    """A GPT on two nodes of chips with this memory [GB]; so many layers on the first position."""
    names = ("A100-SXM4-80GB", "H100-SXM5-80GB")
    host: dict[str, Any] = {"host": {"update": "0.4 ns"}, "host_memory": "440 GB"}
    nodes = [
        {
            "accelerator": name,
            "chips": replicas,
            "fabric": "nvlink3",
            "count": 1,
            "nics": {"profile": "ib_hdr_200g"},
        }
        | ({"pcie": {"rate": "25 GB/s"}, **host} if linked else {"pcie": None})
        for name, linked in zip(names, pcie, strict=True)
    ]
    cluster = {
        "name": "two",
        "accelerators": {n: {"memory": f"{gb} GB"} for n, gb in zip(names, memory, strict=True)},
        "sites": [{"name": "hall", "nodes": nodes}],
    }
    config = {
        "model_type": "gpt2",
        "n_embd": 2048,
        "n_layer": layers,
        "n_head": 16,
        "vocab_size": 8192,
        "n_positions": 1024,
        "tie_word_embeddings": False,
    }
    job = {
        "global_batch": 2 * m * replicas,
        "sequence_length": 1024,
        "microbatch": 2,
        "gradient_dtype": "bf16",
        "limits": {"allow_inexact": True},
    }
    problem = load_problem(cluster, config, job)
    blocks = problem.model.blocks
    cut = next(i for i, b in enumerate(blocks) if b.layer == first)
    draft = PlanDraft(
        cells=tuple(
            CellKnobs(stage=s, replica=r, chips=(s * replicas + r,))
            for s in range(2)
            for r in range(replicas)
        ),
        pipeline=PipelineKnobs(cuts=(0, cut, len(blocks)), microbatch=2),
        data=DataKnobs(microbatches=(m,) * replicas),
    )
    return problem, draft


def spacing(problem: Problem, start: PlanDraft, base: AutoHeteKnobs, choice: Choice) -> float:
    """The longest time a step from an op to itself, or from a stream's last op to its next last.

    Whatever holds a steady step up holds one of these up from the second step on.
    """
    steps = 10
    run = simulate(plan_with(problem, start, base, choice), problem, steps=steps)
    graph, out = run.layout.graph, run.outcome
    starts: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0] * steps)
    ends: dict[int, list[float]] = defaultdict(lambda: [0.0] * steps)
    for k, op in enumerate(graph.ops):
        step = int(graph.step[k])
        starts[int(graph.actor[k]), op.name][step] = float(out.start[k])
        last = ends[int(graph.stream[k])]
        last[step] = max(last[step], float(out.end[k]))
    return max((x[-1] - x[1]) / (steps - 2) for x in (*starts.values(), *ends.values()))
