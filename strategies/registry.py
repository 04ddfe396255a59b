"""Names of strategies: built-in ones register at import, others through entry points.

An entry of the group ``hetlab.strategies`` is a strategy, or a module whose import registers some.
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from sim.errors import InputError
from strategies.base import FIELDS, Strategy

__all__ = ["ENTRY_POINTS", "get", "names", "register"]

ENTRY_POINTS = "hetlab.strategies"

_KNOWN: dict[str, Strategy[Any]] = {}
S = TypeVar("S", bound=Strategy[Any])


def register(strategy: S) -> S:
    """Make a strategy known by its name.

    Raises:
        ValueError: the name is taken by another one, or it owns a field that no draft has.
    """
    taken = _KNOWN.get(strategy.name)
    if taken is not None and type(taken) is not type(strategy):
        raise ValueError(f"strategy {strategy.name} is already registered")
    unknown = strategy.owns - FIELDS
    if unknown:
        raise ValueError(f"strategy {strategy.name} owns no such field: {', '.join(unknown)}")
    _KNOWN[strategy.name] = strategy
    return strategy


def get(name: str) -> Strategy[Any]:
    """Look a strategy up.

    Raises:
        InputError: there is none of this name; offers the nearest.
    """
    known = names()
    if name not in _KNOWN:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
        raise InputError(
            "unknown strategy",
            key="strategy",
            found=name,
            expected=near[0] if near else " ".join(known),
        )
    return _KNOWN[name]


def names(axis: str = "") -> tuple[str, ...]:
    """Names of all strategies (of one axis), sorted; loads the built-in and installed ones once."""
    _load()
    return tuple(sorted(n for n, s in _KNOWN.items() if not axis or s.axis == axis))


@cache
def _load() -> None:
    # Built-ins live above this module, so they are named here rather than imported at the top.
    import strategies.builtin  # noqa: F401

    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.name):
        found = entry.load()
        if hasattr(found, "apply"):
            register(found() if isinstance(found, type) else found)
