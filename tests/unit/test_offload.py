"""Offloading: the lowering pass, its orders, its rings and its memory."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.ledger import knobs_of, peak_memory
from sim.cost.occupancy import memory_over_time
from sim.cost.offload import host_ledgers
from sim.cost.stated import stated_prices
from sim.engine.simulate import Run, lay_out, run_layout, simulate
from sim.errors import InputError, PlanError
from sim.plan.draft import CellKnobs, DataKnobs, OffloadKnobs, PipelineKnobs, PlanDraft
from sim.plan.io import plan_from_json, plan_to_json
from sim.plan.lower import lower
from sim.plan.placement import Segment
from sim.plan.plan import Call, Plan
from sim.plan.validate import validate
from sim.problem import Problem, load_problem
from strategies.compose import compose
from strategies.lowering.updates import CLIPPING
from strategies.offload.autohete import AutoHeteKnobs
from tests.contract import miniatures
from tests.validation.exercise import machine, model, problem
from tests.validation.host_side import with_host

LAYERS = 4


@cache
def gpt(
    chips: int, batch: int, microbatch: int = 1, update: str = "0.5 ns", dtype: str = "bf16"
) -> Problem:
    """A small GPT on chips of one node; communication and updates take as long as compute."""
    node = {
        "accelerator": "A100-SXM4-80GB",
        "chips": chips,
        "fabric": "nvlink3",
        "pcie": {"rate": "25 GB/s", "shared_by": min(chips, 2)},
        "host": {"update": update},
        "host_memory": "440 GB",
    }
    config = {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": LAYERS,
        "n_head": 16,
        "vocab_size": 4096,
        "n_positions": 1024,
        "tie_word_embeddings": chips == 1,
    }
    job = {
        "global_batch": batch,
        "sequence_length": 1024,
        "microbatch": microbatch,
        "dtype": dtype,
        "gradient_dtype": dtype,
        "limits": {"allow_inexact": True},
    }
    cluster = {"name": "one", "sites": [{"name": "hall", "nodes": [{"count": 1, **node}]}]}
    return load_problem(cluster, config, job)


def plan_of(
    given_: Problem, *, replicas: int = 1, stages: int = 1, schedule: str = "1f1b", **knobs: Any
) -> Plan:
    """A plan of the small GPT with offload knobs; layers are shared out evenly."""
    blocks = given_.model.blocks
    per = LAYERS // stages
    inner = [next(i for i, b in enumerate(blocks) if b.layer == per * s) for s in range(1, stages)]
    p = given_.job.pins.microbatch or 1
    m = given_.job.global_batch // (p * replicas)
    draft = PlanDraft(
        cells=tuple(
            CellKnobs(stage=s, replica=r, chips=(r * stages + s,))
            for s in range(stages)
            for r in range(replicas)
        ),
        pipeline=PipelineKnobs(cuts=(0, *inner, len(blocks)), microbatch=p, schedule=schedule),
        data=DataKnobs(microbatches=(m,) * replicas),
    )
    return lower(given_, compose(given_, [("offload", knobs)], start=draft))


def spans(run: Run) -> dict[tuple[int, str, int, str, int], tuple[float, float]]:
    """(step, kind, stage, segment, microbatch) -> (start, end) of rank 0."""
    graph, out = run.layout.graph, run.outcome
    found = {}
    for k, op in enumerate(graph.ops):
        if 0 in graph.actors[graph.actor[k]].ranks:
            key = (int(graph.step[k]), op.kind, op.stage, op.label, op.mb)
            found[key] = (float(out.start[k]), float(out.end[k]))
    return found


# -- miniature plan 8 from three integers


def miniature(knobs: AutoHeteKnobs) -> float:
    given_ = problem(with_host(machine(1, 2), 1e9), model(3), 2)
    draft = PlanDraft(
        cells=tuple(CellKnobs(stage=0, replica=r, chips=(r,)) for r in (0, 1)),
        data=DataKnobs(microbatches=(1, 1)),
    )
    plan = lower(given_, compose(given_, [("offload", knobs)], start=draft))
    validate(plan)
    times = []
    for fold in (True, False):
        layout = lay_out(plan, steps=2, fold=fold)
        prices = stated_prices(layout.graph, miniatures.autohete().seconds)
        times.append(run_layout(layout, lambda _, prices=prices: prices).makespan)  # type: ignore[misc]
    assert times[0] == times[1]
    return times[0]


@pytest.mark.parametrize(
    ("priority", "whole_steps", "makespan"),
    [(True, False, 38.5), (False, False, 39.5), (True, True, 39.5), (False, True, 39.5)],
)
def test_miniature_plan_8(priority: bool, whole_steps: bool, makespan: float) -> None:
    knobs = AutoHeteKnobs(optimizer=3, priority=priority, whole_steps=whole_steps)
    assert miniature(knobs) == makespan


# -- any three integers


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Plan]:
    count = st.integers(0, LAYERS)
    shape = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    m = draw(st.sampled_from([1, 2, 3]))
    given_ = gpt(shape[0] * shape[1], shape[0] * m)
    plan = plan_of(
        given_,
        replicas=shape[0],
        stages=shape[1],
        checkpointed=draw(count),
        parameters=draw(count),
        optimizer=draw(count),
        outer=draw(st.booleans()),
        priority=draw(st.booleans()),
        clipping=draw(st.sampled_from(CLIPPING)),
        whole_steps=draw(st.booleans()),
        parameter_buffers=draw(st.integers(1, 3)),
        gradient_buffers=draw(st.integers(1, 3)),
    )
    return given_, plan


@settings(max_examples=60)
@given(cases())
def test_any_integers_give_a_sound_plan(case: tuple[Problem, Plan]) -> None:
    given_, plan = case
    validate(plan)
    assert plan_from_json(plan_to_json(plan)) == plan
    run = simulate(plan, given_, steps=4)
    assert run.makespan == pytest.approx(simulate(plan, given_, steps=4, fold=False).makespan)
    no_stale_parameters(plan, run)
    rings_hold(plan, run)
    for times, nbytes in memory_over_time(
        run.layout.graph, run.layout.wiring, plan, given_, run.outcome.start, run.outcome.end
    ):
        assert len(times) and nbytes.min() >= 0
        assert nbytes[-1] == pytest.approx(nbytes[0])


def no_stale_parameters(plan: Plan, run: Run) -> None:
    """A pass starts after its segment's update of the step before has reached the chip."""
    at = spans(run)
    kinds = {(k[1], k[2], k[3]) for k in at}
    for s in plan.placement.segments:
        key = (s.stage, s.name)
        for (step, kind, stage, label, _), (start, _) in at.items():
            if (stage, label) != key or step == 0 or kind not in ("F", "B", "FETCH_F", "FETCH_B"):
                continue
            assert start >= at[step - 1, "OPT", *key, -1][1]
            if ("H2D", *key) in kinds:
                assert "parameters" not in s.offload and start >= at[step - 1, "H2D", *key, -1][1]
            if "parameters" in s.offload and "optimizer" not in s.offload:
                assert start >= at[step - 1, "D2H", *key, -1][1]


