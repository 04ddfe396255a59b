"""What plans cost beyond plain pipelines: experts, parts, late amounts, memory, money."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.cell import BlockClasses, CellSpec, cell_times
from sim.cost.compute import Shape as RankShape
from sim.cost.ledger import peak_memory
from sim.cost.money import egress
from sim.cost.occupancy import memory_over_time
from sim.cost.pricing import price
from sim.engine.execute import execute
from sim.engine.simulate import simulate
from sim.errors import InputError
from sim.plan.lower import lower
from sim.plan.placement import Cell, Placement, Segment
from sim.plan.plan import Amount, Mathematics, Plan, ProgramText, Table
from sim.plan.uniform import uniform
from sim.report.report import report_of
from tests.property.cost_cases import (
    FABRIC,
    HOP_S,
    NIC,
    by_kind,
    layout,
    machine,
    problem,
    small,
)

# -- experts, parts, late amounts ---------------------------------------------------------------


def test_expert_exchange_is_boxed_in_the_passes_unless_listed() -> None:
    p = problem(machine(1, 4), small(moe=True), batch=4)
    alone = lower(p, uniform(p.model, 4, range(4)))
    shared = lower(p, uniform(p.model, 4, range(4), ep=4))
    held = 512 * 2 * 2 * 1024
    exchange = held * 3 / 4 / FABRIC
    spec = {"accelerator": "chip"}
    classes = BlockClasses(p.model)
    shape = RankShape(microbatch=1, sequence_length=512, ep=4)
    plain, boxed = (
        cell_times(p, classes, CellSpec(shape=shape, ep_chips=chips, **spec))  # type: ignore[arg-type]
        for chips in ((), (0, 1, 2, 3))
    )
    more = boxed.forward - plain.forward
    moe = [i for i, b in enumerate(p.model.blocks) if b.num_experts]
    assert more[moe] == pytest.approx(2 * exchange)
    assert more.sum() == pytest.approx(2 * exchange * len(moe))
    assert (boxed.input_grad - plain.input_grad)[moe] == pytest.approx(2 * exchange)
    found = by_kind(p, shared)
    assert found["F"][0] == pytest.approx(boxed.forward.sum())
    assert len(found["REDUCE_GRAD"]) < len(by_kind(p, alone)["REDUCE_GRAD"]) + 4


def test_parts_and_listed_collectives_leave_the_pass() -> None:
    m = machine(1, 4)
    p = problem(m, small())
    listed = "F0.0 ALL_REDUCE0.0:tp <- F0.0 ; F0.1 ALL_REDUCE0.1:tp <- F0.1"
    cell = Cell(stage=0, replica=0, ranks=(0, 1, 2, 3), accelerator="chip", tp=4)
    placement = Placement(cells=(cell,), segments=(Segment(stage=0, cell=0, blocks=(1, 2)),))
    plan = Plan(
        mathematics=Mathematics(sequence_length=512, microbatch=2),
        placement=placement,
        programs=(ProgramText((0, 1, 2, 3), listed),),
        barrier=False,
    )
    found = by_kind(p, plan)
    spec = CellSpec(accelerator="chip", shape=RankShape(microbatch=1, sequence_length=512, tp=4))
    alone = cell_times(p, BlockClasses(p.model), spec).forward[1]
    assert found["F"] == pytest.approx([alone] * 8)
    ring = 2 * 3 / 4 * 512 * 1024 * 2 / FABRIC
    assert found["ALL_REDUCE"] == pytest.approx([ring] * 2)


def test_late_amounts_scale_compute_and_make_exchanges_uneven() -> None:
    p = problem(machine(4, 1), small())
    text = "F0{ref=load/x} ; MOVE_EXPERT0{ref=moved/x} <- F0"
    base = Plan(
        mathematics=Mathematics(sequence_length=512),
        placement=Placement(
            cells=tuple(Cell(stage=0, replica=r, ranks=(r,), accelerator="chip") for r in range(4)),
            segments=(Segment(stage=0, cell=0, blocks=(1, 3)),),
            ep=4,
        ),
        programs=(ProgramText((0, 1, 2, 3), text),),
        tables={
            "load": Table(values={"x": [[1.0, 2.0, 0.5, 1.0]]}),
            "moved": Table(values={"x": [[[0, 0, 0, 0], [3e9, 0, 0, 0], [1e9, 0, 0, 0], [0] * 4]]}),
        },
        barrier=False,
    )
    found = by_kind(p, base)
    unit = found["F"][0]
    assert found["F"] == pytest.approx([unit, 2 * unit, unit / 2, unit])
    assert found["MOVE_EXPERT"] == pytest.approx([HOP_S + 4e9 / NIC])


def four_cells(text: str, amounts: dict[str, Amount] | None = None) -> Plan:
    cells = tuple(Cell(stage=0, replica=r, ranks=(r,), accelerator="chip") for r in range(4))
    return Plan(
        mathematics=Mathematics(sequence_length=512),
        placement=Placement(cells=cells, segments=(Segment(stage=0, cell=0, blocks=(1, 3)),)),
        programs=(ProgramText((0, 1, 2, 3), text),),
        amounts=amounts or {},
        barrier=False,
    )


def test_an_op_the_machine_cannot_price_is_refused_by_name() -> None:
    p = problem(machine(4, 1), small())
    plan = four_cells("F0 HOST0 <- F0")
    with pytest.raises(InputError, match="no time for HOST0 of rank 0"):
        by_kind(p, plan)
    copies = four_cells("F0 D2H0{amount=x} <- F0", {"x": Amount(nbytes=3.6e9)})
    assert by_kind(p, copies)["D2H"] == pytest.approx([0.225] * 4)


# -- memory and money of a plan -----------------------------------------------------------------


@settings(max_examples=10)
@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.sampled_from(["none", "selective", "full"]),
    st.integers(1, 2),
)
def test_memory_over_time_peaks_at_the_ledger(schedule: str, recompute: str, tp: int) -> None:
    m = machine(2, 4)
    p = problem(m, small(8), batch=8)
    draft = uniform(
        p.model, 8, range(4 * tp), pp=4, tp=tp, schedule=schedule,
        recompute=recompute,  # type: ignore[arg-type]
    )  # fmt: skip
    plan = lower(p, draft)
    lay = layout(p, plan)
    out = execute(lay.graph, price(lay.graph, lay.wiring, plan, p))
    ledgers = peak_memory(plan, p)
    found = memory_over_time(lay.graph, lay.wiring, plan, p, out.start, out.end)
    for actor, (t, nbytes) in zip(lay.graph.actors, found, strict=True):
        cell = lay.wiring.cell_of[actor.rank]
        assert (np.diff(t) >= 0).all()
        assert nbytes.max() == pytest.approx(ledgers[cell.stage, cell.replica].peak_bytes)
        assert nbytes[-1] == pytest.approx(nbytes[0])
        assert nbytes.min() >= nbytes[0] * (1 - 1e-12)


def test_money_counts_chips_and_egress() -> None:
    m = machine(2, 1, price_per_byte=1e-10)
    p = problem(m, small(), batch=2)
    plan = lower(p, uniform(p.model, 2, range(2), pp=2))
    lay = layout(p, plan)
    prices = price(lay.graph, lay.wiring, plan, p)
    nbytes: dict[int, float] = {}
    for rows in prices.carried.values():
        for link, size in rows:
            nbytes[link] = nbytes.get(link, 0.0) + size
    paid = egress(m, nbytes)
    assert paid == pytest.approx(4 * 512 * 1024 * 2 * 1e-10)
    metrics = report_of(simulate(plan, p), p).metrics
    expected = (2 * 1e-3 * metrics.step_time_s + paid) / 1024 * 1e6
    assert metrics.cost_per_mtoken == pytest.approx(expected)
