"""``--where``: which runs count, as ``column op value`` joined by ``and``."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from sim.errors import UsageError
from sim.fidelity.runs import MeasuredRun

__all__ = ["Condition", "parse_where", "selected"]

_TERM = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>|~)\s*(\"[^\"]*\"|'[^']*'|.+?)\s*\Z", re.DOTALL)
_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}
_HEAD = r"\s*\w+\s*(?:<=|>=|!=|==|=|<|>|~)"


class Condition(msgspec.Struct, frozen=True):
    """One term. Args: column: name. op: operator. value: right side, unquoted."""

    column: str
    op: str
    value: str


def parse_where(text: str, columns: tuple[str, ...]) -> tuple[Condition, ...]:
    """Read an expression.

    Operators: ``= == != < <= > >=`` and ``~`` (contains, any case). Text may be quoted, and must be
    where it holds ``and`` before something that looks like a further term.

    >>> parse_where("source = bloom and tp >= 4", ("source", "tp"))
    (Condition(column='source', op='=', value='bloom'), Condition(column='tp', op='>=', value='4'))

    Args:
        text: "" selects everything. columns: names that may be asked for.

    Raises:
        UsageError: no term, an unknown column, or an order asked of text.
    """
    if not text.strip():
        return ()
    found = []
    for part in _terms(text):
        match = _TERM.match(part)
        if match is None:
            raise UsageError(f"--where {text}: expected column op value, found {part.strip()!r}")
        column, op, value = match.groups()
        if re.search(r"\band\s*\Z", value):
            raise UsageError(f"--where {text}: nothing behind the last and")
        if column not in columns:
            raise UsageError(
                f"--where {text}: unknown column {column}; one of {', '.join(columns)}"
            )
        if value[:1] in "\"'" and value[-1:] == value[:1] and len(value) > 1:
            value = value[1:-1]
        if op in _ORDER and _number(value) is None:
            raise UsageError(f"--where {text}: {op} needs a number, found {value!r}")
        found.append(Condition(column, "=" if op == "==" else op, value))
    return tuple(found)


def _terms(text: str) -> list[str]:
    """Cut at each ``and`` outside quotes."""
    parts, last = [], 0
    for match in re.finditer(rf"\"[^\"]*\"|'[^']*'|\band\b(?={_HEAD})", text):
        if match.group() == "and":
            parts.append(text[last : match.start()])
            last = match.end()
    return [*parts, text[last:]]


def selected(run: MeasuredRun, conditions: tuple[Condition, ...]) -> bool:
    """Return whether a run meets all conditions; an empty column meets no order.

    ``source`` is the name before a run's number, or the address it was read at.
    """
    return all(_meets(run, c) for c in conditions)


def _meets(run: MeasuredRun, condition: Condition) -> bool:
    if condition.column != "source":
        return _holds(run.text(condition.column), condition)
    either = [_holds(x, condition) for x in (run.source, run.text("source"))]
    return all(either) if condition.op == "!=" else any(either)


def _holds(found: str, condition: Condition) -> bool:
    left, right = _number(found), _number(condition.value)
    if condition.op in _ORDER:
        return left is not None and right is not None and _ORDER[condition.op](left, right)
    if condition.op == "~":
        return condition.value.lower() in found.lower()
    both = left is not None and right is not None
    same = left == right if both else found.lower() == condition.value.lower()
    return same == (condition.op == "=")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
