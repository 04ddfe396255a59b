"""Compose strategies into one draft: order of axes, conflicts, and who changed what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sim.errors import InputError, PlanError, UsageError
from sim.plan.arguments import misfit
from sim.plan.draft import PlanDraft
from sim.problem import Problem
from strategies.base import AXES, Strategy, changed_fields, draft_or_default
from strategies.registry import get, names

__all__ = ["REQUIRED", "check_conflicts", "compose", "may_change"]

Choice = tuple[Strategy[Any] | str, Any]

REQUIRED = ("cells.chips", "cells.stage", "data.microbatches", "pipeline.cuts")
"""Fields somebody must own in a complete draft."""


def compose(
    problem: Problem,
    choices: Sequence[Choice],
    *,
    start: PlanDraft | None = None,
    complete: bool = True,
) -> PlanDraft:
    """Apply strategies to a draft, in the order of ``strategies.base.AXES``.

    Args:
        problem: cluster, model, job.
        choices: (strategy or its name, its knobs: the record or a dict of its fields).
        start: draft to start from; None for an empty one.
        complete: refuse choices that leave the grid, the microbatches or the cuts open.

    Raises:
        UsageError: two strategies own the same knob, or one is missing.
        InputError: knobs do not fit, are illegal, or are set on a draft that has them in its passes
            already; PlanError: a strategy changed a knob it does not own.
    """
    resolved = [(get(s) if isinstance(s, str) else s, k) for s, k in choices]
    check_conflicts([s for s, _ in resolved])
    if complete and start is None:
        _check_complete([s for s, _ in resolved])
    draft = draft_or_default(problem, start)
    for strategy, knobs in sorted(resolved, key=lambda c: _rank(c[0])):
        after = strategy.apply(problem, draft, _knobs(strategy, knobs))
        foreign = changed_fields(draft, after) - may_change(strategy)
        if foreign:
            raise PlanError(
                f"strategy {strategy.name} changed a knob it does not own",
                key="strategy",
                found=", ".join(sorted(foreign)),
                expected=", ".join(sorted(strategy.owns)),
            )
        _check_once(strategy, after)
        draft = after
    return draft


def check_conflicts(chosen: Sequence[Strategy[Any]]) -> None:
    """Prove that no two strategies own the same knob, but for those that both only add to.

    Raises:
        UsageError: names the knob and both strategies.
    """
    owner: dict[str, Strategy[Any]] = {}
    for strategy in chosen:
        for field in sorted(strategy.owns):
            other = owner.setdefault(field, strategy)
            if other is not strategy and field not in _added(other) & _added(strategy):
                raise UsageError(
                    f"strategies {other.name} and {strategy.name} both set {field}; choose one"
                )


def _added(strategy: Strategy[Any]) -> frozenset[str]:
    return getattr(strategy, "adds", frozenset())


def may_change(strategy: Strategy[Any]) -> frozenset[str]:
    """Fields a strategy may change: what it owns; who forms cells from chips also numbers them."""
    numbers = {"cells.stage", "cells.replica"} if "cells.chips" in strategy.owns else set()
    return strategy.owns | numbers


def _rank(strategy: Strategy[Any]) -> int:
    return AXES.index(strategy.axis) if strategy.axis in AXES else len(AXES)


def _check_complete(chosen: Sequence[Strategy[Any]]) -> None:
    owned = frozenset[str]().union(*(s.owns for s in chosen))
    for field in REQUIRED:
        if field not in owned:
            able = " or ".join(n for n in names() if field in get(n).owns)
            raise UsageError(f"no strategy sets {field}; add {able}")


def _knobs(strategy: Strategy[Any], knobs: Any) -> Any:
    """The strategy's record, by names and types of its fields; ``apply`` knows their ranges."""
    given = knobs
    if isinstance(knobs, msgspec.Struct):
        if not isinstance(knobs, strategy.knobs):
            raise _refused(strategy, "", type(knobs).__name__, strategy.knobs.__name__)
        given = {field: getattr(knobs, field) for field in knobs.__struct_fields__}
    if not isinstance(given, Mapping):
        fields = ", ".join(strategy.knobs.__struct_fields__)
        raise _refused(strategy, "", repr(knobs), f"{strategy.knobs.__name__}, or {fields}")
    wrong = misfit(given, strategy.knobs)
    if wrong is not None:
        raise _refused(strategy, wrong.key, wrong.found, wrong.expected, wrong.message)
    return knobs if knobs is not given else msgspec.convert(dict(given), strategy.knobs)


def _refused(
    strategy: Strategy[Any], key: str, found: str, expected: str, why: str = "another record"
) -> InputError:
    return InputError(
        f"knobs of strategy {strategy.name}: {why}",
        key=f"{strategy.name}.{key}" if key else strategy.name, found=found, expected=expected,
    )  # fmt: skip


def _check_once(strategy: Strategy[Any], draft: PlanDraft) -> None:
    """Refuse a draft on which a strategy's lowering pass would run twice."""
    names = [call.name for call in draft.passes]
    if len(set(names)) < len(names):
        raise InputError(
            f"the draft went through strategy {strategy.name} already", key=strategy.name,
            found="passes " + " ".join(names), expected="a draft without it",
        )  # fmt: skip
