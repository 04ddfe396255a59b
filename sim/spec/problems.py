"""What pydantic found wrong with a document -> errors that name file, line and key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.errors import InputError

if TYPE_CHECKING:
    from sim.spec.load import Key, Source

__all__ = ["dotted", "in_file_order", "input_errors"]

_TYPE_NAMES = {
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "key: value lines",
    "model_type": "key: value lines",
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
}
_NAMES_ONLY = {"accelerator": "accelerators"}
"""Keys that take a profile's name, where people write the profile itself."""


def input_errors(errors: list[Any], source: Source) -> list[InputError]:
    """Translate pydantic's errors, without those that only follow from others, in file order.

    Args:
        errors: of ``ValidationError.errors``. source: what was validated.
    """
    return in_file_order([_to_input_error(e, source) for e in _leaves(errors)])


def in_file_order(problems: list[InputError]) -> list[InputError]:
    """Sort by line, each problem once."""
    once = {str(p): p for p in problems}
    return sorted(once.values(), key=lambda p: p.line)


def dotted(key: Key) -> str:
    """Write a key path as in error messages, "sites.0.name"."""
    return ".".join(str(part) for part in key)


def _leaves(errors: list[Any]) -> list[Any]:
    """Drop what only follows from a problem further down, e.g. a list left empty by a bad entry."""
    keys = [tuple(e["loc"]) for e in errors]
    return [
        e
        for e, key in zip(errors, keys, strict=True)
        if not any(len(other) > len(key) and other[: len(key)] == key for other in keys)
    ]


def _to_input_error(error: Any, source: Source) -> InputError:
    context = error.get("ctx", {})
    key = tuple(error["loc"])
    found = error["input"]
    if error["type"] == "unknown_key":
        key, found = (*key, context["key"]), ""
    message, expected = error["msg"], str(context.get("expected", ""))
    if error["type"] == "missing":
        message, found = "a required key is missing", ""
    elif error["type"] == "literal_error":
        message = "not one of the choices"
    elif error["type"] == "too_short":
        message, expected = "too few entries", f"at least {context['min_length']}"
    elif error["type"] in _TYPE_NAMES:
        message, expected = "wrong type", _TYPE_NAMES[error["type"]]
        if key and key[-1] in _NAMES_ONLY and isinstance(found, dict):
            kind = _NAMES_ONLY[str(key[-1])]
            expected, found = f"the name of a profile; define it under profiles.{kind}", "its keys"
    file, line = source.where(key)
    return InputError(message, file, line, dotted(key), _shown(found), expected)


def _shown(found: Any) -> str:
    if isinstance(found, (dict, list, tuple)):
        return "" if found else type(found).__name__
    return str(found)[:80]