def rings_hold(plan: Plan, run: Run) -> None:
    """Never more parameters or gradients on their way than there are buffers."""
    at, placement = spans(run), plan.placement
    away = {(s.stage, s.name) for s in placement.segments if "parameters" in s.offload}
    streamed = {(s.stage, s.name) for s in placement.segments if "optimizer" in s.offload}
    passes = [(v, k) for k, v in at.items() if k[1] in ("F", "B") and k[2:4] in away]
    # An update on the chip leaves its buffer when its copy is back on the host.
    passes += [
        ((v[0], at[k[0], "D2H", *k[2:]][1]), k)
        for k, v in at.items()
        if k[1] == "OPT" and k[2:4] in away - streamed
    ]
    held = []
    for (step, _), group in groupby(sorted(passes), key=lambda x: (x[1][0], x[1][2:4])):
        uses = list(group)
        (start, _), (_, kind, *what) = uses[0]
        came = (start, start) if kind == "OPT" else at.pop((step, f"FETCH_{kind}", *what))
        assert came[1] <= start
        held += [(came[0], 1), (uses[-1][0][1], -1)]
    assert not any(k[1].startswith("FETCH") for k in at)
    most(held, placement.parameter_buffers)
    held = []
    for (step, kind, stage, label, _), (start, _) in at.items():
        if kind == "B" and (stage, label) in streamed and placement.microbatches[0] == 1:
            held += [(start, 1), (at[step, "D2H", stage, label, -1][1], -1)]
    most(held, placement.gradient_buffers)


