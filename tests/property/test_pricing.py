"""Prices of op graphs against hand arithmetic, and the engine's answer with contention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.cell import BlockClasses, CellSpec, cell_times
from sim.cost.compute import Shape as RankShape
from sim.cost.ledger import peak_memory
from sim.cost.money import step_price
from sim.cost.occupancy import memory_over_time
from sim.cost.pricing import group_keys, price
from sim.engine.execute import Outcome, execute
from sim.engine.maxplus import longest_path
from sim.engine.simulate import Layout, lay_out
from sim.errors import InputError
from sim.hardware.machine import Accelerator, Link, Machine, Node
from sim.hardware.route import path
from sim.model.graph import Model
from sim.model.shape import Moe, Shape
from sim.model.transformer import build_model
from sim.plan.lower import lower
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Amount, Mathematics, Plan, ProgramText, Table
from sim.plan.uniform import uniform
from sim.problem import Problem
from sim.spec.job import Job

FABRIC, NIC = 100e9, 10e9
HOP_S = 5e-6


def machine(nodes: int, per_node: int, nics: int = 1, price_per_byte: float = 0.0) -> Machine:
    """Equal nodes on one switch; a link in and out per chip port and NIC."""
    links: list[Link] = []

    def both(name: str, rate: float, latency: float, kind: str) -> tuple[int, int]:
        for way in ("out", "in"):
            links.append(
                Link(
                    name=f"{name}/{way}",
                    rate=rate,
                    latency=latency / 2,
                    kind=kind,
                    price_per_byte=price_per_byte if kind == "nic" and way == "out" else 0.0,
                )
            )
        return len(links) - 2, len(links) - 1

    made = [
        Node(
            index=n,
            profile="node",
            site="here",
            island="here",
            accelerator="chip",
            chips=(n * per_node, (n + 1) * per_node),
            fabric_rate=FABRIC,
            nics=nics,
            nic_rate=NIC,
            pcie_rate=16e9,
            chip_nic=tuple(c * nics // per_node for c in range(per_node)),
            chip_links=tuple(both(f"n{n}/c{c}", FABRIC, 0.0, "fabric") for c in range(per_node)),
            nic_links=tuple(both(f"n{n}/nic{c}", NIC, HOP_S, "nic") for c in range(nics)),
        )
        for n in range(nodes)
    ]
    chip = Accelerator(
        name="chip",
        memory_bytes=80e9,
        memory_bytes_per_s=2e12,
        peak_flops_per_s={"bf16": 3e14},
        price_per_s=1e-3,
    )
    return Machine(
        name="test",
        accelerators={"chip": chip},
        nodes=tuple(made),
        links=tuple(links),
        routes={"here>here": ()},
    )


def small(layers: int = 4, moe: bool = False, tied: bool = False) -> Model:
    return build_model(
        Shape(
            name="small",
            family="llama",
            num_layers=layers,
            hidden=1024,
            heads=16,
            kv_heads=16,
            head_dim=64,
            v_head_dim=64,
            ffn=4096,
            gated=True,
            vocab=4096,
            max_seq=512,
            tied=tied,
            moe=Moe(num_experts=8, top_k=2, ffn=1024) if moe else None,
        )
    )


def problem(m: Machine, model: Model, batch: int = 8) -> Problem:
    job = Job(global_batch=batch, sequence_length=512)
    return Problem(machine=m, model=model, job=job, documents={}, hash="")


def layout(p: Problem, plan: Plan, fold: bool = False) -> Layout:
    m = p.machine
    wiring_keys = None
    if fold:
        from sim.plan.wiring import wire

        wiring_keys = group_keys(m, wire(plan.placement), plan.placement.chips)
    return lay_out(
        plan,
        fold=fold,
        rank_keys=wiring_keys,
        path=lambda a, b: path(m, a, b).links,
        link_key=lambda x: m.links[x].rate,
    )


def run(p: Problem, plan: Plan, *, fold: bool = False, contention: bool = True) -> Outcome:
    lay = layout(p, plan, fold)
    return execute(
        lay.graph, price(lay.graph, lay.wiring, plan, p, contention=contention, late=lay.late)
    )


def by_kind(p: Problem, plan: Plan, contention: bool = False) -> dict[str, list[float]]:
    lay = layout(p, plan)
    prices = price(lay.graph, lay.wiring, plan, p, contention=contention, late=lay.late)
    found: dict[str, list[float]] = {}
    for op, seconds in zip(lay.graph.ops, prices.seconds, strict=True):
        found.setdefault(op.kind, []).append(float(seconds))
    return found


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
    from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft

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
    boundaries: tuple[Boundary, ...] = (),
    **more: object,
) -> Plan:
    cells = tuple(Cell(stage=0, replica=r, ranks=(r,), accelerator="chip") for r in range(4))
    return Plan(
        mathematics=Mathematics(sequence_length=512),
        placement=Placement(
            cells=cells, segments=(Segment(stage=0, cell=0, blocks=(1, 3)),), boundaries=boundaries
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


def test_an_op_the_machine_cannot_price_is_refused_by_name() -> None:
    p = problem(machine(4, 1), small())
    plan = cells_plan([((0, 1, 2, 3), "F0 HOST0 <- F0")])
    with pytest.raises(InputError, match="no time for HOST0 of rank 0"):
        by_kind(p, plan)
    copies = cells_plan(
        [((0, 1, 2, 3), "F0 D2H0{amount=x} <- F0")], amounts={"x": Amount(nbytes=3.6e9)}
    )
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
    found = step_price(m, range(2), 2.0, 1024, nbytes)
    assert found.accelerators == pytest.approx(2 * 2.0 * 1e-3)
    assert found.egress == pytest.approx(4 * 512 * 1024 * 2 * 1e-10)
    assert found.per_million_tokens == pytest.approx(found.per_step / 1024 * 1e6)
    assert found.unpriced == ()
