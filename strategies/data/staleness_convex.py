"""Generalization of asynchronous SGD on smooth convex losses, with explicit constants.

The delay term of these bounds adds error. A benefit from delay comes only through a rate that
falls with it, and the authors call the bound pessimistic for a constant rate.
"""

from __future__ import annotations

from math import e, inf, sqrt

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from sim.errors import InputError
from strategies.data.staleness import SHARPER, Bound, Floats, check_delays, check_positive

__all__ = [
    "GeneralConvex",
    "delayed_step_expansion",
    "general_convex",
    "general_convex_stability",
    "plain_sgd_stability",
]


class GeneralConvex(msgspec.Struct, frozen=True, kw_only=True):
    """Projected asynchronous SGD on a convex set with a smooth convex loss >= 0.

    Args:
        smoothness: beta. radius: diameter r of the set. samples: n.
        distance: ||w_1 - w*||. best_risk: F(w*).
    """

    smoothness: float
    radius: float
    samples: int
    distance: float
    best_risk: float = 0.0

    def __post_init__(self) -> None:
        for key in ("smoothness", "radius", "samples"):
            check_positive(getattr(self, key), key)
        if not (0.0 <= self.distance < inf and 0.0 <= self.best_risk < inf):
            raise InputError("distance and best_risk are at least 0", key="distance")


def _rates_and_delays(c: GeneralConvex, rates: ArrayLike, delays: ArrayLike) -> tuple[Floats, ...]:
    """Rates (K,) and, for each update, the sum of the rates in its delay window (K,)."""
    eta, taus = np.asarray(rates, dtype=np.float64), check_delays(delays)
    if eta.shape != taus.shape or not eta.size:
        raise InputError(
            "one rate and one delay per update", key="rates", found=f"{eta.shape}, {taus.shape}"
        )
    falls = bool((np.diff(eta) <= 0.0).all())
    if not (falls and (eta > 0.0).all() and (eta <= 1.0 / (2.0 * c.smoothness)).all()):
        raise InputError(
            "the bound covers positive rates that do not grow, up to 1/(2 beta)",
            key="rates",
            expected=f"non-increasing, at most {1.0 / (2.0 * c.smoothness)}",
        )
    before = np.concatenate([[0.0], np.cumsum(eta)])
    at = np.arange(len(eta))
    return eta, before[at] - before[np.maximum(0, at - taus)]


def delayed_step_expansion(
    rate: float, window: ArrayLike, smoothness: float, radius: float
) -> float:
    """How much one delayed step can add to ||w - w'||^2: 2 eta beta^2 r^2 sum of the window.

    Args:
        rate: eta of the step, at most 2 / beta. window: rates of the tau steps before it.
        smoothness: beta. radius: diameter r.

    Mark: found, key lemma of Deng et al., NeurIPS 2024.

    Raises:
        InputError: the rate is not positive or above 2 / beta, or a constant is not positive.
    """
    check_positive(radius, "radius")
    if not 0.0 < rate <= 2.0 / check_positive(smoothness, "smoothness"):
        raise InputError(
            "the lemma covers rates up to 2/beta", key="rate", found=str(rate), expected="<= 2/beta"
        )
    return 2.0 * rate * smoothness**2 * radius**2 * float(np.sum(window))


def general_convex_stability(c: GeneralConvex, rates: ArrayLike, delays: ArrayLike) -> Bound:
    """On-average model stability of projected asynchronous SGD, with constants.

    (16 beta e (1 + K/n) / n) [eta_1 d^2 + (4 beta r^2 + 2 F*) sum eta_l^2]
    + 2 beta^2 r^2 e sum_l eta_l sum_{j <= tau_l} eta_{l-j}

    Args:
        c: the problem. rates, delays: (K,) of each update; a delay reaches at most to update 1.

    Raises:
        InputError: rates grow or exceed 1/(2 beta), or the shapes differ.
    """
    eta, windows = _rates_and_delays(c, rates, delays)
    beta, n = c.smoothness, c.samples
    inner = eta[0] * c.distance**2 + (4 * beta * c.radius**2 + 2 * c.best_risk) * np.sum(eta**2)
    late = 2 * beta**2 * c.radius**2 * e * np.sum(eta * windows)
    return Bound(
        name="on-average model stability, convex [parameter^2]",
        value=float(16 * beta * e * (1 + len(eta) / n) / n * inner + late),
        mark="found",
        source=SHARPER,
        assumes=("loss >= 0, convex, beta-smooth", "projection on a set of diameter r"),
    )


def general_convex(
    c: GeneralConvex, rates: ArrayLike, delays: ArrayLike, training_loss: float
) -> Bound:
    """Generalization error min over gamma of (beta/gamma) F_S + ((beta + gamma)/2) eps_stab.

    The minimum, at gamma = sqrt(2 beta F_S / eps), is beta eps / 2 + sqrt(2 beta F_S eps): derived.
    The delay term adds error; delay helps only through a rate that falls with it.

    Args:
        c: the problem. rates, delays: (K,). training_loss: E F_S(w_K) reached.
    """
    eps = general_convex_stability(c, rates, delays)
    if not 0.0 <= training_loss < inf:
        raise InputError("the loss is at least 0", key="training_loss", found=str(training_loss))
    value = c.smoothness * eps.value / 2 + sqrt(2 * c.smoothness * training_loss * eps.value)
    return msgspec.structs.replace(
        eps,
        name="generalization error, convex",
        value=value,
        source=f"{SHARPER}; the minimum over gamma is worked out here",
    )


def plain_sgd_stability(rates: ArrayLike, gradient: float, samples: int) -> Bound:
    """Uniform stability of SGD without delay: 2 L^2 sum eta / n, for reference."""
    check_positive(samples, "samples")
    return Bound(
        name="uniform stability, convex, no delay",
        value=2.0 * gradient**2 * float(np.sum(rates)) / samples,
        mark="remembered",
        source="Hardt et al.; the order is found, quoted in the NeurIPS 2024 paper; the factor 2 is"
        " remembered",
        assumes=("loss convex, L-Lipschitz and smooth", "no delay"),
    )
