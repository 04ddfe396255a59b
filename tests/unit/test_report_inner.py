"""Communication inside compute ops: from the cell's prices to the report."""

from __future__ import annotations

import numpy as np
import pytest

from sim.cost.cell import INNER_GROUPS, BlockClasses, CellSpec, cell_times
from sim.cost.collective import collective_cost
from sim.cost.compute import Shape
from sim.engine.simulate import simulate
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.uniform import uniform
from sim.problem import Problem
from sim.report.report import Report, report_of
from tests.property.cost_cases import machine, problem, small

TOKENS = 512
WIDTH = 1024


def reported(p: Problem, draft: PlanDraft) -> Report:
    return report_of(simulate(lower(p, draft), p, overlap=False), p)


def reduce_s(p: Problem) -> float:
    """One tensor-parallel sum of a microbatch's activations over two chips of a node."""
    return collective_cost(p.machine, "all_reduce", (0, 1), TOKENS * WIDTH * 2).seconds


def test_tensor_parallel_sums_are_exposed_by_hand() -> None:
    p = problem(machine(1, 2), small(layers=3), batch=2)
    draft = uniform(p.model, 2, range(2), tp=2)
    report = reported(p, draft)
    # 3 layers sum twice each way, the embedding forward and the head backward; 2 microbatches.
    want = 2 * (2 * 2 * 3 + 1 + 1) * reduce_s(p)
    assert report.metrics.exposed_by_group == pytest.approx({"tp": want})
    assert report.metrics.exposed_comm_s == pytest.approx(want)
    # The compute stream never waits outside its ops.
    assert report.metrics.bubble_fraction == pytest.approx(0.0, abs=1e-6)


def test_full_recomputation_repeats_the_layers_sums() -> None:
    p = problem(machine(1, 2), small(layers=3), batch=2)
    plain = reported(p, uniform(p.model, 2, range(2), tp=2)).metrics.exposed_comm_s
    again = reported(p, uniform(p.model, 2, range(2), tp=2, recompute="full"))
    assert again.metrics.exposed_comm_s - plain == pytest.approx(2 * 2 * 3 * reduce_s(p))


def test_groups_apart_add_up() -> None:
    p = problem(machine(2, 4), small(moe=True), batch=8)
    draft = uniform(p.model, 8, range(8), tp=2, pp=2, ep=2)
    metrics = reported(p, draft).metrics
    assert {"tp", "ep", "pp"} <= metrics.exposed_by_group.keys()
    assert sum(metrics.exposed_by_group.values()) == pytest.approx(metrics.exposed_comm_s)
    assert all(seconds > 0 for seconds in metrics.exposed_by_group.values())


@pytest.mark.parametrize(
    "sizes", [{"tp_chips": (0, 1)}, {"ep_chips": (0, 1)}, {"cp_chips": (0, 1)}]
)
def test_a_cells_times_less_its_collectives_are_those_without_groups(
    sizes: dict[str, tuple[int, ...]],
) -> None:
    p = problem(machine(1, 2), small(moe=True))
    shape = Shape(microbatch=1, sequence_length=TOKENS, recompute="full")
    classes = BlockClasses(p.model)
    alone = cell_times(p, classes, CellSpec(accelerator="chip", shape=shape))
    found = cell_times(p, classes, CellSpec(accelerator="chip", shape=shape, **sizes))  # type: ignore[arg-type]
    assert not alone.comm.any()
    passes = ("forward", "input_grad", "weight_grad", "recompute")
    for k, name in enumerate(passes):
        inside = found.comm[:, k].sum(0)
        np.testing.assert_allclose(getattr(found, name) - inside, getattr(alone, name), rtol=1e-12)
    (role,) = [name.removesuffix("_chips") for name in sizes]
    assert {INNER_GROUPS[g] for g in np.flatnonzero(found.comm.any((1, 2)))} == {role}
