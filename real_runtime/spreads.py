"""Numbers of a cluster whose measurement spread widely. Imports no torch.

``hetlab probe`` writes a number's spread (quartile distance over the median) into its source, where
people read it, so it is read from there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ["WIDE", "Spread", "wide_spreads"]

WIDE = 0.2
"""Spread from which on a number is named."""
_SAID = re.compile(r"spread (?:of a point )?(infinite|[\d.,]+)(%?)")


class Spread(msgspec.Struct, frozen=True):
    """A measured number. Args: name of its profile and of it, spread (1.0 is 100 %)."""

    name: str
    spread: float


def wide_spreads(cluster: dict[str, Any], limit: float = WIDE) -> tuple[Spread, ...]:
    """Return the numbers of a cluster that spread by more than a limit, the widest first.

    Args:
        cluster: its document, profiles included. limit: (1.0 is 100 %).
    """
    found = []
    for profiles in cluster.get("profiles", {}).values():
        for profile in profiles:
            for name, source in _sources(profile, ()):
                said = _SAID.search(source)
                if said is not None:
                    value = math.inf if said[1] == "infinite" else _number(said)
                    found.append(Spread(f"{profile['name']} {name}", value))
    wide = [s for s in found if s.spread > limit]
    return tuple(sorted(wide, key=lambda s: (-s.spread, s.name)))


def _number(said: re.Match[str]) -> float:
    return float(said[1].replace(",", "")) * (0.01 if said[2] else 1.0)


def _sources(data: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(Name, source) of every number in a profile."""
    if not isinstance(data, dict):
        return
    source = data.get("source")
    if path and isinstance(source, str):
        yield " ".join(p for p in path if p != "origins"), source
    for key, value in data.items():
        yield from _sources(value, (*path, key))
