"""Processor cores of the ranks on this machine. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["cores_of", "pin", "usable_cores"]


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may use, () where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def cores_of(ranks: int, asked: bool | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each rank, as many for each, in the order of their numbers.

    Args:
        ranks: of the run. asked: True deals cores out in turn where there are fewer than ranks,
            None then leaves all of them to all ranks, False always does.

    Returns:
        Core numbers by rank, () for ranks that are not kept anywhere.
    """
    usable = usable_cores()
    each = len(usable) // ranks
    if not usable or asked is False or (asked is None and not each):
        return ()
    if not each:
        return tuple((usable[r % len(usable)],) for r in range(ranks))
    return tuple(usable[r * each : (r + 1) * each] for r in range(ranks))


def pin(cores: Iterable[int]) -> None:
    """Keep this process on these cores: the threads that it has and those to come."""
    mine = set(cores)
    os.sched_setaffinity(0, mine)
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), mine)
