"""Faults that users of planners and trainers reported: the whole kind is impossible here.

Forward 10 ms and backward 20 ms per layer and microbatch, zero communication, 1F1B, unless said.
Each expected value is arithmetic, with its formula beside it.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import pytest

import hardware_profiles
from sim.engine.simulate import Run, simulate
from sim.errors import InputError
from sim.model.amounts import forward_flops
from sim.model.load import load_model
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.uniform import layer_cuts, uniform
from sim.plan.validate import validate
from sim.problem import Problem
from strategies.compose import compose
from tests.validation.exercise import BACKWARD, FORWARD, machine, model, problem

LLAMA = Path(str(hardware_profiles.folder("models") / "llama2_7b.json"))


def pipelined(num_layers: int, pp: int, m: int, **partition: object) -> tuple[Problem, Plan]:
    given = problem(machine(1, pp), model(num_layers), m)
    draft = compose(
        given,
        [("megatron", {}), ("1f1b", {"stages": pp}), ("ddp", {}), ("partition", partition)],
    )
    plan = lower(given, draft)
    validate(plan)
    return given, plan


def layers_of(plan: Plan) -> list[int]:
    return [b - a for a, b in (s.blocks for s in plan.placement.segments)]


def milliseconds(run: Run) -> float:
    return 1e3 * run.makespan


# 1. Layers dropped by an integer division


def test_30_layers_on_4_stages_are_30_layers() -> None:
    given, plan = pipelined(30, 4, 8)
    assert layers_of(plan) == [8, 8, 7, 7]
    # 8 x 240 ms of work on the first stage, and 600 ms in which it waits: 420 for its first B
    # (740 - 320) and 60 for each of the last three. (m - 1) max + sum = 2580 holds only when the
    # slowest stage is last.
    assert milliseconds(simulate(plan, given)) == pytest.approx(2520, abs=1e-6)


def test_the_larger_stages_last_cost_60_ms_more() -> None:
    given, plan = pipelined(30, 4, 8, layers=(7, 7, 8, 8))
    assert milliseconds(simulate(plan, given)) == pytest.approx(2580, abs=1e-6)


def test_28_layers_would_have_been_2310_ms() -> None:
    given, plan = pipelined(28, 4, 8)
    assert milliseconds(simulate(plan, given)) == pytest.approx(2310, abs=1e-6)


def test_a_cut_that_loses_layers_is_refused() -> None:
    with pytest.raises(InputError, match=r"every layer.*7\+7\+7\+7 = 28.*8\+8\+7\+7"):
        pipelined(30, 4, 8, layers=(7, 7, 7, 7))
    with pytest.raises(InputError, match=r"every layer"):
        uniform(model(30), 8, range(4), pp=4, layers=(7, 7, 7, 7))


@pytest.mark.parametrize("method", ["equal", "weighted", "min-max"])
def test_40_layers_on_16_stages_are_40_layers(method: str) -> None:
    _, plan = pipelined(40, 16, 16, method=method)
    assert sorted(layers_of(plan)) == [2] * 8 + [3] * 8
    assert sum(layers_of(plan)) == 40


# 2. A stage size that contradicts the model


def test_one_layer_on_the_last_of_one_stage_is_refused() -> None:
    with pytest.raises(InputError, match="every layer of the model once") as caught:
        pipelined(20, 1, 8, layers=(1,))
    assert caught.value.expected == "20 layers on 1 stages, e.g. 20"
    with pytest.raises(InputError, match="every layer of the model once"):
        uniform(model(20), 8, range(1), layers=(1,))


def test_flops_come_from_the_blocks_that_are_placed() -> None:
    given = problem(machine(1, 4), load_model(LLAMA), 8)
    job = msgspec.structs.replace(given.job, sequence_length=128)
    given = msgspec.structs.replace(given, job=job)
    draft = compose(
        given, [("megatron", {}), ("1f1b", {"stages": 4}), ("ddp", {}), ("partition", {})]
    )
    plan = lower(given, draft)
    run = simulate(plan, given)
    placed = [b for s in plan.placement.segments for b in given.model.blocks[slice(*s.blocks)]]
    assert placed == list(given.model.blocks)
    step = 3 * 8 * sum(forward_flops(b, 128, 128) for b in placed)
    assert run.prices.flops is not None
    assert float(run.prices.flops.sum()) == pytest.approx(step, rel=1e-9)
    rate = step / run.makespan / 4
    assert rate < given.machine.accelerators["chip"].peak_flops_per_s["bf16"]


# 5. Fewer microbatches than stages


def test_1f1b_with_fewer_microbatches_than_stages_runs() -> None:
    given, plan = pipelined(8, 8, 4)
    run = simulate(plan, given)
    # (m + p - 1) x 30 ms, of which m x 30 are work.
    assert milliseconds(run) == pytest.approx((4 + 8 - 1) * 30, abs=1e-6)
    work = 4 * (FORWARD + BACKWARD)
    assert 1 - work / run.makespan == pytest.approx(0.636, abs=5e-4)


def test_interleaved_with_fewer_microbatches_than_stages_is_refused_at_once() -> None:
    given = problem(machine(1, 8), model(16), 4)
    choices = [
        ("megatron", {}),
        ("interleaved", {"stages": 8, "chunks": 2}),
        ("ddp", {}),
        ("partition", {}),
    ]
    began = perf_counter()
    with pytest.raises(InputError, match="multiple of the pipeline size") as caught:
        compose(given, choices)
    assert perf_counter() - began < 1.0
    assert caught.value.found == "4 microbatches on 8 stages" and caught.value.expected == "8"


def test_a_plan_that_asks_for_it_anyway_is_refused_too() -> None:
    given = problem(machine(1, 8), model(16), 4)
    draft = uniform(given.model, 4, range(8), pp=8, chunks=2)
    with pytest.raises(InputError, match="multiple of the pipeline size"):
        simulate(lower(given, draft), given)


# 8. A global batch that does not divide


def test_a_batch_that_23_replicas_do_not_divide_is_refused() -> None:
    given = problem(machine(184, 8), model(40, tp=(8,)), 32)
    choices = [
        ("megatron", {"tp": 8}),
        ("1f1b", {"stages": 8}),
        ("ddp", {"microbatch": 1}),
        ("partition", {}),
    ]
    with pytest.raises(InputError, match="dp=23") as caught:
        compose(given, choices)
    assert caught.value.expected == (
        "global batch 23 (m=1) or 46 (m=2), or 1024 chips (dp=16, m=2)"
    )
    with pytest.raises(InputError, match="dp=23"):
        uniform(given.model, 32, range(1472), pp=8, tp=8)


@pytest.mark.parametrize(("batch", "nodes", "m"), [(23, 184, 1), (46, 184, 2), (32, 128, 2)])
def test_what_was_offered_is_legal(batch: int, nodes: int, m: int) -> None:
    given = problem(machine(nodes, 8), model(40, tp=(8,)), batch)
    draft = compose(
        given,
        [
            ("megatron", {"tp": 8}),
            ("1f1b", {"stages": 8}),
            ("ddp", {"microbatch": 1}),
            ("partition", {}),
        ],
    )
    plan = lower(given, draft)
    assert set(plan.placement.microbatches) == {m}
    run = simulate(plan, given)
    assert milliseconds(run) == pytest.approx((m + 8 - 1) * 5 * 30, abs=1e-6)


# 9. Unlike tensor parallelism on two kinds of device

NIC = 25e9
BOUNDARY = 4096 * 4096 * 2


def two_meshes(second_tp: int = 4, second_dp: int = 2, whole: bool = False) -> tuple[Problem, Plan]:
    """Meshes tp2 dp2 pp2 and tp4 dp2 pp1 on 8 + 8 chips; a NIC of 25 GB/s per replica."""
    types = ("first", "second")
    given = problem(
        machine(2, 8, nics=2, nic_rate=NIC, types=types),
        model(3, hidden=4096, sequence=4096, tp=(2, 4), speeds=dict.fromkeys(types, 1.0)),
        4,
    )
    # The cells of a replica sit on the half of each node whose chips its NIC is affine to.
    cells = [
        CellKnobs(stage=s, replica=r, tp=2, chips=tuple(4 * r + 2 * s + i for i in range(2)))
        for s in range(2)
        for r in range(2)
    ]
    width = 8 // second_dp
    cells += [
        CellKnobs(
            stage=2,
            replica=r,
            tp=second_tp,
            chips=tuple(8 + width * r + i for i in range(second_tp)),
        )
        for r in range(second_dp)
    ]
    draft = PlanDraft(
        cells=tuple(cells),
        pipeline=PipelineKnobs(cuts=layer_cuts(given.model, (1, 1, 1)), whole_boundaries=whole),
        data=DataKnobs(microbatches=(2, 2)),
    )
    plan = lower(given, draft)
    validate(plan)
    return given, plan


def transfer(run: Run, name: str) -> tuple[float, float]:
    """[B] over all pieces, and [s] from the first start to the last end, of replica 0."""
    graph, out = run.layout.graph, run.outcome
    nodes = [
        n
        for n, op in enumerate(graph.ops)
        if op.name == name
        and run.layout.wiring.cell_of[graph.actors[graph.actor[n]].rank].replica == 0
    ]
    assert run.prices.nbytes is not None
    span = max(out.end[nodes]) - min(out.start[nodes])
    return float(np.sum(run.prices.nbytes[nodes])), float(span)


def test_two_meshes_of_unlike_tp_make_one_pipeline() -> None:
    given, plan = two_meshes()
    assert plan.placement.num_ranks == 16
    assert plan.placement.num_stages == 3 and plan.placement.num_replicas == 2
    run = simulate(plan, given, fold=False)
    nbytes, seconds = transfer(run, "1SEND_F0")
    # 4096 x 4096 x 2 B, sent once in four pieces over one NIC, gathered inside the receiver.
    assert nbytes == BOUNDARY == 33_554_432
    assert seconds == pytest.approx(BOUNDARY / NIC, rel=1e-9)
    assert 1e3 * seconds == pytest.approx(1.34, abs=5e-3)
    assert simulate(plan, given, fold=True).makespan == pytest.approx(run.makespan, rel=1e-9)


def test_two_senders_that_ship_the_whole_tensor_take_twice_as_long() -> None:
    given, plan = two_meshes(second_tp=2, whole=True)
    nbytes, seconds = transfer(simulate(plan, given, fold=False), "1SEND_F0")
    assert nbytes == 2 * BOUNDARY
    assert seconds == pytest.approx(2 * BOUNDARY / NIC, rel=1e-9)


def test_another_dp_on_the_second_mesh_is_refused() -> None:
    with pytest.raises(InputError, match="exactly one cell"):
        two_meshes(second_tp=2, second_dp=4)


def test_a_mesh_that_does_not_match_its_devices_is_refused() -> None:
    given, _ = two_meshes()
    draft = PlanDraft(
        cells=(CellKnobs(stage=0, replica=0, tp=4, chips=(0, 1)),),
        data=DataKnobs(microbatches=(4,)),
    )
    with pytest.raises(InputError, match="product of sizes must match"):
        lower(given, draft)


def test_one_cell_never_spans_two_kinds_of_device() -> None:
    given, _ = two_meshes()
    draft = PlanDraft(
        cells=(CellKnobs(stage=0, replica=0, tp=2, chips=(7, 8)),),
        data=DataKnobs(microbatches=(4,)),
    )
    with pytest.raises(InputError, match="mixes accelerators"):
        lower(given, draft)
