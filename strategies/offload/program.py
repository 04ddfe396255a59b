"""The integers as a mixed integer linear program, solved by HiGHS.

Minimise T, at least every row of the step's time, within the memory of every chip and node
(arXiv:2503.01890 as a third-party digest describes it: an integer program in three integers). Each
integer is a choice of one of its values, so that any table of it is linear. Of the couplings only
min(o, n - p) is concave and needs a binary; the two that are convex are variables bounded below.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from strategies.offload.forms import CHECKPOINTED, OPTIMIZER, PARAMETERS, Bounds, Floats, Form
from strategies.offload.units import Triple

__all__ = ["Choice", "UndecidedError", "best_choice"]

Choice = tuple[Triple, ...]
Row = dict[int, float]


class UndecidedError(Exception):
    """The solver found no choice in its time, and did not prove that there is none."""


def best_choice(
    bounds: Bounds, without: Collection[Choice] = (), *, seconds: float = 60.0
) -> tuple[Choice, float] | None:
    """Return the choice that fits with the least bound, and the bound [s]; None when none fits.

    Args:
        bounds: of all choices. without: choices that are not asked for.
        seconds: [s] after which HiGHS gives its best choice, and a bound that holds.

    Raises:
        UndecidedError: HiGHS found nothing in that time.
    """
    barred = list(without)
    while True:
        found = _Program(bounds).solve(barred, seconds)
        # HiGHS lets a limit be passed by a hair.
        if found is None or bounds.fits(_arrays(found[0])):
            return found
        barred.append(found[0])


def _arrays(choice: Choice) -> list[list[Any]]:
    return [[np.asarray(count) for count in counts] for counts in choice]


class _Program:
    """Columns: one binary per value of each integer, one or two per coupling, and T last."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.first: dict[tuple[int, int], int] = {}
        count = 0
        for s, size in enumerate(bounds.sizes):
            for axis in (CHECKPOINTED, PARAMETERS, OPTIMIZER):
                self.first[s, axis] = count
                count += size[axis]
        self.binaries = count
        self.aux = [count + 2 * k for k in range(len(bounds.aux))]
        self.step = count + 2 * len(bounds.aux)
        self.unit = max(_size(form) for form in bounds.times) or 1.0

    def _columns(self, s: int, axis: int) -> range:
        return range(self.first[s, axis], self.first[s, axis] + self.bounds.sizes[s][axis])

    def _count(self, s: int, axis: int, factor: float = 1.0) -> Row:
        return {x: factor * k for k, x in enumerate(self._columns(s, axis))}

    def _row(self, form: Form, unit: float) -> Row:
        row: Row = {}
        for (s, axis), table in form.counts.items():
            for x, value in zip(self._columns(s, axis), table.tolist(), strict=True):
                row[x] = value / unit
        for k, factor in form.extra.items():
            scale = self.unit if self.bounds.aux[k].kind == "slow" else 1.0
            row[self.aux[k]] = factor * scale / unit
        return row

    def _rows(self, barred: Sequence[Choice]) -> Iterator[tuple[Row, float, float]]:
        """(coefficients, least, most) of every constraint."""
        for s, axis in self.first:
            yield dict.fromkeys(self._columns(s, axis), 1.0), 1.0, 1.0
        for form in self.bounds.times:
            row = {x: -v for x, v in self._row(form, self.unit).items()}
            yield row | {self.step: 1.0}, form.const / self.unit, np.inf
        for form, most in (*self.bounds.on_chip, *self.bounds.on_host):
            yield self._row(form, most), -np.inf, 1.0 - form.const / most
        for k in range(len(self.bounds.aux)):
            yield from self._coupling(k)
        for choice in barred:
            chosen = [
                self.first[s, axis] + count
                for s, counts in enumerate(choice)
                for axis, count in enumerate(counts)
            ]
            yield dict.fromkeys(chosen, 1.0), -np.inf, len(chosen) - 1.0

    def _coupling(self, k: int) -> Iterator[tuple[Row, float, float]]:
        """An auxiliary is at least what it stands for; it is at least 0 as well."""
        aux, x = self.bounds.aux[k], self.aux[k]
        n, s = float(self.bounds.layers[aux.position]), aux.position
        if aux.kind == "host":
            # At least o where the binary is 0, at least n - p where it is 1.
            yield self._count(s, OPTIMIZER, -1.0) | {x: 1.0, x + 1: n}, 0.0, np.inf
            yield self._count(s, PARAMETERS) | {x: 1.0, x + 1: -n}, 0.0, np.inf
        elif aux.kind == "again":
            less = self._count(s, CHECKPOINTED, -1.0) | self._count(s, OPTIMIZER, -1.0)
            yield less | {x: 1.0}, -n, np.inf
        else:
            table = dict(zip(self._columns(s, PARAMETERS), aux.table, strict=True))
            for axis in (CHECKPOINTED, PARAMETERS):
                row = {y: -v / self.unit for y, v in table.items()}
                for y, v in self._count(s, axis, aux.again / self.unit).items():
                    row[y] = row.get(y, 0.0) + v
                yield row | {x: 1.0}, 0.0, np.inf

    def solve(self, barred: Sequence[Choice], seconds: float) -> tuple[Choice, float] | None:
        """Return the choice and a bound [s] on all choices not barred."""
        from scipy.optimize import Bounds as Box
        from scipy.optimize import LinearConstraint, milp
        from scipy.sparse import coo_array

        rows = list(self._rows(barred))
        entries = [(i, x, v) for i, (row, _, _) in enumerate(rows) for x, v in row.items() if v]
        i, x, v = (np.array(part) for part in zip(*entries, strict=True))
        width = self.step + 1
        matrix = coo_array((v, (i, x)), shape=(len(rows), width)).tocsr()
        least, most = (np.array([row[side] for row in rows]) for side in (1, 2))
        upper, whole = np.full(width, np.inf), np.zeros(width, np.int64)
        upper[: self.binaries], whole[: self.binaries] = 1.0, 1.0
        for k, aux in enumerate(self.bounds.aux):
            if aux.kind == "host":
                upper[self.aux[k] + 1], whole[self.aux[k] + 1] = 1.0, 1.0
        cost: Floats = np.zeros(width)
        cost[self.step] = 1.0
        found = milp(
            cost,
            integrality=whole,
            bounds=Box(np.zeros(width), upper),
            constraints=LinearConstraint(matrix, least, most),
            options={"mip_rel_gap": 0.0, "time_limit": seconds},
        )
        if found.status == 2:
            return None
        if found.x is None:
            raise UndecidedError(found.message)
        choice = []
        for s in range(len(self.bounds.sizes)):
            c, p, o = (int(np.argmax(found.x[list(self._columns(s, axis))])) for axis in range(3))
            choice.append((c, p, o))
        bound = min(float(found.mip_dual_bound), float(found.x[self.step])) * self.unit
        return tuple(choice), bound * (1 - 1e-6)


def _size(form: Form) -> float:
    tables = (float(np.abs(table).max()) for table in form.counts.values())
    return max(abs(form.const), *tables, 0.0)
