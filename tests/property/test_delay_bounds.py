"""Delayed SGD: what must hold for every delay, rate and spectrum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.data.staleness import (
    learning_rate_cap,
    non_oscillation_limit,
    response,
    response_sum,
    stability_limit,
    trace_response,
    trace_sum,
)
from strategies.data.staleness_bounds import Quadratic, convex, from_response, strongly_convex
from strategies.data.staleness_convex import GeneralConvex, general_convex_stability

DELAY = st.integers(0, 40)
SHARE = st.floats(0.01, 0.99)


@given(DELAY, SHARE)
def test_the_spectral_radius_agrees_with_the_limit(tau: int, share: float) -> None:
    for alpha, stable in (
        (share * stability_limit(tau), True),
        ((2 - share) * stability_limit(tau), False),
    ):
        polynomial = np.zeros(tau + 2)
        polynomial[:2] = 1.0, -1.0
        polynomial[-1] += alpha
        assert bool(np.abs(np.roots(polynomial)).max() < 1.0) is stable


@given(DELAY)
def test_limits_fall_with_the_delay_and_keep_their_order(tau: int) -> None:
    limits = (stability_limit, non_oscillation_limit, lambda t: learning_rate_cap(1.0, t))
    for limit in limits:
        assert limit(tau + 1) < limit(tau)
    stable, smooth, cap = (limit(tau) for limit in limits)
    assert cap < smooth < stable


@given(DELAY, SHARE, SHARE, st.integers(1, 400))
def test_without_oscillation_the_response_falls_in_time_and_in_alpha(
    tau: int, share: float, part: float, terms: int
) -> None:
    alpha = share * non_oscillation_limit(tau)
    c, flatter = response([alpha, part * alpha], tau, terms).T
    assert (np.diff(c) <= 0.0).all() and (c >= -1e-15).all()
    assert (flatter >= c - 1e-12).all()
    assert response_sum(alpha, tau, terms) <= (1 + 1e-9) / alpha


@given(DELAY, DELAY, SHARE)
def test_the_sum_to_the_end_does_not_depend_on_the_delay(
    tau: int, other: int, share: float
) -> None:
    alpha = share * non_oscillation_limit(max(tau, other))
    terms = int(60 / alpha)
    if terms < 40_000:
        assert response_sum(alpha, tau, terms) == pytest.approx(1 / alpha, rel=1e-6)
        assert response_sum(alpha, other, terms) == pytest.approx(1 / alpha, rel=1e-6)


@given(DELAY, st.integers(50, 400), st.floats(1e-3, 0.5))
def test_bounds_fall_with_the_delay_and_keep_their_order(
    tau: int, updates: int, convexity: float
) -> None:
    at_cap, fixed = [], []
    for delay in (tau, tau + 1):
        size = {"updates": updates, "samples": 100, "convexity": convexity}
        capped = Quadratic(rate=learning_rate_cap(1.0, delay), **size)
        slow = Quadratic(rate=learning_rate_cap(1.0, 41), **size)
        for q, found in ((capped, at_cap), (slow, fixed)):
            exact = from_response(q, delay).value
            assert exact <= (1 + 1e-12) * min(
                convex(q, delay).value, (1 + 1e-9) * strongly_convex(q, delay).value
            )
            found.append(convex(q, delay).value)
    assert at_cap[1] < at_cap[0] and fixed[1] <= fixed[0]
    if updates > tau + 1:
        assert fixed[1] / fixed[0] == pytest.approx((updates - tau - 1) / (updates - tau))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=60), SHARE)
def test_random_delays_up_to_the_threshold_of_their_maximum_never_overshoot(
    delays: list[int], share: float
) -> None:
    alpha = share * non_oscillation_limit(max(delays))
    p = trace_response(alpha, delays)
    assert (p >= -1e-12).all() and (p <= 1.0).all()
    assert trace_sum(alpha, delays) <= len(delays)


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=30),
    st.integers(1, 5),
    st.floats(0.01, 0.5),
)
def test_general_convex_stability_grows_with_delay_rate_and_shrinks_with_samples(
    delays: list[int], more: int, rate: float
) -> None:
    def value(taus: list[int], eta: float, samples: int) -> float:
        c = GeneralConvex(smoothness=1.0, radius=2.0, samples=samples, distance=1.0)
        return general_convex_stability(c, [eta] * len(taus), taus).value

    base = value(delays, rate, 100)
    later = value([d + more for d in delays], rate, 100)
    # A delay reaches back to the first update at most.
    assert later > base if any(d < t for t, d in enumerate(delays)) else later == base
    assert value(delays, 0.9 * rate, 100) < base
    assert value(delays, rate, 200) < base
