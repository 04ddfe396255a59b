"""What was assumed: from prices to documents, and folded for people."""

from __future__ import annotations

import msgspec

from sim.cost.assume import cost_assumptions
from sim.engine.simulate import simulate
from sim.model.graph import MeasuredTime
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.uniform import uniform
from sim.problem import Problem, load_problem
from sim.report.assumed import fold_assumptions
from sim.report.report import report_of
from tests.property.cost_cases import machine, problem, small


def planned() -> tuple[Problem, Plan]:
    p = problem(machine(1, 2), small(layers=2), batch=2)
    return p, lower(p, uniform(p.model, 2, range(2), pp=2))


def test_a_dtype_that_the_chip_lacks_reaches_the_documents() -> None:
    p, plan = planned()
    chip = msgspec.structs.replace(
        p.machine.accelerators["chip"], peak_flops_per_s={"fp16": 1e14}, calibrated=True
    )
    m = msgspec.structs.replace(p.machine, accelerators={"chip": chip})
    p = msgspec.structs.replace(p, machine=m, assumptions=("told", "told"))
    report = report_of(simulate(plan, p), p)
    assert report.assumptions == ("told", "chip has no bf16: it computes in fp16")
    assert report.plan_document().assumptions == report.assumptions
    assert report.simulate_document().assumptions == report.assumptions


def test_chips_without_measured_efficiency_are_named_unless_all_times_are_measured() -> None:
    p, plan = planned()
    assert cost_assumptions(plan, p) == ("no efficiency of chip was measured",)
    times = tuple(
        MeasuredTime(
            block=b.name, accelerator="chip", tp=1, microbatch=1, forward=1.0, input_grad=1.0
        )
        for b in p.model.blocks
    )
    n = len(times)
    measured = msgspec.structs.replace(p, model=msgspec.structs.replace(p.model, times=times))
    assert cost_assumptions(plan, measured) == (f"chip: {n} of its {n} blocks take measured times",)
    some = msgspec.structs.replace(p, model=msgspec.structs.replace(p.model, times=times[:3]))
    assert cost_assumptions(plan, some) == (
        f"chip: 3 of its {n} blocks take measured times",
        "no efficiency of chip was measured",
    )


def test_many_profiles_fold_to_a_few_lines() -> None:
    p = load_problem("h2_1024", "h2_100b", "h2_1024")
    folded = fold_assumptions(p.assumptions)
    assert len(p.assumptions) > 20
    assert len(folded) <= 10
    assert (
        "H20, C500, BI-V100, Ascend-910B3: assumed gemm_efficiency, gemm_half, "
        "attention_efficiency and 6 more" in folded
    )
    assert any(line.startswith("nodes h2_h20, h2_c500, ") for line in folded)


def test_one_text_stays_as_it_is() -> None:
    texts = [
        "node a stands in for b", "X: assumed w, x, y, z", "X has no bf16: it computes in fp16",
        "no efficiency of X was measured", "by hand",
    ]  # fmt: skip
    assert fold_assumptions(texts) == texts
    assert fold_assumptions([*texts, "by hand"]) == texts
    assert fold_assumptions(["X: assumed a, b, c, d, e"]) == ["X: assumed a, b, c and 2 more"]
    assert fold_assumptions(
        [f"{x} has no bf16: it computes in fp16" for x in "XY"]
        + [f"no efficiency of {x} was measured" for x in "XY"]
    ) == [
        "X, Y have no bf16: they compute in fp16",
        "no efficiency of X, Y was measured",
    ]
