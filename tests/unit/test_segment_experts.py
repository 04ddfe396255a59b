"""Segments whose routed experts other replicas share: sums, gathers, memory and host by group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from sim.cost.ledger import knobs_of, ledger, live_microbatches
from sim.cost.memory import TERMS, stage_memory_terms
from sim.cost.offload import host_ledgers
from sim.cost.traffic import collective_of
from sim.cost.work import Work
from sim.engine.simulate import lay_out, simulate
from sim.errors import InputError, PlanError
from sim.hardware.machine import HostSide, Machine
from sim.model.amounts import block_table, rank_params
from sim.plan.lower import lower
from sim.plan.passes import expand
from sim.plan.plan import Plan
from sim.plan.uniform import uniform
from sim.plan.validate import validate
from sim.problem import Problem
from strategies.compose import compose
from tests.property.cost_cases import machine, problem, small

NOTHING: dict[str, Any] = {}


def hosted(nodes: int, per_node: int, free: bool = False) -> Machine:
    """Chips without kernel overhead whose hosts take updates; ``free`` sums cost nothing."""
    m = machine(nodes, per_node)
    host = HostSide(memory_bytes_per_s=100e9, flops_per_s=1e12)
    made = tuple(msgspec.structs.replace(n, host=host, host_memory_bytes=1e12) for n in m.nodes)
    chip = msgspec.structs.replace(m.accelerators["chip"], kernel_overhead_s=0.0)
    links = m.links
    if free:
        links = tuple(msgspec.structs.replace(x, rate=1e30, latency=0.0) for x in links)
        made = tuple(msgspec.structs.replace(n, fabric_rate=1e30, nic_rate=1e30) for n in made)
    return msgspec.structs.replace(m, accelerators={"chip": chip}, nodes=made, links=links)


def planned(
    *,
    ep: int = 2,
    dp: int = 4,
    tp: int = 1,
    pp: int = 1,
    m: int = 1,
    zero: int = 0,
    offload: dict[str, Any] | None = None,
    free: bool = False,
) -> tuple[Problem, Plan]:
    """A plan of the small mixture of experts; with ``offload`` its stages run by segment."""
    chips = dp * tp * pp
    p = problem(hosted(chips, 1, free), small(moe=True), batch=dp * m)
    draft = uniform(p.model, dp * m, range(chips), pp=pp, tp=tp, ep=ep, zero=zero)
    if offload is not None:
        draft = compose(p, [("offload", {"whole_steps": True} | offload)], start=draft)
    plan = lower(p, draft)
    validate(plan, p)
    return p, plan


def moved(p: Problem, plan: Plan, kind: str) -> Counter[tuple[int, ...]]:
    """Bytes of all collectives of a kind in a step, by members."""
    graph = (lay := lay_out(plan, fold=False)).graph
    work, found = Work(graph, lay.wiring, plan, p), Counter[tuple[int, ...]]()
    for node, op in enumerate(graph.ops):
        if op.kind == kind:
            wire = graph.wires[graph.wire[node]]
            rank = graph.actors[graph.actor[node]].rank
            found[wire.group] += round(collective_of(work, op, wire, rank)[1])
    return found


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("ep", "dp", "tp", "pp"), [(2, 4, 1, 1), (4, 4, 1, 1), (2, 4, 2, 2)])
def test_every_group_moves_what_it_moves_without_segments(
    ep: int, dp: int, tp: int, pp: int, zero: int
) -> None:
    whole, cut = (
        planned(ep=ep, dp=dp, tp=tp, pp=pp, zero=zero, offload=o) for o in (None, NOTHING)
    )
    for kind in ("REDUCE_GRAD", "UNSHARD"):
        sums = moved(*whole, kind)
        assert moved(*cut, kind) == pytest.approx(sums) and bool(sums) == (kind[0] == "R" or zero)
    sums = moved(*cut, "REDUCE_GRAD")
    _, experts = rank_params(whole[0].model.blocks, tp, ep)
    assert sum(sums.values()) > 0 and len({len(g) for g in sums}) == (2 if ep < dp else 1)
    if ep < dp:
        inside = sum(n for g, n in sums.items() if len(g) == dp // ep)
        assert inside == pytest.approx(experts * 4 * ep * tp, rel=1e-6)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("m", [1, 3])
def test_shards_of_each_microbatch(zero: int, m: int) -> None:
    """ZeRO-2 and 3 by segment: every sum and gather once per microbatch, in its own group."""
    p, plan = planned(zero=zero, m=m)
    dense, experts = rank_params(p.model.blocks, 1, 2)
    sums = moved(p, plan, "REDUCE_GRAD")
    assert sum(n for g, n in sums.items() if len(g) == 4) == pytest.approx(4 * dense * m)
    assert sum(n for g, n in sums.items() if len(g) == 2) == pytest.approx(2 * 4 * experts * m)
    gathers = moved(p, plan, "UNSHARD")
    turns = m if zero == 3 else 1
    # The embedding's last backward and the next microbatch's forward share a gather.
    embedding, _ = rank_params(p.model.blocks[:1])
    whole = turns * dense - (turns - 1) * embedding
    assert sum(n for g, n in gathers.items() if len(g) == 4) == pytest.approx(2 * whole)
    assert sum(n for g, n in gathers.items() if len(g) == 2) == pytest.approx(4 * experts * turns)


@pytest.mark.parametrize(("zero", "m", "pp"), [(0, 2, 1), (1, 2, 1), (0, 4, 2)])
def test_memory_with_nothing_on_the_host_is_the_closed_form(zero: int, m: int, pp: int) -> None:
    p, plan = planned(zero=zero, m=m, pp=pp, offload=NOTHING)
    table = block_table(p.model, p.job.sequence_length, p.job.activation_bytes)
    chip = p.machine.accelerators["chip"]
    for cell in plan.placement.cells[:: plan.placement.num_replicas]:
        (low, high) = plan.placement.stages[cell.stage].blocks
        ((live,),) = live_microbatches("1f1b", pp, m)[cell.stage]
        knobs = knobs_of(plan, cell)
        closed = stage_memory_terms(table, p.job, chip, [low], [high], [live], knobs)
        terms = ledger(plan, p, cell).terms
        assert terms == pytest.approx({name: float(closed[name]) for name in TERMS})


@pytest.mark.parametrize(("zero", "parameters"), [(0, 4), (1, 0), (2, 0), (3, 4)])
def test_the_host_holds_and_moves_each_ranks_own(zero: int, parameters: int) -> None:
    """All optimizers, and where that can be all parameters, on the host."""
    away = {"optimizer": 4, "parameters": parameters, "outer": True}
    p, plan = planned(zero=zero, m=2, offload=away)
    dense, experts = rank_params(p.model.blocks, 1, 2)
    own = dense / (4 if zero else 1) + experts / (2 if zero else 1)
    for node in host_ledgers(plan, p, knobs_of).values():
        assert node.terms["optimizer"] == pytest.approx(own * p.job.optimizer_bytes)
        assert node.terms["gradients"] == pytest.approx(own * p.job.gradient_bytes)
    assert ledger(plan, p, plan.placement.cells[0]).terms["optimizer"] == 0
    run = simulate(plan, p, contention=False)
    graph, prices = run.layout.graph, run.prices
    down = [float(prices.nbytes[k]) for k, op in enumerate(graph.ops) if op.kind == "D2H"]
    ranks = sum(len(a.ranks) for a in graph.actors)
    assert sum(down) / len(graph.actors) == pytest.approx(own * p.job.gradient_bytes), ranks


def seconds(p: Problem, plan: Plan) -> float:
    return simulate(plan, p, contention=False).makespan


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(("ep", "dp", "pp"), [(1, 2, 1), (2, 2, 1), (2, 4, 1), (2, 4, 2)])
def test_segments_change_nothing_but_when_sums_leave(ep: int, dp: int, pp: int, m: int) -> None:
    """Free sums: the same step. Else sums leave earlier, so never longer.

    Updates wait for all gradients, for one between two backwards would hold up the stage before.
    """
    for free in (True, False):
        whole, cut = (
            seconds(*planned(ep=ep, dp=dp, pp=pp, m=m * pp, offload=o, free=free))
            for o in (None, {"clipping": "global"})
        )
        if free:
            assert cut == pytest.approx(whole, rel=1e-9)
        else:
            assert cut <= whole * (1 + 1e-9)


def test_updates_wait_for_both_sums_and_forwards_for_both_gathers() -> None:
    _, plan = planned(zero=1, offload={"whole_steps": False})
    (program,) = expand(plan)
    ops = {op.name: op for block in program.blocks for op in block.items}
    waits = {d.name for d in ops["0OPT[l2]"].deps}
    assert waits == {"0REDUCE_GRAD[l2]", "0REDUCE_GRAD[l2/experts]"}
    graph = lay_out(plan, steps=2, fold=False).graph
    second = [k for k, op in enumerate(graph.ops) if op.name == "0F0[l2]" and graph.step[k] == 1]
    for node in second:
        names = {graph.ops[k].name for k in graph.dep_src[graph.dep_dst == node]}
        assert names >= {"0UNSHARD[l2]", "0UNSHARD[l2/experts]"}


def test_a_plan_without_the_experts_gathers_is_refused() -> None:
    """Every pass waits for both gathers under ZeRO-3."""
    _, plan = planned(zero=3)
    texts = msgspec.structs.replace
    (program,) = expand(plan)
    from sim.plan.plan import ProgramText
    from sim.plan.program import format_program

    text = format_program(program)
    assert "0UNSHARD_B0[l1/experts], " in text or ", 0UNSHARD_B0[l1/experts]" in text
    broken = text.replace(", 0UNSHARD_B0[l1/experts]", "").replace("0UNSHARD_B0[l1/experts], ", "")
    bad = texts(plan, lowering=(), programs=(ProgramText(program.ranks, broken),))
    with pytest.raises(PlanError, match="no op does that"):
        validate(bad)


def test_experts_of_replicas_with_unlike_microbatches_are_refused() -> None:
    p = problem(hosted(4, 1), small(moe=True), batch=8)
    draft = uniform(p.model, 8, range(4), ep=2)
    uneven = msgspec.structs.replace(draft.data, microbatches=(3, 1, 2, 2))
    with pytest.raises((InputError, PlanError), match="share experts"):
        lower(p, msgspec.structs.replace(draft, data=uneven))
    apart = msgspec.structs.replace(draft.data, microbatches=(3, 3, 1, 1))
    validate(lower(p, msgspec.structs.replace(draft, data=apart)))
