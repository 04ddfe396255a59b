"""Whole plans on a mixed cluster: folding, max-plus and repetition change nothing."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.faults import Straggler
from sim.engine.maxplus import longest_path
from sim.engine.simulate import simulate
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft, TensorKnobs, split_layers
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.uniform import layer_cuts
from sim.problem import Problem, load_problem
from sim.report.record import spans_of_run

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 4000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@cache
def of_batch(global_batch: int) -> Problem:
    job = {"global_batch": global_batch, "sequence_length": 512, "dtype": "fp16"}
    return load_problem("v100_t4", LLAMA, job)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """Unlike cells anywhere on 12 V100 and 4 T4, uneven replicas, every knob of the draft."""
    stages, replicas = draw(
        st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (2, 3)])
    )
    free = [list(range(4 * n, 4 * n + 4)) for n in draw(st.permutations(range(4)))]
    cells = []
    for stage in range(stages):
        for replica in range(replicas):
            later = stages * replicas - len(cells) - 1
            left = sum(map(len, free)) - later
            tp = draw(
                st.sampled_from([t for t in (1, 2, 4) if t <= min(left, max(map(len, free)))])
            )
            node = draw(st.sampled_from([chips for chips in free if len(chips) >= tp]))
            chips, node[:tp] = tuple(node[:tp]), []
            mode = draw(st.sampled_from(["none", "selective", "full"]))
            cells.append(
                CellKnobs(stage=stage, replica=replica, chips=chips, tp=tp, recompute=mode)
            )
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"]))
    chunks = 2 if schedule == "interleaved" else 1
    unit = stages if chunks > 1 else 1
    microbatches = tuple(unit * draw(st.integers(1, 3)) for _ in range(replicas))
    problem = of_batch(sum(microbatches))
    counts = split_layers(6, stages * chunks)
    draft = PlanDraft(
        cells=tuple(cells),
        pipeline=PipelineKnobs(
            schedule=schedule,
            chunks=chunks,
            cuts=layer_cuts(problem.model, counts),
            buffers=draw(st.integers(1, 3)),
            split_backward=schedule != "zb-h1" and draw(st.booleans()),
            whole_boundaries=draw(st.booleans()),
        ),
        data=DataKnobs(microbatches=microbatches, zero=draw(st.integers(0, 1))),
        tensor=TensorKnobs(sequence_parallel=draw(st.booleans())),
        barrier=draw(st.booleans()),
    )
    return problem, lower(problem, draft)


@given(plans(), st.booleans(), st.booleans(), st.integers(1, 2), st.booleans())
@settings(max_examples=25)
def test_folded_equals_unfolded(
    case: tuple[Problem, Plan], contention: bool, overlap: bool, steps: int, straggler: bool
) -> None:
    problem, plan = case
    faults = (Straggler(ranks=(0,), factor=1.7),) if straggler else ()
    single, folded = (
        simulate(
            plan,
            problem,
            fold=fold,
            contention=contention,
            overlap=overlap,
            steps=steps,
            faults=faults,
        )
        for fold in (False, True)
    )
    assert folded.makespan == pytest.approx(single.makespan, rel=1e-9)


@given(plans(), st.integers(1, 2), st.booleans())
@settings(max_examples=25)
def test_engine_equals_max_plus_without_contention_and_overlap(
    case: tuple[Problem, Plan], steps: int, fold: bool
) -> None:
    problem, plan = case
    run = simulate(plan, problem, steps=steps, fold=fold, contention=False, overlap=False)
    assert not run.prices.flows
    start, end = longest_path(run.layout.graph, run.prices.seconds)
    np.testing.assert_allclose(run.outcome.start, start, rtol=1e-9)
    np.testing.assert_allclose(run.outcome.end, end, rtol=1e-9)


@given(plans())
@settings(max_examples=10)
def test_same_plan_gives_the_same_spans(case: tuple[Problem, Plan]) -> None:
    problem, plan = case
    first, second = (spans_of_run(simulate(plan, problem, steps=2)).to_bytes() for _ in range(2))
    assert first == second


@given(plans())
@settings(max_examples=15)
def test_sharing_links_never_helps(case: tuple[Problem, Plan]) -> None:
    """Without overlap, a run on shared links takes at least as long as with links of one's own."""
    problem, plan = case
    alone = simulate(plan, problem, contention=False, overlap=False).makespan
    assert simulate(plan, problem, overlap=False).makespan >= alone * (1 - 1e-9)
