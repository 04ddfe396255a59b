"""Layers to the stages of many plans at once: the fastest bottleneck that memory allows.

Equal layers make the min-max split a threshold search: stage p takes as many layers as fit into
time T and into its memory, and the smallest T that places all layers is the optimum. That is h2.md
2.4 step 3 (equal time, rounding, repair) without its local moves, exact and for all rows together.
Layers that are not equal are cut by dynamic programming (strategies.pipeline.partition).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["compositions", "moves", "share_out", "split_min_max"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_HALVINGS = 12


def split_min_max(
    num_layers: int, layer_s: Floats, extra_s: Floats, most: Ints
) -> tuple[Ints, NDArray[np.bool_]]:
    """Split equal layers so that the slowest stage is fastest.

    Args:
        num_layers: L. layer_s: [s] of one layer on each stage, shape (n, P), positive.
        extra_s: [s] each stage has besides its layers (embedding, head), shape (n, P).
        most: layers that each stage has memory for, shape (n, P).

    Returns:
        Layers, shape (n, P), at least one each; and which rows could be placed, shape (n,). Rows
        that could not hold zeros.
    """
    stages = layer_s.shape[1]
    most = np.minimum(most, num_layers - stages + 1)
    possible = (most >= 1).all(axis=1) & (most.sum(axis=1) >= num_layers)
    layers = np.zeros(layer_s.shape, np.int64)
    if not possible.any():
        return layers, possible
    unit, extra, cap = layer_s[possible], extra_s[possible], most[possible]
    chosen = _fitting(_floor(num_layers, unit, extra, cap), unit, extra, cap)
    missing = num_layers - chosen.sum(axis=1)
    rows = np.flatnonzero(missing > 0)
    while len(rows):
        full = chosen[rows] >= cap[rows]
        time = np.where(full, np.inf, (chosen[rows] + 1) * unit[rows] + extra[rows])
        # Of equally fast stages the last takes the layer: it holds fewest microbatches.
        best = time.shape[1] - 1 - np.argmin(time[:, ::-1], axis=1)
        chosen[rows, best] += 1
        missing[rows] -= 1
        rows = rows[missing[rows] > 0]
    rows = np.flatnonzero(missing < 0)
    while len(rows):
        time = np.where(chosen[rows] > 1, chosen[rows] * unit[rows] + extra[rows], -np.inf)
        worst = np.argmax(time, axis=1)
        chosen[rows, worst] -= 1
        missing[rows] += 1
        rows = rows[missing[rows] < 0]
    layers[possible] = chosen
    return layers, possible


def _floor(num_layers: int, unit: Floats, extra: Floats, cap: Ints) -> Floats:
    """A time below the optimum, close to it: real-valued layers, then a few halvings for caps."""
    inverse = 1.0 / unit
    low = (num_layers + (extra * inverse).sum(axis=1)) / inverse.sum(axis=1)
    high = (extra + unit * cap).max(axis=1)
    bound = (cap < (low[:, None] - extra) * inverse).any(axis=1)
    rows = np.flatnonzero(bound)
    for _ in range(_HALVINGS if len(rows) else 0):
        middle = (low[rows] + high[rows]) / 2
        placed = _fitting(middle, unit[rows], extra[rows], cap[rows]).sum(axis=1)
        less = placed <= num_layers
        low[rows] = np.where(less, middle, low[rows])
        high[rows] = np.where(less, high[rows], middle)
    return np.asarray(low)


def _fitting(time: Floats, unit: Floats, extra: Floats, cap: Ints) -> Ints:
    fitting = np.floor((time[:, None] - extra) / unit)
    return np.asarray(np.clip(fitting, 1, cap), np.int64)


def compositions(num_layers: int, stages: int) -> Ints:
    """All ways to give every stage at least one layer, shape (C(L - 1, P - 1), P).

    >>> compositions(4, 2).tolist()
    [[1, 3], [2, 2], [3, 1]]
    """
    rows = np.zeros((1, 0), np.int64)
    left = np.array([num_layers], np.int64)
    for stage in range(stages - 1):
        room = left - (stages - 1 - stage)
        index = np.repeat(np.arange(len(rows)), room)
        first = np.repeat(np.cumsum(room) - room, room)
        take = np.arange(len(index)) - first + 1
        rows = np.concatenate([rows[index], take[:, None]], axis=1)
        left = left[index] - take
    return np.concatenate([rows, left[:, None]], axis=1)


def moves(layers: Ints, most: Ints) -> Ints:
    """All splits that differ from one split by one layer given from a stage to another.

    Args:
        layers: shape (P,). most: layers each stage has memory for, shape (P,).

    Returns:
        Shape (moves, P), possibly (0, P).
    """
    stages = len(layers)
    giver, taker = np.divmod(np.arange(stages * stages), stages)
    legal = (giver != taker) & (layers[giver] > 1) & (layers[taker] < most[taker])
    giver, taker = giver[legal], taker[legal]
    found = np.repeat(layers[None, :], len(giver), axis=0)
    rows = np.arange(len(giver))
    found[rows, giver] -= 1
    found[rows, taker] += 1
    return found


def share_out(speeds: Sequence[float], dps: Sequence[int], total: int) -> list[tuple[int, ...]]:
    """Microbatches per replica of unlike pools: near their speeds, adding up exactly.

    Args:
        speeds: of a replica of each pool. dps: replicas. total: microbatches of all together.

    Returns:
        Sharings, the one first under which the slowest pool is fastest.

    >>> share_out([3.0, 1.0], [2, 2], 16)[0]
    (6, 2)
    """
    whole = sum(d * s for d, s in zip(dps, speeds, strict=True))
    ideal = [total * s / whole for s in speeds]
    near = [sorted({max(1, math.floor(x) + k) for k in (-1, 0, 1, 2)}) for x in ideal[:-1]]
    found = []
    for head in itertools.product(*near):
        left = total - sum(d * m for d, m in zip(dps, head, strict=False))
        if left > 0 and left % dps[-1] == 0:
            found.append((*head, left // dps[-1]))
    return sorted(found, key=lambda m: max(x / s for x, s in zip(m, speeds, strict=True)))
