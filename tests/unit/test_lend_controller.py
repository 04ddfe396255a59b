"""The controller of lent experts: which step a search serves, and what its row amounts to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.errors import PlanError
from strategies.expert.controllers import lend_experts
from strategies.expert.layer_cost import costs_to_plain, released
from strategies.expert.lending import static

HOT = [[400, 400], [0, 0], [0, 20], [0, 20]]
COLD = [[20, 0], [20, 0], [0, 0], [400, 400]]


LAYER = costs_to_plain(released(64, 128, 2))
GIVEN: dict[str, Any] = {
    "balancer": "pro-prophet", "options": {"alpha": 0.0}, "budget": 1, "period": 1,
    "fresh": False, "tokens": 420.0, "state_bytes": 0.0, "layers": {"l0": 0}, "costs": [LAYER],
}  # fmt: skip


def row(counts: Any, before: dict[str, Any], **how: Any) -> dict[str, Any]:
    return lend_experts({"routing": {"l0": counts}, "lent@1": before}, **(GIVEN | how))


def test_a_search_lends_for_the_next_step() -> None:
    """Expert 0 overloads device 0; from step 1 on device 1 computes its own tokens of it."""
    first = row(HOT, {})
    assert first["searched"] == 1.0
    assert np.sum(first["l0.move"]) == 0.0
    assert first["l0.load"] == pytest.approx([800 / 420, 40 / 420])
    then = row(HOT, first)
    assert then["l0.load"] == pytest.approx([400 / 420, 440 / 420])
    costs = released(64, 128, 2)
    assert then["l0.move"] == [[0.0, costs.param_bytes], [0.0, 0.0]]
    assert then["l0.reduce"] == [[0.0, 0.0], [costs.gradient_bytes, 0.0]]
    halves = np.array(then["l0.move.0"]) + np.array(then["l0.move.1"])
    assert halves == pytest.approx(np.array(then["l0.move"]))
    # Bytes leave as many tokens as are computed elsewhere, and come back the same way.
    assert np.array(then["l0.dispatch"]) == pytest.approx(np.array(then["l0.combine"]).T)
    tokens = np.array(first["l0.dispatch"]) / costs.token_bytes
    assert tokens[1, 0] == pytest.approx(400) and np.sum(then["l0.dispatch"]) == 0.0
    # Another step's counts meet what was planned from these.
    late = row(COLD, first)
    assert late["l0.load"] == pytest.approx([40 / 420, 800 / 420])


def test_between_searches_a_lending_stays() -> None:
    first = row(HOT, {}, period=3)
    second = row(COLD, first, period=3)
    third = row(COLD, second, period=3)
    fourth = row(COLD, third, period=3)
    assert [r["searched"] for r in (first, second, third, fourth)] == [1.0, 0.0, 0.0, 1.0]
    assert second["l0.hosts"] == third["l0.hosts"] == first["l0.hosts"] != fourth["l0.hosts"]


def test_a_fresh_search_serves_its_own_step() -> None:
    assert row(HOT, {}, fresh=True)["l0.load"] == pytest.approx([400 / 420, 440 / 420])
    late = row(COLD, row(HOT, {}, fresh=True), fresh=True)
    assert late["l0.load"] == pytest.approx([440 / 420, 400 / 420])


def test_an_expert_that_moves_house_takes_its_states_along() -> None:
    """As a standing placement would: once, with the step that first uses it."""
    how: dict[str, Any] = {"balancer": "eplb", "options": {}, "budget": 1, "state_bytes": 1e3}
    both = [[200, 200], [200, 200], [10, 10], [10, 10]]
    first = row(both, {}, **how)
    then = row(both, first, **how)
    changed = np.array(first["l0.homes"])
    assert changed.sum() == 2 and then["l0.home"] != static(4, 2).home.tolist()
    each = released(64, 128, 2).param_bytes + 1e3
    assert np.sum(then["l0.hosts"]) == 4  # replicas on one device are one
    assert np.array(then["l0.move"]) == pytest.approx(changed * each)
    assert then["l0.load"] == pytest.approx([1.0, 1.0])
    assert np.sum(row(both, then, **how)["l0.move"]) == 0.0


def test_no_tokens_are_no_load() -> None:
    none = row(np.zeros((4, 2), int).tolist(), {})
    assert none["l0.load"] == [0.0, 0.0] and np.sum(none["l0.dispatch"]) == 0.0


# -- plans that a person has edited ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "key", "found"),
    [
        ({"balancer": "magic"}, "parameters.balancer", "magic"),
        ({"balancer": 3}, "parameters.balancer", "3"),
        ({"balancer": "eplb", "options": {}, "budget": 0}, "parameters.budget", "0"),
        ({"budget": -3}, "parameters.budget", "-3"),
        ({"budget": 1.5}, "parameters.budget", "1.5"),
        ({"period": 0}, "parameters.period", "0"),
        ({"fresh": "yes"}, "parameters.fresh", "'yes'"),
        ({"tokens": 0.0}, "parameters.tokens", "0.0"),
        ({"state_bytes": -1.0}, "parameters.state_bytes", "-1.0"),
        ({"options": {"bogus": 1}}, "parameters.options.bogus", "1"),
        ({"options": {"alpha": "x"}}, "parameters.options.alpha", "'x'"),
        ({"options": 3}, "parameters.options", "3"),
        ({"balancer": "spread", "options": {"alpha": 1.0}}, "parameters.options.alpha", "1.0"),
        ({"balancer": "none", "options": {"alpha": 1.0}}, "parameters.options.alpha", "1.0"),
        ({"layers": {"l0": 7}}, "parameters.layers.l0", "7"),
        ({"layers": {"l0": -1}}, "parameters.layers", "{'l0': -1}"),
        ({"layers": {"l9": 0}}, "tables.routing.l9", "l0"),
        ({"costs": []}, "parameters.layers.l0", "0"),
        ({"costs": [3]}, "parameters.costs.0", "[3]"),
        ({"costs": [{}]}, "parameters.costs.0", "{}"),
        ({"costs": [LAYER | {"token_bytes": -1.0}]}, "parameters.costs.0", "{"),
        ({"costs": [LAYER | {"links": LAYER["links"] | {"trans": 0.0}}]}, "costs.0", "{"),
        ({"costs": [LAYER | {"links": LAYER["links"] | {"exchange": []}}]}, "costs.0", "{"),
        ({"experts": 3, "devices": 2}, "tables.routing.l0", "4 x 2"),
        ({"experts": 4, "devices": 4}, "tables.routing.l0", "4 x 2"),
    ],
)
def test_parameters_that_no_plan_of_ours_has_are_refused_by_place(
    how: dict[str, Any], key: str, found: str
) -> None:
    with pytest.raises(PlanError) as caught:
        row(HOT, {}, **how)
    assert caught.value.key.endswith(key) and caught.value.key.startswith("tables.")
    assert caught.value.found.startswith(found) and caught.value.expected


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (3.0, "another shape"),
        ([1, 2, 3, 4], "another shape"),
        ([[[1]]], "another shape"),
        ([[1.5, 2], [3, 4]], "whole numbers"),
        ([[2**52, 2**52], [3, 4]], "this many tokens"),
    ],
)
def test_counts_that_no_router_has_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        row(counts, {})
    assert caught.value.key == "tables.routing.l0" and caught.value.found and caught.value.expected
    whole = [[float(n) for n in counts_of] for counts_of in HOT]
    assert row(whole, {}) == row(HOT, {})


def test_a_row_before_that_is_none_of_ours_is_refused() -> None:
    good = row(HOT, {})
    del_hosts = {k: v for k, v in good.items() if k != "l0.hosts"}
    odd: list[dict[str, Any]] = [
        {"turn": 0}, {"x": 1.0}, good | {"turn": [1]}, good | {"turn": 0.5}, del_hosts,
        good | {"l0.hosts": [[1]]}, good | {"l0.home": [9, 0, 0, 0]}, good | {"l0.split": 9},
        good | {"l0.homes": 0.0}, good | {"l0.slack": [1.0, 2.0]},
    ]  # fmt: skip
    for before in odd:
        with pytest.raises(PlanError) as caught:
            row(HOT, before)
        assert caught.value.key.startswith("tables.lent.initial") and caught.value.expected
    with pytest.raises(PlanError, match="reads two tables"):
        lend_experts({"lent@1": {}}, **GIVEN)
