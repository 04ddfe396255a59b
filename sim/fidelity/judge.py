"""Judge a fit on runs it did not see: held out by run, plan, model or source."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.fidelity.fit import Case, fit, predict

__all__ = ["folds_of", "held_out"]

Floats = NDArray[np.float64]


def folds_of(names: Sequence[str], count: int) -> list[int]:
    """Return a fold per name: equal names share one, and no draw is involved.

    Args:
        names: what must stay together. count: folds; 0 gives every name its own.
    """
    distinct = sorted(set(names), key=lambda n: (zlib.crc32(n.encode()), n))
    number = {name: i % (count or len(distinct)) for i, name in enumerate(distinct)}
    return [number[n] for n in names]


def held_out(cases: Sequence[Case], names: Sequence[str], count: int = 5) -> Floats:
    """Predict every case by a fit to the other folds.

    Args:
        cases: with measured times. names: of each case, what is held out together. count: folds.

    Returns:
        Step times [s], shape (n,).
    """
    fold = np.array(folds_of(names, count))
    found = np.zeros(len(cases))
    for k in np.unique(fold):
        seen = [c for c, f in zip(cases, fold, strict=True) if f != k]
        rest = [c for c, f in zip(cases, fold, strict=True) if f == k]
        found[fold == k] = predict(fit(seen), rest)
    return found
