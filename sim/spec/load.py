"""Files people write -> validated documents; every error names file, line and key.

YAML 1.2 through ruamel's round-trip loader (it knows the line of each key), so that ``989e12`` is a
number, ``on`` is text, and nothing but plain data can come out: tags are refused.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from sim.errors import InputError
from sim.spec.fields import Doc
from sim.spec.problems import dotted, input_errors, without

__all__ = [
    "MAX_FILE_BYTES",
    "MAX_NODES",
    "Source",
    "parse_text",
    "parse_value",
    "problems_of",
    "read_source",
    "validate",
]

MAX_FILE_BYTES = 8 * 2**20
MAX_NODES = 500_000
"""Most values one document may expand to; stops alias bombs."""

_MAX_JSON_WITH_LINES = 65_536
Key = tuple[str | int, ...]
D = TypeVar("D", bound=Doc)


class Source(msgspec.Struct, frozen=True):
    """Plain data read from a file, and where each value stood.

    Args:
        data: dicts, lists and scalars. file: path or "". lines: key path -> 1-based line.
        changes: key path -> the option that set it after reading, e.g. "--set job.microbatch=3".
    """

    data: Any
    file: str = ""
    lines: dict[Key, int] = {}
    changes: dict[Key, str] = {}

    def where(self, key: Key) -> tuple[str, int]:
        """Return what to blame for a key, a file or an option, and the line (0 when unknown)."""
        for end in range(len(key), -1, -1):
            if key[:end] in self.changes:
                return self.changes[key[:end]], 0
        below = [text for k, text in self.changes.items() if k[: len(key)] == key]
        file = f"{self.file} with {', '.join(below)}" if below else self.file
        return file, self.line(key)

    def line(self, key: Key) -> int:
        """Return the line of a key, or of the nearest parent that has one; 0 when unknown."""
        for end in range(len(key), -1, -1):
            if key[:end] in self.lines:
                return self.lines[key[:end]]
        return 0


def read_source(path: str | Path) -> Source:
    """Read a YAML or JSON file as plain data.

    Raises:
        InputError: missing, too large, not UTF-8, not YAML, duplicate keys, tags.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InputError(
                f"file of {file.stat().st_size} bytes",
                file=str(path),
                expected=f"at most {MAX_FILE_BYTES} bytes",
            )
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", file=str(path)) from None
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text at byte {error.start}", file=str(path)) from None
    return parse_text(text, str(path))


def parse_text(text: str, file: str = "") -> Source:
    """Parse YAML 1.2 (or JSON, when ``file`` ends with .json) to plain data with lines.

    Raises:
        InputError: not parseable, duplicate keys, tags, or no mapping at the top.
    """
    if file.endswith(".json"):
        source = Source(_parse_json(text, file), file, _json_lines(text))
    else:
        lines: dict[Key, int] = {}
        data = _plain(_parse_yaml(text, file), (), lines, file, iter(range(MAX_NODES)))
        source = Source(data, file, lines)
    if not isinstance(source.data, dict):
        raise InputError(
            "not a mapping",
            file=file,
            line=1,
            found=type(source.data).__name__ if source.data is not None else "an empty file",
            expected="key: value lines",
        )
    return source


def parse_value(text: str, name: str) -> Any:
    """Parse one YAML value given on the command line.

    Args:
        text: the value. name: what to call it in an error.

    Raises:
        InputError: not parseable, tags.
    """
    return _plain(_parse_yaml(text, name), (), {}, name, iter(range(MAX_NODES)))


def validate(kind: type[D], source: Source) -> D:
    """Turn plain data into a document.

    Raises:
        InputError: the first problem in file order, with the number of further ones.
    """
    try:
        return kind.model_validate(source.data)
    except ValidationError as error:
        problems = input_errors(error.errors(include_url=False), source)
    first = problems[0]
    if len(problems) > 1:
        more = f"{first.message} (and {len(problems) - 1} more)"
        first = InputError(more, first.file, first.line, first.key, first.found, first.expected)
    raise first


