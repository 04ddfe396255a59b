"""Numbers of the generator under which drawn routing has the statistics of a published trace."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.expert.routing import RoutingStatistics, for_sources, statistics
from strategies.expert.routing_synthetic import Popularity, drawn

__all__ = [
    "LAER_E16K4",
    "LAER_E8K2",
    "Calibration",
    "Target",
    "calibrate",
    "compared",
    "drawn_like",
]


Floats = NDArray[np.float64]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a trace, and the sizes under which they were taken.

    Args:
        name: of the trace. steps, layers, experts: T, L, E. devices: of an expert-parallel group.
        groups: expert-parallel groups side by side.
        tokens: that each rank sends in each layer and step, k times those of its batch.
        shares, drift, same_hottest, source_spread: see RoutingStatistics; sources are groups.
        correlation: the same. group_load: mean of the fullest rank over the mean of all.
    """

    name: str
    steps: int
    layers: int
    experts: int
    devices: int
    groups: int
    tokens: int
    shares: tuple[float, ...]
    drift: dict[int, float]
    source_spread: float
    same_hottest: float
    correlation: dict[int, float]
    group_load: float


LAER_E8K2 = Target(
    name="LAER-MoE, Mixtral-8x7B with 8 experts, top 2",
    steps=10,
    layers=32,
    experts=8,
    devices=4,
    groups=8,
    tokens=2 * 16384,
    shares=(0.356, 0.271, 0.219, 0.154),
    drift={1: 0.061, 5: 0.09},
    source_spread=0.110,
    same_hottest=0.785,
    correlation={1: 0.73, 5: 0.62, 9: 0.11},
    group_load=1.66,
)
"""Rank loads of static expert parallelism in the artifact's trace (wikitext, near-initial weights;
https://github.com/PKU-DAIR/Hetu-Galvatron, branch laer-moe), worked out from its rows."""
LAER_E16K4 = Target(
    name="LAER-MoE, Mixtral-8x7B with 16 experts, top 4",
    steps=30,
    layers=24,
    experts=16,
    devices=4,
    groups=8,
    tokens=4 * 16384,
    shares=(0.376, 0.274, 0.219, 0.130),
    drift={1: 0.041, 5: 0.09},
    source_spread=0.072,
    same_hottest=0.856,
    correlation={1: 0.86, 5: 0.76, 9: 0.61, 20: 0.24},
    group_load=1.73,
)
"""As LAER_E8K2."""
_EVALUATIONS = 120


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. ``popularity``: of the generator. ``reached``: what is then drawn."""

    target: Target
    popularity: Popularity
    reached: RoutingStatistics


def calibrate(target: Target, seed: int = 0) -> Calibration:
    """Choose skew, drift and source spread by the statistics that they give.

    Nelder and Mead's search over the logarithms of the standard deviations of base and drift, of
    the forgetting per step and of the concentration, always on the same random numbers, so the same
    target gives the same answer. What is matched: the shards' shares, drift and source spread; the
    rest of the target is there to be compared.

    Args:
        target: of a trace. seed: of what is drawn.
    """
    from scipy.optimize import minimize

    start: Floats = np.log([0.5 * _log_spread(target), 0.5 * _log_spread(target), 0.1, 100.0])
    options: Any = {
        "maxfev": _EVALUATIONS,
        "initial_simplex": [start, *(start + 0.5 * np.eye(start.size))],
    }

    def miss(x: Any, *_: Any, **__: Any) -> float:
        return _miss(target, drawn_like(target, _popularity(x), seed))

    found = minimize(miss, start.tolist(), method="Nelder-Mead", options=options)
    popularity = _popularity(found.x)
    return Calibration(
        target=target, popularity=popularity, reached=drawn_like(target, popularity, seed)
    )


def drawn_like(target: Target, popularity: Popularity, seed: int = 0) -> RoutingStatistics:
    """Return the statistics of routing drawn at the sizes of a trace."""
    routing = drawn(
        steps=target.steps,
        layers=target.layers,
        experts=target.experts,
        sources=target.devices * target.groups,
        tokens=target.tokens,
        seed=seed,
        popularity=popularity,
    )
    lags = sorted({*target.drift, *target.correlation})
    return statistics(for_sources(routing, target.groups), target.devices, lags)


def compared(calibration: Calibration) -> list[tuple[str, float, float]]:
    """Return every statistic of the target as (name, target, reached)."""
    target, reached = calibration.target, calibration.reached
    rows = [
        (f"share of shard {n}", want, reached.shares[n - 1])
        for n, want in enumerate(target.shares, start=1)
    ]
    rows += [(f"drift, lag {k}", v, reached.drift[k]) for k, v in target.drift.items()]
    rows += [("source spread", target.source_spread, reached.source_spread)]
    rows += [("same hottest shard", target.same_hottest, reached.same_hottest)]
    rows += [
        (f"correlation, lag {k}", v, reached.correlation[k]) for k, v in target.correlation.items()
    ]
    return [*rows, ("fullest rank / mean", target.group_load, reached.group_load.mean)]


def _popularity(x: Floats) -> Popularity:
    sigma, moved, forgets, concentration = np.exp(np.clip(x, -20.0, 20.0)).tolist()
    phi = math.exp(-forgets)
    return Popularity(
        sigma=min(sigma, 10.0),
        phi=phi,
        step=min(moved, 10.0) * math.sqrt(1.0 - phi * phi),
        concentration=min(max(concentration, 0.1), 1e8),
    )


def _log_spread(target: Target) -> float:
    return float(np.std(np.log(target.shares))) * math.sqrt(target.experts / target.devices)


def _miss(target: Target, reached: RoutingStatistics) -> float:
    """Squared logarithms of reached over wanted, the shares together as one."""
    miss = np.mean(
        [math.log(a / b) ** 2 for a, b in zip(reached.shares, target.shares, strict=True)]
    )
    pairs = [(reached.drift[k], v) for k, v in target.drift.items()]
    pairs += [(reached.source_spread, target.source_spread)]
    return float(4.0 * miss + sum(math.log(max(a, 1e-12) / b) ** 2 for a, b in pairs))
