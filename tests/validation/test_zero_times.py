"""ZeRO-2 and 3 on ideal machines: step times by recurrence, bytes as in the paper's section 7."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec
import pytest

from sim.engine.simulate import simulate
from sim.hardware.machine import HostSide
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.validate import validate
from sim.problem import Problem
from strategies.compose import compose
from tests.validation.exercise import BACKWARD, FORWARD, machine, model, problem
from tests.validation.host_side import with_host

PARAMS = 10**8
LAYERS = 4


def given_with(
    gather: float, *, chips: int = 2, members: int = 2, batch: int = 2, pcie: float = 0.0
) -> Problem:
    """Chips of one node on which gathering a layer takes this long [s], and summing it as long."""
    share = (members - 1) / members
    on = machine(1, chips, fabric_rate=2 * PARAMS * share / gather if gather else 1e30)
    on = with_host(on, pcie, HostSide(update_s=1e-30)) if pcie else on
    found = problem(on, model(LAYERS, params=PARAMS), batch)
    job = msgspec.structs.replace(found.job, reduction_dtype="bf16", gradient_dtype="bf16")
    return msgspec.structs.replace(found, job=job)


def plan_of(
    given: Problem, zero: int, buffers: int = 2, stages: int = 1, **offload: object
) -> Plan:
    chips = given.machine.num_chips
    replicas = chips // stages
    draft = PlanDraft(
        cells=tuple(
            CellKnobs(stage=s, replica=r, chips=(s * replicas + r,))
            for s in range(stages)
            for r in range(replicas)
        ),
        pipeline=PipelineKnobs(cuts=tuple(range(0, LAYERS + 1, LAYERS // stages))),
        data=DataKnobs(microbatches=(given.job.global_batch // replicas,) * replicas),
    )
    choices: list[tuple[str, object]] = [("zero", {"stage": zero, "buffers": buffers})]
    choices += [("offload", offload)] if offload else []
    plan = lower(given, compose(given, choices, start=draft))
    validate(plan, given)
    return plan


def by_hand(gather: float, reduce: float, buffers: int, m: int, fetch: float = 0.0) -> float:
    """One step of ``LAYERS`` layers on one position, m microbatches one after another.

    One stream computes, one carries gathers and sums in the order of their list, one fetches. Use k
    waits for its gather, which waits for the use ``buffers`` before it and for its fetch, which
    waits for the gather ``buffers`` before it; a gradient waits for the sum ``buffers`` before it.
    """
    passes = [(mb, way, n) for mb in range(m) for way, n in _order()]
    holds: list[list[tuple[int, str, int]]] = []
    for p in passes:
        if holds and holds[-1][-1][2] == p[2]:
            holds[-1].append(p)
        else:
            holds.append([p])
    compute = wire = pcie = 0.0
    gathered, summed = [0.0] * len(holds), []

    def bring(k: int, free: float) -> None:
        nonlocal wire, pcie
        ready = max(pcie, gathered[k - buffers] if k >= buffers else 0.0) + fetch
        pcie = ready
        gathered[k] = wire = max(wire, free, ready) + gather

    for k in range(min(buffers, len(holds))):
        bring(k, 0.0)
    for k, uses in enumerate(holds):
        for i, (_, way, _) in enumerate(uses):
            start = max(compute, gathered[k])
            if way == "B" and len(summed) >= buffers:
                start = max(start, summed[-buffers])
            compute = start + (FORWARD if way == "F" else BACKWARD)
            if i == len(uses) - 1 and k + buffers < len(holds):
                bring(k + buffers, compute)
            if way == "B":
                wire = max(wire, compute) + reduce
                summed.append(wire)
    return max(compute, wire)


def _order() -> list[tuple[str, int]]:
    return [("F", n) for n in range(LAYERS)] + [("B", n) for n in reversed(range(LAYERS))]


@pytest.mark.parametrize("gather", [0.0, 0.002, 0.009, 0.015, 0.04])
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 3])
def test_a_step_is_a_pipeline_of_gathers_and_passes(gather: float, buffers: int, m: int) -> None:
    given = given_with(gather, batch=2 * m)
    plan = plan_of(given, 3, buffers)
    found = by_hand(gather, gather, buffers, m)
    for fold in (True, False):
        for contention in (True, False):
            run = simulate(plan, given, fold=fold, contention=contention)
            assert run.makespan == pytest.approx(found, rel=1e-9)


def test_the_recurrence_by_hand() -> None:
    compute = LAYERS * (FORWARD + BACKWARD)
    # One buffer: nothing overlaps. The last layer's passes share a gather.
    serial = (2 * LAYERS - 1) * 0.004 + LAYERS * 0.003 + compute
    assert by_hand(0.004, 0.003, 1, 1) == pytest.approx(serial)
    # Two buffers and a fast wire: the first gather and the last sum stand alone.
    assert by_hand(0.004, 0.003, 2, 1) == pytest.approx(0.004 + compute + 0.003)
    # A slow wire: it never rests between the first gather and the last sum.
    assert by_hand(0.1, 0.1, 2, 1) == pytest.approx((3 * LAYERS - 1) * 0.1)


@pytest.mark.parametrize("rate", [1e9, 8e9, 40e9])
@pytest.mark.parametrize("buffers", [1, 2])
def test_shards_come_from_the_host_before_they_are_gathered(rate: float, buffers: int) -> None:
    given = given_with(0.006, pcie=rate)
    plan = plan_of(
        given, 3, buffers, parameters=LAYERS, optimizer=0, priority=False,
        parameter_buffers=buffers, gradient_buffers=buffers,
    )  # fmt: skip
    fetch = 2 * PARAMS / 2 / rate
    run = simulate(plan, given)
    graph = run.layout.graph
    # Updated shards go back behind the step's last sum, and end the step.
    passes = [
        float(run.outcome.end[k])
        for k, op in enumerate(graph.ops)
        if op.kind in ("B", "REDUCE_GRAD")
    ]
    assert max(passes) == pytest.approx(by_hand(0.006, 0.006, buffers, 1, fetch), rel=1e-9)


@pytest.mark.parametrize("chips", [2, 4])
def test_stage_3_moves_half_as_much_again(chips: int) -> None:
    # Section 7: data parallelism, stages 1 and 2 move 2 Psi, stage 3 moves 3 Psi, each (G - 1)/G.
    given = given_with(0.01, chips=chips, members=chips, batch=chips)
    sent = {}
    for zero in (0, 1, 2, 3):
        run = simulate(plan_of(given, zero), given)
        assert run.prices.nbytes is not None
        sent[zero] = sum(
            float(n)
            for op, n in zip(run.layout.graph.ops, run.prices.nbytes, strict=True)
            if op.kind in ("REDUCE_GRAD", "UNSHARD", "UNSHARD_B")
        )
    psi = 2 * LAYERS * PARAMS * (chips - 1) / chips
    assert sent[0] == sent[1] == pytest.approx(sent[2]) == pytest.approx(2 * psi)
    # The last layer's backward follows its forward and finds its parameters there.
    assert sent[3] == pytest.approx(3 * psi - psi / LAYERS)


def test_each_microbatch_pays_again() -> None:
    # Section 5.2 reduces where gradients come; with m microbatches that is m times.
    given = given_with(0.01, batch=6)
    count: dict[int, dict[str, float]] = {}
    for zero in (1, 2, 3):
        run = simulate(plan_of(given, zero), given)
        assert run.prices.nbytes is not None
        found: dict[str, float] = defaultdict(float)
        for op, n in zip(run.layout.graph.ops, run.prices.nbytes, strict=True):
            found[op.kind] += float(n)
        count[zero] = found
    psi, m = LAYERS * PARAMS, 3
    assert count[1]["REDUCE_GRAD"] == pytest.approx(psi)
    assert count[2]["REDUCE_GRAD"] == count[3]["REDUCE_GRAD"] == pytest.approx(m * psi)
    assert count[2]["UNSHARD"] == pytest.approx(psi)
    shared = m + (m - 1)
    gathers = count[3]["UNSHARD"] + count[3]["UNSHARD_B"]
    assert gathers == pytest.approx((2 * m * LAYERS - shared) * PARAMS)


@pytest.mark.parametrize("offload", [{}, {"optimizer": 4, "priority": False}])
def test_free_wires_leave_the_pipeline_alone(offload: dict[str, object]) -> None:
    # 1F1B on two positions: (m + p - 1) slots of two layers' forward and backward.
    given = given_with(0.0, chips=4, batch=8, pcie=1e30 if offload else 0.0)
    plan = plan_of(given, 3, stages=2, **offload)
    run = simulate(plan, given)
    ends = [
        float(run.outcome.end[k]) for k, op in enumerate(run.layout.graph.ops) if op.kind == "B"
    ]
    assert max(ends) == pytest.approx((4 + 2 - 1) * 2 * (FORWARD + BACKWARD))
    assert run.makespan == pytest.approx(simulate(plan, given, fold=False).makespan)


def test_slow_wires_on_two_positions_never_rest() -> None:
    # A position gathers and sums far more than it computes: its wire is busy from its first gather.
    gather, m = 0.5, 4
    given = given_with(gather, chips=4, batch=2 * m)
    plan = plan_of(given, 3, stages=2)
    run = simulate(plan, given)
    graph, last = run.layout.graph, 0.0
    for stage in (0, 1):
        wire = [
            k
            for k, op in enumerate(graph.ops)
            if op.stage == stage and op.kind in ("UNSHARD", "UNSHARD_B", "REDUCE_GRAD")
        ]
        for kind, n in Counter(graph.ops[k].kind for k in wire).items():
            # Per pass two layers; where a backward follows its forward they share a gather.
            assert n <= 2 * m and (n == 2 * m or kind != "REDUCE_GRAD")
        last = max(last, len(wire) * gather)
    assert last <= run.makespan <= last + m * LAYERS * (FORWARD + BACKWARD)
    assert run.makespan == pytest.approx(simulate(plan, given, fold=False).makespan)
