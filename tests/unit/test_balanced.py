"""Experts lent by a strategy: its knobs, traces, what it goes with, and reports."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import sim
from sim.engine.simulate import simulate
from sim.errors import InputError, PlanError
from sim.plan.draft import PlanDraft
from sim.plan.io import save_plan
from sim.plan.lower import lower
from sim.plan.passes import expand
from sim.plan.placement import Segment
from sim.plan.plan import Plan
from sim.plan.program import walk
from sim.plan.tables import resolve_tables
from sim.plan.validate import validate
from sim.problem import Problem, load_problem
from sim.report.late import late_texts
from strategies.compose import compose
from strategies.expert.balanced import BalancedKnobs
from strategies.expert.balancers import balancer_names
from strategies.expert.routing import Routing
from strategies.expert.routing_files import save_routing
from strategies.expert.routing_synthetic import Popularity
from tests.unit.lend_cases import MIXTRAL

WIDE = MIXTRAL | {"hidden_size": 2048, "intermediate_size": 7168}


@cache
def problem() -> Problem:
    """Layers wide enough that lending pays."""
    job: dict[str, Any] = {"global_batch": 16, "sequence_length": 2048, "dtype": "bf16"}
    return load_problem("a100x64", WIDE, job | {"limits": {"allow_inexact": True}})


def drafted(
    *more: tuple[str, dict[str, Any]], chips: int = 8, ep: int = 8, stages: int = 1, **knobs: Any
) -> PlanDraft:
    choices: list[tuple[str, dict[str, Any]]] = [
        ("megatron", {"tp": 1, "chips": tuple(range(chips))}),
        ("1f1b", {"stages": stages}),
        ("ddp", {"microbatch": 1}),
        ("partition", {}),
        ("expert", {"ep": ep}),
        *more,
        ("balanced", knobs),
    ]
    return compose(problem(), choices)


def planned(*more: tuple[str, dict[str, Any]], **how: Any) -> Plan:
    return lower(problem(), drafted(*more, **how))


# -- the strategy ------------------------------------------------------------------------------


def test_routing_is_drawn_from_the_runs_seed() -> None:
    tables = planned(balancer="spread").tables
    one, same, other = (resolve_tables(tables, 3, seed).rows["lent"] for seed in (1, 1, 2))
    assert one == same and one != other
    assert {k for k in one[0] if k.endswith(".load")} == {f"l{i}.load" for i in range(4)}
    assert all(max(r["l2.load"]) < max(one[0]["l2.load"]) for r in one[1:])


def test_drawn_routing_has_the_numbers_of_the_knob_zero_included() -> None:
    asked = Popularity(sigma=0.5, phi=0.0, step=0.1)
    numbers = planned(popularity=asked).tables["routing"].parameters
    names = Popularity.__struct_fields__
    assert Popularity(**{k: v for k, v in numbers.items() if k in names}) == asked


def test_even_routing_costs_what_boxed_layers_cost() -> None:
    """With a table whose routing is forced even, the step is that of the plan without this."""
    even = planned(popularity=Popularity(balanced=True))
    boxed = lower(problem(), compose(problem(), [
        ("megatron", {"tp": 1, "chips": tuple(range(8))}), ("1f1b", {"stages": 1}),
        ("ddp", {"microbatch": 1}), ("partition", {}), ("expert", {"ep": 8}),
    ]))  # fmt: skip
    times = [simulate(p, problem()).makespan for p in (even, boxed)]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_a_trace_takes_the_place_of_drawn_routing(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 50, (3, 4, 8, 16))
    save_routing(tmp_path / "trace.npz", Routing(counts))
    plan = planned(trace=str(tmp_path / "trace.npz"))
    values = plan.tables["routing"].values
    assert np.array(values["l1"]).tolist() == counts.reshape(3, 4, 8, 8, 2).sum(-1)[:, 1].tolist()
    save_routing(tmp_path / "other.npz", Routing(counts[:, :3]))
    with pytest.raises(InputError, match="trace is of another model") as caught:
        planned(trace=str(tmp_path / "other.npz"))
    assert caught.value.found == "3 layers of 8 experts"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"balancer": "sprayed"}, "no balancer sprayed; there are none"),
        ({"fresh": True}, "cannot wait for the counts of its own"),
        ({"ep": 1}, "spread them with ep"),
        ({"slots": -1}, "outside the range"),
        ({"balancer": "eplb", "slots": 0}, "eplb moves experts between devices, so it needs slots"),
        ({"period": 0}, "outside the range"),
    ],
)
def test_what_cannot_be_balanced_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(**how)


@pytest.mark.parametrize("name", [n for n in balancer_names() if n != "eplb"])
def test_without_slots_nothing_is_lent_and_no_expert_moves(name: str) -> None:
    plan = planned(balancer=name, slots=0)
    assert {op.kind for op in walk(expand(plan)[0])} & {
        "MOVE_EXPERT",
        "REDUCE_EXPERT",
        "HOST",
    } == set()
    for row in resolve_tables(plan.tables, 3).rows["lent"]:
        assert np.sum(row["l1.move"]) == np.sum(row["l1.reduce"]) == np.sum(row["l1.homes"]) == 0
        assert row["l1.home"] == list(range(8))


def edited(plan: Plan, **parameters: Any) -> Plan:
    lent = plan.tables["lent"]
    table = msgspec.structs.replace(lent, parameters=lent.parameters | parameters)
    return msgspec.structs.replace(plan, tables=plan.tables | {"lent": table})


def test_a_plan_that_somebody_has_edited_is_refused_by_the_place(tmp_path: Path) -> None:
    """With exit code 4, and a budget that the pass has no slots for with the other number."""
    plan = planned(balancer="spread")
    with pytest.raises(PlanError, match="more experts than the pass has slots for") as caught:
        expand(edited(plan, budget=3))
    assert (caught.value.key, caught.value.found) == ("tables.lent.parameters.budget", "3")
    expand(edited(plan, budget=1))
    wrong = {
        "tables.lent.parameters.period": edited(plan, period=0),
        "tables.lent.parameters.layers.l1": edited(plan, layers={"l1": 7}),
        "tables.routing.l0": edited(plan, experts=4),
        "tables.lent.parameters.costs.0": edited(plan, devices=4),
    }
    for key, broken in wrong.items():
        with pytest.raises(PlanError) as caught:
            simulate(broken, problem())
        assert caught.value.key == key and caught.value.found and caught.value.expected
    save_plan(wrong["tables.lent.parameters.period"], tmp_path / "plan.json")
    code = "from sim.cli import main; main()"
    call = [sys.executable, "-c", code, "simulate", "plan.json"]
    done = subprocess.run(
        call, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 4 and "found 0; expected int >= 1" in done.stderr


@pytest.mark.parametrize(
    "more",
    [
        [("zero", {"stage": 1})],
        [("zero", {"stage": 2})],
        [("zero", {"stage": 3})],
        [("recompute", {"modes": ("full",)})],
        [("offload", {"optimizer": 2})],
    ],
)
def test_it_goes_with_other_strategies(more: list[tuple[str, dict[str, Any]]]) -> None:
    """Experts are held once; gradients and parameters of all else may be shared out, or away."""
    plan = planned(*more, balancer="spread")
    validate(plan)
    runs = [simulate(plan, problem(), steps=2, fold=fold).makespan for fold in (True, False)]
    assert runs[0] == pytest.approx(runs[1], rel=1e-9)
    ops = list(walk(expand(plan)[0]))
    waits = {op.name: {d.name for d in op.deps or ()} for op in ops}
    last = next(op for op in ops if op.kind in ("D2H", "OPT") and op.label in ("", "l0"))
    assert "0REDUCE_EXPERT[l0]" in waits[last.name]


def test_sites_that_step_by_themselves_balance_inside() -> None:
    plan = planned(("local_sgd", {"inner": 3, "workers": 2}), chips=16, balancer="spread", stages=1)
    validate(plan)
    assert simulate(plan, problem(), steps=2).makespan > 0


@pytest.mark.parametrize(
    ("more", "chips", "message"),
    [
        (("zero", {"stage": 3}), 16, "ZeRO-2 or 3 shares out"),
        (("offload", {"optimizer": 4, "parameters": 4}), 8, "parameters are on the host"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    more: tuple[str, dict[str, Any]], chips: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        expand(planned(more, chips=chips, balancer="spread"))
    if more[0] == "zero":
        validate(planned(more, chips=chips))  # nothing lent


# -- what a person sees ------------------------------------------------------------------------


def test_the_report_says_how_uneven_work_was() -> None:
    found = {}
    for name in ("none", "spread"):
        run = simulate(planned(balancer=name), problem(), steps=6)
        found[name] = sim.report_of(run, problem())
    none, spread = (found[n].late for n in ("none", "spread"))
    assert none is not None and spread is not None
    rows = found["none"].run.layout.tables.rows["lent"]
    loads = np.array([r[f"l{i}.{k}"] for r in rows for i in range(4) for k in ("load", "load_b")])
    assert none.load_max == pytest.approx((loads.max(1) / loads.mean(1)).mean())
    assert none.load_spread == pytest.approx((loads.std(1) / loads.mean(1)).mean())
    assert spread.load_max < none.load_max and spread.load_spread < none.load_spread
    kinds = {k.kind: k for k in spread.kinds}
    assert set(kinds) == {"ALL_TO_ALL", "MOVE_EXPERT", "REDUCE_EXPERT", "HOST"}
    assert 0 < kinds["MOVE_EXPERT"].exposed_s < kinds["MOVE_EXPERT"].busy_s
    assert kinds["HOST"].busy_s == pytest.approx(4 * BalancedKnobs().search_s)
    assert [k.kind for k in none.kinds] == ["ALL_TO_ALL"]
    names = [name for name, _ in late_texts(spread)]
    assert names[0] == "uneven work" and "MOVE_EXPERT" in names
    even = simulate(planned(popularity=Popularity(balanced=True)), problem())
    late = sim.report_of(even, problem()).late
    assert late is not None and late.load_max == pytest.approx(1.0)


def test_eager_transfers_are_no_slower() -> None:
    times = [
        simulate(planned(balancer="spread", eager=e), problem(), steps=4).makespan
        for e in (False, True)
    ]
    assert times[1] < times[0]


def test_segments_finer_than_layers_are_written_out_too() -> None:
    """Attention and experts apart, as a draft may name them: the same step."""
    draft = drafted(balancer="spread")
    start = msgspec.structs.replace(draft, passes=(), tables={}, knobs={})
    names = {"attention": "attn", "moe": "moe"}
    segments = tuple(
        Segment(
            name=f"l{b.layer}.{names[b.kind]}" if b.kind in names else b.kind,
            stage=0,
            cell=0,
            blocks=(i, i + 1),
        )
        for i, b in enumerate(problem().model.blocks)
    )
    offload = msgspec.structs.replace(start.offload, segments=segments, late_updates=True)
    start = msgspec.structs.replace(start, offload=offload)
    fine = lower(problem(), compose(problem(), [("balanced", {"balancer": "spread"})], start=start))
    validate(fine)
    assert "F[l2.moe/experts]" in {
        op.name[1:].replace("F0", "F") for op in walk(expand(fine)[0]) if op.kind == "F"
    }
    times = [simulate(p, problem(), steps=2).makespan for p in (fine, lower(problem(), draft))]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_a_search_that_is_not_hidden_shows() -> None:
    """Fifty milliseconds a layer are longer than the step."""
    short, long = (
        simulate(planned(balancer="spread", search_s=s), problem(), steps=3).makespan
        for s in (1e-4, 5e-2)
    )
    assert long > short + 3 * 0.9 * 4 * 5e-2 - short


def test_simulate_prints_and_writes_it(tmp_path: Path) -> None:
    """The plan file alone is enough, in a process that imports no strategy by itself."""
    texts = {}
    for name in ("none", "spread"):
        save_plan(planned(balancer=name), tmp_path / f"{name}.json")
        assert (tmp_path / f"{name}.json").stat().st_size < 200_000
        code = "from sim.cli import main; main()"
        call = [sys.executable, "-c", code, "simulate", f"{name}.json", "--json"]
        done = subprocess.run(call, cwd=tmp_path, capture_output=True, timeout=60, check=True)
        texts[name] = json.loads(done.stdout)
    none, spread = texts["none"], texts["spread"]
    assert none["steps"] == spread["steps"] == 8  # routing differs from step to step
    assert spread["metrics"]["step_time_s"] < none["metrics"]["step_time_s"]
    assert spread["metrics"]["step_p95_s"] > spread["metrics"]["step_p50_s"]
    assert spread["exact"] and spread["late"]["load_max"] < none["late"]["load_max"]
