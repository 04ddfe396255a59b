"""Routing as data: how many tokens every source sends to every expert, step after step.

T steps, L layers of experts, E experts, S sources; the sources are the ranks of one expert-parallel
group, in rank order. A *shard* is the block of experts that a device of the group owns.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.expert.routing_input import whole_total

__all__ = ["LoadRatio", "Routing", "RoutingStatistics", "for_sources", "load_ratio", "statistics"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
LAGS = (1, 5, 9, 20)


class Routing(msgspec.Struct, frozen=True, eq=False):
    """Token counts of a run; a token that goes to k experts counts k times.

    Args:
        counts: whole numbers, shape (T, L, E, S). origin: where they come from, in words.

    Raises:
        InputError: another shape, nothing in it, or counts that are no whole numbers from 0 up.
    """

    counts: Ints
    origin: str = ""

    def __post_init__(self) -> None:
        """Refuse what no router can have done."""
        if self.counts.ndim != 4 or not self.counts.size or self.counts.dtype.kind not in "iu":
            raise InputError(
                "routing is an array of whole numbers",
                key="counts",
                found=f"{self.counts.dtype} {self.counts.shape}",
                expected="integers (steps, layers, experts, sources)",
            )
        if (least := int(self.counts.min())) < 0:
            raise InputError(
                "a router sends no negative number of tokens",
                key="counts",
                found=str(least),
                expected="0 or more",
            )
        whole_total(self.counts)


class LoadRatio(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the fullest device over the mean of all, over steps and layers."""

    mean: float
    median: float
    p95: float
    max: float


class RoutingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What published traces say about routing, for static blocks of experts on D devices.

    Shares are of a layer's tokens in a step. Means are over steps and layers. What needs more steps
    or sources than there are is nan.

    Args:
        load: fullest device over the mean, where one group serves all sources.
        group_load: the same over the devices of all groups, where each source is a group that has
            a copy of the experts. layer_load: its mean over steps in the calmest and the
            most uneven layer.
        shares: share of the largest shard, the second, ..., means, (D,). worst_share: largest of
            any step and layer.
        top3, bottom3: share of the three hottest and the three coldest experts of a layer and step.
        drift: lag [steps] -> total variation between the shards' shares so far apart.
        first_last: the same between the first and the last step.
        same_hottest: share of steps whose fullest device was the fullest in the step before.
        correlation: lag [steps] -> Pearson correlation of the shards' shares, all layers together.
        source_spread: relative standard deviation between sources of a shard's share.
    """

    load: LoadRatio
    group_load: LoadRatio
    layer_load: tuple[float, float]
    shares: tuple[float, ...]
    worst_share: float
    top3: float
    bottom3: float
    drift: dict[int, float]
    first_last: float
    same_hottest: float
    correlation: dict[int, float]
    source_spread: float


def load_ratio(loads: NDArray[np.generic]) -> LoadRatio:
    """Return how uneven loads are.

    Args:
        loads: of the devices, shape (..., D). Where all are 0 the ratio is 1.
    """
    given = np.asarray(loads, np.float64)
    mean = given.mean(axis=-1)
    ratio = np.where(mean > 0, given.max(axis=-1) / np.where(mean > 0, mean, 1.0), 1.0)
    return LoadRatio(
        mean=float(ratio.mean()),
        median=float(np.median(ratio)),
        p95=float(np.quantile(ratio, 0.95)),
        max=float(ratio.max()),
    )


def statistics(routing: Routing, devices: int, lags: Sequence[int] = LAGS) -> RoutingStatistics:
    """Return the statistics of a run whose experts lie on devices in contiguous blocks.

    Args:
        routing: the run. devices: D; experts must divide evenly.
        lags: of drift and correlation [steps].

    Raises:
        InputError: experts that D devices cannot share evenly.
    """
    shards = _shards(routing.counts, devices)
    loads = shards.sum(axis=-1)
    share = _share(loads)
    experts = np.sort(_share(routing.counts.sum(axis=-1)), axis=-1)
    each = [load_ratio(loads[:, layer]).mean for layer in range(loads.shape[1])]
    hottest = loads.argmax(axis=-1)
    steps = len(loads)
    return RoutingStatistics(
        load=load_ratio(loads),
        group_load=load_ratio(shards.reshape(*shards.shape[:2], -1)),
        layer_load=(min(each), max(each)),
        shares=tuple(np.sort(share, axis=-1)[..., ::-1].mean(axis=(0, 1)).tolist()),
        worst_share=float(share.max()),
        top3=float(experts[..., -3:].sum(axis=-1).mean()),
        bottom3=float(experts[..., :3].sum(axis=-1).mean()),
        drift={lag: _drift(share, lag) for lag in lags},
        first_last=_drift(share, steps - 1),
        same_hottest=float((hottest[1:] == hottest[:-1]).mean()) if steps > 1 else float("nan"),
        correlation={lag: _correlation(share, lag) for lag in lags},
        source_spread=_source_spread(shards),
    )


def for_sources(routing: Routing, sources: int) -> Routing:
    """Return the same routing seen from another number of sources.

    Neighbours are put together where the number divides; where it is a multiple, each source's
    tokens are dealt out evenly, what is left over one by one.

    Args:
        routing: the run. sources: S of the result.

    Raises:
        InputError: neither number divides the other.
    """
    counts, now = routing.counts, routing.counts.shape[-1]
    if sources == now:
        return routing
    if sources < 1 or (now % sources and sources % now):
        raise InputError(
            "the sources of this routing cannot be regrouped evenly",
            key="sources",
            found=f"{now} sources for {sources} ranks",
            expected="a divisor or a multiple",
        )
    if sources < now:
        part = counts.reshape(*counts.shape[:-1], sources, now // sources).sum(axis=-1)
        return Routing(part, f"{routing.origin}; {now} sources put together as {sources}")
    times = sources // now
    whole, rest = np.divmod(counts, times)
    # The first of the leftover moves on from expert to expert, else one rank would get them all.
    place = (np.arange(times) - np.arange(counts.shape[2])[:, None, None]) % times
    dealt = whole[..., None] + (place < rest[..., None])
    found = dealt.reshape(*counts.shape[:-1], sources).astype(np.int64)
    return Routing(found, f"{routing.origin}; {now} sources dealt out evenly to {sources}")


def _shards(counts: Ints, devices: int) -> Ints:
    steps, layers, experts, sources = counts.shape
    if devices < 1 or experts % devices:
        raise InputError(
            "the devices cannot own equally many experts each",
            key="devices",
            found=f"{experts} experts on {devices} devices",
            expected="a divisor of the number of experts",
        )
    blocks = counts.reshape(steps, layers, devices, experts // devices, sources)
    return np.asarray(blocks.sum(axis=3), np.int64)


def _share(loads: Ints, axis: int = -1) -> Floats:
    total = loads.sum(axis=axis, keepdims=True)
    return np.asarray(loads / np.where(total > 0, total, 1), np.float64)


def _drift(share: Floats, lag: int) -> float:
    if not 0 < lag < len(share):
        return float("nan")
    return float(0.5 * np.abs(share[lag:] - share[:-lag]).sum(axis=-1).mean())


def _correlation(share: Floats, lag: int) -> float:
    if not 0 < lag < len(share):
        return float("nan")
    first = share[:-lag] - 1.0 / share.shape[-1]
    then = share[lag:] - 1.0 / share.shape[-1]
    scale = float(np.sqrt((first**2).sum() * (then**2).sum()))
    return float((first * then).sum() / scale) if scale > 0 else float("nan")


def _source_spread(shards: Ints) -> float:
    if shards.shape[-1] < 2:
        return float("nan")
    share = _share(shards, axis=2)
    mean = share.mean(axis=-1)
    there = mean > 0
    if not there.any():
        return float("nan")
    return float((share.std(axis=-1)[there] / mean[there]).mean())
