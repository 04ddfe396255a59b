"""Records that people fill in: fields by name and type, and which of them a lowering pass takes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from sim.errors import PlanError
from sim.plan.plan import Call
from sim.plan.variant import Pass

__all__ = ["Arguments", "Misfit", "check_call", "misfit", "takes"]


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what a pass takes; itself for a pass that takes nothing."""


class Misfit(msgspec.Struct, frozen=True, kw_only=True):
    """A field that does not fit: what is wrong, its dotted path, what was found and expected."""

    message: str
    key: str
    found: str
    expected: str


class _Accepted(msgspec.Struct, frozen=True):
    arguments: type[Arguments]
    version: int


_ACCEPTED: dict[Pass, _Accepted] = {}


def takes(arguments: type[Arguments], version: int = 1) -> Callable[[Pass], Pass]:
    """Declare what a lowering pass takes, so that plans that say something else are refused.

    Args:
        arguments: record of its arguments. version: newest that it understands.
    """

    def declare(function: Pass) -> Pass:
        _ACCEPTED[function] = _Accepted(arguments, version)
        return function

    return declare


def check_call(call: Call, function: Pass) -> None:
    """Check version and arguments of a call; a pass that declares none is of version 1.

    Raises:
        PlanError: a newer version, an unknown argument, or one of the wrong type.
    """
    accepted = _ACCEPTED.get(function)
    newest = accepted.version if accepted else 1
    if not 1 <= call.version <= newest:
        raise PlanError(
            f"lowering pass {call.name} of a newer version" if call.version > newest
            else f"lowering pass {call.name} of no version",
            key="lowering", found=f"version {call.version}", expected=f"at most {newest}",
        )  # fmt: skip
    wrong = misfit(call.args, accepted.arguments) if accepted else None
    if wrong is not None:
        raise PlanError(
            f"the lowering pass {call.name}: {wrong.message}",
            key=f"lowering.{call.name}.{wrong.key}", found=wrong.found, expected=wrong.expected,
        )  # fmt: skip


def misfit(values: Mapping[str, Any], record: type[msgspec.Struct]) -> Misfit | None:
    """Return the first field that does not fit a record, None when all do.

    Args:
        values: by field, as in JSON. record: its type; no value is turned into another type.
    """
    names = record.__struct_fields__
    for key, value in values.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            known = f"{near[0]}, or one of " if near else "one of " if names else "none"
            return Misfit(
                message=f"there is no {key}", key=str(key), found=_short(value),
                expected=known + " ".join(names),
            )  # fmt: skip
    try:
        msgspec.convert(dict(values), record, strict=True)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        key = where.strip("`").lstrip(".")
        field = key.partition(".")[0].partition("[")[0]
        if field not in values:
            return Misfit(message=message, key=key, found="nothing", expected=" ".join(names))
        named = _named(get_type_hints(record)[field])
        return Misfit(
            message=f"unknown {field}" if named else "wrong type, or outside the range",
            key=key, found=_short(values[field]),
            expected=named or message.removeprefix("Expected ").split(", got")[0].replace("`", ""),
        )  # fmt: skip
    return None


def _named(hint: Any) -> str:
    """The values of a Literal, "" for other types."""
    return "one of " + " ".join(map(str, get_args(hint))) if get_origin(hint) is Literal else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
