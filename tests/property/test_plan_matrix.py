"""Every axis with every other: such plans lower, validate, run, and fold without a difference."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.cost.ledger import peak_memory
from sim.engine.simulate import simulate
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.uniform import uniform
from sim.plan.validate import validate
from sim.problem import Problem, load_problem
from sim.report.report import report_of

BATCH = 16
SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 1024,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "llama", "intermediate_size": 2816, "tie_word_embeddings": True, **SHAPE,
    },
    "moe": {
        "model_type": "mixtral", "intermediate_size": 1792, "num_local_experts": 8,
        "num_experts_per_tok": 2, **SHAPE,
    },
}  # fmt: skip
SCHEDULES = (
    {}, {"split_backward": True}, {"schedule": "gpipe"}, {"chunks": 2}, {"schedule": "zb-h1"},
)  # fmt: skip


@lru_cache(maxsize=2)
def given(model: str) -> Problem:
    job = {"global_batch": BATCH, "sequence_length": 512, "dtype": "bf16", "optimizer": "adamw"}
    return load_problem("a100x64", MODELS[model], job)


def sizes(model: str, chips: int) -> list[dict[str, int]]:
    """All meshes of tp, cp, ep and pp on this many chips."""
    found = []
    for tp, cp, ep, pp in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4)):
        dp, rest = divmod(chips, tp * cp * pp)
        if not rest and dp % ep == 0 and (ep == 1 or model == "moe"):
            found.append({"tp": tp, "cp": cp, "ep": ep, "pp": pp})
    return found


def draft_of(model: str, chips: int, mesh: dict[str, int], knobs: dict[str, Any], seed: int) -> Any:
    """A draft with the other knobs drawn, on chips that lie together, apart or anyhow."""
    rng = random.Random(f"{model} {chips} {mesh} {knobs} {seed}")
    pool = rng.choice(
        [range(chips), range(0, 4 * chips, 4), rng.sample(range(64), chips), range(0, 2 * chips, 2)]
    )
    draft = uniform(
        given(model).model, BATCH, tuple(pool), **mesh, **knobs,
        recompute=rng.choice(["none", "selective", "full"]), zero=rng.randint(0, 1),
        sequence_parallel=mesh["tp"] > 1 and rng.random() < 0.5,
    )  # fmt: skip
    pipeline = msgspec.structs.replace(draft.pipeline, whole_boundaries=rng.random() < 0.2)
    counts = list(draft.data.microbatches)
    ep = mesh["ep"]
    if len(counts) > ep and counts[0] > 1 and "chunks" not in knobs and rng.random() < 0.3:
        # Replicas that share experts run equally many.
        counts[:ep], counts[ep : 2 * ep] = [counts[0] + 1] * ep, [counts[ep] - 1] * ep
    data = msgspec.structs.replace(draft.data, microbatches=tuple(counts))
    return msgspec.structs.replace(draft, pipeline=pipeline, data=data, barrier=rng.random() < 0.7)


def check(problem: Problem, draft: PlanDraft, steps: int) -> None:
    plan = lower(problem, draft)
    validate(plan)
    for contention in (True, False):
        folded = simulate(plan, problem, steps=steps, contention=contention)
        apart = simulate(plan, problem, steps=steps, contention=contention, fold=False)
        assert folded.makespan == pytest.approx(apart.makespan, rel=1e-9)
        one, other = report_of(folded, problem).metrics, report_of(apart, problem).metrics
        for name in ("step_time_s", "mfu", "hfu", "bubble_fraction", "exposed_comm_s"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-8, abs=1e-12)
        assert one.exposed_by_group == pytest.approx(other.exposed_by_group, rel=1e-8, abs=1e-12)
    ledgers = peak_memory(plan, problem)
    assert len(ledgers) == len(plan.placement.cells)
    for ledger in ledgers.values():
        assert np.isfinite(ledger.peak_bytes)
        assert min(ledger.terms.values()) >= 0


@pytest.mark.parametrize("chips", [8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_matrix(model: str, chips: int) -> None:
    meshes = sizes(model, chips)
    assert len(meshes) >= 14
    for i, mesh in enumerate(meshes):
        # Each mesh with two of the schedules, each schedule with two fifths of the meshes.
        for k in (0, 2):
            knobs = SCHEDULES[(i + k) % len(SCHEDULES)]
            check(given(model), draft_of(model, chips, mesh, knobs, k), steps=1 + (i % 3 == 0))


def test_context_parallel_ranks_share_the_tied_embedding_pairwise() -> None:
    problem = given("dense")
    plan = lower(problem, uniform(problem.model, BATCH, range(8), pp=2, tp=2, cp=2))
    run = simulate(plan, problem, fold=False)
    embed = [w.group for w in run.layout.graph.wires if "embed" in w.roles]
    assert sorted(embed) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    sums = [op for op in run.layout.graph.ops if op.kind == "ALL_REDUCE"]
    assert len(sums) == 4
