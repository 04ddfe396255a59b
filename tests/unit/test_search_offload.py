"""Offloaded plans in the search: relaxed, repaired, bounded."""

from __future__ import annotations

import itertools
import math
import time
from functools import cache
from typing import Any

import pytest

from sim.cost.ledger import peak_memory
from sim.errors import InfeasibleError, InputError, UsageError
from sim.problem import Problem, load_problem
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.planner import plan_offload
from strategies.offload.policies import outcome_of, short_of
from strategies.search import SearchResult, search
from strategies.search import offloaded as module
from strategies.search.board import Effort
from strategies.search.drafts import draft_of
from strategies.search.offloaded import offloaded
from strategies.search.options import choices_of
from strategies.search.pools import pools_of
from strategies.search.repaired import Offloaded
from strategies.search.result import OffloadFacts

A100 = "A100-SXM4-80GB"


@cache
def gpt(
    memory: float,
    *,
    chips: int = 1,
    layers: int = 3,
    hidden: int = 1024,
    host: str = "440 GB",
    pcie: bool = True,
    batch: int = 4,
    dtype: str = "bf16",
) -> Problem:
    """A GPT on one node of chips of this memory [GB]."""
    node: dict[str, Any] = {
        "accelerator": A100, "chips": chips, "count": 1, "host_memory": host,
        "host": {"update": "0.5 ns"}, "fabric": "nvlink3",
    }  # fmt: skip
    if pcie:
        node["pcie"] = {"rate": "25 GB/s"}
    config = {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": 16,
        "vocab_size": 8192, "n_positions": 1024, "tie_word_embeddings": False,
    }  # fmt: skip
    job = {
        "global_batch": batch, "sequence_length": 1024, "dtype": dtype, "gradient_dtype": dtype,
    }  # fmt: skip
    cluster = {
        "name": "one",
        "accelerators": {A100: {"memory": f"{memory} GB"}},
        "sites": [{"name": "hall", "nodes": [node]}],
    }
    return load_problem(cluster, config, job)


@cache
def large() -> Problem:
    """4e9 parameters on one chip of 16 GB: 64 GB of states and gradients."""
    return gpt(16, layers=32, hidden=3072, batch=8)


PLAIN = {"microbatch": 8}


@cache
def rescued() -> SearchResult:
    return search(large(), pins=PLAIN)


def facts_of(result: SearchResult) -> OffloadFacts:
    assert result.offload is not None
    return result.offload


def repaired(problem: Problem, **pins: Any) -> Offloaded:
    choices = choices_of(problem, pins)
    return offloaded(problem, pools_of(problem.machine), choices, effort=Effort())


def test_what_fits_nowhere_else_is_offloaded_and_says_so() -> None:
    result = rescued()
    (stage,) = facts_of(result).stages
    assert stage.optimizer > 0 and stage.layers == 32
    assert short_of(result.plan, large()) == ""
    assert facts_of(result).proven and facts_of(result).why.startswith(
        "nothing fits without offloading: short by"
    )
    with pytest.raises(InfeasibleError) as error:
        search(large(), pins={**PLAIN, "offload": "no"})
    assert result.notes[0] == f"without offloading: {error.value}"


@pytest.mark.parametrize("memory", [1.8, 2.0, 3.0, 40.0])
def test_in_competition_offloading_never_makes_it_worse(memory: float) -> None:
    with_ = search(gpt(memory), pins={"offload": "yes"})
    assert not any(x.verdict != "fits" for x in peak_memory(with_.plan, gpt(memory)).values())
    try:
        without = search(gpt(memory), pins={"offload": "no"})
    except InfeasibleError:
        assert with_.offload is not None
        return
    assert with_.finalists[0].score <= without.finalists[0].score * (1 + 1e-12)


@pytest.mark.parametrize(("chips", "memory"), [(1, 1.8), (1, 40.0), (2, 1.5), (2, 40.0)])
def test_no_repaired_step_beats_the_relaxed_bound(chips: int, memory: float) -> None:
    state = repaired(gpt(memory, chips=chips))
    assert state.found
    for plan in state.found:
        assert plan.finalist.step_time_s >= plan.structure.bound_s * (1 - 1e-9)
        assert not short_of(plan.finalist.plan, gpt(memory, chips=chips))


def test_each_plan_comes_once_and_in_order() -> None:
    found = repaired(gpt(1.8)).found
    scores = [r.finalist.score for r in found]
    assert scores == sorted(scores)
    assert len({r.finalist.plan.hash for r in found}) == len(found) > 1


def test_where_something_fits_auto_changes_nothing() -> None:
    results = [search(gpt(40.0), pins={"offload": o}) for o in ("auto", "no")]
    assert results[0].plan.hash == results[1].plan.hash
    assert results[0].offload is None and results[0].notes == ()


@pytest.mark.parametrize("pins", [{"dp": 2}, {"pp": 2}, {"tp": 2}, {"microbatch": 1}])
def test_pins_hold(pins: dict[str, int]) -> None:
    result = search(gpt(1.5, chips=2), pins={**pins, "offload": "yes"})
    placement = result.plan.placement
    sizes = {
        "dp": placement.num_replicas,
        "pp": placement.num_stages,
        "tp": placement.cells[0].tp,
        "microbatch": result.plan.mathematics.microbatch,
    }
    assert all(sizes[name] == value for name, value in pins.items())


