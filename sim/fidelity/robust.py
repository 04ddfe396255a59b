"""The soft absolute loss as a change of residuals, so that priors beside them stay square."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["slope", "soft"]

Floats = NDArray[np.float64]


def soft(r: Floats) -> Floats:
    """Return residuals whose square is the soft absolute loss 2 (sqrt(1 + r^2) - 1)."""
    return np.asarray(np.sign(r) * np.sqrt(2.0 * (np.sqrt(1.0 + r * r) - 1.0)))


def slope(r: Floats) -> Floats:
    """Return the derivative of ``soft``, which is 1 at 0."""
    root = np.sqrt(1.0 + r * r)
    size = np.sqrt(2.0 * (root - 1.0))
    return np.asarray(np.where(np.abs(r) < 1e-6, 1.0, np.abs(r) / (root * np.maximum(size, 1e-12))))
