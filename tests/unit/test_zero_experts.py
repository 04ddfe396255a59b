"""ZeRO-1 with expert parallelism: experts are sharded over the replicas that hold the same ones."""

from __future__ import annotations

import msgspec
import pytest

from sim.cost.ledger import ledger
from sim.cost.pricing import price
from sim.engine.simulate import Layout, lay_out
from sim.model.amounts import rank_params
from sim.plan.lower import lower
from sim.plan.placement import Cell, Placement, derive_groups
from sim.plan.plan import Plan
from sim.plan.uniform import uniform
from sim.plan.validate import validate
from sim.problem import Problem
from tests.property.cost_cases import HOP_S, NIC, layout, machine, problem, small


def planned(zero: int, ep: int = 2, cp: int = 1, dp: int = 4) -> tuple[Problem, Plan]:
    p = problem(machine(dp * cp, 1), small(moe=True), batch=dp)
    plan = lower(p, uniform(p.model, dp, range(dp * cp), ep=ep, cp=cp, zero=zero))
    validate(plan)
    return p, plan


def seconds(p: Problem, plan: Plan) -> tuple[Layout, dict[str, float]]:
    lay = layout(p, plan)
    prices = price(lay.graph, lay.wiring, plan, p, contention=False)
    named = {op.name: float(s) for op, s in zip(lay.graph.ops, prices.seconds, strict=True)}
    return lay, named


def test_experts_are_scattered_and_gathered_over_their_own_group() -> None:
    p, plan = planned(zero=1)
    dense, experts = rank_params(p.model.blocks, 1, 2)
    _, found = seconds(p, plan)
    # Rings of 2 for experts (4-byte sums, 2-byte parameters), of 4 for the rest.
    assert found["0REDUCE_GRAD[experts]"] == pytest.approx(HOP_S + experts * 4 / 2 / NIC)
    assert found["0UNSHARD[experts]"] == pytest.approx(HOP_S + experts * 2 / 2 / NIC)
    assert found["0REDUCE_GRAD"] == pytest.approx(3 * (HOP_S + dense * 4 / 4 / NIC))
    assert found["0UNSHARD"] == pytest.approx(3 * (HOP_S + dense * 2 / 4 / NIC))
    _, whole = seconds(*planned(zero=0))
    assert whole["0REDUCE_GRAD[experts]"] == pytest.approx(2 * found["0REDUCE_GRAD[experts]"])
    assert "0UNSHARD[experts]" not in whole


def test_update_and_optimizer_memory_are_divided_likewise() -> None:
    (p, plan), (_, whole) = planned(zero=1), planned(zero=0)
    dense, experts = rank_params(p.model.blocks, 1, 2)
    chip, job = p.machine.accelerators["chip"], p.job
    per_param = job.gradient_bytes + 2 * job.optimizer_bytes + job.param_bytes
    rate = chip.memory_bytes_per_s * chip.memory_efficiency
    update = (dense / 4 + experts / 2) * per_param / rate + chip.kernel_overhead_s
    assert seconds(p, plan)[1]["0OPT"] == pytest.approx(update)
    mine = ledger(plan, p, plan.placement.cells[0]).terms["optimizer"]
    assert mine == pytest.approx((dense / 4 + experts / 2) * job.optimizer_bytes)
    assert ledger(whole, p, whole.placement.cells[0]).terms["optimizer"] == pytest.approx(
        (dense + experts) * job.optimizer_bytes
    )


def test_experts_held_by_one_replica_stay_whole() -> None:
    p, plan = planned(zero=1, ep=4)
    dense, experts = rank_params(p.model.blocks, 1, 4)
    _, found = seconds(p, plan)
    assert "0UNSHARD[experts]" not in found
    mine = ledger(plan, p, plan.placement.cells[0]).terms["optimizer"]
    assert mine == pytest.approx((dense / 4 + experts) * p.job.optimizer_bytes)


def test_context_parallel_ranks_add_up_their_experts_gradients() -> None:
    p, plan = planned(zero=1, ep=2, cp=2, dp=2)
    _, found = seconds(p, plan)
    _, experts = rank_params(p.model.blocks, 1, 2)
    assert found["0REDUCE_GRAD[experts]"] == pytest.approx(HOP_S + experts * 4 / 2 / NIC)
    cells = tuple(Cell(stage=0, replica=r, ranks=tuple(range(4 * r, 4 * r + 4)), tp=2, cp=2)
                  for r in range(4))  # fmt: skip
    groups = derive_groups(Placement(cells=cells, ep=2))
    assert [g.ranks for g in groups if g.role == "edp"] == [
        (0, 2, 8, 10), (1, 3, 9, 11), (4, 6, 12, 14), (5, 7, 13, 15),
    ]  # fmt: skip


def test_the_next_step_waits_for_both_gathers() -> None:
    _, plan = planned(zero=1)
    plan = msgspec.structs.replace(plan, barrier=False)
    graph = lay_out(plan, steps=2, fold=False).graph
    second = [
        node for node, op in enumerate(graph.ops) if op.name == "0F0" and graph.step[node] == 1
    ]
    assert len(second) == 4
    for node in second:
        waits = {graph.ops[k].name for k in graph.dep_src[graph.dep_dst == node]}
        assert waits == {"0UNSHARD", "0UNSHARD[experts]"}
