"""Late amounts: tables whose values are known only in the step, and what writes them.

Structure is static: which ops exist never depends on a table. A table is written down in the plan
(``file``), made from the run's seed (``generator``, see sim.plan.generators) or worked out from
other tables (``controller``). A controller is a registered pure
function of the tables it reads, so its result for step k depends on no simulated time and can be
computed when the run is laid out; the op that runs it (HOST) has a cost of its own. An input
``name@d`` is the row of d steps before; so a controller can go on from a row of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sim.errors import PlanError
from sim.plan.generators import generated_rows
from sim.plan.numbers import check_values
from sim.plan.op import MAX_DIGITS, Ref
from sim.plan.plan import Table

__all__ = ["CONTROLLERS", "Resolved", "controller", "resolve_tables", "unsettled_steps"]

Values = dict[str, Any]
Controller = Callable[..., Values]

CONTROLLERS: dict[str, Controller] = {}


def controller(name: str) -> Callable[[Controller], Controller]:
    """Register a pure function (input -> its row, **parameters) -> row under a name.

    An input is spelt as in the table; of the steps before the first its row is the table's
    ``initial``.

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
    read = {_source(text)[0] for t in tables.values() for text in t.inputs}
    for name, table in tables.items():
        _check_origin(name, table)
        for key, value in table.initial.items():
            check_values(name, key, [value], name not in read)
        for key, values in table.values.items():
            check_values(name, key, values, name not in read)
    rows: dict[str, list[Values]] = {}
    waiting = dict(tables)
    while waiting:
        ready = [n for n, t in waiting.items() if _sources(n, t) <= set(rows)]
        if not ready:
            raise PlanError(
                "tables read one another in a circle, or an unknown one",
                key="tables",
                found=", ".join(sorted(waiting)),
            )
        for name in ready:
            table = waiting.pop(name)
            rows[name] = _rows(name, tables, rows, steps, seed)
            for row in rows[name] if table.origin != "file" else ():
                for key, value in row.items():
                    check_values(name, key, [value], name not in read)
    return Resolved(rows, {n: t.initial for n, t in tables.items()})


def unsettled_steps(tables: Mapping[str, Table]) -> int:
    """Steps at the beginning of a run in which a controller has no row of the steps before yet.

    Experts are lent by the counts of the step before, so the first step of such a plan lends
    nothing and says little of those that follow.

    Args:
        tables: name -> table of a plan.
    """
    read = [_source(text) for table in tables.values() for text in table.inputs]
    return max([lag for name, lag in read if not tables[name].initial], default=0)


def _check_origin(name: str, table: Table) -> None:
    given = {
        "file": bool(table.values),
        "generator": bool(table.generator or (table.parameters and not table.controller)),
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


def _source(text: str) -> tuple[str, int]:
    """Table and lag of an input."""
    name, _, lag = text.partition("@")
    if lag and not (lag.isdigit() and len(lag) <= MAX_DIGITS):
        raise PlanError(
            "an input of a controller is a table, or a row of it some steps before",
            key="tables", found=text, expected=f"{name} or {name}@1",
        )  # fmt: skip
    return name, int(lag or 0)


def _sources(name: str, table: Table) -> set[str]:
    """Tables that must be known before this one; its own earlier rows always are."""
    return {source for source, lag in map(_source, table.inputs) if source != name or not lag}


def _rows(
    name: str, tables: dict[str, Table], rows: dict[str, list[Values]], steps: int, seed: int
) -> list[Values]:
    table = tables[name]
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
    function, found = CONTROLLERS[table.controller], list[Values]()
    known = {**rows, name: found}
    inputs = [(text, *_source(text)) for text in table.inputs]
    for step in range(steps):
        read = {
            text: known[source][step - lag] if step >= lag else tables[source].initial
            for text, source, lag in inputs
        }
        found.append(_called(name, table, function, read))
    return found


def _called(name: str, table: Table, function: Controller, read: dict[str, Values]) -> Values:
    if not table.parameters:
        return function(read)
    try:
        inspect.signature(function).bind(read, **table.parameters)
    except TypeError as error:
        raise PlanError(
            f"controller {table.controller} refuses its parameters: {error}",
            key=f"tables.{name}.parameters", found=" ".join(sorted(table.parameters)),
            expected=str(inspect.signature(function)),
        ) from error  # fmt: skip
    return function(read, **table.parameters)
