"""The search under a routing: steady steps, the plan's own rows, sizes compared as balanced."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.cli import main
from sim.engine.simulate import simulate
from sim.errors import UsageError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Table
from sim.plan.tables import resolve_tables, unsettled_steps
from sim.problem import Problem, load_problem
from sim.report.explain import window_of
from sim.report.metrics import pace_between
from sim.report.report import report_of
from strategies.compose import compose
from strategies.expert.balanced import BalancedKnobs
from strategies.search import search
from strategies.search.finalists import Contender
from strategies.search.options import choices_of
from strategies.search.routed import STEPS, ExpertFacts, balances, best_balance, expert_facts
from strategies.search.routed_play import MOST, in_turn
from strategies.search.routed_times import Imbalance
from tests.unit.lend_cases import MIXTRAL

CLUSTER = {
    "name": "one",
    "sites": [{"name": "hall", "nodes": [{"profile": "a100_80gb_hdr", "count": 1, "name": "a"}]}],
}
ROUTING = {"sigma": 0.8, "phi": 0.947, "step": 0.2, "concentration": 144.0}
PINS: dict[str, Any] = {"tp": 1, "pp": 1, "microbatch": 2, "zero": 1, "families": "pipeline"}
WIDE = {"hidden_size": 1024, "intermediate_size": 3584}


@cache
def problem(wide: bool = False, routing: str = json.dumps(ROUTING), length: int = 512) -> Problem:
    model = MIXTRAL | {"num_hidden_layers": 2} | (WIDE if wide else {})
    job = {
        "global_batch": 32, "sequence_length": length, "limits": {"allow_inexact": True},
        "routing": json.loads(routing),
    }  # fmt: skip
    return load_problem(CLUSTER, model, job)


def traced(tmp_path: Path, counts: np.ndarray) -> Problem:
    file = tmp_path / f"{len(counts)}.npz"
    np.savez(file, counts=counts)
    return problem(routing=json.dumps({"trace": str(file)}))


def start(given: Problem, ep: int = 8, microbatch: int = 2, tp: int = 1) -> PlanDraft:
    chosen = [
        ("megatron", {"tp": tp, "chips": tuple(range(8))}), ("1f1b", {"stages": 1}),
        ("ddp", {"microbatch": microbatch}), ("partition", {}), ("expert", {"ep": ep}),
    ]  # fmt: skip
    return compose(given, chosen)


def offered(given: Problem, draft: PlanDraft) -> list[BalancedKnobs]:
    return balances(given, draft, choices_of(given))


def finishes(given: Problem, plan: Any, steps: int) -> np.ndarray:
    run = simulate(plan, given, steps=steps)
    step, end = run.layout.graph.step, run.outcome.end
    return np.array([float(end[step == s].max()) for s in range(steps)])


# -- what is compared


def test_all_but_the_release_are_offered() -> None:
    found = {k.balancer for k in offered(problem(), start(problem()))}
    assert found == {"none", "fastermoe", "pro-prophet", "spread", "eplb"}


@pytest.mark.parametrize("microbatch", [1, 2])
def test_closed_forms_and_plans_lend_on_the_same_rows(microbatch: int) -> None:
    """Loads by closed forms are the tokens of the plan's own table, whatever the balancer."""
    given = problem()
    draft, imbalance = start(given, microbatch=microbatch), Imbalance(problem())
    for knobs in offered(given, draft):
        full = compose(given, [("balanced", knobs)], start=imbalance.with_routing(draft, knobs))
        whole = compose(given, [("balanced", knobs)], start=draft)
        assert full.tables == whole.tables and lower(given, full) == lower(given, whole)
        times = imbalance.times(draft, knobs, 4)
        rows = resolve_tables(lower(given, whole).tables, 4).rows["lent"]
        for t, row in enumerate(rows):
            for number in range(2):
                ours, theirs = times.loads[t, number], np.array(row[f"l{number}.tokens"])
                assert np.abs(ours - theirs).max() <= 0.02 * theirs.mean()


