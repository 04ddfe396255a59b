"""Assumptions for people: equal facts about many profiles on one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["fold_assumptions"]

SHOWN = 3
"""Keys of a list of assumed ones that are named; all of them are in the document."""

_FORMS = (
    (r"link (?P<name>[^:]+): assumed (?P<keys>.+)", "links {names}: assumed {keys}"),
    (r"node (?P<name>\S+): assumed (?P<keys>.+)", "nodes {names}: assumed {keys}"),
    (r"(?P<name>[^:]+): assumed (?P<keys>.+)", "{names}: assumed {keys}"),
    (r"node (?P<name>\S+) stands in for .+", "nodes {names} stand in for others"),
    (r"no efficiency of (?P<name>.+) was measured", "no efficiency of {names} was measured"),
    (
        r"(?P<name>\S+) has no (?P<dtype>\w+): it computes in (?P<other>\w+)",
        "{names} have no {dtype}: they compute in {other}",
    ),
)
"""Texts that differ in a name only, and how several of them are written at once."""
_COMPILED = tuple((re.compile(pattern), many) for pattern, many in _FORMS)

Key = tuple[tuple[str, str], ...]


def fold_assumptions(texts: Sequence[str]) -> list[str]:
    """Return the texts with those of one form and content joined, in order of first appearance.

    >>> fold_assumptions(("link a: assumed latency", "by hand", "link b: assumed latency"))
    ['links a, b: assumed latency', 'by hand']
    """
    names: dict[tuple[str, Key], list[str]] = {}
    first: dict[tuple[str, Key], str] = {}
    for text in dict.fromkeys(texts):
        form, name, rest = _read(text)
        first.setdefault((form, rest), text)
        names.setdefault((form, rest), []).append(name)
    lines = []
    for (form, rest), who in names.items():
        keys = {k: _short(v) for k, v in rest}
        if form and len(who) > 1:
            lines.append(form.format(names=", ".join(who), **keys))
        else:
            line = first[form, rest]
            lines.append(line.replace(dict(rest).get("keys", line), keys.get("keys", line)))
    return lines


def _read(text: str) -> tuple[str, str, Key]:
    """(how several are written, name, what else must be equal) of a text; ("", "", itself)."""
    for pattern, many in _COMPILED:
        match = pattern.fullmatch(text)
        if match is not None:
            parts = match.groupdict()
            return many, parts.pop("name"), tuple(parts.items())
    return "", "", (("text", text),)


def _short(keys: str) -> str:
    listed = keys.split(", ")
    if len(listed) <= SHOWN + 1:
        return keys
    return ", ".join(listed[:SHOWN]) + f" and {len(listed) - SHOWN} more"
