"""Plans of lent experts with one value changed anywhere in their tables: run or refused by name."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import PlanError
from sim.plan.plan import Table
from sim.plan.tables import resolve_tables
from tests.unit.test_balanced import planned

GONE = "gone"
VALUES: list[Any] = [
    GONE, None, True, 0, -1, 1, 7, 10**30, 0.0, -1.0, 0.5, 1e12, 1e300, "", "x", "eplb", "chain",
    [], [1], [[1]], [[1.5, 2.0]], [1, [2]], {}, {"x": 1},
]  # fmt: skip


@cache
def tables(balancer: str) -> dict[str, Any]:
    """Of a plan with one layer that is looked at, and a trace of one step."""
    found: dict[str, Any] = msgspec.to_builtins(planned(balancer=balancer).tables)
    first = resolve_tables(planned(balancer=balancer).tables, 1).rows["routing"][0]
    found["routing"] = {"values": {"l0": [first["l0"]]}}
    found["lent"]["parameters"]["layers"] = {"l0": found["lent"]["parameters"]["layers"]["l0"]}
    return found


def changed(given: dict[str, Any], start: int, turns: list[int], value: Any) -> dict[str, Any]:
    """The same with another value, as deep below one of the starts as the turns lead."""
    found = copy.deepcopy(given)
    lent = found["lent"]["parameters"]
    cost = lent["costs"][lent["layers"]["l0"]]
    at: Any = (found, lent, cost, cost["links"], cost["experts"])[start]
    for n, turn in enumerate(turns):
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = keys[turn % len(keys)]
        inner = at[key]
        if n + 1 < len(turns) and isinstance(inner, dict | list) and inner:
            at = inner
            continue
        if value == GONE:
            del at[key]
        else:
            at[key] = value
        break
    return found


@given(
    st.sampled_from(["spread", "pro-prophet", "eplb"]),
    st.integers(0, 4),
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.sampled_from(VALUES),
)
@settings(max_examples=250, deadline=None)
def test_a_changed_table_runs_or_is_refused_by_its_place(
    balancer: str, start: int, turns: list[int], value: Any
) -> None:
    raw = changed(tables(balancer), start, turns, value)
    try:
        given_tables = msgspec.convert(raw, dict[str, Table])
    except msgspec.ValidationError:
        return  # refused where the file is read
    try:
        resolve_tables(given_tables, 2)
    except PlanError as error:
        assert error.key.startswith("tables") and error.message
