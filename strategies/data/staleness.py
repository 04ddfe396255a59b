"""Delayed SGD on a quadratic: its response to one disturbance, and the limits on its rate.

Every gradient arrives tau updates late: w_{t+1} = w_t - eta grad f(w_{t - tau}). On one eigenvalue
a of the Hessian the divergence of two runs obeys c_{k+1} = c_k - alpha c_{k - tau}, alpha = eta a.

Marks say where a statement comes from and travel with each value (see Bound):

    found       read in the source that is named
    derived     worked out here; not a statement of any paper
    remembered  known, but not read again in a source
"""

from __future__ import annotations

from math import ceil, isfinite, log, pi, sin, sqrt
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.errors import InputError

__all__ = [
    "Bound",
    "average_delay_rate",
    "decay_start",
    "learning_rate_cap",
    "non_oscillation_limit",
    "rate_limits",
    "response",
    "response_sum",
    "stability_limit",
    "trace_response",
    "trace_sum",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ACCOUNT = "second-hand account of the theorems of Deng et al., arXiv:2308.09430"
SHARPER = (
    "Deng et al., NeurIPS 2024, 'Stability and Generalization of Asynchronous SGD: Sharper"
    " Bounds Beyond Lipschitz and Smoothness'"
)
CAP_SHARE = 20.0


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A number of the theory with what it rests on.

    Args:
        name: what it bounds. value: the number, in the unit of the loss unless the name says
            otherwise.
        mark: found, derived or remembered, of the formula as a whole; ``source`` names the steps
            that rest on something else.
        source: paper, section or lemma. assumes: what must hold for the value to mean anything.
        flags: assumptions that the arguments are known to break.
        estimate: true when the value is not a rigorous bound even where the assumptions hold.
    """

    name: str
    value: float
    mark: Literal["found", "derived", "remembered"]
    source: str
    assumes: tuple[str, ...]
    flags: tuple[str, ...] = ()
    estimate: bool = False

    def __str__(self) -> str:
        kind = f"{self.mark}, estimate" if self.estimate else self.mark
        text = f"{self.name}: {self.value:.4g} [{kind}: {self.source}]"
        text += f"; assumes {'; '.join(self.assumes)}"
        return text + "".join(f"; BROKEN: {flag}" for flag in self.flags)


def check_delay(tau: int, key: str = "tau") -> int:
    """The delay [updates] itself.

    Raises:
        InputError: it is negative or not a whole number.
    """
    if not isfinite(tau) or tau != int(tau) or tau < 0:
        raise InputError(
            "a delay is a number of updates", key=key, found=str(tau), expected="0, 1, 2 ..."
        )
    return int(tau)


def check_positive(value: float, key: str) -> float:
    """The value itself.

    Raises:
        InputError: it is not a positive finite number.
    """
    if not 0.0 < value < float("inf"):
        raise InputError(
            "must be positive and finite", key=key, found=str(value), expected="a number > 0"
        )
    return value


def response(alpha: ArrayLike, tau: int, num_terms: int) -> Floats:
    """c_0 .. c_{K-1} of c_{k+1} = c_k - alpha c_{k - tau}, shape (K, *alpha.shape).

    c_k is what is left after k updates of a disturbance of size one: the power series of
    1 / (1 - x + alpha x^{tau+1}). It may grow without limit where ``alpha`` is not stable.

    Args:
        alpha: rate times eigenvalue [-], any shape. tau: [updates]. num_terms: K.

    Mark: derived.

    Raises:
        InputError: the delay or the number of terms is negative.
    """
    tau, alphas = check_delay(tau), np.asarray(alpha, dtype=np.float64)
    terms = check_delay(num_terms, "num_terms")
    c = np.ones((terms, *alphas.shape))
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(min(tau, terms - 1), terms - 1):
            c[k + 1] = c[k] - alphas * c[k - tau]
    return c


def response_sum(alpha: ArrayLike, tau: int, num_terms: int) -> float:
    """S = sum over k < K of the largest |c_k| over the given ``alpha`` [-]; inf past overflow.

    Mark: derived.
    """
    c = np.abs(response(np.atleast_1d(alpha), tau, num_terms))
    return _finite_sum(c)


def trace_response(alpha: ArrayLike, delays: ArrayLike) -> Floats:
    """What is left at the end of a disturbance made by each update, shape (T, *alpha.shape).

    With a delay of its own for each update, e_{t+1} = e_t - alpha e_{t - tau_t} + u_t, the answer
    depends on when the disturbance comes. Entry t is d e_T / d u_t, from one reverse pass. For a
    constant delay it is ``response`` read backwards.

    Args:
        alpha: rate times eigenvalue [-], any shape. delays: (T,) [updates]; a read before the
            first update sees no divergence.

    Mark: derived.
    """
    alphas = np.asarray(alpha, dtype=np.float64)
    taus = check_delays(delays)
    p = np.zeros((len(taus) + 1, *alphas.shape))
    p[-1] = 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(len(taus) - 1, -1, -1):
            p[t] += p[t + 1]
            if taus[t] <= t:
                p[t - taus[t]] -= alphas * p[t + 1]
    return p[1:]


def check_delays(delays: ArrayLike, key: str = "delays") -> Ints:
    """Delays as whole numbers, shape (T,).

    Raises:
        InputError: they are not one row of numbers >= 0.
    """
    given = np.asarray(delays, dtype=np.float64)
    taus = np.where(np.isfinite(given), given, -1.0).astype(np.int64)
    if taus.ndim != 1 or (taus < 0).any() or (taus != given).any():
        raise InputError(
            "delays are one whole number per update", key=key, expected="shape (T,), all >= 0"
        )
    return taus


def trace_sum(alpha: ArrayLike, delays: ArrayLike) -> float:
    """Sum over updates of the largest |trace_response| over the given ``alpha`` [-].

    Mark: derived.
    """
    return _finite_sum(np.abs(trace_response(np.atleast_1d(alpha), delays)))


def _finite_sum(sizes: Floats) -> float:
    """Sum over the first axis of the maximum over the others."""
    if not np.isfinite(sizes).all():
        return float("inf")
    if not sizes.size:
        return 0.0
    return float(sizes.reshape(len(sizes), -1).max(axis=1).sum())


def stability_limit(tau: int) -> float:
    """The ``alpha`` [-] below which every disturbance dies out: 2 sin(pi / (2 (2 tau + 1))).

    Exact for a fixed delay. Mark: remembered; the tests check it against the roots of
    z^{tau+1} = z^tau - alpha.
    """
    return 2.0 * sin(pi / (2 * (2 * check_delay(tau) + 1)))


def non_oscillation_limit(tau: int) -> float:
    """The ``alpha`` [-] up to which all c_k >= 0: tau^tau / (tau + 1)^{tau+1}.

    Up to it the c_k sum to 1 / alpha (derived: the series at x = 1) and each falls as alpha grows
    (derived: dc_k / dalpha is minus a sum of products of c_j >= 0). Mark: remembered.
    """
    tau = check_delay(tau)
    return 1.0 if tau == 0 else (tau / (tau + 1)) ** tau / (tau + 1)


def learning_rate_cap(smoothness: float, tau: int) -> float:
    """1 / (20 mu (tau + 1)): the condition on the rate for the published orders.

    For random delay put the largest one. Mark: found, in a second-hand account of
    arXiv:2308.09430, where mu is taken to be the largest eigenvalue.
    """
    return 1.0 / (CAP_SHARE * check_positive(smoothness, "smoothness") * (check_delay(tau) + 1))


def average_delay_rate(scale: float, mean_delay: float, updates: int) -> float:
    """Rate eta = c / (mean delay sqrt(K)) of the average-delay corollary.

    Mark: found, Deng et al., NeurIPS 2024.
    """
    check_positive(scale, "scale")
    return scale / (
        check_positive(mean_delay, "mean_delay") * sqrt(check_positive(updates, "updates"))
    )


def decay_start(tau: int) -> int:
    """The k from which |c_k| <= 3 (1 - alpha)^{k+1}: (tau + 1) ln(2 (tau + 1)), rounded up.

    For alpha <= 1 / (20 (tau + 1)). Mark: remembered, a lemma of Arjevani, Shamir and Srebro; the
    factor 3 is loose, the tests find less than 1.06 at the edge of the condition.
    """
    tau = check_delay(tau)
    return ceil((tau + 1) * log(2 * (tau + 1)))


def rate_limits(smoothness: float, tau: int) -> tuple[Bound, ...]:
    """The three limits on the rate of a quadratic with one fixed delay, strictest first."""
    fixed = ("quadratic loss", "one fixed delay")
    return (
        Bound(
            name="rate of the published theorem",
            value=learning_rate_cap(smoothness, tau),
            mark="found",
            source=ACCOUNT,
            assumes=(*fixed, "smoothness is the largest eigenvalue"),
        ),
        Bound(
            name="rate without oscillation",
            value=non_oscillation_limit(tau) / smoothness,
            mark="remembered",
            source="classic threshold of delayed difference equations",
            assumes=fixed,
        ),
        Bound(
            name="rate of stability",
            value=stability_limit(tau) / smoothness,
            mark="remembered",
            source="exact limit of delayed difference equations; agrees with the spectral radius",
            assumes=fixed,
        ),
    )