def most(changes: list[tuple[float, int]], buffers: int) -> None:
    rows = sorted((round(t, 12), change) for t, change in changes)
    assert max(np.cumsum([c for _, c in rows]), default=0) <= buffers


def test_nothing_on_the_host_is_the_plain_plan() -> None:
    given_ = gpt(2, 4)
    plain = lower(
        given_,
        PlanDraft(
            cells=tuple(CellKnobs(stage=0, replica=r, chips=(r,)) for r in (0, 1)),
            data=DataKnobs(microbatches=(2, 2)),
        ),
    )
    plan = plan_of(given_, replicas=2)
    whole, cut = (simulate(p, given_) for p in (plain, plan))
    kinds = Counter(op.kind for op in cut.layout.graph.ops)
    assert not set(kinds) & {"H2D", "D2H", "HOST", "FETCH_F", "FETCH_B"}
    assert cut.prices.flops is not None and whole.prices.flops is not None
    assert cut.prices.flops.sum() == pytest.approx(whole.prices.flops.sum())
    # Reductions by layer hide under the rest of the backward.
    assert cut.makespan <= whole.makespan * (1 + 1e-9)
    peaks = [next(iter(peak_memory(p, given_).values())).terms for p in (plain, plan)]
    for term in ("parameters", "optimizer", "activations", "gradients", "logits", "working"):
        assert peaks[0][term] == pytest.approx(peaks[1][term])


def test_priority_lets_the_next_step_begin_early() -> None:
    given_ = gpt(1, 8, 8, "3 ns")
    times = {}
    for priority, whole in ((True, False), (False, False), (False, True)):
        plan = plan_of(given_, optimizer=LAYERS, priority=priority, whole_steps=whole)
        times[priority, whole] = simulate(plan, given_, steps=6).makespan
    assert times[True, False] < times[False, True]
    assert times[True, False] <= times[False, False] * (1 + 1e-9)


def test_each_clipping_costs_what_it_waits_for() -> None:
    given_ = gpt(1, 8, 8)
    times = {
        way: simulate(plan_of(given_, optimizer=LAYERS, clipping=way), given_, steps=8).makespan
        for way in CLIPPING
    }
    assert times["none"] == times["per-block"]
    assert times["none"] <= times["previous-norm"] <= times["global"]
    assert times["none"] <= times["speculate"] < times["global"]
    often = plan_of(given_, optimizer=LAYERS, clipping="speculate", failure_rate=1.0)
    assert simulate(often, given_, steps=8).makespan > times["global"]


@pytest.mark.parametrize("way", CLIPPING)
def test_only_what_changes_the_mathematics_is_inexact(way: str) -> None:
    plan = plan_of(gpt(1, 1), optimizer=1, clipping=way)
    assert plan.exact == (way not in ("per-block", "previous-norm"))
    assert plan.exact or "clipped" in plan.reason
    call = next(c for c in plan.lowering if c.name == "segments")
    assert call.args["clipping"] == way


# -- memory


