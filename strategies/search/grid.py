"""Communication of a slab, each distinct pattern of cells priced once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from strategies.search.slab import Slab
from strategies.search.wires import Both, Cells, Wires, stage_cells

__all__ = ["Collectives", "Grid"]

Floats = NDArray[np.float64]

KNOTS = 6
"""Sizes at which a collective is priced when a slab has more of them and need not be exact."""


class Grid:
    """Which cells the stages of a slab get.

    Attributes:
        cells: distinct cells. of: number of each stage's, shape (n, P).
        patterns: number of the pattern of each distinct cells.
    """

    def __init__(self, slab: Slab) -> None:
        both = np.concatenate([slab.tp, slab.pp], axis=1)
        _, first, self.inverse = np.unique(both, axis=0, return_index=True, return_inverse=True)
        self.inverse = self.inverse.reshape(-1)
        few = slab.take(first)
        group, index = few.groups()
        tp, pp = (np.take_along_axis(x, group, axis=1) for x in (few.tp, few.pp))
        wide = pp if slab.knobs.scatter else np.zeros_like(pp)
        code = ((group * 1024 + tp) * 4096 + index) * 4096 + wide
        _, at, of = np.unique(code, return_index=True, return_inverse=True)
        self.few = of.reshape(code.shape)
        self.of = self.few[self.inverse]
        flat = [x.reshape(-1)[at].tolist() for x in (group, tp, pp, index)]
        self.cells = [
            stage_cells(slab.pools[g], t, p, slab.dp, i, slab.knobs.scatter)
            for g, t, p, i in zip(*flat, strict=True)
        ]
        names: dict[object, int] = {}
        self.patterns = np.array([names.setdefault(c.pattern, len(names)) for c in self.cells])

    def pairs(
        self, price: Callable[[Cells, Cells, float], Both], nbytes: float, in_step: bool, shift: int
    ) -> Floats:
        """Price every stage with the one ``shift`` further on (around the end), shape (n, P)."""
        other = np.roll(self.few, -shift, axis=1)
        count = len(self.cells)
        known, of = np.unique(self.few * count + other, return_inverse=True)
        pairs = ((self.cells[c // count], self.cells[c % count]) for c in known.tolist())
        found = np.array([price(a, b, nbytes)[in_step] for a, b in pairs])
        return np.asarray(found[of.reshape(other.shape)][self.inverse])


class Collectives:
    """Prices a collective over the replicas of every stage of a slab."""

    def __init__(self, wires: Wires, grid: Grid, chunks: int, in_step: bool, exact: bool) -> None:
        self.wires, self.grid, self.in_step, self.exact = wires, grid, in_step, exact
        self.pattern = np.tile(grid.patterns[grid.of], (1, chunks)).reshape(-1)
        self.order = np.argsort(self.pattern, kind="stable")

    def __call__(self, kind: str, nbytes: Floats, every: int) -> Floats:
        """Time of a collective of every stage [s].

        Args:
            kind: of collective. nbytes: [B] of each stage's tensor, shape (n, V).
            every: a group takes every n-th replica.
        """
        found, flat = np.zeros(nbytes.size), nbytes.reshape(-1)
        numbers, firsts = np.unique(self.grid.patterns, return_index=True)
        edges = np.searchsorted(self.pattern[self.order], np.append(numbers, len(numbers)))
        for k, first in enumerate(firsts):
            rows = self.order[edges[k] : edges[k + 1]]
            price = partial(self.wires.between, kind, self.grid.cells[first], every)
            found[rows] = self._sizes(price, flat[rows])
        return found.reshape(nbytes.shape)

    def _sizes(self, price: Callable[[float], Both], nbytes: Floats) -> Floats:
        sizes, inverse = np.unique(nbytes, return_inverse=True)
        if self.exact or len(sizes) <= KNOTS:
            return np.array([price(float(s))[self.in_step] for s in sizes])[inverse.reshape(-1)]
        knots = sizes[np.linspace(0, len(sizes) - 1, KNOTS).astype(np.int64)]
        return np.interp(nbytes, knots, [price(float(s))[self.in_step] for s in knots])
