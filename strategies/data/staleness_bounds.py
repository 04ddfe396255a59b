"""Bounds on the generalization error of delayed SGD, each with its source and assumptions.

The quadratic bounds are our derivation: it gives the orders that arXiv:2308.09430 states, with
constants, and is not that paper's theorem. At a fixed rate they hardly depend on the delay; the
delay in the denominator comes from the cap on the rate, and a capped run also trains less per
update. So compare runs at equal training loss or equal sum of rates as well as at equal updates.
"""

from __future__ import annotations

from math import log

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from sim.errors import InputError
from strategies.data.staleness import (
    ACCOUNT,
    Bound,
    check_delay,
    check_delays,
    check_positive,
    learning_rate_cap,
    non_oscillation_limit,
    response_sum,
    stability_limit,
    trace_sum,
)

__all__ = [
    "Quadratic",
    "bounded_delay",
    "convex",
    "from_response",
    "published_order_convex",
    "random_delay",
    "strongly_convex",
    "strongly_convex_lemma",
]

OURS = "derived here from average stability and the delayed recursion; not the paper's theorem"
QUADRATIC = ("quadratic loss", "all gradients bounded", "equal starts w_0 = ... = w_tau")
MEAN_ONLY = "the norm of the mean divergence stands for the mean norm"


class Quadratic(msgspec.Struct, frozen=True, kw_only=True):
    """Delayed SGD on a quadratic empirical risk.

    Args:
        rate: eta. updates: T. samples: n in the training set.
        smoothness: largest eigenvalue of the Hessian. convexity: smallest one, may be 0.
        gradient: bound on the norm of any sample's gradient.

    Raises:
        InputError: a value is out of range.
    """

    rate: float
    updates: int
    samples: int
    smoothness: float = 1.0
    convexity: float = 0.0
    gradient: float = 1.0

    def __post_init__(self) -> None:
        for key in ("rate", "updates", "samples", "smoothness", "gradient"):
            check_positive(getattr(self, key), key)
        if not 0.0 <= self.convexity <= self.smoothness:
            raise InputError(
                "the smallest eigenvalue lies between 0 and the largest",
                key="convexity",
                found=str(self.convexity),
                expected=f"0 to {self.smoothness}",
            )

    def of_sum(self, total: float) -> float:
        """B = 2 eta L^2 S / n for a response sum S."""
        return 2.0 * self.rate * self.gradient**2 * total / self.samples

    def broken(self, tau: int) -> tuple[str, ...]:
        """Which limits on the rate this run breaks at delay ``tau``."""
        alpha, found = self.rate * self.smoothness, []
        # The cap itself, computed by division, must not count as above the cap.
        if self.rate > learning_rate_cap(self.smoothness, tau) * (1 + 1e-12):
            found.append("rate above 1/(20 mu (tau + 1)): outside the published theorem")
        if alpha >= stability_limit(tau):
            found.append("rate at or above the stability limit: the run diverges")
        return tuple(found)


def _effective(q: Quadratic, tau: int) -> int:
    return max(0, q.updates - check_delay(tau))


def _require_smooth_decay(q: Quadratic, tau: int) -> None:
    limit = non_oscillation_limit(tau)
    if q.rate * q.smoothness > limit * (1 + 1e-12):
        raise InputError(
            "the response oscillates, so its maximum need not lie at the smallest eigenvalue;"
            " give all eigenvalues to from_response",
            key="rate",
            found=str(q.rate),
            expected=f"at most {limit / q.smoothness}",
        )


def from_response(q: Quadratic, tau: int, eigenvalues: ArrayLike | None = None) -> Bound:
    """B(T, tau) = (2 eta L^2 / n) sum_{k < T - tau} max_a |c_k(a)|, from the recursion itself.

    Args:
        q: the run. tau: fixed delay [updates].
        eigenvalues: (E,) of the Hessian. Without them the response must not oscillate, and the
            maximum is then at the smallest eigenvalue.

    Raises:
        InputError: the response oscillates and no eigenvalues were given.
    """
    if eigenvalues is None:
        _require_smooth_decay(q, tau)
        eigenvalues = q.convexity
    alphas = q.rate * np.atleast_1d(np.asarray(eigenvalues, dtype=np.float64))
    return Bound(
        name="generalization error, quadratic, fixed delay",
        value=q.of_sum(response_sum(alphas, tau, _effective(q, tau))),
        mark="derived",
        source=OURS,
        assumes=(*QUADRATIC, "one fixed delay", MEAN_ONLY),
        flags=q.broken(tau),
        estimate=True,
    )


def convex(q: Quadratic, tau: int) -> Bound:
    """Closed form without strong convexity: B = 2 eta L^2 (T - tau) / n.

    At eta = 1/(20 mu (tau + 1)) it is L^2 (T - tau) / (10 mu n (tau + 1)), the published order.

    Raises:
        InputError: the response oscillates.
    """
    _require_smooth_decay(q, tau)
    return Bound(
        name="generalization error, quadratic convex",
        value=q.of_sum(_effective(q, tau)),
        mark="derived",
        source=OURS,
        assumes=(*QUADRATIC, "one fixed delay", MEAN_ONLY),
        flags=q.broken(tau),
        estimate=True,
    )


