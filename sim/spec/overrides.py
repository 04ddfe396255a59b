"""``--set path=value``: changes to a document before it is validated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.errors import InputError, UsageError
from sim.spec.load import Source, parse_value

__all__ = ["apply_overrides"]


def apply_overrides(source: Source, overrides: Sequence[str], part: str = "") -> Source:
    """Set values by dotted path, as ``--set job.global_batch=512`` does.

    A number is an index into a list. The text after ``=`` is read as YAML; missing mappings on the
    way are created, so that validation, not this function, names an unknown key.

    Args:
        source: left unchanged. overrides: "path=value" texts, applied in order.
        part: what the path starts with on the command line ("job"), for messages.

    Raises:
        UsageError: no "=", or an empty path. InputError: the path goes through a scalar or past the
            end of a list.
    """
    data = _copy(source.data)
    lines, changes = dict(source.lines), dict(source.changes)
    for text in overrides:
        option = f"--set {part}.{text}" if part else f"--set {text}"
        path, sign, value = text.partition("=")
        if not sign or not path.strip() or not all(path.split(".")):
            raise UsageError(f"{option}: expected path=value, e.g. global_batch=512")
        _assign(data, path.split("."), parse_value(value, option), option)
        key = tuple(int(p) if p.isdigit() else p for p in path.split("."))
        lines = {k: line for k, line in lines.items() if k[: len(key)] != key}
        changes[key] = option
    return Source(data, source.file, lines, changes)


def _copy(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _copy(v) for k, v in data.items()}
    return [_copy(v) for v in data] if isinstance(data, list) else data


def _assign(data: Any, path: list[str], value: Any, option: str) -> None:
    here = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        where: Any = part
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                raise InputError(
                    "no such list entry",
                    file=option,
                    key=".".join(path[: depth + 1]),
                    expected=f"an index from 0 to {len(here) - 1}",
                )
            where = int(part)
        elif not isinstance(here, dict):
            raise InputError(
                "the path goes through a value",
                file=option,
                key=".".join(path[:depth]),
                found=str(here),
            )
        if last:
            here[where] = value
        else:
            if isinstance(here, dict) and here.get(where) is None:
                here[where] = {}
            here = here[where]
