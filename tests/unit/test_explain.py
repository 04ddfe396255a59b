"""Changes that make a plan fit, differences between plans, origins of numbers."""

from __future__ import annotations

from functools import cache
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from sim.cost.ledger import peak_memory
from sim.engine.simulate import simulate
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.uniform import uniform
from sim.problem import Problem, load_problem
from sim.report.explain import explain
from sim.report.explain_edits import offloaded, recomputing, smaller_microbatch, sound, zero_one
from sim.report.explain_fit import changes_that_fit, short_cells
from sim.report.explain_inputs import inputs_of, kind_of_origin
from sim.report.explain_table import print_difference, print_explanation
from sim.report.report import Report, report_of
from sim.report.table import headline
from sim.spec.origins import Tag


@cache
def problem(batch: int = 64) -> Problem:
    return load_problem("v100_t4", "gpt2_355m", "v100_t4", [f"job.global_batch={batch}"])


def plan_of(**knobs: Any) -> Plan:
    p = problem()
    return lower(p, uniform(p.model, p.job.global_batch, range(16), **{"pp": 2} | knobs))


def report(**knobs: Any) -> Report:
    plan = plan_of(**knobs)
    return report_of(simulate(plan, problem()), problem())


def text_of(found: Any, show: Any = print_explanation) -> str:
    console = Console(file=StringIO(), width=120, no_color=True)
    show(console, found)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


# -- changes that fit ---------------------------------------------------------------------------


def test_an_edited_plan_is_the_plan_made_with_that_knob() -> None:
    base = plan_of(microbatch=8)
    pairs = [
        (recomputing(base, "full"), {"microbatch": 8, "recompute": "full"}),
        (recomputing(base, "selective"), {"microbatch": 8, "recompute": "selective"}),
        (smaller_microbatch(base, problem(), 2), {"microbatch": 2}),
        (zero_one(base), {"microbatch": 8, "zero": 1}),
    ]
    for edited, knobs in pairs:
        assert edited is not None
        assert edited == plan_of(**knobs)
        assert sound(edited, problem())


def test_knobs_that_do_not_apply_give_no_plan() -> None:
    assert recomputing(plan_of(recompute="full"), "selective") is None
    assert smaller_microbatch(plan_of(microbatch=8), problem(), 3) is None
    assert smaller_microbatch(plan_of(), problem(), 1) is None
    assert zero_one(plan_of(zero=1)) is None
    assert zero_one(plan_of(pp=8, tp=2)) is None  # one replica has nothing to divide


def test_states_on_the_host_leave_the_chips() -> None:
    p = problem()
    base = lower(p, uniform(p.model, 64, range(16), pp=1))
    away = offloaded(base, p)
    assert away is not None
    assert sound(away, p)
    ledgers = peak_memory(away, p)
    assert {x.terms["optimizer"] for x in ledgers.values()} == {0.0}
    assert simulate(away, p).makespan > 0
    assert offloaded(away, p) is None


def test_the_cheapest_change_is_the_quickest_that_fits() -> None:
    base = plan_of(microbatch=8)
    assert {stage for stage, _ in short_cells(base, problem())} == {1}
    tried = {
        "ZeRO-1": {"microbatch": 8, "zero": 1},
        "microbatch 4 instead of 8": {"microbatch": 4},
        "microbatch 2 instead of 8": {"microbatch": 2},
        "microbatch 1 instead of 8": {"microbatch": 1},
    }
    seconds = {text: simulate(plan_of(**k), problem()).makespan for text, k in tried.items()}
    found = changes_that_fit(base, problem())
    assert found[0].text == min(seconds, key=seconds.__getitem__)
    for change in found:
        if change.text in seconds:
            assert change.step_time_s == pytest.approx(seconds[change.text], rel=1e-12)
            assert change.peak_share <= 1.0
    assert {"recompute selective in stage 1", "recompute full in stage 1"} < {c.text for c in found}
    assert [c.step_time_s for c in found] == sorted(c.step_time_s for c in found)


def test_two_changes_where_one_is_not_enough() -> None:
    p = load_problem("a100x64", "llama2_7b", "a100x64", ["job.global_batch=64"])
    tight = {"A100-SXM4-80GB": {"memory": "45 GB"}}
    cluster = p.documents["cluster"] | {"accelerators": tight}
    p = load_problem(cluster, "llama2_7b", p.documents["job"])
    base = lower(p, uniform(p.model, 64, range(16), pp=1, microbatch=4))
    found = changes_that_fit(base, p)
    assert found
    assert all(" and " in c.text for c in found)


def test_the_verdict_names_cell_shortfall_and_change() -> None:
    found = explain(report(microbatch=8))
    assert [c.verdict for c in found.short] == ["does not fit"] * 2  # V100 and T4 cells of stage 1
    ledger = peak_memory(plan_of(microbatch=8), problem())[1, 0]
    assert found.short[0].short_bytes == pytest.approx(ledger.peak_bytes - ledger.capacity_bytes)
    text = " ".join(text_of(found).split())
    assert "does not fit stage 1, replica 0 on V100-SXM2-16GB, and 3 like it: short of" in text
    assert f"cheapest change {found.changes[0].text}" in text
    assert found.fullest is not None
    assert sum(found.fullest.terms.values()) == pytest.approx(found.fullest.peak_bytes)


# -- parts --------------------------------------------------------------------------------------


