"""Every registered strategy passes the shipped contract; composition refuses clearly."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest

from sim.errors import InputError, PlanError, UsageError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.uniform import uniform
from sim.problem import Problem, load_problem
from strategies.base import Space, Strategy, changed_fields, divisors, fill
from strategies.compose import compose
from strategies.data.zero import ZeroKnobs
from strategies.offload.autohete import AutoHeteKnobs
from strategies.registry import get, names, register
from strategies.testing import StrategyContract, lower_bound
from tests.unit.offload_cases import gpt

MOE = {
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@cache
def small() -> Problem:
    """Mixed accelerators, a mixture of experts, and few enough microbatches to be quick."""
    job = {"global_batch": 16, "sequence_length": 256, "dtype": "fp16"}
    return load_problem("v100_t4", MOE, job)


@pytest.mark.parametrize("strategy", names(), indirect=True)
class TestRegistered(StrategyContract):
    @pytest.fixture
    def strategy(self, request: pytest.FixtureRequest) -> Strategy[Any]:
        return get(request.param)

    @pytest.fixture
    def problem(self) -> Problem:
        return small()


def test_all_axes_are_covered() -> None:
    assert {get(n).axis for n in names()} >= {
        "data",
        "tensor",
        "pipeline",
        "expert",
        "recompute",
        "partition",
    }
    assert "1f1b" in names("pipeline") and "1f1b" not in names("data")


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown strategy") as caught:
        get("interleave")
    assert caught.value.expected == "interleaved"


class Impostor:
    """Owns one knob and changes another."""

    name, axis, paper = "impostor", "data", "none"
    owns = frozenset({"data.zero"})
    knobs = type(get("zero").knobs())

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[Any]:
        return Space((self.knobs(),))

    def apply(self, problem: Problem, draft: PlanDraft, knobs: Any) -> PlanDraft:
        return fill(draft, self.name, knobs, barrier=False)


class Greedy(Impostor):
    name = "ddp"


class Unreal(Impostor):
    name = "unreal"
    owns = frozenset({"data.zeros"})


def test_registration_refuses_taken_names_and_unknown_fields() -> None:
    assert register(get("ddp")) is get("ddp")
    with pytest.raises(ValueError, match="already registered"):
        register(Greedy())
    with pytest.raises(ValueError, match=r"data\.zeros"):
        register(Unreal())


BASE: list[tuple[str, dict[str, Any]]] = [
    ("megatron", {"tp": 2}),
    ("1f1b", {"stages": 4}),
    ("ddp", {"microbatch": 2}),
    ("partition", {}),
]


def test_order_of_choices_does_not_matter() -> None:
    drafts = [compose(small(), choices) for choices in (BASE, BASE[::-1])]
    assert lower(small(), drafts[0]) == lower(small(), drafts[1])


def test_two_owners_of_one_knob_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"1f1b and gpipe both set cells\.replica"):
        compose(small(), [*BASE, ("gpipe", {"stages": 4})])


@pytest.mark.parametrize(
    ("left_out", "needed"), [("megatron", "cells.chips"), ("ddp", "data.microbatches")]
)
def test_an_incomplete_draft_says_what_to_add(left_out: str, needed: str) -> None:
    choices = [c for c in BASE if c[0] != left_out]
    with pytest.raises(UsageError, match=rf"no strategy sets {needed}; add .*{left_out}"):
        compose(small(), choices)


def test_a_strategy_that_changes_what_it_does_not_own_is_refused() -> None:
    with pytest.raises(PlanError, match="does not own") as caught:
        compose(small(), [*BASE, (Impostor(), {})])
    assert caught.value.found == "barrier"


@pytest.mark.parametrize(
    ("name", "knobs", "key"),
    [
        ("1f1b", {"stages": "four"}, "1f1b.stages"),
        ("1f1b", {"stage": 4}, "1f1b.stage"),
        ("1f1b", 4, "1f1b"),
        ("1f1b", ZeroKnobs(), "1f1b"),
        ("zero", {"stage": True}, "zero.stage"),
        ("zero", {"stage": 2.0}, "zero.stage"),
        ("zero", ZeroKnobs(stage=7), "zero.stage"),  # type: ignore[arg-type]
        ("zero", ZeroKnobs(buffers=1.5), "zero.buffers"),  # type: ignore[arg-type]
        ("offload", {"optimiser": 2}, "offload.optimiser"),
        ("offload", AutoHeteKnobs(optimizer="3"), "offload.optimizer"),  # type: ignore[arg-type]
        ("offload", AutoHeteKnobs(optimizer=None), "offload.optimizer"),  # type: ignore[arg-type]
        ("offload", AutoHeteKnobs(optimizer=1.5), "offload.optimizer"),  # type: ignore[arg-type]
        ("offload", AutoHeteKnobs(clipping="foo"), "offload.clipping"),  # type: ignore[arg-type]
        ("offload", AutoHeteKnobs(stages=((1, 1),)), "offload.stages[0]"),  # type: ignore[arg-type]
    ],
)
def test_knobs_of_another_shape_are_refused(name: str, knobs: Any, key: str) -> None:
    with pytest.raises(InputError, match=f"knobs of strategy {name}") as caught:
        compose(small(), [(name, knobs)], complete=False)
    assert caught.value.key == key and caught.value.found and caught.value.expected


@pytest.mark.parametrize("name", names())
def test_every_strategy_refuses_a_misspelt_knob(name: str) -> None:
    with pytest.raises(InputError, match="there is no such_knob") as caught:
        compose(small(), [(name, {"such_knob": 1})], complete=False)
    assert all(f in caught.value.expected for f in get(name).knobs.__struct_fields__)


def test_a_strategy_with_a_pass_applies_once() -> None:
    problem, draft = gpt(80.0)
    once = compose(problem, [("offload", {"optimizer": 1})], start=draft)
    with pytest.raises(InputError, match="went through strategy offload already"):
        compose(problem, [("offload", {"optimizer": 1})], start=once)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"megatron": {"tp": 3}}, "chips of every node"),
        ({"megatron": {"tp": 8}}, "chips of every node"),
        ({"megatron": {"tp": 0}}, "must be positive"),
        ({"megatron": {"chips": (0, 0)}}, "distinct chips"),
        ({"megatron": {"chips": (0, 99)}}, "distinct chips"),
        ({"1f1b": {"stages": 3}}, "do not make this pipeline"),
        ({"1f1b": {"stages": 16}}, "do not make this pipeline"),
        ({"ddp": {"microbatch": 3}}, "not a multiple"),
        ({"ddp": {"microbatch": 0}}, "at least one sequence"),
        ({"ddp": {"microbatches": (9, 8)}}, "add up to the global batch"),
        ({"partition": {"layers": (3, 3, 3)}}, "place every layer"),
        ({"partition": {"at": "block"}}, "counts layers"),
        ({"recompute": {"modes": ("full", "none")}}, "one per stage"),
        ({"expert": {"ep": 3}}, "ep must divide"),
    ],
)
def test_illegal_knobs_are_refused(change: dict[str, dict[str, Any]], message: str) -> None:
    choices = dict(BASE) | change
    with pytest.raises(InputError, match=message) as caught:
        compose(small(), list(choices.items()))
    assert caught.value.expected


def test_uneven_replicas() -> None:
    """Microbatches of each replica may differ, as long as they add up."""
    draft = compose(small(), [*BASE[:2], ("ddp", {"microbatches": (10, 6)}), BASE[3]])
    assert lower(small(), draft).placement.microbatches == (10, 6)


def test_composition_equals_the_uniform_draft() -> None:
    given = small()
    knobs = {"recompute": {"modes": ("full",)}, "zero": {}, "expert": {"ep": 2}, "sequence": {}}
    ours = compose(given, [*BASE, *knobs.items()])
    mesh = uniform(
        given.model,
        given.job.global_batch,
        range(16),
        pp=4,
        tp=2,
        ep=2,
        microbatch=2,
        recompute="full",
        zero=1,
        sequence_parallel=True,
    )
    plans = [msgspec.structs.replace(lower(given, d), name="") for d in (ours, mesh)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("name", "pin", "pinned"),
    [
        ("megatron", {"tp": 2}, {2}),
        ("1f1b", {"pp": 4}, {4}),
        ("gpipe", {"schedule": "1f1b"}, set()),
        ("ddp", {"microbatch": 2}, {2}),
        ("zero", {"zero": 0}, {0}),
        ("recompute", {"recompute": "full"}, {("full",)}),
        ("expert", {"ep": 3}, set()),
    ],
)
def test_pins_of_the_job_prune_the_space(name: str, pin: dict[str, Any], pinned: set[Any]) -> None:
    given = small()
    microbatch = pin.pop("microbatch", None)
    pins = msgspec.structs.replace(given.job.pins, microbatch=microbatch, **pin)
    job = msgspec.structs.replace(given.job, pins=pins)
    draft = compose(given, BASE[:2], complete=False)
    space = get(name).space(msgspec.structs.replace(given, job=job), draft)
    first = get(name).knobs.__struct_fields__[0]
    assert {getattr(k, first) for k in space} == pinned
    assert space.values or "pin" in space.reason


def test_changed_fields() -> None:
    given = small()
    before = compose(given, BASE[:1], complete=False)
    after = compose(given, BASE[1:2], start=before)
    assert changed_fields(before, after) == {"cells.stage", "cells.replica"}
    assert changed_fields(after, after) == frozenset()


@pytest.mark.parametrize("n", [1, 2, 12, 36, 97, 360])
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_a_space_without_values_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="reason"):
        Space(())


def test_lower_bound_by_hand() -> None:
    from tests.validation.exercise import machine, model, problem

    given = problem(machine(1, 4), model(8), 6)
    choices = [("megatron", {}), ("1f1b", {"stages": 4}), ("ddp", {}), ("partition", {})]
    assert lower_bound(given, compose(given, choices)) == pytest.approx(6 * 2 * 0.03)
    few = problem(machine(1, 4), model(8), 1)
    assert lower_bound(few, compose(few, choices)) == pytest.approx(8 * 0.03)
