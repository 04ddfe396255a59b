"""Late amounts: tables whose values are known only in the step, and what writes them.

Structure is static: which ops exist never depends on a table. A table is written down in the plan
(``file``), made from the run's seed (``generator``, see sim.plan.generators) or worked out from
other tables (``controller``). A controller is a registered pure
function of the tables it reads, so its result for step k depends on no simulated time and can be
computed when the run is laid out; the op that runs it (HOST) has a cost of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.errors import PlanError
from sim.plan.generators import generated_rows
from sim.plan.numbers import check_values
from sim.plan.op import Ref
from sim.plan.plan import Table

__all__ = ["CONTROLLERS", "Resolved", "controller", "resolve_tables"]

Values = dict[str, Any]
Controller = Callable[[dict[str, Values]], Values]

CONTROLLERS: dict[str, Controller] = {}


def controller(name: str) -> Callable[[Controller], Controller]:
    """Register a pure function (tables read -> key -> value) under a name.

    Raises:
        ValueError: the name is taken.
    """

    def add(function: Controller) -> Controller:
        if CONTROLLERS.get(name, function) is not function:
            raise ValueError(f"controller {name} is already registered")
        CONTROLLERS[name] = function
        return function

    return add


class Resolved:
    """Values of all tables over the steps of one run.

    Attributes:
        rows: table -> step -> key -> value. initial: table -> key -> value before step 0.
    """

    def __init__(self, rows: dict[str, list[Values]], initial: dict[str, Values]) -> None:
        self.rows, self.initial = rows, initial

    def value(self, ref: Ref, step: int) -> Any:
        """What ``ref`` is worth in ``step``: a number, a vector over members, or a matrix.

        Raises:
            PlanError: the table or the key is unknown, or nothing was written before step 0.
        """
        if ref.table not in self.rows:
            raise PlanError(
                "a late amount names an unknown table",
                key="tables",
                found=ref.table,
                expected=" ".join(sorted(self.rows)) or "no table is declared",
            )
        at = step - ref.lag
        row = self.initial[ref.table] if at < 0 else self.rows[ref.table][at]
        if ref.key not in row:
            raise PlanError(
                f"table {ref.table} has no key for step {at}",
                key=f"tables.{ref.table}",
                found=ref.key,
                expected=" ".join(sorted(row)) or "an initial value",
            )
        return row[ref.key]


def resolve_tables(tables: dict[str, Table], steps: int, seed: int = 0) -> Resolved:
    """Values of every table for ``steps`` steps; controllers run in order of their inputs.

    Args:
        tables: name -> table. steps: number of steps. seed: of generated tables.

    Raises:
        PlanError: an origin is unknown or contradicts the table's other fields, a controller or
            generator is not registered, tables read one another in a circle, or a value is no
            amount.
    """
    for name, table in tables.items():
        _check_origin(name, table)
        for key, value in table.initial.items():
            check_values(name, key, [value])
        for key, values in table.values.items():
            check_values(name, key, values)
    rows: dict[str, list[Values]] = {}
    waiting = dict(tables)
    while waiting:
        ready = [n for n, t in waiting.items() if set(t.inputs) <= set(rows)]
        if not ready:
            raise PlanError(
                "tables read one another in a circle, or an unknown one",
                key="tables",
                found=", ".join(sorted(waiting)),
            )
        for name in ready:
            table = waiting.pop(name)
            rows[name] = _rows(name, table, rows, steps, seed)
            for row in rows[name] if table.origin != "file" else ():
                for key, value in row.items():
                    check_values(name, key, [value])
    return Resolved(rows, {n: t.initial for n, t in tables.items()})


def _check_origin(name: str, table: Table) -> None:
    given = {
        "file": bool(table.values),
        "generator": bool(table.generator or table.parameters),
        "controller": bool(table.controller or table.inputs),
    }
    if table.origin not in given:
        raise PlanError(
            "unknown origin of a table",
            key=f"tables.{name}.origin",
            found=table.origin,
            expected="one of " + " ".join(given),
        )
    odd = [origin for origin, there in given.items() if there and origin != table.origin]
    if odd:
        raise PlanError(
            f"a table of origin {table.origin} with what belongs to origin {odd[0]}",
            key=f"tables.{name}",
            found=odd[0],
            expected=f"origin {odd[0]}, or nothing of it",
        )


def _rows(
    name: str, table: Table, rows: dict[str, list[Values]], steps: int, seed: int
) -> list[Values]:
    if table.origin == "file":
        return [
            {k: v[min(s, len(v) - 1)] for k, v in table.values.items() if v} for s in range(steps)
        ]
    if table.origin == "generator":
        return generated_rows(name, table.generator, table.parameters, seed, steps)
    if table.controller not in CONTROLLERS:
        raise PlanError(
            "a controller of this plan is not installed",
            key=f"tables.{name}.controller",
            found=table.controller or "no name",
            expected=" ".join(sorted(CONTROLLERS)),
        )
    function = CONTROLLERS[table.controller]
    return [function({i: rows[i][s] for i in table.inputs}) for s in range(steps)]
