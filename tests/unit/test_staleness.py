from __future__ import annotations

from math import e

import numpy as np
import pytest

from sim.errors import InputError
from strategies.data.staleness import (
    average_delay_rate,
    decay_start,
    learning_rate_cap,
    non_oscillation_limit,
    rate_limits,
    response,
    response_sum,
    stability_limit,
    trace_response,
    trace_sum,
)
from strategies.data.staleness_bounds import (
    Quadratic,
    bounded_delay,
    convex,
    from_response,
    published_order_convex,
    random_delay,
    strongly_convex,
    strongly_convex_lemma,
)
from strategies.data.staleness_convex import (
    GeneralConvex,
    delayed_step_expansion,
    general_convex,
    general_convex_stability,
    plain_sgd_stability,
)

DELAYS = (0, 1, 2, 4, 8, 16, 32)
RUN = {"updates": 5000, "samples": 10_000}

SUMS = [
    (0.01, 0, 100, "63.396766"),
    (0.01, 4, 100, "64.906851"),
    (0.01, 4, 1000, "99.997196"),
    (0.001, 16, 1000, "638.241521"),
    (0.001, 16, 10000, "999.961662"),
    (1 / 340, 16, 2000, "339.302522"),
    (0.05, 8, 500, "20.199746"),
]

# tau: rate 1/660 with lambda 0 and 0.01, rate 1/(20 (tau + 1)) with lambda 0 and 0.01
BOUNDS = {
    0: ("1.515e-03", "1.459e-03", "5.000e-02", "1.836e-02"),
    4: ("1.514e-03", "1.458e-03", "9.992e-03", "7.867e-03"),
    8: ("1.513e-03", "1.457e-03", "5.547e-03", "4.846e-03"),
    16: ("1.510e-03", "1.455e-03", "2.932e-03", "2.728e-03"),
    # The sheet prints 1.506e-3 twice here; its own 2 (T - tau)/(660 n) = 9936/6.6e6 is 1.50545e-3.
    32: ("1.505e-03", "1.451e-03", "1.505e-03", "1.451e-03"),
}


def companion(alpha: float, tau: int) -> np.ndarray:
    """State (e_t, ..., e_{t - tau}) to the next one."""
    matrix = np.diag(np.ones(tau), -1)
    matrix[0, 0] += 1.0
    matrix[0, tau] -= alpha
    return matrix


def spectral_radius(alpha: float, tau: int) -> float:
    return float(np.abs(np.linalg.eigvals(companion(alpha, tau))).max())


@pytest.mark.parametrize(("alpha", "tau", "terms", "printed"), SUMS)
def test_response_sums_to_the_printed_digits(
    alpha: float, tau: int, terms: int, printed: str
) -> None:
    assert f"{response_sum(alpha, tau, terms):.6f}" == printed


@pytest.mark.parametrize("tau", BOUNDS)
def test_bounds_to_the_printed_digits(tau: int) -> None:
    rates = [1 / 660, 1 / 660, learning_rate_cap(1.0, tau), learning_rate_cap(1.0, tau)]
    runs = [
        Quadratic(rate=r, convexity=c, **RUN) for r, c in zip(rates, [0, 0.01] * 2, strict=True)
    ]
    assert tuple(f"{from_response(q, tau).value:.3e}" for q in runs) == BOUNDS[tau]


@pytest.mark.parametrize(
    ("tau", "printed"),
    [(0, 2), (1, 1), (2, 0.618), (4, 0.3473), (8, 0.1845), (16, 0.0952), (32, 0.0483)],
)
def test_stability_limits_to_the_printed_digits(tau: int, printed: float) -> None:
    assert stability_limit(tau) == pytest.approx(printed, abs=5e-5 if tau > 2 else 5e-4)


@pytest.mark.parametrize("tau", DELAYS)
def test_stability_limit_is_where_the_spectral_radius_is_one(tau: int) -> None:
    limit = stability_limit(tau)
    assert spectral_radius(0.99 * limit, tau) < 1.0 < spectral_radius(1.01 * limit, tau)
    assert spectral_radius(limit, tau) == pytest.approx(1.0, abs=1e-9)


def test_the_cap_is_32_to_40_times_stricter_than_stability() -> None:
    ratios = [stability_limit(tau) / learning_rate_cap(1.0, tau) for tau in DELAYS]
    assert min(ratios) == pytest.approx(31.9, abs=0.2) and max(ratios) == 40.0
    assert f"{learning_rate_cap(1.0, 32):.4f}" == "0.0015"
    for tau in DELAYS:
        values = [b.value for b in rate_limits(2.0, tau)]
        assert values == sorted(values) and values[2] == stability_limit(tau) / 2


