"""The three integers: the search finds what simulating all choices finds."""

from __future__ import annotations

import itertools
from functools import cache

import msgspec
import numpy as np
import pytest

from sim.cost.ledger import peak_memory
from sim.errors import InputError
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.problem import Problem, load_problem
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.planner import memory_bounds, plan_offload, time_bounds
from strategies.offload.policies import POLICIES, Outcome, outcome_of, run_policy

LAYERS = 3


@cache
def gpt(memory: float, replicas: int = 1, m: int = 1) -> tuple[Problem, PlanDraft]:
    """A small GPT on chips of this memory [GB]."""
    node = {
        "accelerator": "A100-SXM4-80GB",
        "chips": replicas,
        "fabric": "nvlink3",
        "pcie": {"rate": "25 GB/s"},
        "host": {"update": "0.4 ns"},
        "host_memory": "440 GB",
        "count": 1,
    }
    config = {
        "model_type": "gpt2",
        "n_embd": 2048,
        "n_layer": LAYERS,
        "n_head": 16,
        "vocab_size": 8192,
        "n_positions": 1024,
    }
    job = {
        "global_batch": 4 * replicas * m,
        "sequence_length": 1024,
        "microbatch": 4,
        "gradient_dtype": "bf16",
        "limits": {"allow_inexact": True},
    }
    cluster = {
        "name": "one",
        "accelerators": {"A100-SXM4-80GB": {"memory": f"{memory} GB"}},
        "sites": [{"name": "hall", "nodes": [node]}],
    }
    draft = PlanDraft(
        cells=tuple(CellKnobs(stage=0, replica=r, chips=(r,)) for r in range(replicas)),
        pipeline=PipelineKnobs(microbatch=4),
        data=DataKnobs(microbatches=(m,) * replicas),
    )
    return load_problem(cluster, config, job), draft


@cache
def everything(memory: float, base: AutoHeteKnobs) -> dict[tuple[int, ...], Outcome]:
    problem, start = gpt(memory)
    found = {}
    for c, p, o in itertools.product(range(LAYERS + 1), repeat=3):
        knobs = msgspec.structs.replace(base, checkpointed=c, parameters=p, optimizer=o)
        found[c, p, o] = outcome_of(problem, start, knobs)
    return found


BASES = (AutoHeteKnobs(), AutoHeteKnobs(clipping="speculate"), AutoHeteKnobs(priority=False))


@pytest.mark.parametrize("memory", [80.0, 4.0, 3.2])
@pytest.mark.parametrize("base", BASES)
def test_the_search_finds_what_simulating_all_finds(memory: float, base: AutoHeteKnobs) -> None:
    found = plan_offload(*gpt(memory), base)
    fits = [o.step_s for o in everything(memory, base).values() if not o.short]
    assert found.proven and fits
    assert found.best.step_s == min(fits)
    assert found.simulated <= len(fits)


@pytest.mark.parametrize("base", BASES)
def test_no_step_beats_its_bound(base: AutoHeteKnobs) -> None:
    bound = time_bounds(*gpt(80.0), base)
    for at, outcome in everything(80.0, base).items():
        assert not outcome.short
        assert outcome.step_s >= bound[at] * (1 - 1e-9)


@pytest.mark.parametrize(("replicas", "m"), [(1, 1), (2, 1), (1, 2)])
def test_no_choice_needs_less_memory_than_its_bound(replicas: int, m: int) -> None:
    problem, start = gpt(80.0, replicas, m)
    least = memory_bounds(problem, start, AutoHeteKnobs())
    for at in itertools.product(range(LAYERS + 1), repeat=3):
        knobs = AutoHeteKnobs(checkpointed=at[0], parameters=at[1], optimizer=at[2])
        plan = lower(problem, compose(problem, [("offload", knobs)], start=start))
        peak = max(x.peak_bytes for x in peak_memory(plan, problem).values())
        assert peak >= least[at] * (1 - 1e-9)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_bounds_hold_for_several_microbatches(m: int) -> None:
    problem, start = gpt(80.0, 1, m)
    bound = time_bounds(problem, start, AutoHeteKnobs())
    for at in ((0, 0, 0), (0, LAYERS, LAYERS), (1, 2, 1), (LAYERS, 1, 2)):
        knobs = AutoHeteKnobs(checkpointed=at[0], parameters=at[1], optimizer=at[2])
        assert outcome_of(problem, start, knobs).step_s >= bound[at] * (1 - 1e-9)


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


def test_priority_never_hurts() -> None:
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


def test_several_stages_are_refused() -> None:
    problem, start = gpt(80.0, 2)
    cells = (
        CellKnobs(stage=0, replica=0, chips=(0,)),
        CellKnobs(stage=1, replica=0, chips=(1,)),
    )
    with pytest.raises(InputError, match="one stage"):
        time_bounds(problem, msgspec.structs.replace(start, cells=cells), AutoHeteKnobs())
    assert np.all(time_bounds(problem, start, AutoHeteKnobs()) > 0)
