"""What asynchronous plans and their knobs refuse, in words, wherever they are read."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sim.checks import check_file, read_plan
from sim.engine.simulate import simulate
from sim.errors import InputError, PlanError
from sim.plan.io import save_plan
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.validate import validate
from sim.problem import load_problem
from strategies.compose import compose
from strategies.data.delayed import rule_of
from strategies.data.delayed_knobs import DelayedKnobs
from tests.unit.delayed_cases import plan_of, problem_of

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "server": ("delayed_sgd", {"variant": "server"}),
    "ssp": ("delayed_sgd", {"variant": "server", "rule": "ssp", "bound": 1}),
    "late": ("delayed_sgd", {"tau": 2}),
    "local": ("local_sgd", {"inner": 8, "workers": 4}),
}


@cache
def written(kind: str) -> Plan:
    """A plan that carries its problem, as a file does."""
    problem = load_problem("uneven_workers", "gpt2_355m", "uneven_workers")
    grid = [("megatron", {}), ("1f1b", {}), ("ddp", {"microbatch": 32}), ("partition", {})]
    return lower(problem, compose(problem, [*grid, KINDS[kind]]))


def edited(plan: Plan, folder: Path, change: Any) -> Path:
    """The plan's file after a change of its document; the hash of the problem is left out."""
    path = folder / "plan.json"
    save_plan(plan, path)
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
    return path


def call_of(document: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in document["lowering"] if c["name"] in ("delayed", "local_steps"))


# -- the job's word -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_whose_own_job_forbids_it(kind: str, tmp_path: Path) -> None:
    def forbid(document: dict[str, Any]) -> None:
        document["problem"]["job"]["limits"]["allow_inexact"] = False
        document["problem_hash"] = ""

    assert check_file(edited(written(kind), tmp_path, lambda _: None)).error == ""
    file = edited(written(kind), tmp_path, forbid)
    (found,) = check_file(file).problems
    assert found.key == "job.limits.allow_inexact"
    assert "its job does not allow it" in found.message
    with pytest.raises(PlanError, match="its job does not allow it"):
        read_plan(file)


def test_a_problem_that_forbids_what_the_plan_s_own_allows() -> None:
    problem = problem_of([3.0, 3.0])
    plan = plan_of(problem)
    limits = msgspec.structs.replace(problem.job.limits, allow_inexact=False)
    strict = msgspec.structs.replace(
        problem, job=msgspec.structs.replace(problem.job, limits=limits)
    )
    validate(plan, problem)
    with pytest.raises(PlanError, match="its job does not allow it"):
        validate(plan, strict)


# -- edited files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("ssp", "slack", "x"), ("ssp", "slack", -5), ("ssp", "slack", 1.5),
        ("late", "tau", 1.5), ("late", "tau", 0), ("late", "tau", "x"),
        ("server", "variant", "foo"), ("server", "reads", "foo"), ("server", "stream", "banana"),
        ("server", "shards", 0), ("server", "foo", 1),
        ("local", "inner", 0), ("local", "inner", -1), ("local", "overlap", "maybe"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be(kind: str, name: str, value: Any, tmp_path: Path) -> None:
    file = edited(written(kind), tmp_path, lambda d: call_of(d)["args"].update({name: value}))
    (found,) = check_file(file).problems
    assert found.key.endswith(f".{name}") and found.message.startswith("the lowering pass")
    with pytest.raises(PlanError):
        read_plan(file)


@pytest.mark.parametrize("kind", ["server", "late", "local"])
def test_the_pass_twice(kind: str, tmp_path: Path) -> None:
    file = edited(written(kind), tmp_path, lambda d: d["lowering"].append(call_of(d)))
    (found,) = check_file(file).problems
    assert found.key == "lowering"


@pytest.mark.parametrize(
    ("kind", "amount"),
    [
        ("server", "update0"), ("server", "gradient0"), ("server", "parameters0"),
        ("server", "request"), ("local", "way0"), ("local", "exchange0"), ("local", "outer0"),
    ],
)  # fmt: skip
def test_a_missing_amount(kind: str, amount: str, tmp_path: Path) -> None:
    file = edited(written(kind), tmp_path, lambda d: d["amounts"].pop(amount))
    (found,) = check_file(file).problems
    assert found.key == f"amounts.{amount}"


def test_a_plan_without_any_amounts_may_have_stated_times() -> None:
    validate(msgspec.structs.replace(plan_of(problem_of([3.0, 3.0])), amounts={}))


# -- knobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"tau": -4}, "tau = -4 is for an all-reduce"),
        ({"tau": 1}, "tau = 1 is for an all-reduce"),
        ({"bound": 3}, "bound = 3 says nothing to the rule constant"),
        ({"rule": "scaled", "bound": 1}, "bound = 1 says nothing to the rule scaled"),
        ({"rule": "ssp", "bound": -1}, "at least 0 updates"),
        ({"variant": "allreduce", "tau": -1}, "at least 0 steps"),
        ({"variant": "allreduce", "tau": 2, "place": "chip"}, "place = chip is for servers"),
        ({"variant": "allreduce", "tau": 2, "at": (0,)}, "at = .* is for servers"),
        ({"variant": "allreduce", "shards": 5}, "shards = 5 is for servers"),
        ({"variant": "allreduce", "tau": 2, "current": True}, "current = True is for servers"),
        ({"variant": "allreduce", "rule": "drop", "bound": -1}, "at least 0 updates"),
        ({"variant": "allreduce", "tau": 2, "rule": "capped", "bound": -5}, "at least 0 updates"),
        ({"variant": "allreduce", "tau": 1, "rule": "drop", "bound": 0}, "drops every gradient"),
        ({"variant": "allreduce", "tau": 3, "rule": "capped", "bound": 2}, "less than the delay"),
        ({"variant": "allreduce", "rule": "scaled"}, "rule = scaled is for late gradients"),
        ({"variant": "allreduce", "tau": 2, "rule": "ssp"}, "ssp is for servers"),
        ({"place": "chip", "at": (0, 3)}, "2 chips are named for 1 servers"),
    ],
)
def test_knobs_that_nobody_hears(knobs: dict[str, Any], message: str) -> None:
    problem = problem_of([3.0, 3.0, 3.0], batch=2)
    with pytest.raises(InputError, match=message):
        plan_of(problem, chips=(1, 2), **knobs)


@pytest.mark.parametrize("tau", [1, 2])
def test_a_bound_at_the_delay_is_heard(tau: int) -> None:
    problem = problem_of([3.0, 3.0])
    plan = plan_of(problem, variant="allreduce", tau=tau, rule="drop", bound=tau)
    assert simulate(plan, problem, steps=2).makespan > 0
    knobs = DelayedKnobs(tau=tau, rule="drop", bound=tau)
    assert rule_of(knobs, 0.1).drop_above == tau