@pytest.mark.parametrize(("mode", "count"), [("none", 0), ("full", 3)])
def test_pinned_recomputation_holds(mode: str, count: int) -> None:
    found = repaired(gpt(2.0), recompute=mode).found
    assert found
    for r in found:
        layers = [s for s in r.finalist.plan.placement.segments if s.name.startswith("l")]
        assert sum(s.recompute == "full" for s in layers) == count


def test_fp16_offloads_with_updates_it_may_have() -> None:
    result = search(gpt(1.8, dtype="fp16"))
    assert result.offload is not None and result.plan.exact


def test_neither_accelerators_nor_hosts_suffice() -> None:
    problem = gpt(1.8, host="0.2 GB")
    with pytest.raises(InfeasibleError) as error:
        search(problem)
    assert "is short of" in error.value.message
    assert "GB of host memory on node 0" in error.value.message
    assert "memory of stage 0" in error.value.binding and "host memory" in error.value.binding


def test_without_a_link_to_host_memory_it_says_so() -> None:
    with pytest.raises(InfeasibleError, match="not offloaded: a node has no link to host memory"):
        search(gpt(1.8, pcie=False))


def test_ctrl_c_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "plan_offload", interrupted)
    result = search(large(), pins=PLAIN)
    assert result.stopped and result.offload is not None and not result.offload.proven
    assert result.step_time_s >= rescued().step_time_s


def test_a_budget_of_nothing_gives_an_offloaded_plan() -> None:
    result = search(gpt(1.8), budget=0.0)
    assert result.stopped and result.offload is not None


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relaxed searches that no deadline ends, so that only the repairs are measured."""
    whole = module.relaxed
    monkeypatch.setattr(
        module, "relaxed", lambda p, q, c, e, _, show: whole(p, q, c, e, math.inf, show)
    )


@pytest.mark.usefixtures("unhurried")
def test_a_budget_that_was_too_short_for_nothing_is_not_blamed() -> None:
    """Where all was looked at behind the deadline, there is no plan, whatever the budget."""
    with pytest.raises(InfeasibleError, match="with all layers on the host the closest"):
        search(gpt(1.8, host="0.1 GB"), budget=0.0)


@pytest.mark.usefixtures("unhurried")
def test_repairs_end_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", -1.0)
    monkeypatch.setattr(module, "plan_offload", lambda *_, **__: pytest.fail("planned too late"))
    with pytest.raises(UsageError, match="budget of 0 s ended before a plan was found"):
        search(gpt(1.8), budget=0.0)


@pytest.mark.usefixtures("unhurried")
def test_knobs_around_a_structure_end_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only between structures: the first planner ends behind the deadline, no other starts."""
    asked: list[float] = []

    def slow(*_: object, seconds: float, **__: object) -> None:
        asked.append(seconds)
        monkeypatch.setattr(module, "GRACE_S", -math.inf)
        raise InputError("nothing was found in time")

    monkeypatch.setattr(module, "plan_offload", slow)
    problem = gpt(1.8)
    state = offloaded(
        problem, pools_of(problem.machine), choices_of(problem),
        effort=Effort(), deadline=time.monotonic(),
    )  # fmt: skip
    assert len(asked) == 1 and state.stopped and state.left
    # The integer program gets no more than what is left.
    assert 0 < asked[0] <= 30.0


@pytest.mark.parametrize("recompute", [True, False])
def test_the_planner_keeps_a_pin_and_beats_a_step(recompute: bool) -> None:
    problem = gpt(2.0)
    slabs = [s.slab for s in repaired(problem).relaxed.structures]
    draft = draft_of(problem, next(s for s in slabs if s.microbatch == 1))
    every = [
        outcome_of(problem, draft, AutoHeteKnobs(checkpointed=c, parameters=p, optimizer=o))
        for c in (3 if recompute else 0,)
        for p, o in itertools.product(range(4), repeat=2)
    ]
    least = min(o.step_s for o in every if not o.short)
    found = plan_offload(problem, draft, recompute=recompute)
    assert found.proven and found.best.knobs.checkpointed == (3 if recompute else 0)
    assert found.best.step_s == pytest.approx(least, rel=1e-9)
    again = plan_offload(problem, draft, recompute=recompute, beat=least * 1.001)
    assert again.proven and again.best.step_s == found.best.step_s
    assert plan_offload(problem, draft, recompute=recompute, beat=0.5 * found.bound_s).best.short
    late = plan_offload(problem, draft, recompute=recompute, late=lambda: True)
    assert late.simulated == 0 and not late.proven


def test_progress_counts_structures() -> None:
    seen: list[tuple[str, int, int]] = []
    search(gpt(1.8), progress=lambda *x: seen.append(x))
    mine = [(done, total) for what, done, total in seen if what == "offload"]
    assert mine and [d for d, _ in mine] == list(range(1, mine[-1][1] + 1))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_pinned_zero_stages_hold(zero: int) -> None:
    result = search(gpt(1.8, chips=2), pins={"zero": zero, "dp": 2, "offload": "yes"})
    assert result.plan.mathematics.zero == zero and result.plan.placement.num_replicas == 2


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        ({"offload": "maybe"}, "expected one of auto yes no"),
        ({"zero": "3", "offload": "no"}, "planned with offloading only"),
        ({"zero": "7"}, "no such ZeRO stage: 7"),
    ],
)
def test_wrong_pins_are_refused(pins: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        choices_of(gpt(1.8), pins)


def test_the_job_may_pin_it() -> None:
    problem = gpt(1.8)
    documents = problem.documents
    job = {**documents["job"], "pins": {"offload": "no"}}
    pinned = load_problem(documents["cluster"], documents["model"], job)
    assert choices_of(pinned).offload == "no"