def test_memory_moves_from_the_chip_to_the_host() -> None:
    given_ = gpt(1, 8, 8)
    layer = 12 * 1024**2 + 13 * 1024
    chip, host = [], []
    for knobs in ({}, {"optimizer": 2}, {"parameters": 3}, {"checkpointed": LAYERS}):
        plan = plan_of(given_, **knobs)  # type: ignore[arg-type]
        chip.append(next(iter(peak_memory(plan, given_).values())).terms)
        host.append(host_ledgers(plan, given_, knobs_of))
    assert host[0] == {} and host[3] == {}
    assert chip[0]["optimizer"] - chip[1]["optimizer"] == pytest.approx(12 * 2 * layer)
    assert host[1][0].terms == pytest.approx(
        {"optimizer": 24 * layer, "gradients": 4 * layer, "parameters": 4 * layer}
    )
    assert chip[0]["parameters"] - chip[2]["parameters"] == pytest.approx(2 * 3 * layer)
    assert chip[2]["gathered"] == pytest.approx(2 * 2 * layer)
    assert host[2][0].terms == pytest.approx(
        {"optimizer": 0, "gradients": 0, "parameters": 6 * layer}
    )
    full = (CellKnobs(stage=0, replica=0, chips=(0,), recompute="full"),)
    whole = lower(given_, PlanDraft(cells=full, pipeline=PipelineKnobs(microbatch=8)))
    terms = next(iter(peak_memory(whole, given_).values())).terms
    assert chip[3]["activations"] == pytest.approx(terms["activations"])
    assert chip[3]["working"] == pytest.approx(terms["working"])
    assert chip[3]["activations"] < chip[0]["activations"]
    assert host[1][0].verdict == "fits" and host[1][0].capacity_bytes == 440e9


def test_ranks_of_a_node_share_its_memory() -> None:
    plan = plan_of(gpt(2, 2), replicas=2, optimizer=2)
    both = host_ledgers(plan, gpt(2, 2), knobs_of)[0]
    alone = host_ledgers(plan_of(gpt(1, 1), optimizer=2), gpt(1, 1), knobs_of)[0]
    assert both.peak_bytes == pytest.approx(2 * alone.peak_bytes)


@pytest.mark.parametrize("knobs", [{"optimizer": 3, "parameters": 2, "checkpointed": 2}, {}])
def test_fifty_steps_leak_nothing(knobs: dict[str, int]) -> None:
    given_ = gpt(2, 4)
    plan = plan_of(given_, replicas=2, **knobs)  # type: ignore[arg-type]
    run = simulate(plan, given_, steps=50)
    layout, out = run.layout, run.outcome
    for times, nbytes in memory_over_time(
        layout.graph, layout.wiring, plan, given_, out.start, out.end
    ):
        starts = np.searchsorted(times, [0.0, run.makespan / 2])
        assert nbytes[starts[1] :].max() == pytest.approx(nbytes.max())
        assert nbytes[-1] == pytest.approx(nbytes[0])


# -- refusals


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"optimizer": LAYERS + 1}, "between none and all"),
        ({"checkpointed": -1}, "between none and all"),
        ({"parameter_buffers": 0}, "at least one buffer"),
        ({"failure_rate": 2.0}, "share"),
    ],
)
def test_illegal_knobs_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_of(gpt(1, 1), **knobs)


def test_fp16_needs_a_way_to_skip_a_step() -> None:
    base = gpt(1, 1)
    fp16 = msgspec.structs.replace(base, job=msgspec.structs.replace(base.job, dtype="fp16"))
    with pytest.raises(InputError, match="overflow"):
        plan_of(fp16, optimizer=1)
    assert not plan_of(fp16, optimizer=1, clipping="speculate").reason


def test_segments_that_do_not_cut_the_stages_are_refused() -> None:
    given_ = gpt(1, 1)
    for segments in (
        (Segment(name="a", stage=0, cell=0, blocks=(0, 2)),),
        (
            Segment(name="a", stage=0, cell=0, blocks=(0, 2)),
            Segment(name="a", stage=0, cell=0, blocks=(2, len(given_.model.blocks))),
        ),
    ):
        draft = PlanDraft(
            cells=(CellKnobs(stage=0, replica=0, chips=(0,)),),
            offload=OffloadKnobs(segments=segments),
        )
        with pytest.raises(InputError, match="segments must cut every stage"):
            lower(given_, draft)


def test_unknown_clipping_is_refused() -> None:
    plan = plan_of(gpt(1, 1), optimizer=1)
    calls = (*plan.lowering[:-1], Call("segments", 1, {"clipping": "perhaps"}))
    with pytest.raises(PlanError, match="unknown clipping"):
        validate(msgspec.structs.replace(plan, lowering=calls))
