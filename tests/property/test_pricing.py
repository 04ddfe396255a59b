"""Prices of op graphs against hand arithmetic, and the engine's answer with contention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.cell import BlockClasses, CellSpec, cell_times
from sim.cost.compute import Shape as RankShape
from sim.cost.pricing import price
from sim.engine.execute import execute
from sim.engine.maxplus import longest_path
from sim.hardware.machine import Link, Machine
from sim.model.shape import Shape
from sim.model.transformer import build_model
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.placement import Cell, Placement, Segment
from sim.plan.plan import Amount, Mathematics, Plan, ProgramText
from sim.plan.uniform import uniform
from sim.problem import Problem
from sim.spec.job import Job
from tests.property.cost_cases import HOP_S, NIC, by_kind, layout, machine, problem, run, small

# -- by hand ------------------------------------------------------------------------------------


def test_two_stages_without_contention_are_hand_arithmetic() -> None:
    p = problem(machine(2, 1), small(), batch=2)
    plan = lower(p, uniform(p.model, 2, range(2), pp=2))
    times = cell_times(
        p,
        BlockClasses(p.model),
        CellSpec(accelerator="chip", shape=RankShape(microbatch=1, sequence_length=512)),
    )
    cut = plan.placement.segments[0].blocks[1]
    f = [times.forward[:cut].sum(), times.forward[cut:].sum()]
    backward = times.input_grad + times.weight_grad
    b = [backward[:cut].sum(), backward[cut:].sum()]
    send = HOP_S + 512 * 1024 * 2 / NIC
    found = by_kind(p, plan)
    assert sorted(set(found["F"])) == pytest.approx(sorted(f))
    assert sorted(set(found["B"])) == pytest.approx(sorted(b))
    assert found["SEND_F"] == pytest.approx([send] * 2)
    opt = max(found["OPT"])
    # 1F1B of two microbatches: stage 1 follows stage 0's first forward and sends back twice
    first = f[0] + send
    start1 = max(first + f[1] + b[1], 2 * f[0] + send)
    last = max(start1 + f[1] + b[1] + send, max(first + f[1] + b[1] + send, 2 * f[0]) + b[0])
    makespan = run(p, plan, contention=False).makespan
    assert last + b[0] <= makespan <= last + b[0] + opt
    assert makespan == pytest.approx(last + b[0] + found["OPT"][0])


def test_a_gradient_all_reduce_is_the_ring_formula() -> None:
    p = problem(machine(4, 1), small(), batch=4)
    plan = lower(p, uniform(p.model, 4, range(4)))
    params = sum(b.params + b.params_replicated for b in p.model.blocks)
    want = 2 * 3 * (HOP_S + 4 * params / 4 / NIC)
    assert by_kind(p, plan)["REDUCE_GRAD"] == pytest.approx([want])
    zero = lower(p, uniform(p.model, 4, range(4), zero=1))
    found = by_kind(p, zero)
    assert found["REDUCE_GRAD"] == pytest.approx([want / 2])
    assert found["UNSHARD"] == pytest.approx([3 * (HOP_S + 2 * params / 4 / NIC)])
    assert max(found["OPT"]) < max(by_kind(p, plan)["OPT"]) / 2


def test_a_boundary_between_unequal_tp_crosses_the_wire_once() -> None:
    """User report 9: h 4096, seq 4096, mbs 1, bf16: 33.6 MB, 1.34 ms over one 25 GB/s NIC."""
    base = machine(2, 4)
    fast = [
        Link(name=x.name, rate=25e9 if x.kind == "nic" else x.rate, kind=x.kind) for x in base.links
    ]
    m = Machine(
        name="t", accelerators=base.accelerators, nodes=base.nodes, links=tuple(fast),
        routes=base.routes,
    )  # fmt: skip
    shape = Shape(
        name="x", family="llama", num_layers=2, hidden=4096, heads=32, kv_heads=32, head_dim=128,
        v_head_dim=128, ffn=4096, gated=True, vocab=4096, max_seq=4096, tied=False,
    )  # fmt: skip
    model = build_model(shape)
    p = Problem(
        machine=m, model=model, job=Job(global_batch=1, sequence_length=4096), documents={}, hash=""
    )
    draft = PlanDraft(
        cells=(
            CellKnobs(stage=0, replica=0, chips=(0, 1), tp=2),
            CellKnobs(stage=1, replica=0, chips=(4, 5, 6, 7), tp=4),
        ),
        pipeline=PipelineKnobs(cuts=(0, 3, len(model.blocks))),
        data=DataKnobs(microbatches=(1,)),
    )
    plan = lower(p, draft)
    lay = layout(p, plan)
    prices = price(lay.graph, lay.wiring, plan, p)
    sends = [k for k, op in enumerate(lay.graph.ops) if op.kind == "SEND_F"]
    whole = 4096 * 4096 * 2
    assert whole == pytest.approx(33.6e6, rel=2e-3)
    assert len(sends) == 4
    assert prices.nbytes is not None and prices.nbytes[sends].sum() == whole
    out = execute(lay.graph, prices)
    took = out.end[sends].max() - out.start[sends].min()
    assert took == pytest.approx(1.34e-3, rel=2e-3)
    gathers = [
        k for k, op in enumerate(lay.graph.ops) if op.kind == "ALL_GATHER" and op.label == "f"
    ]
    assert (prices.seconds[gathers] > 0).all()


# -- contention ---------------------------------------------------------------------------------


def cells_plan(
    texts: Sequence[tuple[tuple[int, ...], str]],
    **more: object,
) -> Plan:
    cells = tuple(Cell(stage=0, replica=r, ranks=(r,), accelerator="chip") for r in range(4))
    return Plan(
        mathematics=Mathematics(sequence_length=512),
        placement=Placement(
            cells=cells,
            segments=(Segment(stage=0, cell=0, blocks=(1, 3)),),
        ),
        programs=tuple(ProgramText(r, t) for r, t in texts),
        barrier=False,
        **more,  # type: ignore[arg-type]
    )


def test_streams_on_one_nic_share_it_and_others_do_not() -> None:
    m = machine(2, 2)
    p = problem(m, small())
    amounts = {"0SEND_F": Amount(nbytes=1e9), "SEND_F": Amount(nbytes=1e9)}
    texts = [
        ((0,), "SEND_F0>2{amount=SEND_F} <- none"),
        ((1,), "SEND_F0>3{amount=SEND_F} <- none"),
        ((2,), "RECV_F0>0"),
        ((3,), "RECV_F0>1"),
    ]
    plan = cells_plan(texts, amounts=amounts)
    assert run(p, plan, contention=False).makespan == pytest.approx(HOP_S + 1e9 / NIC)
    assert run(p, plan).makespan == pytest.approx(HOP_S + 2e9 / NIC)
    two = problem(machine(2, 2, nics=2), small())
    lay = layout(two, plan)
    assert price(lay.graph, lay.wiring, plan, two).flows == {}
    assert run(two, plan).makespan == pytest.approx(HOP_S + 1e9 / NIC)


def test_links_that_cannot_bind_are_left_out_of_flows() -> None:
    m = machine(2, 2)
    slow = tuple(
        Link(name=x.name, rate=x.rate, latency=x.latency, kind=x.kind, flow_cap=NIC / 2)
        for x in m.links
    )
    capped = Machine(
        name="t", accelerators=m.accelerators, nodes=m.nodes, links=slow, routes=m.routes
    )
    p = problem(capped, small())
    texts = [
        ((0,), "SEND_F0>2{amount=SEND_F} <- none"),
        ((1,), "SEND_F0>3{amount=SEND_F} <- none"),
        ((2,), "RECV_F0>0"),
        ((3,), "RECV_F0>1"),
    ]
    plan = cells_plan(texts, amounts={"SEND_F": Amount(nbytes=1e9)})
    lay = layout(p, plan)
    prices = price(lay.graph, lay.wiring, plan, p)
    assert prices.flows == {}  # two flows of half the NIC each fill it exactly
    assert prices.seconds.max() == pytest.approx(HOP_S + 1e9 / (NIC / 2))


@settings(max_examples=15)
@given(
    st.sampled_from([(2, 4, 1), (2, 4, 2), (4, 2, 1), (4, 4, 2)]),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 2), (4, 1), (1, 4)]),
    st.booleans(),
    st.booleans(),
)
def test_folded_prices_equal_unfolded(
    nodes: tuple[int, int, int], sizes: tuple[int, int], zero: bool, contention: bool
) -> None:
    m = machine(*nodes)
    p = problem(m, small(), batch=16)
    pp, tp = sizes
    draft = uniform(p.model, 16, range(m.num_chips), pp=pp, tp=tp, zero=int(zero))
    plan = lower(p, draft)
    folded = run(p, plan, fold=True, contention=contention)
    unfolded = run(p, plan, contention=contention)
    assert folded.makespan == pytest.approx(unfolded.makespan, rel=1e-9)
    lay = layout(p, plan)
    prices = price(lay.graph, lay.wiring, plan, p, contention=False)
    end = longest_path(lay.graph, prices.seconds)[1].max()
    if not contention:
        assert end == pytest.approx(unfolded.makespan, rel=1e-9)
    assert unfolded.makespan >= end * (1 - 1e-9)  # sharing never helps


@settings(max_examples=10)
@given(st.sampled_from([(1, 2), (2, 1), (2, 2)]), st.booleans())
def test_every_byte_is_on_a_link_folded_or_not(sizes: tuple[int, int], zero: bool) -> None:
    m = machine(4, 2)
    p = problem(m, small(), batch=16)
    plan = lower(p, uniform(p.model, 16, range(8), pp=sizes[0], tp=sizes[1], zero=int(zero)))
    totals = []
    for fold in (True, False):
        lay = layout(p, plan, fold)
        prices = price(lay.graph, lay.wiring, plan, p)
        nbytes = np.array(execute(lay.graph, prices).link_bytes)
        for rows in prices.carried.values():
            for link, size in rows:
                nbytes[link] += size
        totals.append(nbytes)
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)
