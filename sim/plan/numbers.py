"""Numbers of a plan that are neither sizes nor indices: amounts of ops, and late amounts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import numpy as np

from sim.errors import PlanError
from sim.plan.plan import Amount

__all__ = ["check_amounts", "check_values"]

MOST = 1e30
"""Largest amount: finite times and sums follow from it."""
MOST_LATE = 1e15
"""Largest late amount, a factor or bytes: beyond it a step would vanish beside another."""


def check_amounts(amounts: Mapping[str, Amount]) -> None:
    """Check that every amount is a number from 0 up.

    Raises:
        PlanError: names the first one that is not.
    """
    for key, amount in amounts.items():
        for field in amount.__struct_fields__:
            value = getattr(amount, field)
            if not (isfinite(value) and 0 <= value <= MOST):
                raise PlanError(
                    "an amount is a finite number and not negative",
                    key=f"amounts.{key}.{field}", found=str(value), expected=f"0 to {MOST:g}",
                )  # fmt: skip


def check_values(table: str, key: str, values: Iterable[Any], square: bool = True) -> None:
    """Check that late amounts are numbers from 0 up, vectors of them or matrices.

    Args:
        table, key: where they stand. values: over steps.
        square: False for a table that controllers read, whose matrices may have any sides.

    Raises:
        PlanError: names table and key, and the first value that is none of these.
    """
    for value in values:
        if not _is_amount(value, square):
            text = repr(value)
            raise PlanError(
                "a late amount is a number, a vector or a square matrix, finite and not negative",
                key=f"tables.{table}.{key}", found=text if len(text) <= 60 else text[:57] + "...",
                expected=f"numbers from 0 to {MOST_LATE:g}",
            )  # fmt: skip


def _is_amount(value: Any, square: bool) -> bool:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return 0 <= value <= MOST_LATE
    try:
        found = np.asarray(value)
    except ValueError:
        return False
    if found.dtype.kind not in "iuf" or not found.size:
        return False
    shaped = found.ndim < 2 or (
        found.ndim == 2 and (not square or found.shape[0] == found.shape[1])
    )
    return shaped and bool(((found >= 0) & (found <= MOST_LATE)).all())