def problems_of(kind: type[Doc], source: Source) -> list[InputError]:
    """Return everything wrong with a document, in file order; [] when it is valid.

    An unknown key stops the validation of its mapping: what else is wrong there shows without it.
    """
    data, found = source.data, list[Any]()
    for _ in range(MAX_NODES):
        try:
            kind.model_validate(data)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        else:
            break
        unknown = [e for e in errors if e["type"] == "unknown_key"]
        found += unknown or errors
        if not unknown:
            break
        for e in unknown:
            data = without(data, (*e["loc"], e["ctx"]["key"]))
    return input_errors(found, source)


def _parse_yaml(text: str, file: str) -> Any:
    yaml = YAML(typ="rt")
    yaml.allow_duplicate_keys = False
    try:
        return yaml.load(text)
    except DuplicateKeyError as error:
        _refuse_mark(error, str(error.problem).split(" with value")[0], file)
    except MarkedYAMLError as error:
        _refuse_mark(error, f"not valid YAML: {error.problem or error.context}", file)
    except (YAMLError, ValueError) as error:
        raise InputError(f"not valid YAML: {error}", file=file) from None
    except RecursionError:
        raise InputError("not valid YAML: nested too deeply", file=file) from None


def _refuse_mark(error: MarkedYAMLError, message: str, file: str) -> NoReturn:
    mark = error.problem_mark or error.context_mark
    raise InputError(message, file=file, line=mark.line + 1 if mark else 0) from None


def _parse_json(text: str, file: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise InputError(f'found duplicate key "{key}"', file=file, key=key)
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error.msg}", file=file, line=error.lineno) from None
    except RecursionError:
        raise InputError("not valid JSON: nested too deeply", file=file) from None


def _json_lines(text: str) -> dict[Key, int]:
    """Find the lines of a small JSON file's keys: YAML's parser knows them, JSON's does not."""
    lines: dict[Key, int] = {}
    if len(text) <= _MAX_JSON_WITH_LINES:
        try:
            _plain(_parse_yaml(text, ""), (), lines, "", iter(range(MAX_NODES)))
        except InputError:
            return {}  # JSON that is not YAML (tabs): errors then name the key only
    return lines


def _plain(
    node: Any, key: Key, lines: dict[Key, int], file: str, budget: Iterator[int]
) -> dict[str, Any] | list[Any] | str | int | float | bool | None:
    """Copy ruamel's objects to plain data and note the line of every key."""
    if next(budget, None) is None:
        raise InputError(f"more than {MAX_NODES} values", file=file, expected="fewer aliases")
    if isinstance(node, (CommentedMap, CommentedSeq, TaggedScalar)):
        tag = node.tag.value if node.tag is not None else None
        if tag is not None:
            _refuse_tag(str(tag), key, lines, file)
    if isinstance(node, CommentedMap):
        own = node.lc.data or {}
        for name in node:
            if not isinstance(name, str):
                raise InputError(
                    "a key that is not text",
                    file=file,
                    line=own[name][0] + 1 if name in own else 0,
                    key=dotted(key),
                    found=repr(name),
                    expected=f'"{name}" in quotes',
                )
            if name in own:
                lines[(*key, name)] = own[name][0] + 1
        return {name: _plain(v, (*key, name), lines, file, budget) for name, v in node.items()}
    if isinstance(node, CommentedSeq):
        for index, where in (node.lc.data or {}).items():
            lines[(*key, index)] = where[0] + 1
        return [_plain(v, (*key, i), lines, file, budget) for i, v in enumerate(node)]
    return _scalar(node)


def _refuse_tag(tag: str, key: Key, lines: dict[Key, int], file: str) -> NoReturn:
    raise InputError(
        "tags are not allowed",
        file=file,
        line=Source(None, file, lines).line(key),
        key=dotted(key),
        found=tag,
        expected="plain data",
    )


def _scalar(node: Any) -> str | int | float | bool | None:
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, (datetime.date, datetime.datetime)):
        return node.isoformat()
    for plain in (int, float, str):
        if isinstance(node, plain):
            return plain(node)
    return str(node)
