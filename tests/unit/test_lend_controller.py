"""The controller of lent experts: which step a search serves, and what its row amounts to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strategies.expert.controllers import lend_experts
from strategies.expert.layer_cost import costs_to_plain, released
from strategies.expert.lending import static

HOT = [[400, 400], [0, 0], [0, 20], [0, 20]]
COLD = [[20, 0], [20, 0], [0, 0], [400, 400]]


def row(counts: Any, before: dict[str, Any], **how: Any) -> dict[str, Any]:
    given = {
        "balancer": "pro-prophet", "options": {"alpha": 0.0}, "budget": 1, "period": 1,
        "fresh": False, "tokens": 420.0, "state_bytes": 0.0, "layers": {"l0": 0},
        "costs": [costs_to_plain(released(64, 128, 2))],
    }  # fmt: skip
    return lend_experts({"routing": {"l0": counts}, "lent@1": before}, **(given | how))


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
    how: dict[str, Any] = {"balancer": "eplb", "options": {}, "budget": 0, "state_bytes": 1e3}
    both = [[200, 200], [200, 200], [10, 10], [10, 10]]
    first = row(both, {}, **how)
    then = row(both, first, **how)
    changed = np.array(first["l0.homes"])
    assert changed.sum() == 2 and then["l0.home"] != static(4, 2).home.tolist()
    each = released(64, 128, 2).param_bytes + 1e3
    assert np.array(then["l0.move"]) == pytest.approx(changed * each)
    assert then["l0.load"] == pytest.approx([1.0, 1.0])
    assert np.sum(row(both, then, **how)["l0.move"]) == 0.0


def test_no_tokens_are_no_load() -> None:
    none = row(np.zeros((4, 2), int).tolist(), {})
    assert none["l0.load"] == [0.0, 0.0] and np.sum(none["l0.dispatch"]) == 0.0
