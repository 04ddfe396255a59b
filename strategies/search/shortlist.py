"""Candidates worth a closer look, and the best times known so far."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from strategies.search.slab import Slab, plan_key, structure_key

__all__ = ["Incumbent", "Shortlist"]

Floats = NDArray[np.float64]


class Incumbent:
    """The k smallest scores of different plans; a plan that comes again is not counted again.

    Attributes:
        size: k. scores: ascending. seeded: True when there is a score to beat.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.seeded = False
        self.scores: list[float] = []
        self._known: set[bytes] = set()

    @property
    def value(self) -> float:
        """The k-th smallest: a candidate that is certainly above it is not among the best k."""
        return self.scores[-1] if len(self.scores) == self.size else float("inf")

    def seed(self, score: float) -> None:
        """Only what beats this score is of interest."""
        self.scores = [score] * self.size
        self.seeded = True

    def add(self, scores: Floats, slab: Slab) -> None:
        """Take note of the exact scores of a slab's plans, shape (n,)."""
        for row in np.argsort(scores).tolist():
            if not scores[row] < self.value:
                break
            key = plan_key(slab, row)
            if key not in self._known:
                self._known.add(key)
                bisect.insort(self.scores, float(scores[row]))
                del self.scores[self.size :]


class Shortlist:
    """The ``size`` candidates with the smallest scores, as slabs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[tuple[Slab, Floats]] = []
        self._held = 0
        self._limit = float("inf")

    def __len__(self) -> int:
        return self._held

    def add(self, slab: Slab, scores: Floats) -> None:
        """Add candidates; those that can no longer be among the best are dropped."""
        rows = np.flatnonzero(scores < self._limit)
        if len(rows):
            self.parts.append((slab.take(rows), scores[rows]))
            self._held += len(rows)
        if self._held > 4 * self.size:
            self._trim()

    def _trim(self) -> None:
        every = np.concatenate([np.zeros(0), *(s for _, s in self.parts)])
        if len(every) > self.size:
            self._limit = float(np.partition(every, self.size - 1)[self.size - 1])
        kept = []
        for slab, scores in self.parts:
            rows = np.flatnonzero(scores <= self._limit)
            if len(rows):
                kept.append((slab.take(rows), scores[rows]))
        self.parts = kept
        self._held = sum(len(s) for _, s in kept)

    def batches(self, sizes: int) -> list[list[tuple[Slab, Floats]]]:
        """The candidates in rising order of score, about ``sizes`` in each batch."""
        self._trim()
        if not self.parts:
            return []
        every = np.sort(np.concatenate([s for _, s in self.parts]))
        edges = [*every[:: max(sizes, 1)].tolist(), float("inf")]
        found = []
        for low, high in itertools.pairwise(edges):
            batch = []
            for slab, scores in self.parts:
                rows = np.flatnonzero((scores >= low) & (scores < high))
                if len(rows):
                    batch.append((slab.take(rows), scores[rows]))
            if batch:
                found.append(batch)
        return found

    def best(self, count: int, alike: int = 0) -> list[tuple[float, Slab]]:
        """The ``count`` best, each as a slab of one row, in order; ties in order of arrival.

        Args:
            count: how many. alike: most plans of one structure, 0 for no limit.
        """
        self._trim()
        rows = [
            (float(s), i, r)
            for i, (_, scores) in enumerate(self.parts)
            for r, s in enumerate(scores)
        ]
        found: list[tuple[float, Slab]] = []
        plans: set[bytes] = set()
        structures: Counter[bytes] = Counter()
        for score, i, r in sorted(rows):
            slab = self.parts[i][0]
            key, structure = plan_key(slab, r), structure_key(slab, r)
            if key in plans or (alike and structures[structure] >= alike):
                continue
            plans.add(key)
            structures[structure] += 1
            found.append((score, slab.take(slice(r, r + 1))))
            if len(found) == count:
                break
        return found