def test_alpha_is_priced_as_it_is_planned() -> None:
    given = problem(wide=True)
    draft, imbalance = start(given), Imbalance(given)
    plain = next(k for k in offered(given, draft) if k.balancer == "pro-prophet")
    never = msgspec.structs.replace(plain, alpha=1e3)
    none = next(k for k in offered(given, draft) if k.balancer == "none")
    loads = [imbalance.times(draft, k).loads for k in (plain, never, none)]
    assert (loads[1] == loads[2]).all() and (loads[0] != loads[2]).any()


def test_nobody_waits_for_searches_that_are_not_made() -> None:
    given = problem()
    draft, imbalance = start(given), Imbalance(given)
    none = next(k for k in offered(given, draft) if k.balancer == "none")
    slow = msgspec.structs.replace(none, search_s=10.0)
    assert imbalance.of(draft, none) == imbalance.of(draft, slow)
    assert not imbalance.times(draft, slow).plan_s.any()


def test_sequence_parallel_drafts_have_prices_of_their_own() -> None:
    given = problem()
    plain = start(given, ep=4, tp=2)
    knobs = offered(given, plain)[0]
    split = msgspec.structs.replace(
        plain, tensor=msgspec.structs.replace(plain.tensor, sequence_parallel=True)
    )
    both = Imbalance(given)
    found = both.of(plain, knobs), both.of(split, knobs)
    assert found[0] != found[1] == Imbalance(given).of(split, knobs)


def test_short_traces_go_on_with_their_last_row(tmp_path: Path) -> None:
    counts = np.random.default_rng(1).integers(1, 99, (2, 2, 8, 8))
    short, longer = counts, counts[[0, *[1] * (STEPS - 1)]]
    prices = []
    for given in (traced(tmp_path, short), traced(tmp_path, longer)):
        draft = start(given)
        prices.append([Imbalance(given).of(draft, k) for k in offered(given, draft)])
    assert prices[0] == prices[1]
    given = traced(tmp_path, short)
    assert search(given, pins=PINS | {"ep": 8}).step_time_s > 0


def test_layers_without_tokens_cost_nothing(tmp_path: Path) -> None:
    counts = np.random.default_rng(1).integers(1, 99, (3, 2, 8, 8))
    counts[1, 0] = 0
    given = traced(tmp_path, counts)
    draft = start(given)
    for knobs in offered(given, draft):
        times = Imbalance(given).times(draft, knobs)
        assert (times.loads[1, 0] == 0).all() and np.isfinite(times.seconds).all()


# -- steady steps


def test_the_first_step_is_left_out_of_score_and_report() -> None:
    given = problem(wide=True)
    draft = start(given)
    found = best_balance(given, draft, offered(given, draft), Imbalance(given))
    assert found is not None and found.knobs.balancer != "none"
    ends = finishes(given, found.plan, STEPS)
    steady = (ends[-1] - ends[0]) / (STEPS - 1)
    assert found.step_s == pytest.approx(steady) and ends[0] > 1.02 * steady
    report = report_of(found.run, given)
    took = np.diff(ends)
    assert report.metrics.step_p95_s == pytest.approx(np.percentile(took, 95))
    assert report.metrics.unsettled == 1
    window = window_of(report)
    assert window.steps == STEPS - 1
    assert window.stop - window.start == pytest.approx(steady * window.steps)


def test_paces_with_barriers_leave_out_what_is_said() -> None:
    ends = np.array([5.0, 6.0, 8.0])
    assert pace_between(ends, 0.0, barrier=True).step_time_s == 8.0 / 3
    found = pace_between(ends, 0.0, barrier=True, warm_up=1)
    assert (found.step_time_s, found.p50_s, found.warm_up) == (1.5, 1.5, 1)
    assert pace_between(ends[:1], 0.0, barrier=True, warm_up=1).step_time_s == 5.0
    assert pace_between(ends, 0.0, barrier=True, warm_up=0).step_time_s == 8.0 / 3


def test_steps_without_rows_before_them_are_unsettled() -> None:
    own = Table(origin="controller", controller="c", inputs=("a", "own@2"))
    known = msgspec.structs.replace(own, initial={"x": 1.0})
    given = {"a": Table(values={"x": [1.0]})}
    assert unsettled_steps({**given, "own": own}) == 2
    assert unsettled_steps({**given, "own": known}) == 0 == unsettled_steps(given)


