"""Metrics against schedules small enough to compute by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sim.cost.stated import StatedFlow, stated_prices
from sim.engine.simulate import Run, lay_out, run_layout
from sim.errors import InputError, SimulationError
from sim.hardware.machine import Accelerator, Machine, Node
from sim.model.graph import Attention, Block, Gemm, Model
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Mathematics, Plan, ProgramText
from sim.report.basis import Basis, basis_of
from sim.report.busy import busy_of
from sim.report.delays import settled_delays
from sim.report.links import link_loads
from sim.report.metrics import metrics_of, pace_between, pace_of, pace_of_run, rates_of
from sim.report.record import spans_of_run
from sim.report.spans import Spans

BASIS = Basis(
    tokens_per_step=1000, num_chips=2, model_flops_per_step=60.0, hardware_flops_per_step=80.0,
    peak_flops_per_s=20.0, dtype="bf16", price_per_s=0.5, egress_per_step=1.0,
)  # fmt: skip


def pipeline(p: int, m: int, *, schedule: str = "1f1b", barrier: bool = False) -> Plan:
    return Plan(
        placement=Placement(
            cells=tuple(Cell(stage=s, replica=0, ranks=(s,)) for s in range(p)),
            segments=tuple(Segment(stage=s, cell=s) for s in range(p)),
            boundaries=tuple(Boundary(src=s, dst=s + 1) for s in range(p - 1)),
            microbatches=(m,),
        ),
        lowering=standard_calls(schedule, 1, False, False, (), ()),
        barrier=barrier,
    )


def run_of(plan: Plan, send: float = 0.0, steps: int = 1, **seconds: float) -> Run:
    prices = {"F": 1.0, "B": 2.0, "SEND_F": send, "SEND_B": send, "OPT": 0.0, **seconds}
    layout = lay_out(plan, steps=steps)
    return run_layout(layout, lambda lay: stated_prices(lay.graph, prices))


def spans_for(plan: Plan, send: float = 0.0, steps: int = 1, **seconds: float) -> Spans:
    return spans_of_run(run_of(plan, send, steps, **seconds))


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (8, 4)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubble_of_balanced_pipelines(p: int, m: int, schedule: str) -> None:
    # (p - 1) / (m + p - 1): Narayanan et al. 2021, section 2.2; p 8, m 4 is the 63.6 % of a report.
    spans = spans_for(pipeline(p, m, schedule=schedule), F=10.0, B=20.0)
    metrics = metrics_of(spans, BASIS)
    assert metrics.step_time_s == pytest.approx(30 * (m + p - 1))
    assert metrics.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert metrics.exposed_comm_s == 0
    assert metrics.imbalance == pytest.approx(1)


def test_exposed_communication_by_hand() -> None:
    # Rank 0: F0 0-1, F1 1-2, idle, B0 5.0-7.0 ... ; sends of 0.5 s: F0 1-1.5, F1 2-2.5.
    # Rank 1: F0 1.5-2.5, B0 -4.5, F1 -5.5, B1 -7.5; gradient sends 4.5-5 and 7.5-8.
    # Rank 0: B0 5-7, B1 8-10. Idle while communicating: rank 0: 2-2.5, 4.5-5, 7.5-8;
    # rank 1: 1-1.5 and 7.5-8.
    spans = spans_for(pipeline(2, 2), send=0.5)
    busy = busy_of(spans)
    assert busy.makespan_s == 10
    assert busy.compute_s.tolist() == [6, 6]
    assert {g: s.tolist() for g, s in busy.exposed_s.items()} == {"pp": [1.5, 1.0]}
    assert busy.communication_s.tolist() == [2, 2]
    metrics = metrics_of(spans, BASIS)
    assert metrics.bubble_fraction == pytest.approx(0.4)
    assert metrics.exposed_comm_s == pytest.approx(1.25)
    assert metrics.exposed_comm_max_s == pytest.approx(1.5)
    assert metrics.exposed_comm_max_rank == 0


def test_averages_weigh_classes_by_their_members() -> None:
    # Ranks 0-2 fold and work 30 s, rank 3 works 10 s.
    programs = (ProgramText((0, 1, 2), "0F0 0B0"), ProgramText((3,), "0F0"))
    cells = tuple(Cell(stage=0, replica=r, ranks=(r,)) for r in range(4))
    plan = Plan(placement=Placement(cells=cells), programs=programs, barrier=False)
    spans = spans_for(plan, F=10.0, B=20.0)
    assert sorted(set(spans["weight"].tolist())) == [1, 3]
    metrics = metrics_of(spans, BASIS)
    assert metrics.bubble_fraction == pytest.approx(1 - (3 * 3 + 1) / 4 / 3)
    assert metrics.imbalance == pytest.approx(3 / 2.5)
    assert metrics.straggler_rank == 0


def test_communication_inside_compute_ops_counts_as_exposed() -> None:
    spans = spans_for(pipeline(2, 2))
    inner = np.where(spans["kind"] == "F", 0.25, 0.0)
    found = metrics_of(spans, BASIS, inner_comm_s={"tp": inner, "ep": 2 * inner})
    assert found.exposed_comm_s == pytest.approx(1.5)
    assert found.exposed_by_group == pytest.approx({"tp": 0.5, "ep": 1.0})
    assert found.exposed_comm_max_s == pytest.approx(1.5)
    assert found.bubble_fraction == metrics_of(spans, BASIS).bubble_fraction


def test_groups_that_communicate_at_once_share_the_exposed_time() -> None:
    # The transfer runs 1-3, the reduction 2-4 and nothing computes until 4.
    cells = tuple(Cell(stage=s, replica=r, ranks=(2 * s + r,)) for s in (0, 1) for r in (0, 1))
    plan = Plan(
        placement=Placement(
            cells=cells, segments=tuple(Segment(stage=s, cell=s) for s in (0, 1)),
            boundaries=(Boundary(src=0, dst=1),), microbatches=(1, 1),
        ),
        programs=(
            ProgramText((0, 1), "0F0 0SEND_F0 0F1 REDUCE_GRAD <- 0F1 ; OPT <- REDUCE_GRAD"),
            ProgramText((2, 3), "1RECV_F0"),
        ),
        barrier=False,
    )  # fmt: skip
    spans = spans_for(plan, send=2.0, REDUCE_GRAD=2.0, OPT=1.0)
    busy = busy_of(spans)
    assert {g: s.tolist() for g, s in busy.exposed_s.items()} == {"dp": [1.5], "pp": [0.5]}
    assert metrics_of(spans, BASIS).exposed_comm_s == pytest.approx(2.0)


def test_rates_and_cost() -> None:
    metrics = metrics_of(spans_for(pipeline(2, 2), send=0.5), BASIS)
    assert metrics.tokens_per_s == pytest.approx(100)
    assert metrics.tgs == pytest.approx(50)
    assert metrics.mfu == pytest.approx(60 / (10 * 20))
    assert metrics.hfu == pytest.approx(80 / (10 * 20))
    assert metrics.cost_per_mtoken == pytest.approx((0.5 * 10 + 1.0) / 1000 * 1e6)
    assert metrics.updates_per_s == pytest.approx(0.1)


def test_a_rate_above_the_peak_is_refused() -> None:
    assert rates_of(4.0, BASIS)["hfu"] == pytest.approx(1.0)
    with pytest.raises(SimulationError, match=r"2 times the dense bf16 peak"):
        rates_of(2.0, BASIS)


def test_step_time_with_a_barrier_is_the_mean() -> None:
    pace = pace_of(spans_for(pipeline(2, 2, barrier=True), steps=3), barrier=True)
    assert (pace.step_time_s, pace.p50_s, pace.p95_s, pace.steps) == (9, 9, 9, 3)


def test_step_time_without_a_barrier_is_the_slope_after_warm_up() -> None:
    # Rank 0 alone decides: it works 9 s a step, and its first step waits for the pipeline to fill.
    # Stage 1 takes 3 s of a step, so the steps overlap and follow each other by the slowest stage.
    plan = pipeline(2, 3)
    seconds = {"1F": 0.5, "1B": 0.5}
    spans = spans_for(plan, steps=8, **seconds)
    finish = [float(spans["end_s"][spans["step"] == s].max()) for s in range(8)]
    pace = pace_of(spans, barrier=False)
    assert pace.warm_up == 2
    assert pace.step_time_s == pytest.approx((finish[7] - finish[2]) / 5)
    assert pace.p50_s == pytest.approx(np.median(np.diff(finish[2:])))
    assert pace.step_time_s <= finish[0]


def test_a_step_of_a_parameter_server_is_one_update() -> None:
    # Two workers push every 2 s and every 4 s; an APPLY takes 0.5 s on the host.
    plan = Plan(
        exact=False, reason="stale", barrier=False,
        placement=Placement(extra_ranks=(0, 1, 2)),
        programs=(
            ProgramText((0,), "on(PUSH){ APPLY{writes=next} }"),
            ProgramText((1,), "repeat(4){ F ; PUSH>0 <- F }"),
            ProgramText((2,), "repeat(2){ F ; PUSH>0 <- F }"),
        ),
    )  # fmt: skip
    run = run_layout(
        lay_out(plan),
        lambda lay: stated_prices(lay.graph, {"rank 1 F": 2.0, "rank 2 F": 4.0, "PUSH": 0.0}),
        message_price=lambda op, rank, sender: (0.5, ()),
    )
    spans = spans_of_run(run)
    applied = spans.take(spans["kind"] == "APPLY")
    assert applied["end_s"].tolist() == [2.5, 4.5, 5.0, 6.5, 8.5, 9.0]
    assert len(set(applied["op"].tolist())) == 6
    assert applied["stream"].tolist() == ["host"] * 6
    assert applied["step"].tolist() == [-1] * 6
    assert sorted(applied["version"].tolist()) == list(range(1, 7))
    # Both write from 5 s to 8.5 s: one 1 / 2 s, the other 1 / 4 s.
    delays = settled_delays(run)
    assert delays is not None and (delays.start, delays.stop) == (5.0, 8.5)
    pace = pace_of_run(run, spans)
    assert (pace.steps, pace.step_time_s) == (6, pytest.approx(1 / (1 / 2 + 1 / 4)))
    assert pace.p50_s == pytest.approx(1.75)
    found = metrics_of(
        spans, msgspec.structs.replace(BASIS, peak_flops_per_s=1e3), barrier=False, pace=pace,
        delays=delays,
    )  # fmt: skip
    assert found.updates_per_s == pytest.approx(1 / 2 + 1 / 4)
    # Both compute until 8 s.
    assert found.bubble_fraction == pytest.approx(0.5 / 3.5)


def test_percentiles_see_an_uneven_step() -> None:
    spans = spans_for(pipeline(1, 1), steps=4)
    columns = dict(spans.columns)
    slow = columns["step"] == 3
    columns["end_s"] = columns["end_s"] + 6.0 * slow
    pace = pace_of(Spans(columns, spans.names), barrier=True)
    assert pace.step_time_s == pytest.approx((12 + 6) / 4)
    assert pace.p50_s == pytest.approx(3)
    assert pace.p95_s == pytest.approx(3 + 0.85 * 6)


def test_no_spans_no_step_time() -> None:
    spans = spans_for(pipeline(1, 1))
    with pytest.raises(SimulationError, match="without spans"):
        pace_of(spans.take(np.zeros(len(spans), bool)), barrier=True)


def test_link_loads_are_sorted_and_leave_idle_links_out() -> None:
    loads = link_loads(("a", "b", "c"), (10.0, 0.0, 30.0), (1.0, 0.0, 2.0), 4.0)
    assert [(x.name, x.nbytes, x.busy_fraction) for x in loads] == [("c", 30, 0.5), ("a", 10, 0.25)]


def test_links_of_a_run_carry_what_was_sent() -> None:
    plan = pipeline(2, 2)
    prices = {"F": 1.0, "B": 2.0, "OPT": 0.0, "SEND_B": 0.0}
    flow = StatedFlow(links=("nic",), nbytes=5.0)
    run = run_layout(
        lay_out(plan),
        lambda lay: stated_prices(lay.graph, {**prices, "SEND_F": flow}, {"nic": 10.0}),
    )
    spans = spans_of_run(run)
    sent = spans.where("kind", lambda k: k == "SEND_F")
    outcome = run.outcome
    loads = link_loads(
        run.prices.link_names, outcome.link_bytes, outcome.link_busy, outcome.makespan
    )
    assert loads[0].nbytes == spans["nbytes"][sent].sum() == 10
    assert loads[0].busy_fraction == pytest.approx(1.0 / outcome.makespan)


# -- what the rates are relative to ---------------------------------------------------------------

H100 = Accelerator(
    name="fast", memory_bytes=8e10, memory_bytes_per_s=3e12,
    peak_flops_per_s={"bf16": 1e15}, price_per_s=0.001,
)  # fmt: skip
V100 = Accelerator(
    name="old", memory_bytes=1.6e10, memory_bytes_per_s=9e11,
    peak_flops_per_s={"fp16": 1.25e14, "fp32": 1.5e13}, price_per_s=0.0005,
)  # fmt: skip


def machine(*types: Accelerator) -> Machine:
    return Machine(
        name="m", accelerators={a.name: a for a in types},
        nodes=tuple(
            Node(
                index=i, profile="n", site="s", island="i", accelerator=a.name,
                chips=(2 * i, 2 * i + 2), fabric_rate=1e11,
            )
            for i, a in enumerate(types)
        ),
        links=(),
    )  # fmt: skip


def model(layers: int) -> Model:
    """An embedding, ``layers`` layers of one product and causal attention, a head."""
    blocks = [Block(name="embed", kind="embedding", layer=-1, params=1000)]
    for i in range(layers):
        blocks.append(
            Block(
                name=f"layers.{i}", kind="attention", layer=i, gemms=(Gemm(n=10, k=20, count=3),),
                attention=Attention(heads=2, kv_heads=2, head_dim=5, v_head_dim=5),
            )
        )  # fmt: skip
    blocks.append(Block(name="head", kind="head", layer=layers, gemms=(Gemm(n=100, k=20),)))
    return Model(name="tiny", family="x", blocks=tuple(blocks), edges=(), num_layers=layers)


LAYER, CORE, HEAD = 2 * 10 * 20 * 3 + 2 * 2 * 10 * 4, 2 * 2 * 10 * 4, 2 * 100 * 20
"""Forward FLOPs per token at a sequence length of 8: causal keys are 4."""


def plan_on(chips: tuple[int, ...], blocks: list[tuple[int, int]], **cell: object) -> Plan:
    return Plan(
        placement=Placement(
            cells=tuple(
                Cell(stage=s, replica=0, ranks=(s,), **cell)  # type: ignore[arg-type]
                for s in range(len(blocks))
            ),
            segments=tuple(Segment(stage=s, cell=s, blocks=b) for s, b in enumerate(blocks)),
            microbatches=(4,), chips=chips,
        ),
        mathematics=Mathematics(global_batch=8, microbatch=2, sequence_length=8, dtype="bf16"),
    )  # fmt: skip


def test_model_flops_are_those_of_the_placed_blocks() -> None:
    basis = basis_of(plan_on((0, 1), [(0, 2), (2, 4)]), machine(H100), model(2))
    assert basis.tokens_per_step == 64
    assert basis.model_flops_per_step == 3 * 64 * (2 * LAYER + HEAD)
    assert basis.hardware_flops_per_step == basis.model_flops_per_step
    # The model says 20 layers, one was placed: FLOPs of one layer and the head.
    cut = basis_of(plan_on((0,), [(20, 22)]), machine(H100), model(20))
    assert cut.model_flops_per_step == 3 * 64 * (LAYER + HEAD)


def test_recomputation_counts_for_hfu_only() -> None:
    blocks = [(0, 2), (2, 4)]
    plain = 3 * 64 * (2 * LAYER + HEAD)
    full = basis_of(plan_on((0, 1), blocks, recompute="full"), machine(H100), model(2))
    assert full.model_flops_per_step == plain
    assert full.hardware_flops_per_step == plain + 64 * 2 * LAYER
    some = basis_of(plan_on((0, 1), blocks, recompute="selective"), machine(H100), model(2))
    assert some.hardware_flops_per_step == plain + 64 * 2 * CORE


def test_the_peak_is_the_sum_over_the_plans_chips_only() -> None:
    two = machine(H100, V100)
    basis = basis_of(plan_on((0, 2), [(0, 2), (2, 4)]), two, model(2))
    # The V100 has no bf16 and computes in fp16 instead.
    assert basis.peak_flops_per_s == 1e15 + 1.25e14
    assert basis.num_chips == 2
    assert basis.price_per_s == pytest.approx(0.0015)
    free = machine(H100, Accelerator(
        name="gift", memory_bytes=1e10, memory_bytes_per_s=1e12, peak_flops_per_s={"bf16": 1e14},
    ))  # fmt: skip
    assert basis_of(plan_on((0, 2), [(0, 2), (2, 4)]), free, model(2)).price_per_s is None


def test_plans_that_name_missing_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="blocks 2 to 8"):
        basis_of(plan_on((0, 1), [(0, 2), (2, 9)]), machine(H100), model(2))


def test_dense_peak_of_a_reported_h200_run() -> None:
    # 420 TFLOP/s against the dense 989 is 42.5 %, not the 21 % of the sparse figure.
    for peak, mfu in ((989e12, 0.425), (1979e12, 0.212)):
        basis = Basis(
            tokens_per_step=1, num_chips=16, model_flops_per_step=16 * 420e12,
            hardware_flops_per_step=16 * 420e12, peak_flops_per_s=16 * peak, dtype="bf16",
        )  # fmt: skip
        assert rates_of(1.0, basis)["mfu"] == pytest.approx(mfu, abs=5e-4)


def test_the_last_step_does_not_set_the_pace() -> None:
    # Steps of 2 s; the last ends half a second early, nothing competing with it.
    finish = np.array([3.0, 5.0, 7.0, 9.0, 10.5])
    assert pace_between(finish, 0.0, barrier=False).step_time_s == 2.0
    assert pace_between(finish, 0.0, barrier=True).step_time_s == 10.5 / 5
    assert pace_between(finish[:3], 0.0, barrier=False).step_time_s == 2.0
    assert pace_between(finish[3:], 7.0, barrier=False).step_time_s == pytest.approx(1.75)
