"""The engine's steps under lent experts equal the closed form, where nothing contends."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.simulate import Run, simulate
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Table
from sim.problem import Problem, load_problem
from strategies.compose import compose
from strategies.expert.balancers import get_balancer
from strategies.expert.controllers import searching
from strategies.expert.draft_costs import costs_of, expert_layers
from strategies.expert.routing import Routing
from strategies.expert.routing_synthetic import drawn
from strategies.expert.step_times import Balancing, StepCosts, step_times
from tests.unit.lend_cases import MIXTRAL

STEPS = 4


@cache
def problem(experts: int) -> Problem:
    model = MIXTRAL | {
        "num_local_experts": experts,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 3,
    }
    job = {"global_batch": experts, "sequence_length": 512, "dtype": "bf16"}
    return load_problem("a100x64", model, job)


def draft(experts: int, routing: Routing, knobs: dict[str, Any]) -> PlanDraft:
    """One microbatch on a replica per expert; a search takes no time."""
    table = Table(values={f"l{i}": routing.counts[:, i].tolist() for i in range(3)})
    start = msgspec.structs.replace(base(experts), tables={"routing": table})
    return compose(problem(experts), [("balanced", {"search_s": 0.0} | knobs)], start=start)


@cache
def base(experts: int) -> PlanDraft:
    choices: list[tuple[str, dict[str, Any]]] = [
        ("megatron", {"tp": 1, "chips": tuple(range(experts))}),
        ("1f1b", {"stages": 1}),
        ("ddp", {"microbatch": 1}),
        ("partition", {}),
        ("expert", {"ep": experts}),
    ]
    return compose(problem(experts), choices)


def engine(experts: int, plan: PlanDraft, **how: Any) -> Run:
    given_ = problem(experts)
    return simulate(lower(given_, plan), given_, steps=STEPS, overlap=False, **how)


def states(plan: PlanDraft) -> float:
    found: float = plan.tables["lent"].parameters["state_bytes"]
    return found


def seconds(run: Run) -> np.ndarray:
    graph, end = run.layout.graph, run.outcome.end
    finish = [float(end[graph.step == s].max()) for s in range(STEPS)]
    return np.diff(finish, prepend=0.0)


@settings(max_examples=12, deadline=None)
@given(
    experts=st.sampled_from([8, 16]),
    name=st.sampled_from(["none", "pro-prophet", "spread", "eplb", "fastermoe"]),
    sigma=st.sampled_from([0.0, 0.5, 1.2]),
    period=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_the_engine_equals_the_closed_form(
    experts: int, name: str, sigma: float, period: int, seed: int
) -> None:
    """Each step: what is even stays, exchanges, experts and exposed transfers are the formula's."""
    fresh = name == "fastermoe"
    sizes = {"layers": 3, "experts": experts, "sources": experts, "tokens": 1024}
    routing = drawn(steps=STEPS, seed=seed, sigma=sigma, step=0.2, concentration=50.0, **sizes)
    even = drawn(steps=STEPS, balanced=True, **sizes)
    knobs = {"balancer": name, "period": period, "overlap": not fresh, "fresh": fresh, "slots": 3}
    plan = draft(experts, routing, knobs)
    layers = tuple(
        costs_of(problem(experts), plan, layer) for layer in expert_layers(problem(experts), plan)
    )
    options = {"alpha": 0.0} if name == "pro-prophet" else {}
    balancer = searching(name, options)
    how = Balancing(balancer=balancer, budget=3, period=period, fresh=fresh, scheduled=not fresh)
    none = Balancing(balancer=get_balancer("none"), budget=0)
    rest = seconds(engine(experts, draft(experts, even, {}), contention=False))[0]
    fixed = rest - step_times(even, StepCosts(layers=layers), none).seconds[0]
    costs = StepCosts(layers=layers, after_s=fixed, state_bytes=states(plan))
    found = step_times(routing, costs, how)
    run = engine(experts, plan, contention=False)
    ours = seconds(run)
    # Two parts of a transfer have a latency each, and end when the slower of two does.
    latency = 1e-5 * 2 * len(layers)
    assert np.all(ours <= found.seconds * (1 + 1e-6) + latency)
    if name != "eplb":  # which moves experts beside the copies, and the formula before them
        assert np.all(ours >= found.seconds * (1 - 1e-9))
    if name in ("none", "fastermoe"):
        assert ours == pytest.approx(found.seconds, rel=1e-9)
    whole = engine(experts, plan, contention=False, fold=False)
    assert seconds(whole) == pytest.approx(seconds(run), rel=1e-9)
