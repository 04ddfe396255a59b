"""Sums over the integers of pipeline positions: one form for arrays and for integer programs.

A ``Form`` has a table per integer and factors of three auxiliaries that couple two integers of one
position; ``Bounds`` holds the forms that a step's time and its memory obey.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AUXILIARIES",
    "CHECKPOINTED",
    "OPTIMIZER",
    "PARAMETERS",
    "Aux",
    "Bounds",
    "Floats",
    "Form",
    "Ints",
    "total",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CHECKPOINTED, PARAMETERS, OPTIMIZER = range(3)
"""Places of a position's integers."""
SLACK = 1e-9
"""Sums of many equal times are a little off."""


class Aux(msgspec.Struct, frozen=True, kw_only=True):
    """A coupling of a position's integers c, p, o of n layers.

    Args:
        position: pipeline position. kind: "host" min(o, n - p); "again" max(0, c + o - n);
            "slow" max(0, table[p] - again * min(c, p)).
        again: [s]. table: [s] by p.
    """

    position: int
    kind: str
    again: float = 0.0
    table: tuple[float, ...] = ()


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A sum over positions.

    Args:
        const: constant. counts: (position, 0 checkpointed, 1 parameters, 2 optimizer) -> value by
            number of layers. extra: number of an auxiliary -> factor, not negative.
    """

    const: float = 0.0
    counts: dict[tuple[int, int], Floats] = {}
    extra: dict[int, float] = {}


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What no choice can beat.

    Args:
        sizes: (c, p, o) -> number of values of each position's integers, 0 included.
        layers: of each position. aux: auxiliaries, which forms name by number.
        times: each at most the step [s]. on_chip, on_host: (memory, at most) [B].
    """

    sizes: tuple[tuple[int, int, int], ...]
    layers: tuple[int, ...]
    aux: tuple[Aux, ...]
    times: tuple[Form, ...]
    on_chip: tuple[tuple[Form, float], ...]
    on_host: tuple[tuple[Form, float], ...] = ()

    def value(self, form: Form, choice: Sequence[Sequence[Ints]]) -> Floats:
        """Return a form at choices; one (c, p, o) of arrays that broadcast per position."""
        found: Floats = np.asarray(form.const, np.float64)
        for (position, axis), table in form.counts.items():
            found = found + table[choice[position][axis]]
        for k, factor in form.extra.items():
            a = self.aux[k]
            value = AUXILIARIES[a.kind](a, self.layers[a.position], *choice[a.position])
            found = np.asarray(found + factor * value)
        return found

    def step(self, choice: Sequence[Sequence[Ints]]) -> Floats:
        """Return the least step [s]."""
        found = [self.value(form, choice) for form in self.times]
        return np.asarray(np.maximum.reduce(np.broadcast_arrays(*found)) * (1 - SLACK))

    def fits(self, choice: Sequence[Sequence[Ints]]) -> NDArray[np.bool_]:
        """Return where memory suffices."""
        limits = (*self.on_chip, *self.on_host)
        found = [self.value(form, choice) <= most * (1 + SLACK) for form, most in limits]
        return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*found)))


def total(forms: Sequence[Form]) -> Form:
    """Return the sum of forms."""
    counts: dict[tuple[int, int], Floats] = {}
    extra: dict[int, float] = {}
    for form in forms:
        for key, table in form.counts.items():
            counts[key] = counts.get(key, 0.0) + table
        for k, factor in form.extra.items():
            extra[k] = extra.get(k, 0.0) + factor
    return Form(const=sum(f.const for f in forms), counts=counts, extra=extra)


def _host(aux: Aux, n: int, c: Ints, p: Ints, o: Ints) -> Ints:
    return np.asarray(np.minimum(o, n - p))


def _again(aux: Aux, n: int, c: Ints, p: Ints, o: Ints) -> Ints:
    return np.asarray(np.maximum(0, c + o - n))


def _slow(aux: Aux, n: int, c: Ints, p: Ints, o: Ints) -> Floats:
    table = np.asarray(aux.table)[p]
    return np.asarray(np.maximum(0.0, table - aux.again * np.minimum(c, p)))


AUXILIARIES = {"host": _host, "again": _again, "slow": _slow}
"""Value of each kind of auxiliary: (auxiliary, layers, c, p, o) -> array."""
