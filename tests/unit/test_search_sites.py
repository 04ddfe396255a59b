"""The search over sites that step by themselves: shares, bounds, what is forbidden and gave."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.simulate import simulate
from sim.errors import InfeasibleError, UsageError
from sim.plan.draft import DataKnobs
from sim.plan.lower import lower
from sim.plan.validate import validate
from sim.problem import Problem, load_problem
from sim.report.report import report_of
from strategies.compose import compose
from strategies.expert.balanced import BalancedKnobs
from strategies.search import SearchResult, leave_one_out, search
from strategies.search.hosted import shortfall
from strategies.search.options import FORBIDDEN, choices_of
from strategies.search.pools import pools_of
from strategies.search.routed import balances, best_balance
from strategies.search.routed_times import Imbalance
from strategies.search.site_ways import SiteWay, SiteWays
from strategies.search.sites import draft_of_sites, site_pools, site_structures, why_no_sites
from strategies.search.split import share_out
from tests.unit.test_local_sites import MODEL, two_sites

ROUTING = {"sigma": 0.5, "step": 0.1, "concentration": 100.0}
PINS: dict[str, Any] = {"tp": 1, "pp": 1, "microbatch": 16}


@cache
def sites(fraction: float = 0.9, routed: bool = False, inexact: bool = True) -> Problem:
    job = {
        "global_batch": 2048,
        "sequence_length": 512,
        "limits": {"allow_inexact": inexact, "max_memory_fraction": fraction},
        **({"routing": ROUTING} if routed else {}),
    }
    documents = two_sites().documents
    return load_problem(dict(documents["cluster"]), MODEL, job)


@cache
def planned(
    fraction: float = 0.9, routed: bool = False, forbid: tuple[str, ...] = ()
) -> SearchResult:
    return search(sites(fraction, routed), pins={**PINS, "forbid": forbid})


# -- shares and structures


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 4)), min_size=2, max_size=3),
    st.integers(6, 40),
)
def test_shares_are_as_good_as_any(sites_: list[tuple[float, int]], total: int) -> None:
    """Near the speeds nothing better is missed by more than a microbatch of each site."""
    speeds, dps = [s for s, _ in sites_], [d for _, d in sites_]
    found = share_out(speeds, dps, total)

    def slowest(shares: tuple[int, ...]) -> float:
        return max(m / s for m, s in zip(shares, speeds, strict=True))

    for shares in found:
        assert sum(m * d for m, d in zip(shares, dps, strict=True)) == total
    every = [
        m
        for m in itertools.product(*(range(1, total + 1) for _ in dps))
        if sum(a * d for a, d in zip(m, dps, strict=True)) == total
    ]
    if found:
        assert slowest(found[0]) == min(map(slowest, found))
        assert slowest(found[0]) >= min(map(slowest, every))


def test_structures_hold_the_batch_and_their_bounds_hold() -> None:
    problem = sites()
    pools, choices = site_pools(problem, pools_of(problem.machine)), choices_of(problem, PINS)
    every = site_structures(problem, pools, choices)
    assert {s.slabs[0].ep for s in every} == {1, 2, 4}
    assert every == sorted(every, key=lambda s: s.bound_s)
    ways = SiteWays(problem, choices, contention=True)
    for structure in every:
        dps = [s.dp for s in structure.slabs]
        for shares in structure.shares:
            assert sum(d * m for d, m in zip(dps, shares, strict=True)) == 128
        for way in ways.of(structure):
            shares = structure.shares[0]
            real = ways.simulated(structure, way, shares)
            assert real is not None and real.step_s(shares) >= structure.bound_s * (1 - 1e-9)
            assert way.step_s(shares) == pytest.approx(real.step_s(shares), rel=0.1)


def test_even_shares_are_equal() -> None:
    problem = sites()
    pools, choices = site_pools(problem, pools_of(problem.machine)), choices_of(problem, PINS)
    for structure in site_structures(problem, pools, choices, even=True):
        assert structure.shares == ((16, 16),)


@pytest.mark.parametrize(
    ("pins", "inexact", "message"),
    [
        ({}, False, "no inexact plans"),
        ({"zero": 1}, True, "ZeRO"),
        ({"dp": 4}, True, "unlike replicas"),
        ({"accelerators": "H100-SXM5-80GB"}, True, "one site"),
    ],
)
def test_why_sites_do_not_step_by_themselves(
    pins: dict[str, Any], inexact: bool, message: str
) -> None:
    problem = sites(inexact=inexact)
    choices = choices_of(problem, pins)
    assert message in why_no_sites(
        problem, pools_of(problem.machine, choices.accelerators), choices
    )


# -- the search


def test_a_plan_of_both_sites_beats_all_others() -> None:
    found, without = planned(), planned(forbid=("local_sgd",))
    assert found.plan.placement.workers and not without.plan.placement.workers
    assert found.tokens_per_s > without.tokens_per_s
    assert {s.site for s in found.sites} == {"a", "b"} and found.offload is None
    validate(found.plan, sites())
    assert lower(sites(), found.draft) == found.plan
    best = found.finalists[0]
    assert (
        best.batches
        == found.draft.knobs["local_sgd"]["inner"] // (found.draft.knobs["local_sgd"]["fragments"])
    )
    assert found.plan_gap >= 0 and found.finalists[0].score == min(f.score for f in found.finalists)
    shares = found.plan.placement.microbatches
    assert shares[0] > shares[-1]


def test_the_small_site_alone_keeps_states_on_its_hosts() -> None:
    """An eighth of the memory: the A100 do not hold their part, the H100 do."""
    found = planned(fraction=0.12)
    assert found.offload is not None
    kept = {c.accelerator: c.offload for c in found.plan.placement.cells}
    assert kept == {"H100-SXM5-80GB": "none", "A100-SXM4-40GB": ""}
    # With one layer fewer on hosts it would not fit.
    counts, local = (found.draft.knobs[n] for n in ("offload", "local_sgd"))
    fewer = {**counts, "optimizer": counts["optimizer"] - 1}
    assert not counts["outer"] and counts["optimizer"] >= 1
    problem, ends = sites(0.12), found.plan.placement.microbatches
    structure = next(
        s
        for s in site_structures(
            problem, site_pools(problem, pools_of(problem.machine)), choices_of(problem, PINS)
        )
        if s.slabs[0].ep == found.plan.placement.ep
    )
    start = draft_of_sites(problem, structure, (ends[0], ends[-1]), ["none", "none"])
    for knobs, fits in ((counts, True), (fewer, False)):
        chosen = [("offload", knobs), ("local_sgd", local)]
        plan = lower(problem, compose(problem, chosen, start=start))
        assert (shortfall(plan, problem).nbytes == 0) == fits


def test_routing_is_balanced_and_said() -> None:
    found, plain = planned(0.12, True), planned(0.12, True, ("balanced",))
    assert found.experts is not None and found.experts.ep == found.plan.placement.ep > 1
    assert 1 <= found.experts.load < found.experts.static_load
    assert found.experts.rb > 1
    assert found.tokens_per_s >= plain.tokens_per_s
    assert plain.experts is None or plain.experts.slots == 0


def test_without_routing_the_answer_says_what_it_takes() -> None:
    found = planned()
    if found.plan.placement.ep > 1:
        assert any("as many tokens" in note for note in found.notes)
    assert found.experts is None


def test_leave_one_out_is_the_search_without() -> None:
    problem = sites(0.12, routed=True)
    found = planned(0.12, routed=True)
    given_ = leave_one_out(problem, found, pins=PINS)
    assert [w.name for w in given_] == sorted(FORBIDDEN)
    for without in given_:
        other = planned(0.12, routed=True, forbid=(without.name,))
        assert without.tokens_per_s == other.tokens_per_s
        assert without.gain == pytest.approx(found.tokens_per_s / other.tokens_per_s - 1)
        assert without.gain > -0.02 and without.text
    only = leave_one_out(problem, found, pins={**PINS, "forbid": ("uneven",)}, names=["uneven"])
    assert only == ()


def test_forbidden_names_are_checked() -> None:
    with pytest.raises(UsageError, match="nothing to forbid: hosts"):
        choices_of(sites(), {"forbid": ("hosts",)})
    with pytest.raises(UsageError, match="offload is forbidden"):
        choices_of(sites(), {"forbid": ("offload",), "offload": "yes"})
    assert choices_of(sites(), {"forbid": "offload,uneven"}).offload == "no"


def test_nothing_fits_is_said_of_sites_too() -> None:
    with pytest.raises(InfeasibleError):
        search(sites(0.001), pins=PINS)


def test_even_plans_share_layers_and_microbatches_evenly() -> None:
    found = search(sites(), pins={"forbid": ("uneven", "local_sgd"), "pp": 2, "chunks": 1})
    layers = [s.blocks[1] - s.blocks[0] for s in found.plan.placement.stages]
    assert len(found.plan.placement.stages) == 2 and abs(layers[0] - layers[1]) <= 1
    assert len(set(found.plan.placement.microbatches)) == 1


# -- what routing costs


def test_closed_forms_of_routing_are_near_the_engine() -> None:
    problem = sites(routed=True)
    pools, choices = site_pools(problem, pools_of(problem.machine)), choices_of(problem, PINS)
    structure = next(s for s in site_structures(problem, pools, choices) if s.slabs[0].ep == 4)
    both = draft_of_sites(problem, structure, (16, 16), ["none", "none"])
    start = msgspec.structs.replace(
        both, cells=both.cells[:4], data=DataKnobs(microbatches=(32,) * 4)
    )
    problem = msgspec.structs.replace(
        problem, job=msgspec.structs.replace(problem.job, global_batch=32 * 4 * 16)
    )
    imbalance = Imbalance(problem)
    offered = balances(problem, start, choices)
    assert {k.balancer for k in offered} >= {"none", "spread"} and {k.slots for k in offered} == {
        1,
        2,
    }
    plain = next(k for k in offered if k.balancer == "none")
    cost = imbalance.of(start, plain)
    assert imbalance.of(start, None).microbatch_s == 0 < cost.microbatch_s

    def pace(knobs: BalancedKnobs | None) -> float:
        even = msgspec.structs.replace(
            knobs or plain, popularity=type(plain.popularity)(balanced=True)
        )
        found = best_balance(problem, start, [knobs or even], imbalance)
        assert found is not None
        return found.step_s

    more = pace(plain) - pace(None)
    assert 32 * cost.microbatch_s == pytest.approx(more, rel=0.3)
    ours = min(offered, key=lambda k: imbalance.of(start, k).microbatch_s)
    assert ours.balancer != "none"


def test_a_microbatch_of_another_size_costs_in_proportion() -> None:
    problem = sites(routed=True)
    pools, choices = site_pools(problem, pools_of(problem.machine)), choices_of(problem, PINS)
    structure = next(s for s in site_structures(problem, pools, choices) if s.slabs[0].ep == 2)
    start = draft_of_sites(problem, structure, (16, 16), ["none", "none"])
    knobs = balances(problem, start, choices)[0]
    one = Imbalance(problem).of(start, knobs).microbatch_s
    double = msgspec.structs.replace(start.pipeline, microbatch=32)
    twice = Imbalance(problem).of(msgspec.structs.replace(start, pipeline=double), knobs)
    assert twice.microbatch_s == pytest.approx(2 * one, rel=0.35)


def test_a_way_is_as_slow_as_its_slowest_site() -> None:
    problem = sites()
    pools, choices = site_pools(problem, pools_of(problem.machine)), choices_of(problem, PINS)
    structure = site_structures(problem, pools, choices)[0]
    start = draft_of_sites(problem, structure, (16, 16), ["none", "none"])
    way = SiteWay(start=start, hosts=None, balance=None, fixed_s=(1.0, 0.0), pace_s=(1.0, 2.0))
    assert way.step_s((4, 2)) == 5.0 and way.step_s((4, 3)) == 6.0


def test_what_the_answer_says_is_what_runs() -> None:
    found = planned(0.12, routed=True)
    run = simulate(found.plan, found.problem, steps=24)
    pace = report_of(run, found.problem).metrics.step_time_s
    assert found.step_time_s == pytest.approx(pace, rel=0.05)


def test_the_document_of_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    from sim.cli import main

    files = []
    for name in ("cluster", "model", "job"):
        (tmp_path / f"{name}.json").write_text(json.dumps(sites(0.12, True).documents[name]))
        files.append(str(tmp_path / f"{name}.json"))
    pins = [x for k, v in PINS.items() for x in ("--pin", f"{k}={v}")]
    with pytest.raises(SystemExit) as done:
        main(["plan", *files, *pins, "--forbid", "uneven", "--leave-one-out", "--json"])
    assert not done.value.code
    found = json.loads(capsys.readouterr().out)
    assert {w["name"] for w in found["without"]} == set(FORBIDDEN) - {"uneven"}
    assert "experts" in found and "sites" in found