@pytest.mark.parametrize("tau", DELAYS)
def test_no_oscillation_up_to_its_limit_and_some_above(tau: int) -> None:
    limit = non_oscillation_limit(tau)
    terms = 200 * (tau + 1)
    assert response(0.999 * limit, tau, terms).min() >= 0.0
    assert response(1.2 * limit, tau, terms).min() < 0.0
    assert response_sum(limit, tau, terms) == pytest.approx(1 / limit, rel=1e-4)


def test_decay_lemma_holds_with_the_factor_that_was_measured() -> None:
    factors = []
    for tau in DELAYS:
        alpha = 1 / (20 * (tau + 1))
        k = np.arange(decay_start(tau), 400 * (tau + 1))
        c = response(alpha, tau, len(k) + decay_start(tau))[k]
        factors.append(float((np.abs(c) * np.exp(-(k + 1) * np.log1p(-alpha))).max()))
    assert (f"{min(factors):.3f}", f"{max(factors):.3f}") == ("1.044", "1.053")


def test_the_response_is_a_power_of_the_companion_matrix() -> None:
    alpha, tau = 0.3, 3
    state, matrix = np.eye(tau + 1)[0], companion(alpha, tau)
    for value in response(alpha, tau, 40):
        assert value == pytest.approx(state[0], abs=1e-12)
        state = matrix @ state


def test_trace_response_is_the_derivative_of_the_last_error() -> None:
    rng = np.random.default_rng(5)
    delays, alpha, noise = rng.integers(0, 6, size=30), 0.2, rng.normal(size=30)
    errors = [0.0]
    for t in range(30):
        late = errors[t - delays[t]] if delays[t] <= t else 0.0
        errors.append(errors[t] - alpha * late + noise[t])
    assert trace_response(alpha, delays) @ noise == pytest.approx(errors[-1], rel=1e-12)


def test_a_constant_trace_is_the_fixed_delay() -> None:
    alphas = [0.01, 0.05]
    np.testing.assert_allclose(
        trace_response(alphas, [8] * 50), response(alphas, 8, 50)[::-1], rtol=1e-12
    )
    q = Quadratic(rate=0.05, updates=508, samples=100, convexity=0.2)
    eigenvalues = [0.2, 0.6, 1.0]
    fixed = from_response(q, 8, eigenvalues)
    assert random_delay(q, [8] * 500, eigenvalues).value == pytest.approx(fixed.value)
    assert random_delay(q, [[8] * 500] * 2, eigenvalues).value == pytest.approx(fixed.value)


def test_closed_forms() -> None:
    tau = 16
    q = Quadratic(rate=learning_rate_cap(2.0, tau), smoothness=2.0, gradient=3.0, **RUN)
    assert convex(q, tau).value == pytest.approx(from_response(q, tau).value)
    assert convex(q, tau).value == pytest.approx(9 * 4984 / (10 * 2 * 10_000 * 17))
    order = published_order_convex(5000, tau, 10_000)
    assert order.mark == "found" and order.value == 4984 / (10_000 * 16)
    assert convex(q, tau).value / order.value == pytest.approx(9 / 20 * 16 / 17)
    s = Quadratic(rate=q.rate, smoothness=2.0, convexity=0.05, **RUN)
    assert strongly_convex(s, tau).value == pytest.approx(2 / (0.05 * 10_000))
    assert bounded_delay(s, tau).value == strongly_convex(s, tau).value
    assert bounded_delay(q, tau).value == convex(q, tau).value
    lemma = strongly_convex_lemma(s, tau).value
    assert from_response(s, tau).value < strongly_convex(s, tau).value < lemma
    sum_of_lemma = 17 * np.log(34) + 3 / (s.rate * 0.05)
    assert lemma == pytest.approx(2 * s.rate * sum_of_lemma / 10_000)


def test_no_bound_of_ours_is_called_published() -> None:
    tau, q = 4, Quadratic(rate=0.001, convexity=0.1, **RUN)
    ours = [f(q, tau) for f in (from_response, convex, strongly_convex, strongly_convex_lemma)]
    ours += [bounded_delay(q, tau), random_delay(q, [0, 1, 2], [0.1, 1.0])]
    assert {b.mark for b in ours} == {"derived"} and all(b.estimate for b in ours)
    assert all("not the paper's theorem" in str(b) and "estimate" in str(b) for b in ours)
    assert [b.mark for b in rate_limits(1.0, tau)] == ["found", "remembered", "remembered"]
    assert plain_sgd_stability([0.1], 1.0, 10).mark == "remembered"