def test_closed_forms_are_of_steady_steps() -> None:
    """What routing costs is the mean of the steps after the first, beyond even routing."""
    given = problem()
    draft, imbalance = start(given), Imbalance(given)
    none = next(k for k in offered(given, draft) if k.balancer == "none")
    times = imbalance.times(draft, none)
    work = times.exchange_s + times.expert_s
    even = imbalance.times(draft, BalancedKnobs(popularity=type(none.popularity)(balanced=True)), 1)
    usual = float((even.exchange_s + even.expert_s)[0])
    assert imbalance.of(draft, none).microbatch_s == pytest.approx(work[1:].mean() - usual)


def test_facts_are_of_the_steps_that_run_and_name_no_second_spread() -> None:
    given = problem(wide=True)
    draft = start(given)
    found = best_balance(given, draft, offered(given, draft), Imbalance(given))
    assert found is not None
    facts = expert_facts(given, found.draft)
    assert facts is not None and "p95" not in facts.text and "left out" in facts.text
    assert not [f for f in ExpertFacts.__struct_fields__ if "p50" in f or "p95" in f]
    rows = resolve_tables(found.plan.tables, STEPS).rows["lent"][1:]
    loads = np.array([[r[f"l{n}.tokens"] for n in range(2)] for r in rows])
    assert facts.load == pytest.approx((loads.max(axis=2) / loads.mean(axis=2)).mean(), rel=1e-2)


# -- what is chosen


@pytest.mark.parametrize("sigma", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("ep", [None, 8])
def test_lending_that_is_allowed_never_makes_the_answer_worse(
    sigma: float, wide: bool, ep: int | None
) -> None:
    given = problem(wide, json.dumps(ROUTING | {"sigma": sigma}), 256)
    pins = PINS | {"ep": ep}
    whole, without = search(given, pins=pins), search(given, pins=pins | {"forbid": ("balanced",)})
    assert whole.step_time_s <= without.step_time_s * (1 + 1e-12)


def test_sizes_are_compared_under_their_balancers() -> None:
    given = problem(wide=True)
    found = search(given, pins=PINS)
    pinned = [search(given, pins=PINS | {"ep": ep}) for ep in (1, 2, 4, 8)]
    assert found.step_time_s == pytest.approx(min(p.step_time_s for p in pinned), rel=1e-9)
    sizes = {f.plan.placement.ep for f in found.finalists}
    cut = {p.plan.placement.ep for p in pinned if p.finalists[0].estimate_s >= found.step_time_s}
    assert sizes | cut == {1, 2, 4, 8}


def test_the_best_of_every_size_comes_before_more_of_one() -> None:
    expert = PlanDraft().expert
    made = [
        Contender(
            draft=msgspec.structs.replace(
                PlanDraft(), expert=msgspec.structs.replace(expert, ep=ep)
            ),
            estimate_s=float(k),
        )
        for k, ep in enumerate([8, 8, 8, 8, 4, 2])
    ]
    scores = [3.0, 4.0, 5.0, 6.0, 1.0, 2.0]
    found = in_turn(made, scores, scores)
    assert [c.draft.expert.ep for c in found] == [4, 2, 8, *[8] * MOST]
    other = in_turn(made, scores, [9.0, 9.0, 9.0, 0.0, 9.0, 9.0])
    assert made[3] in other and len(other) == len(found) + 1


@pytest.mark.parametrize("name", ["tp", "pp", "dp", "ep", "microbatch", "chunks"])
def test_no_size_is_below_one(name: str) -> None:
    with pytest.raises(UsageError, match=f"--pin {name}=0: expected 1 or more"):
        choices_of(problem(), {name: "0"})


def test_a_size_of_zero_is_a_usage_error(tmp_path: Path) -> None:
    files = []
    for name in ("cluster", "model", "job"):
        (tmp_path / f"{name}.json").write_text(json.dumps(problem().documents[name]))
        files.append(str(tmp_path / f"{name}.json"))
    with pytest.raises(SystemExit) as done:
        main(["plan", *files, "--pin", "ep=0"])
    assert done.value.code == 2
