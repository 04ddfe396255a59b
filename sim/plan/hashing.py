"""Hashes of whole arrays, to compare multisets at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Hashes", "dense", "mix", "renumber", "sum_at"]

Hashes = NDArray[np.uint64]
"""64-bit hashes; sums of them stand for multisets (equal by chance once in 2**64)."""


def mix(values: NDArray[np.uint64] | NDArray[np.int64], salt: int = 0) -> Hashes:
    """Scramble 64-bit numbers (splitmix64, Steele, Lea and Flood 2014), another way per salt."""
    step = (salt * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64
    x = values.astype(np.uint64) + np.uint64(step)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sum_at(where: NDArray[np.int64], hashes: Hashes, size: int) -> Hashes:
    """Sum of the hashes at each place, shape (size,)."""
    found = np.zeros(size, np.uint64)
    np.add.at(found, where, hashes)
    return found


def dense(hashes: Hashes) -> tuple[NDArray[np.int64], int]:
    """Small numbers for equal hashes, and how many there are."""
    values, inverse = np.unique(hashes, return_inverse=True)
    return inverse.reshape(-1).astype(np.int64), len(values)


def renumber(keys: Iterable[Hashable] | Sequence[Hashable]) -> list[int]:
    """Small numbers for equal keys, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(k, len(numbers)) for k in keys]
