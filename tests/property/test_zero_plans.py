"""Any plan under ZeRO-2 and 3 is sound: its rings hold, it folds, both engines agree."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.occupancy import memory_over_time
from sim.engine.faults import Straggler
from sim.engine.maxplus import longest_path
from sim.engine.simulate import Run, simulate
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft, split_layers
from sim.plan.io import plan_from_json, plan_to_json
from sim.plan.lower import lower
from sim.plan.passes import expand
from sim.plan.plan import Call, Plan
from sim.plan.program import walk
from sim.plan.uniform import layer_cuts
from sim.plan.validate import validate
from sim.problem import Problem, load_problem
from tests.unit.test_offload import LAYERS, gpt, most, spans
from tests.unit.zero_cases import sharded

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Plan]:
    replicas, stages, chunks = draw(
        st.sampled_from([(2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1)])
    )
    m = draw(st.sampled_from([1, 2, 3])) * (stages if chunks > 1 else 1)
    zero = draw(st.sampled_from([2, 3]))
    count = st.integers(0, LAYERS)
    offload = {
        "checkpointed": draw(count),
        "parameters": draw(count) if zero == 3 else 0,
        "optimizer": draw(count),
        "clipping": draw(st.sampled_from(["none", "global", "speculate"])),
        "whole_steps": draw(st.booleans()),
        "parameter_buffers": draw(st.integers(1, 3)),
        "gradient_buffers": draw(st.integers(1, 3)),
    }
    given_ = gpt(replicas * stages, replicas * m)
    plan = sharded(
        given_,
        zero,
        stages=stages,
        chunks=chunks,
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
        buffers=draw(st.sampled_from([0, 1, 2])),
        **(offload if draw(st.booleans()) else {}),
    )
    return given_, plan


@settings(max_examples=40)
@given(cases())
def test_any_sharded_plan_is_sound(case: tuple[Problem, Plan]) -> None:
    given_, plan = case
    validate(plan, given_)
    assert plan_from_json(plan_to_json(plan)) == plan
    run = simulate(plan, given_, steps=3)
    assert run.makespan == pytest.approx(simulate(plan, given_, steps=3, fold=False).makespan)
    rings_hold(plan, run)
    for times, nbytes in memory_over_time(
        run.layout.graph, run.layout.wiring, plan, given_, run.outcome.start, run.outcome.end
    ):
        assert len(times) and nbytes.min() >= 0
        assert nbytes[-1] == pytest.approx(nbytes[0])


def rings_hold(plan: Plan, run: Run) -> None:
    """Gathered parameters are fresh and there, and never more than there are buffers for."""
    at, placement = spans(run), plan.placement
    gathered: list[tuple[int, str, int, str, int]] = []
    unsummed = []
    for key, (start, end) in sorted(at.items(), key=lambda x: x[1]):
        step, kind, stage, label, mb = key
        if kind in ("UNSHARD", "UNSHARD_B") and mb >= 0 and step:
            assert start >= at[step - 1, "OPT", stage, label, -1][1]
        if kind in ("B", "W") and (kind == "W" or (step, "W", stage, label, mb) not in at):
            summed = at[step, "REDUCE_GRAD", stage, label, mb]
            assert summed[0] >= end - 1e-12
            unsummed += [(start, 1), (summed[1], -1)]
        if kind in ("F", "B", "I"):
            gathered.append(key)
    most(unsummed, placement.gradient_buffers)
    if plan.mathematics.zero < 3:
        return
    held = []
    gathered.sort(key=lambda k: (k[0], at[k]))
    last = None
    for key in gathered:
        step, kind, stage, label, mb = key
        came = at.get((step, "UNSHARD" if kind == "F" else "UNSHARD_B", stage, label, mb))
        if (step, stage, label) == last:
            assert came is None
            held[-1] = (at[key][1], -1)
        else:
            assert came is not None and came[1] <= at[key][0] + 1e-12
            held += [(came[0], 1), (at[key][1], -1)]
        last = (step, stage, label)
    most(held, placement.parameter_buffers)


@settings(max_examples=15)
@given(cases())
def test_engine_equals_max_plus_without_contention(case: tuple[Problem, Plan]) -> None:
    given_, plan = case
    if any(op.priority is not None for p in expand(plan) for op in walk(p)):
        calls = [
            Call(c.name, c.version, c.args | ({"priority": False} if c.name == "segments" else {}))
            for c in plan.lowering
        ]
        plan = msgspec.structs.replace(plan, lowering=tuple(calls))
    run = simulate(plan, given_, steps=2, contention=False, overlap=False)
    _, end = longest_path(run.layout.graph, run.prices.seconds)
    assert run.makespan == pytest.approx(end.max(), rel=1e-9)


@st.composite
def unlike(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """Unlike cells anywhere on 12 V100 and 4 T4."""
    stages, replicas = draw(st.sampled_from([(1, 2), (1, 3), (2, 2), (3, 2)]))
    free = [list(range(4 * n, 4 * n + 4)) for n in draw(st.permutations(range(4)))]
    cells = []
    for stage in range(stages):
        for replica in range(replicas):
            left = sum(map(len, free)) - (stages * replicas - len(cells) - 1)
            sizes = [t for t in (1, 2, 4) if t <= min(left, max(map(len, free)))]
            tp = draw(st.sampled_from(sizes))
            node = draw(st.sampled_from([chips for chips in free if len(chips) >= tp]))
            chips, node[:tp] = tuple(node[:tp]), []
            mode = draw(st.sampled_from(["none", "selective", "full"]))
            cells.append(
                CellKnobs(stage=stage, replica=replica, chips=chips, tp=tp, recompute=mode)
            )
    m = draw(st.integers(1, 3))
    job = {"global_batch": m * replicas, "sequence_length": 256, "dtype": "fp16"}
    given_ = load_problem("v100_t4", LLAMA, job)
    draft = PlanDraft(
        cells=tuple(cells),
        pipeline=PipelineKnobs(
            cuts=layer_cuts(given_.model, split_layers(6, stages)),
            split_backward=draw(st.booleans()),
        ),
        data=DataKnobs(microbatches=(m,) * replicas, zero=draw(st.sampled_from([2, 3]))),
        barrier=draw(st.booleans()),
    )
    return given_, lower(given_, draft)


@settings(max_examples=20)
@given(unlike(), st.booleans(), st.booleans())
def test_unlike_replicas_fold(case: tuple[Problem, Plan], contention: bool, slow: bool) -> None:
    given_, plan = case
    validate(plan, given_)
    faults = (Straggler(ranks=(0,), factor=1.7),) if slow else ()
    runs = [
        simulate(plan, given_, steps=2, fold=fold, contention=contention, faults=faults)
        for fold in (True, False)
    ]
    assert runs[0].makespan == pytest.approx(runs[1].makespan, rel=1e-9)
    rings_hold(plan, runs[1])
