"""What the blocks of a transformer keep for the backward pass, beyond their products."""

from __future__ import annotations

from sim.model.graph import Saved
from sim.model.shape import Shape

__all__ = ["dropout_mask", "norm_inputs"]


def norm_inputs(s: Shape, count: int) -> tuple[Saved, ...]:
    """Return the inputs of this many norms over the residual stream."""
    return (Saved(elements=s.hidden * count, split=False),)


def dropout_mask(s: Shape, dropout: bool) -> tuple[Saved, ...]:
    """Return the mask of one dropout over the residual stream, () without dropout."""
    return (Saved(elements=s.hidden, nbytes=1, split=False),) if dropout else ()