def test_rates_past_the_limits_are_flagged_or_refused() -> None:
    fine = Quadratic(rate=learning_rate_cap(1.0, 8), **RUN)
    high = Quadratic(rate=0.03, **RUN)
    wild = Quadratic(rate=0.19, updates=20_000, samples=10)
    assert not convex(fine, 8).flags
    assert len(convex(high, 8).flags) == 1 and "BROKEN: rate above" in str(convex(high, 8))
    with pytest.raises(InputError, match="oscillates"):
        from_response(wild, 8)
    with pytest.raises(InputError, match="lemma"):
        strongly_convex_lemma(Quadratic(rate=0.03, convexity=0.1, **RUN), 8)
    with pytest.raises(InputError, match="strong convexity"):
        strongly_convex(fine, 8)
    diverging = from_response(wild, 8, [1.0])
    assert len(diverging.flags) == 2 and "diverges" in diverging.flags[1]
    assert response_sum(3.0, 0, 3000) == trace_sum(3.0, [0] * 3000) == float("inf")
    assert response_sum(0.1, 4, 0) == 0.0


def by_hand(c: GeneralConvex, rates: list[float], delays: list[int]) -> float:
    """The formula as printed, with its 1-based sums."""
    eta = dict(enumerate(rates, start=1))
    beta, n, k = c.smoothness, c.samples, len(rates)
    squares = sum(v**2 for v in rates)
    first = eta[1] * c.distance**2 + (4 * beta * c.radius**2 + 2 * c.best_risk) * squares
    late = sum(
        eta[step] * sum(eta.get(step - j, 0.0) for j in range(1, tau + 1))
        for step, tau in enumerate(delays, start=1)
    )
    return 16 * beta * e * (1 + k / n) / n * first + 2 * beta**2 * c.radius**2 * e * late


def test_general_convex_bound_against_the_printed_sums() -> None:
    c = GeneralConvex(smoothness=1.5, radius=2.0, samples=50, distance=1.0, best_risk=0.1)
    rates, delays = [0.3, 0.3, 0.2, 0.1, 0.1], [0, 1, 2, 1, 9]
    eps = general_convex_stability(c, rates, delays)
    assert eps.mark == "found" and not eps.estimate
    assert eps.value == pytest.approx(by_hand(c, rates, delays), rel=1e-12)
    gammas = np.geomspace(1e-4, 1e4, 20_001)
    grid = c.smoothness / gammas * 0.7 + (c.smoothness + gammas) / 2 * eps.value
    assert general_convex(c, rates, delays, 0.7).value == pytest.approx(grid.min(), rel=1e-6)
    assert general_convex(c, rates, delays, 0.0).value == pytest.approx(1.5 * eps.value / 2)


def test_general_convex_delay_term_is_the_sum_of_the_lemma() -> None:
    c = GeneralConvex(smoothness=1.0, radius=2.0, samples=50, distance=1.0)
    rates, delays = [0.3, 0.2, 0.2, 0.1], [0, 1, 1, 3]
    late = general_convex_stability(c, rates, delays).value
    late -= general_convex_stability(c, rates, [0] * 4).value
    steps = [
        delayed_step_expansion(r, rates[i - d : i], 1.0, 2.0)
        for i, (r, d) in enumerate(zip(rates, delays, strict=True))
    ]
    assert late == pytest.approx(e * sum(steps))


@pytest.mark.parametrize("rates", [[0.1, 0.2], [0.6, 0.1], [0.1, 0.0], [0.1]])
def test_general_convex_refuses_rates_it_does_not_cover(rates: list[float]) -> None:
    c = GeneralConvex(smoothness=1.0, radius=2.0, samples=50, distance=1.0)
    with pytest.raises(InputError):
        general_convex_stability(c, rates, [0, 1])


def test_reference_values() -> None:
    assert plain_sgd_stability([0.1] * 20, 2.0, 40).value == pytest.approx(0.4)
    assert average_delay_rate(0.1, 4.0, 100) == pytest.approx(0.0025)
    with pytest.raises(InputError, match="2/beta"):
        delayed_step_expansion(2.1, [0.1], 1.0, 1.0)


@pytest.mark.parametrize("delays", [[-1], [0.5], [[1, 2], [3, 4]]])
def test_delays_that_are_none(delays: list[float]) -> None:
    with pytest.raises(InputError):
        trace_response(0.1, delays)


@pytest.mark.parametrize(
    "wrong", [{"rate": 0.0}, {"samples": 0}, {"convexity": 2.0}, {"gradient": float("inf")}]
)
def test_runs_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Quadratic(**{"rate": 0.1, **RUN, **wrong})
