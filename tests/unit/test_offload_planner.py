"""The three integers: the search finds what simulating all choices finds."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from sim.cost.ledger import knobs_of, peak_memory
from sim.cost.offload import host_ledgers
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.bounds import bounds_of
from strategies.offload.forms import Bounds
from strategies.offload.planner import plan_offload, settled
from strategies.offload.policies import POLICIES, Outcome, run_policy
from strategies.offload.program import Choice
from strategies.offload.units import plan_with
from tests.unit.offload_cases import gpt, spacing

LAYERS = 3
TRIPLES = [
    (c, p, o) for c in range(LAYERS + 1) for p in range(LAYERS + 1) for o in range(LAYERS + 1)
]


@cache
def everything(memory: float, base: AutoHeteKnobs) -> dict[tuple[int, int, int], Outcome]:
    problem, start = gpt(memory)
    found = {}
    for at in TRIPLES:
        found[at] = settled(problem, start, base, (at,))
    return found


BASES = (AutoHeteKnobs(), AutoHeteKnobs(clipping="speculate"), AutoHeteKnobs(priority=False))


@cache
def bounds(memory: float, base: AutoHeteKnobs, replicas: int = 1, m: int = 1) -> Bounds:
    return bounds_of(*gpt(memory, replicas, m), base)


def arrays(choice: Choice) -> list[list[Any]]:
    return [[np.asarray(x) for x in counts] for counts in choice]


@pytest.mark.parametrize("memory", [80.0, 4.0, 3.2])
@pytest.mark.parametrize("base", BASES)
def test_the_search_finds_what_simulating_all_finds(memory: float, base: AutoHeteKnobs) -> None:
    found = plan_offload(*gpt(memory), base)
    least = bounds(memory, base)
    fits = [
        max(o.step_s, float(least.step(arrays((at,)))))
        for at, o in everything(memory, base).items()
        if not o.short
    ]
    assert found.proven and fits and found.gap == 0
    assert found.best.step_s == found.bound_s == min(fits)
    assert found.simulated <= len(fits)


@pytest.mark.parametrize("memory", [80.0, 4.0, 3.2])
def test_memory_bounds_are_exact(memory: float) -> None:
    least = bounds(memory, AutoHeteKnobs())
    for at, outcome in everything(memory, AutoHeteKnobs()).items():
        assert bool(least.fits(arrays((at,)))) == (not outcome.short)


@pytest.mark.parametrize(
    ("base", "m", "count"),
    [
        (AutoHeteKnobs(), 1, len(TRIPLES)),
        (AutoHeteKnobs(), 2, 16),
        (AutoHeteKnobs(clipping="speculate"), 1, 16),
        (AutoHeteKnobs(priority=False), 2, 16),
        (AutoHeteKnobs(whole_steps=True, clipping="global"), 1, 16),
        (AutoHeteKnobs(whole_steps=True, clipping="global"), 2, 16),
    ],
)
def test_no_step_beats_its_bound(base: AutoHeteKnobs, m: int, count: int) -> None:
    least = bounds(80.0, base, 1, m)
    for at in random.Random(m).sample(TRIPLES, count):
        bound = float(least.step(arrays((at,))))
        assert spacing(*gpt(80.0, 1, m), base, (at,)) >= bound * (1 - 1e-9)


@pytest.mark.parametrize(("replicas", "m"), [(1, 1), (1, 2)])
def test_memory_forms_are_the_ledgers(replicas: int, m: int) -> None:
    problem, start = gpt(80.0, replicas, m)
    least = bounds(80.0, AutoHeteKnobs(), replicas, m)
    for at in TRIPLES:
        plan = plan_with(problem, start, AutoHeteKnobs(), (at,))
        peak = max(x.peak_bytes for x in peak_memory(plan, problem).values())
        forms = [float(least.value(form, arrays((at,)))) for form, _ in least.on_chip]
        assert max(forms) == pytest.approx(peak)
        hosts = [x.peak_bytes for x in host_ledgers(plan, problem, knobs_of).values()]
        forms = [float(least.value(form, arrays((at,)))) for form, _ in least.on_host]
        assert max(forms) == pytest.approx(max(hosts, default=0.0))


def test_unlimited_memory_keeps_everything_on_the_chip() -> None:
    knobs = plan_offload(*gpt(80.0)).best.knobs
    assert (knobs.checkpointed, knobs.parameters, knobs.optimizer) == (0, 0, 0)


def test_more_memory_is_never_slower_and_no_policy_is_faster() -> None:
    times = []
    for memory in (3.2, 4.0, 6.0, 80.0):
        best = plan_offload(*gpt(memory)).best
        times.append(best.step_s)
        for name in POLICIES:
            other = run_policy(*gpt(memory), name)
            assert other.short or best.step_s <= other.step_s * (1 + 1e-9)
    assert times == sorted(times, reverse=True)


def test_priority_does_not_hurt_where_the_link_is_fast() -> None:
    for memory in (3.2, 4.0):
        with_, without = (
            plan_offload(*gpt(memory), AutoHeteKnobs(priority=p)).best for p in (True, False)
        )
        assert with_.step_s <= without.step_s * (1 + 1e-9)


def test_nothing_that_fits_says_what_is_short() -> None:
    found = plan_offload(*gpt(1.2))
    assert found.best.short == "accelerator memory" and found.best.step_s == 0


def test_a_limit_on_simulations_is_admitted() -> None:
    found = plan_offload(*gpt(4.0), most=0)
    assert not found.proven and found.simulated == 0


@pytest.mark.parametrize(
    ("limits", "key"),
    [({"most": -1}, "most"), ({"beat": 0.0}, "beat"), ({"beat": float("nan")}, "beat")],
)
def test_limits_that_admit_nothing_are_refused(limits: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match="admits nothing") as error:
        plan_offload(*gpt(80.0), **limits)
    assert error.value.key == key


@pytest.mark.parametrize("draft", [None, PlanDraft()])
def test_a_draft_without_cells_is_refused(draft: Any) -> None:
    with pytest.raises(InputError, match="no cells"):
        plan_offload(gpt(80.0)[0], draft)


def test_an_offloaded_draft_is_refused() -> None:
    problem, draft = gpt(80.0)
    once = compose(problem, [("offload", {"optimizer": 1})], start=draft)
    with pytest.raises(InputError, match="went through strategy offload already"):
        plan_offload(problem, once)
