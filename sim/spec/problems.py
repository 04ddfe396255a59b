"""What pydantic found wrong with a document -> errors that name file, line and key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.errors import InputError

if TYPE_CHECKING:
    from sim.spec.load import Key, Source

__all__ = ["dotted", "in_file_order", "input_errors", "without"]

_TYPE_NAMES = {
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "key: value lines",
    "model_type": "key: value lines",
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
}
_MISSING = "a required key is missing"
_NAMES_ONLY = {"accelerator": "accelerators"}
"""Keys that take a profile's name, where people write the profile itself."""


def input_errors(errors: list[Any], source: Source) -> list[InputError]:
    """Translate pydantic's errors, without those that only follow from others, in file order.

    Args:
        errors: of ``ValidationError.errors``. source: what was validated.
    """
    found = in_file_order([_to_input_error(e, source) for e in _leaves(errors)])
    misspelt = [(p.key.rpartition(".")[0], p.message) for p in found]
    return [p for p in found if not _is_misspelt(p, misspelt)]


def _is_misspelt(problem: InputError, unknown: list[tuple[str, str]]) -> bool:
    """A missing key that an unknown key of the same mapping most likely stands for."""
    parent, _, name = problem.key.rpartition(".")
    return problem.message == _MISSING and any(
        where == parent and message.endswith(f"nearest valid key is {name}")
        for where, message in unknown
    )


def without(data: Any, key: Key) -> Any:
    """A copy of plain data that lacks one key."""
    head, rest = key[0], key[1:]
    if isinstance(data, dict):
        if not rest:
            return {k: v for k, v in data.items() if k != head}
        return {k: without(v, rest) if k == head else v for k, v in data.items()}
    return [without(v, rest) if i == head else v for i, v in enumerate(data)]


def in_file_order(problems: list[InputError]) -> list[InputError]:
    """Sort by line, each problem once."""
    once = {str(p): p for p in problems}
    return sorted(once.values(), key=lambda p: p.line)


def dotted(key: Key) -> str:
    """Write a key path as in error messages, "sites.0.name"."""
    return ".".join(str(part) for part in key)


def _leaves(errors: list[Any]) -> list[Any]:
    """Drop what only follows from a problem further down, e.g. a list left empty by a bad entry."""
    keys = [_key_of(e) for e in errors]
    return [
        e
        for e, key in zip(errors, keys, strict=True)
        if not any(len(other) > len(key) and other[: len(key)] == key for other in keys)
    ]


def _key_of(error: Any) -> Key:
    """Pydantic puts an unknown key on its mapping."""
    key = tuple(error["loc"])
    return (*key, error["ctx"]["key"]) if error["type"] == "unknown_key" else key


def _to_input_error(error: Any, source: Source) -> InputError:
    context = error.get("ctx", {})
    key = _key_of(error)
    found = "" if error["type"] == "unknown_key" else error["input"]
    message, expected = error["msg"], str(context.get("expected", ""))
    if error["type"] == "missing":
        message, found = _MISSING, ""
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
