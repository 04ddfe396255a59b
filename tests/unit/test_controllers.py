"""Controllers read rows of steps before, rows of their own and parameters."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import PlanError
from sim.plan.plan import Table
from sim.plan.tables import controller, resolve_tables


@controller("test-sum-so-far")
def _sum_so_far(read: dict[str, dict[str, Any]], *, factor: float = 1.0) -> dict[str, Any]:
    before = read["sum@1"].get("x", 0.0)
    return {"x": before + factor * read["given@2"].get("x", 0.0)}


def tables(*inputs: str, **fields: Any) -> dict[str, Table]:
    found = Table(origin="controller", controller="test-sum-so-far", inputs=inputs, **fields)
    return {"given": Table(values={"x": [1.0, 2.0, 4.0, 8.0]}, initial={"x": 0.5}), "sum": found}


def test_a_controller_goes_on_from_rows_before() -> None:
    """Its own of one step before, another's of two; before the first what is initial."""
    both = ("given@2", "sum@1")
    rows = resolve_tables(tables(*both), 5).rows["sum"]
    assert [row["x"] for row in rows] == [0.5, 1.0, 2.0, 4.0, 8.0]
    rows = resolve_tables(tables(*both, parameters={"factor": 2.0}, initial={"x": 10.0}), 3).rows
    assert [row["x"] for row in rows["sum"]] == [11.0, 12.0, 14.0]


@pytest.mark.parametrize(
    ("inputs", "fields", "message"),
    [
        (("given@2", "sum"), {}, "in a circle"),
        (("given@2", "sum@0"), {}, "in a circle"),
        (("given@2", "other@1"), {}, "in a circle, or an unknown one"),
        (("given@x", "sum@1"), {}, "some steps before"),
        (("given@1111111111", "sum@1"), {}, "some steps before"),
        (("given@2", "sum@1"), {"parameters": {"factr": 2}}, "refuses its parameters"),
        (("given@2", "sum@1"), {"generator": "lognormal"}, "belongs to origin generator"),
    ],
)
def test_what_no_controller_can_read_is_refused(
    inputs: tuple[str, ...], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        resolve_tables(tables(*inputs, **fields), 2)


def test_only_tables_that_controllers_read_hold_matrices_of_any_sides() -> None:
    wide = Table(values={"x": [[[1.0, 2.0]]]})
    with pytest.raises(PlanError, match="square matrix"):
        resolve_tables({"given": wide}, 1)
    alone = {"given": wide, "sum": tables("given", "given@2", "sum@1")["sum"]}
    with pytest.raises(TypeError):
        resolve_tables(alone, 3)  # it is read: this controller adds numbers
