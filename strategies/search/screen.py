"""From structures to scored candidates: layers placed, memory proven, times estimated or exact."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.pipeline.partition import min_max_cuts
from strategies.search.bounds import estimate, lower_bound
from strategies.search.costs import Costs
from strategies.search.recurrence import StageTimes, Sync, step_times
from strategies.search.slab import Slab
from strategies.search.split import compositions, split_min_max

__all__ = [
    "by_stages",
    "compute_bound",
    "every_split",
    "exact_times",
    "fits",
    "place_layers",
    "rough_times",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
CHUNK = 8_192
"""Rows that are split and estimated together."""


def by_stages(slab: Slab) -> list[Slab]:
    """Sort structures by their number of stages; each part has one."""
    stages = slab.pp.sum(axis=1)
    return [slab.take(stages == p) for p in np.unique(stages)]


def place_layers(costs: Costs, slab: Slab, pruned: Counter[str]) -> Slab:
    """Split the layers of every structure by the fastest bottleneck; drop what does not fit.

    Args:
        costs: of the problem. slab: structures of one number of stages.
        pruned: "memory" counts structures that no split of this kind fits.
    """
    total = costs.passes.num_layers
    if slab.num_stages * slab.knobs.chunks > total:
        return slab.take(slice(0, 0))
    most = costs.most_layers(slab)
    unit, extra = costs.layer_times(slab)
    if costs.passes.equal:
        layers, possible = split_min_max(total, unit, extra, most)
    else:
        layers, possible = _unequal(costs, slab, most)
    pruned["memory"] += int((~possible).sum())
    placed = slab.take(np.flatnonzero(possible)).with_layers(layers[np.flatnonzero(possible)])
    return _drop_unfit(costs, placed, pruned)


def _unequal(costs: Costs, slab: Slab, most: Ints) -> tuple[Ints, Bools]:
    """Unlike layers: the exact min-max cut of each row, whether or not it fits."""
    layers = np.zeros(most.shape, np.int64)
    ways, stage = costs.ways_of_stages(slab)
    steps = np.stack([np.diff(costs.passes.seconds(w)[:3].sum(axis=0)) for w in ways])
    known: dict[bytes, Ints] = {}
    for row in range(len(slab)):
        key = stage[row].tobytes()
        if key not in known:
            known[key] = np.diff(min_max_cuts(steps[stage[row]]))
        layers[row] = known[key]
    return layers, np.asarray((most >= 1).all(axis=1))


def every_split(costs: Costs, slab: Slab, pruned: Counter[str]) -> Slab:
    """Every structure with every split of the layers that fits."""
    total, stages = costs.passes.num_layers, slab.num_stages * slab.knobs.chunks
    if stages > total:
        return slab.take(slice(0, 0))
    splits = compositions(total, stages)
    wide = slab.repeat(len(splits)).with_layers(np.tile(splits, (len(slab), 1)))
    if costs.passes.equal:
        most = np.repeat(costs.most_layers(slab), len(splits), axis=0)
        possible: Bools = np.asarray((wide.layers <= most).all(axis=1))
        pruned["memory"] += int((~possible).sum())
        wide = wide.take(possible)
    return _drop_unfit(costs, wide, pruned)


def count_splits(num_layers: int, stages: int) -> int:
    """Splits of the layers over stages."""
    return math.comb(num_layers - 1, stages - 1) if stages <= num_layers else 0


def fits(costs: Costs, slab: Slab, shards: int | None = None) -> Bools:
    """Which candidates fit into memory.

    Args:
        costs: of the problem. slab: candidates with layers. shards: as for ``Costs.most_layers``.
    """
    if not len(slab):
        return np.zeros(0, np.bool_)
    peak, limit = costs.memory(slab, shards)
    return np.asarray((peak <= limit).all(axis=1))


def _drop_unfit(costs: Costs, slab: Slab, pruned: Counter[str]) -> Slab:
    if costs.passes.equal and slab.knobs.chunks == 1:
        return slab  # the layers each stage has memory for were exact
    keep = fits(costs, slab)
    pruned["memory"] += int((~keep).sum())
    return slab.take(keep)


def rough_times(costs: Costs, slab: Slab) -> Floats:
    """Closed-form step times [s], shape (n,)."""
    return estimate(slab.shape, costs.times(slab), costs.sync(slab, exact=False))


def compute_bound(costs: Costs, slab: Slab) -> Floats:
    """Proven bound of candidates with layers from their passes alone [s], shape (n,)."""
    count, virtual = slab.layers.shape
    none, zero = np.zeros((count, virtual)), np.zeros(count)
    sync = Sync(
        reduce=none, reduce_experts=none, update=none, unshard=none, unshard_experts=none,
        embed=zero, barrier=zero,
    )  # fmt: skip
    return lower_bound(slab.shape, costs.compute_only(slab), sync)


def exact_times(
    costs: Costs, slabs: list[Slab], incumbent: float = math.inf, *, in_step: bool | None = None
) -> list[Floats]:
    """Exact step times [s] of candidates with layers; plans of one shape are run together.

    Args:
        costs: of the problem. slabs: candidates.
        incumbent: [s] candidates whose proven bound is above it get infinity.
        in_step: as for ``Costs.times``.
    """
    inputs = [(costs.times(s, in_step), costs.sync(s, in_step)) for s in slabs]
    results = [lower_bound(s.shape, t, y) for s, (t, y) in zip(slabs, inputs, strict=True)]
    shapes: dict[tuple[object, ...], list[int]] = {}
    for i, slab in enumerate(slabs):
        shapes.setdefault(slab.shape, []).append(i)
    for members in shapes.values():
        rows = [np.flatnonzero(results[i] <= incumbent) for i in members]
        for i in members:
            results[i] = np.where(results[i] <= incumbent, results[i], math.inf)
        if not sum(map(len, rows)):
            continue
        times = _join([inputs[i][0].take(r) for i, r in zip(members, rows, strict=True)])
        sync = _join_sync([inputs[i][1] for i in members], rows)
        found = step_times(slabs[members[0]].shape, times, sync)
        first = 0
        for i, r in zip(members, rows, strict=True):
            results[i][r] = found[first : first + len(r)]
            first += len(r)
    return results


def _join(parts: list[StageTimes]) -> StageTimes:
    names = StageTimes.__struct_fields__
    return StageTimes(**{k: np.concatenate([getattr(p, k) for p in parts]) for k in names})


def _join_sync(parts: list[Sync], rows: list[Ints]) -> Sync:
    def joined(name: str) -> NDArray[Any] | None:
        values = [getattr(p, name) for p in parts]
        if any(v is None for v in values):
            return None
        return np.concatenate([v[r] for v, r in zip(values, rows, strict=True)])

    return Sync(**{k: joined(k) for k in Sync.__struct_fields__})  # type: ignore[arg-type]
