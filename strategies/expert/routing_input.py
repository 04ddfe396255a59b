"""What every reader of routing checks before it makes an array."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError

__all__ = ["LARGEST", "MOST", "experts_of", "limited", "places", "whole_total", "zeros"]

MOST = 2**27
"""Most counts of a run (1 GiB); more is taken for a broken file."""
LARGEST = 2**53
"""Below it whole numbers and their sums are exact in double precision too."""

Ints = NDArray[np.int64]


def experts_of(file: Path, named: NDArray[np.integer[Any]], experts: int | None) -> int:
    """Return E, which the named experts must be below; None means one more than the largest.

    Raises:
        InputError: an expert that there cannot be.
    """
    least, most = int(named.min(initial=0)), int(named.max(initial=0))
    if least < 0 or most >= (experts or MOST):
        raise InputError(
            "an expert that the model does not have",
            file=str(file),
            key="expert",
            found=str(least if least < 0 else most),
            expected=f"0 to {(experts or MOST) - 1}",
        )
    return experts or most + 1


def places(values: Iterable[int]) -> Ints:
    """Return numbers of steps, layers or ranks, which may begin anywhere, as 0, 1, ..."""
    return np.asarray(np.unique(np.array(list(values)), return_inverse=True)[1], np.int64)


def zeros(file: Path, shape: tuple[int, ...]) -> Ints:
    """Return an empty array of counts, if a run can have as many.

    Raises:
        InputError: more than ``MOST``.
    """
    limited(file, shape)
    return np.zeros(shape, np.int64)


def limited(file: Path, shape: Iterable[int]) -> None:
    """Refuse more counts than a run can have.

    Raises:
        InputError: more than ``MOST``.
    """
    sizes, size = list(shape), 1
    for n in sizes:
        size *= n
    if not 0 <= size <= MOST:
        raise InputError(
            "no run routes this much",
            file=str(file),
            key="counts",
            found=" x ".join(map(str, sizes)),
            expected=f"at most {MOST} counts",
        )


def whole_total(counts: NDArray[np.integer[Any]]) -> None:
    """Refuse counts, none negative, whose total is not exact in double precision.

    Raises:
        InputError: 2^53 tokens or more.
    """
    total = float(counts.sum(dtype=np.float64))
    if total >= LARGEST:
        raise InputError(
            "no router sends this many tokens",
            key="counts",
            found=f"{total:g} in all",
            expected=f"below {LARGEST}",
        )