def strongly_convex(q: Quadratic, tau: int) -> Bound:
    """Closed form with smallest eigenvalue lambda > 0: S <= 1/(eta lambda), B <= 2 L^2/(lambda n).

    Raises:
        InputError: lambda is 0, or the response oscillates.
    """
    _require_convexity(q)
    _require_smooth_decay(q, tau)
    return Bound(
        name="generalization error, quadratic strongly convex",
        value=q.of_sum(1.0 / (q.rate * q.convexity)),
        mark="derived",
        source=f"{OURS}; rests on the non-oscillation threshold, which is remembered",
        assumes=(*QUADRATIC, "one fixed delay", MEAN_ONLY),
        flags=q.broken(tau),
        estimate=True,
    )


def strongly_convex_lemma(q: Quadratic, tau: int) -> Bound:
    """By the lemma of Arjevani et al.: S <= (tau+1) ln(2(tau+1)) + 3/(eta lambda).

    Raises:
        InputError: lambda is 0, or the rate is above 1/(20 mu (tau + 1)).
    """
    _require_convexity(q)
    if q.broken(tau):
        raise InputError(
            "the lemma does not cover this rate",
            key="rate",
            found=str(q.rate),
            expected=f"at most {learning_rate_cap(q.smoothness, tau)}",
        )
    total = (tau + 1) * log(2 * (tau + 1)) + 3.0 / (q.rate * q.convexity)
    return Bound(
        name="generalization error, quadratic strongly convex, by the decay lemma",
        value=q.of_sum(total),
        mark="derived",
        source=f"{OURS}; rests on a lemma of Arjevani, Shamir and Srebro, which is remembered",
        assumes=(*QUADRATIC, "one fixed delay", MEAN_ONLY),
        estimate=True,
    )


def _require_convexity(q: Quadratic) -> None:
    if q.convexity == 0.0:
        raise InputError(
            "this bound needs strong convexity", key="convexity", found="0", expected="> 0"
        )


def random_delay(q: Quadratic, delays: ArrayLike, eigenvalues: ArrayLike) -> Bound:
    """B for given sequences of delays: the mean over rows of (2 eta L^2 / n) trace_sum.

    One row is one run, for example the delays a simulation gave; several rows are a Monte Carlo
    over their distribution. It follows each sequence exactly instead of putting its maximum.

    Args:
        q: the run; ``q.updates`` is not used, the sequences say how many there are.
        delays: (T,) or (R, T) [updates]. eigenvalues: (E,) of the Hessian.
    """
    rows = [check_delays(row) for row in np.atleast_2d(np.asarray(delays))]
    alphas = q.rate * np.atleast_1d(np.asarray(eigenvalues, dtype=np.float64))
    largest = max((int(row.max()) for row in rows if row.size), default=0)
    return Bound(
        name="generalization error, quadratic, random delay",
        value=q.of_sum(float(np.mean([trace_sum(alphas, row) for row in rows]))),
        mark="derived",
        source=OURS,
        assumes=(*QUADRATIC, "delays do not depend on the samples drawn", MEAN_ONLY),
        flags=q.broken(largest),
        estimate=True,
    )


def bounded_delay(q: Quadratic, tau_max: int) -> Bound:
    """The closed forms with tau -> tau_max, as the corollary for bounded random delay is reported.

    The substitution is found, in a second-hand account; the constants are ours, so the value is
    marked as its closed form is.
    """
    at_max = strongly_convex(q, tau_max) if q.convexity else convex(q, tau_max)
    return msgspec.structs.replace(
        at_max,
        name=at_max.name + ", random delay by its maximum",
        source=f"{at_max.source}; the substitution is found in a {ACCOUNT}",
        assumes=(*QUADRATIC, "no delay above tau_max", MEAN_ONLY),
    )


def published_order_convex(updates: int, tau: int, samples: int) -> Bound:
    """(T - tau) / (n tau), the published order for quadratic convex losses, without constants.

    Raises:
        InputError: ``tau`` is 0, where the order says nothing, or the run has no more updates than
            that; or a size is not positive.
    """
    check_positive(check_delay(tau), "tau")
    check_positive(samples, "samples")
    if check_delay(updates, "updates") <= tau:
        raise InputError(
            "a run has more updates than its delay",
            key="updates",
            found=str(updates),
            expected=f"more than {tau}",
        )
    return Bound(
        name="order of the generalization error, quadratic convex (no constants, no logarithms)",
        value=(updates - tau) / (samples * tau),
        mark="found",
        source="Deng et al., arXiv:2308.09430, abstract",
        assumes=("quadratic loss", "one fixed delay", "rate at most 1/(20 mu (tau + 1))"),
        estimate=True,
    )
