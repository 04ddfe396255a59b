"""Three integers for every pipeline position, counted over its own layers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sim.cost.ledger import peak_memory
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.validate import validate
from sim.problem import Problem
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs, own_layers
from strategies.offload.policies import outcome_of
from tests.unit.offload_cases import two


def plan_of(given: tuple[Problem, PlanDraft], **knobs: Any) -> Plan:
    problem, start = given
    return lower(problem, compose(problem, [("offload", AutoHeteKnobs(**knobs))], start=start))


def test_integers_count_over_a_positions_own_layers() -> None:
    given = two(first=3)
    assert own_layers(*given) == (3, 1)
    plan = plan_of(given, stages=((2, 1, 1), (0, 1, 0)))
    validate(plan)
    found = {s.name: (s.recompute, s.offload) for s in plan.placement.segments}
    assert found == {
        "embed": ("none", ()),
        "l0": ("full", ("parameters",)),
        "l1": ("full", ()),
        "l2": ("none", ("optimizer",)),
        "l3": ("none", ("parameters",)),
        "head": ("none", ()),
    }
    assert [c.recompute for c in plan.placement.cells] == ["full", "none"]


@pytest.mark.parametrize("whole", [(0, 0, 0), (4, 4, 4), (3, 2, 1), (1, 3, 3)])
def test_the_models_integers_are_integers_of_positions(whole: tuple[int, int, int]) -> None:
    given = two()
    c, p, o = whole
    split = ((min(c, 2), min(p, 2), max(o - 2, 0)), (max(c - 2, 0), max(p - 2, 0), min(o, 2)))
    one = plan_of(given, checkpointed=c, parameters=p, optimizer=o)
    other = plan_of(given, stages=split)
    assert one.placement == other.placement and one.lowering == other.lowering
    assert one.amounts == other.amounts


def test_a_small_chip_offloads_and_its_neighbour_does_not() -> None:
    """Uneven layers, unlike chips: nothing fits until the small chip's own layers leave."""
    given = two(memory=(2.4, 80.0), first=1)
    assert outcome_of(*given, AutoHeteKnobs()).short == "accelerator memory"
    found = outcome_of(*given, AutoHeteKnobs(stages=((1, 0, 1), (0, 0, 0))))
    assert not found.short and found.step_s > 0
    plan = plan_of(given, stages=((1, 0, 1), (0, 0, 0)))
    ledgers = list(peak_memory(plan, given[0]).values())
    rest = list(peak_memory(plan_of(given), given[0]).values())
    assert ledgers[1].terms == rest[1].terms
    assert ledgers[0].peak_bytes < rest[0].peak_bytes


def test_only_positions_that_offload_need_a_link_to_the_host() -> None:
    given = two(pcie=(True, False))
    assert outcome_of(*given, AutoHeteKnobs(stages=((0, 0, 2), (1, 0, 0)))).step_s > 0
    for knobs in ({"stages": ((0, 0, 0), (0, 0, 1))}, {"optimizer": 4}):
        with pytest.raises(InputError, match="no link to host memory"):
            plan_of(given, **knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"stages": ((0, 0, 0),)},
        {"stages": ((0, 0, 0), (0, 0, 3))},
        {"stages": ((-1, 0, 0), (0, 0, 0))},
        {"stages": ((0, 0, 0), (0, 0, 0)), "optimizer": 1},
    ],
)
def test_integers_that_do_not_match_the_positions_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"offload\.stages"):
        plan_of(two(), **knobs)


def test_zero_with_parameters_of_one_position_is_refused() -> None:
    problem, start = two(replicas=2)
    start = msgspec.structs.replace(start, data=msgspec.structs.replace(start.data, zero=1))
    with pytest.raises(InputError, match="ZeRO"):
        plan_of((problem, start), stages=((0, 0, 0), (0, 1, 0)))
