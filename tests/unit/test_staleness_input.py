"""What the bounds of late gradients refuse."""

from __future__ import annotations

from math import inf, nan

import pytest

from sim.errors import InputError
from strategies.data.staleness import (
    decay_start,
    non_oscillation_limit,
    stability_limit,
    trace_response,
)
from strategies.data.staleness_bounds import published_order_convex
from strategies.data.staleness_convex import (
    GeneralConvex,
    delayed_step_expansion,
    general_convex,
    general_convex_stability,
)


@pytest.mark.parametrize("tau", [nan, inf, -1, 0.5])
def test_delays_that_are_no_number_of_updates(tau: float) -> None:
    for limit in (stability_limit, non_oscillation_limit, decay_start):
        with pytest.raises(InputError, match="number of updates"):
            limit(tau)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one whole number per update"):
        trace_response(0.1, [0.0, tau])


@pytest.mark.parametrize(
    ("updates", "tau", "samples", "key"),
    [
        (10, 20, 10, "updates"), (10, 10, 10, "updates"), (100, 0, 10, "tau"),
        (100, 4, 0, "samples"), (100, 4, -3, "samples"), (100, nan, 5, "tau"),
        (nan, 4, 5, "updates"),
    ],
)  # fmt: skip
def test_orders_of_runs_that_are_none(updates: int, tau: int, samples: int, key: str) -> None:
    with pytest.raises(InputError, match=key):
        published_order_convex(updates, tau, samples)


@pytest.mark.parametrize("wrong", [{"distance": nan}, {"best_risk": inf}, {"distance": -1.0}])
def test_convex_problems_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="distance"):
        GeneralConvex(**({"smoothness": 1.0, "radius": 2.0, "samples": 5, "distance": 1.0} | wrong))


def test_convex_bounds_of_nothing() -> None:
    c = GeneralConvex(smoothness=1.0, radius=2.0, samples=50, distance=1.0)
    with pytest.raises(InputError, match="rates"):
        general_convex_stability(c, [], [])
    with pytest.raises(InputError, match="training_loss"):
        general_convex(c, [0.1], [0], nan)
    for constants in ((nan, 1.0, 1.0), (0.1, 0.0, 1.0), (0.1, 1.0, nan)):
        rate, smooth, radius = constants
        with pytest.raises(InputError):
            delayed_step_expansion(rate, [0.1], smooth, radius)
