"""Numbers that a run and its network take."""

from __future__ import annotations

from math import isfinite

from sim.errors import InputError

__all__ = ["check_capacity", "check_flow", "check_span"]


def check_span(steps: int, until: float | None) -> None:
    """Check how far a run is to go: steps, and [s] where it stops.

    Raises:
        InputError: no step, or a time that is negative or not finite.
    """
    if steps < 1:
        raise InputError("a run has steps", key="steps", found=str(steps), expected="at least 1")
    if until is not None and not (isfinite(until) and until >= 0.0):
        raise InputError(
            "a run ends at a time", key="until", found=f"{until} s", expected="0 s or more"
        )


def check_capacity(index: int, rate: float) -> float:
    """Return a capacity [B/s] as it was given.

    Raises:
        ValueError: it is negative or not finite.
    """
    if not (isfinite(rate) and rate >= 0.0):
        raise ValueError(f"capacity {rate} B/s of link {index} is not a number from 0 up")
    return float(rate)


def check_flow(nbytes: float, cap: float) -> None:
    """Check the bytes [B] and the cap [B/s] of a flow.

    Raises:
        ValueError: one is negative, not a number, or the bytes are not finite.
    """
    if not (isfinite(nbytes) and nbytes >= 0.0):
        raise ValueError(f"a flow of {nbytes} B; expected a number from 0 up")
    if not cap >= 0.0:
        raise ValueError(f"a cap of {cap} B/s; expected a number from 0 up")
