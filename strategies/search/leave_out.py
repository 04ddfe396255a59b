"""What each strategy gave: the same search again with one of them forbidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.errors import InfeasibleError
from sim.problem import Problem
from strategies.search.options import FORBIDDEN, choices_of
from strategies.search.result import SearchResult, Without
from strategies.search.search import search

__all__ = ["leave_one_out"]


def leave_one_out(
    problem: Problem,
    found: SearchResult,
    *,
    pins: Mapping[str, Any] | None = None,
    names: Sequence[str] = tuple(FORBIDDEN),
    **options: Any,
) -> tuple[Without, ...]:
    """Search again without each strategy, and say what it gave.

    What strategies give does not add up: each may need the others.

    Args:
        problem: what was planned. found: by the whole search. pins: of it, as for ``search``.
        names: of strategies to leave out in turn. options: further arguments of ``search``.

    Returns:
        One answer per name that was not forbidden anyway, in order.
    """
    given = dict(pins or {})
    already = choices_of(problem, given).forbid
    return tuple(
        _without(problem, found, given, (*already, name), options)
        for name in names
        if name not in already
    )


def _without(
    problem: Problem,
    found: SearchResult,
    pins: dict[str, Any],
    forbid: tuple[str, ...],
    options: Mapping[str, Any],
) -> Without:
    try:
        other = search(problem, pins={**pins, "forbid": forbid}, **options)
    except InfeasibleError as error:
        return Without(name=forbid[-1], unfit=str(error))
    placement = other.plan.placement
    return Without(
        name=forbid[-1],
        plan=other.plan.name,
        tokens_per_s=other.tokens_per_s,
        chips=placement.num_ranks - len(placement.extra_ranks),
        gain=found.tokens_per_s / other.tokens_per_s - 1.0,
    )