def test_recomputation_inside_b_is_a_forward_of_its_layers() -> None:
    """Full recomputation adds one forward of the layers; embedding and head are not done again."""
    plain, again = (explain(report(tp=1, recompute=r)) for r in ("none", "full"))
    assert "recompute" not in plain.parts
    assert again.parts["forward"] == pytest.approx(plain.parts["forward"], rel=1e-9)
    assert again.parts["backward"] == pytest.approx(plain.parts["backward"], rel=1e-9)
    for row in again.classes:
        assert 0.5 * row.parts["forward"] < row.parts["recompute"] <= row.parts["forward"]


# -- differences --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("this", "other"),
    [
        ({"pp": 4, "tp": 2}, {"pp": 2, "microbatch": 2}),
        ({"pp": 4, "recompute": "full", "zero": 1}, {"pp": 4, "schedule": "gpipe"}),
        ({"pp": 1}, {"pp": 8, "tp": 2}),
    ],
)
def test_the_parts_of_a_difference_add_up(this: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = report(**this), report(**other)
    found = explain(a, b).against
    assert found is not None
    assert found.difference_s == pytest.approx(a.run.makespan - b.run.makespan, rel=1e-12)
    for rows in (found.parts, found.path_parts):
        total = sum(r.difference_s for r in rows)
        assert total == pytest.approx(found.difference_s, abs=1e-9 * a.run.makespan)


@pytest.mark.parametrize(
    ("knob", "value", "name"),
    [
        ("recompute", "full", "recompute"), ("zero", 1, "zero"), ("schedule", "zb-h1", "schedule"),
        ("split_backward", True, "schedule"), ("buffers", 1, "buffers"),
        ("layers", (10, 14), "cuts"), ("sequence_parallel", True, "sequence parallel"),
    ],
)  # fmt: skip
def test_one_knob_is_worth_the_whole_difference(knob: str, value: Any, name: str) -> None:
    base = {"pp": 2, "tp": 2}
    found = explain(report(**base, **{knob: value}), report(**base)).against
    assert found is not None
    assert [k.name for k in found.knobs] == [name]
    assert found.knobs[0].alone_s == pytest.approx(found.difference_s, abs=1e-12)


def test_microbatches_of_another_size_are_two_knobs() -> None:
    found = explain(report(microbatch=2), report()).against
    assert found is not None
    knobs = {k.name: (k.this, k.other) for k in found.knobs}
    assert knobs == {"microbatch": ("2", "1"), "microbatches": ("4", "8")}
    assert found.knobs[0].alone_s == pytest.approx(found.difference_s, abs=1e-12)


def test_a_plan_against_itself() -> None:
    found = explain(report(), report())
    assert found.against is not None
    assert (found.against.difference_s, found.against.knobs) == (0.0, ())
    text = text_of(found, print_difference)
    assert "equally fast" in text
    assert "no knob differs" in text


def test_steps_of_unequal_work_are_named() -> None:
    small = problem(32)
    plan = lower(small, uniform(small.model, 32, range(16), pp=2))
    other = report_of(simulate(plan, small), small)
    found = explain(report(), other).against
    assert found is not None
    assert "not of equal work" in found.note
    assert "job" in {k.name for k in found.knobs}
    assert all(k.alone_s is None for k in found.knobs)  # plans of two problems


# -- origins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "kind"),
    [
        (Tag(source="https://x", evidence="found"), "published"),
        (Tag(source="https://x"), "published"),
        (Tag(source="hetlab probe on 2 ranks", evidence="found"), "measured"),
        (Tag(source="all-reduce measured by nccl-tests", evidence="derived"), "measured"),
        (Tag(source="half of the both-ways rate", evidence="derived"), "derived"),
        (Tag(source="recalled data sheet", evidence="remembered"), "recalled"),
        (Tag(source="measured elsewhere", evidence="stand-in"), "guessed"),
        (Tag(evidence="assumed"), "guessed"),
        (Tag(), "guessed"),
    ],
)
def test_kinds_of_origin(tag: Tag, kind: str) -> None:
    assert kind_of_origin(tag) == kind


def test_remembered_numbers_are_never_called_published() -> None:
    rows = {r.name: r for r in inputs_of(plan_of(), problem())}
    assert "memory_bandwidth" in rows["T4"].recalled
    assert "gemm_efficiency" in rows["T4"].guessed
    assert "peaks.fp16" in rows["V100-SXM2-16GB"].published
    assert "latency" in rows["nvlink2"].guessed


def test_an_explanation_is_one_document() -> None:
    found = explain(report(), report(zero=1))
    data = msgspec.json.decode(msgspec.json.encode(found))
    assert data["schema"] == "hetlab.explain/1"
    assert data["plan_hash"] == plan_of().hash
    assert sum(data["parts"].values()) == pytest.approx(data["step_time_s"], rel=1e-9)
    assert data["against"]["knobs"][0]["name"] == "zero"


def test_simulate_points_at_the_cell_that_is_short() -> None:
    rows = dict(headline(report(microbatch=8).simulate_document()))
    assert rows["memory"].startswith("stage 1 on ")
    assert "hetlab explain" in rows["memory"]
    assert "memory" not in dict(headline(report().simulate_document()))


def test_only_links_that_used_nodes_name_are_inputs() -> None:
    p = problem()
    alone = lower(p, uniform(p.model, 64, range(4), pp=1))  # V100 nodes hold all ranks
    names = {r.name for r in inputs_of(alone, p)}
    assert {"nvlink2", "p3_8xlarge", "V100-SXM2-16GB"} <= names
    assert not {"T4", "pcie3_t4_node", "g4dn_12xlarge"} & names
