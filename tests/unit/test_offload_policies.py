"""Baselines on one simulator: what they place where, and how they rank."""

from __future__ import annotations

from functools import cache

import pytest

from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.problem import Problem, load_problem
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.policies import POLICIES, Outcome, outcome_of, outcome_of_plan, run_policy
from strategies.registry import get

LAYERS = 8


@cache
def gpt(memory: float, host: str = "440 GB", update: str = "0.5 ns") -> tuple[Problem, PlanDraft]:
    """A small GPT on one chip of this memory [GB]."""
    node = {
        "accelerator": "A100-SXM4-80GB",
        "chips": 1,
        "pcie": {"rate": "25 GB/s"},
        "host": {"update": update},
        "host_memory": host,
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
    job = {"global_batch": 4, "sequence_length": 1024, "microbatch": 4, "gradient_dtype": "bf16"}
    cluster = {
        "name": "one",
        "accelerators": {"A100-SXM4-80GB": {"memory": f"{memory} GB"}},
        "sites": [{"name": "hall", "nodes": [node]}],
    }
    draft = PlanDraft(
        cells=(CellKnobs(stage=0, replica=0, chips=(0,)),),
        pipeline=PipelineKnobs(microbatch=4),
        data=DataKnobs(microbatches=(1,)),
    )
    return load_problem(cluster, config, job), draft


def outcomes(memory: float, host: str = "440 GB") -> dict[str, Outcome]:
    return {name: run_policy(*gpt(memory, host), name) for name in POLICIES}


def test_with_memory_to_spare_nothing_beats_the_chip() -> None:
    found = outcomes(80)
    assert not any(o.short for o in found.values())
    least = min(o.step_s for o in found.values())
    assert found["all-on-gpu"].step_s == pytest.approx(least)
    assert found["all-on-gpu"].knobs.checkpointed == 0
    patrickstar = found["patrickstar"].knobs
    assert (patrickstar.parameters, patrickstar.optimizer) == (0, 0)


def test_each_policy_ends_where_its_terms_do() -> None:
    # 0.4e9 parameters: 12 B of states each, 2 B of parameters, and what stands besides.
    small, tight = outcomes(6), outcomes(3.2)
    assert small["all-on-gpu"].short == "accelerator memory"
    assert not small["zero-offload"].short
    assert not small["patrickstar"].short
    assert 0 < small["patrickstar"].knobs.optimizer <= LAYERS
    assert tight["zero-offload"].short == "accelerator memory"
    assert not tight["zero-infinity"].short and not tight["stronghold"].short
    assert tight["patrickstar"].knobs.parameters > 0
    poor = outcomes(6, "2 GB")
    assert poor["zero-offload"].short == "host memory"


def test_the_closer_policy_is_never_slower() -> None:
    found = outcomes(6)
    assert found["stronghold"].step_s <= found["zero-infinity"].step_s
    assert found["zero-offload"].step_s <= found["zero-infinity"].step_s * (1 + 1e-9)
    given, start = gpt(6)
    same = outcome_of(given, start, AutoHeteKnobs(checkpointed=LAYERS, optimizer=LAYERS))
    assert not same.short and same.step_s < found["zero-offload"].step_s


@pytest.mark.parametrize("name", POLICIES)
def test_policies_say_where_they_come_from(name: str) -> None:
    assert POLICIES[name].name == name and len(POLICIES[name].source) > 20


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_is_a_strategy(name: str) -> None:
    problem, start = gpt(80)
    baseline, chosen = get(name), run_policy(problem, start, name).knobs
    assert chosen in baseline.space(problem, start).values
    plan = lower(problem, compose(problem, [(baseline, chosen)], start=start))
    assert outcome_of_plan(plan, problem, chosen) == run_policy(problem, start, name)
