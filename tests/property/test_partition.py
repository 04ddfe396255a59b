"""The optimal cut against brute force, and no layer ever lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.pipeline.partition import min_max_cuts, weighted_counts

COSTS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0, 7.0])


@st.composite
def cost_tables(draw: st.DrawFn) -> NDArray[np.float64]:
    """Costs of up to nine units on up to four stages; stages differ in speed, units in size."""
    num_units = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, min(4, num_units)))
    units = np.array([draw(COSTS) for _ in range(num_units)])
    speeds = np.array([draw(st.sampled_from([1.0, 2.0, 4.0])) for _ in range(num_stages)])
    return units[None, :] / speeds[:, None]


def brute_force(costs: NDArray[np.float64]) -> tuple[tuple[int, ...], float, float]:
    """The cut of smallest (slowest stage, sum of squares, then later stages smallest)."""
    num_stages, num_units = costs.shape
    found = []
    for inner in itertools.combinations(range(1, num_units), num_stages - 1):
        cuts = (0, *inner, num_units)
        times = [costs[s, a:b].sum() for s, (a, b) in enumerate(itertools.pairwise(cuts))]
        squares = sum(t * t for t in times)
        found.append((max(times), squares, tuple(-c for c in reversed(cuts)), cuts))
    best = min(found)
    return best[3], best[0], best[1]


@given(cost_tables())
def test_min_max_equals_brute_force(costs: NDArray[np.float64]) -> None:
    cuts = min_max_cuts(costs)
    expected, slowest, squares = brute_force(costs)
    times = [costs[s, a:b].sum() for s, (a, b) in enumerate(itertools.pairwise(cuts))]
    assert max(times) == pytest.approx(slowest, rel=1e-12)
    assert sum(t * t for t in times) == pytest.approx(squares, rel=1e-12)
    assert cuts == expected


@given(st.integers(1, 12), st.integers(1, 60))
def test_min_max_of_equal_layers_is_the_equal_split(num_stages: int, more: int) -> None:
    num_units = num_stages + more
    cuts = min_max_cuts(np.ones((num_stages, num_units)))
    base, rest = divmod(num_units, num_stages)
    assert np.diff(cuts).tolist() == [base + 1] * rest + [base] * (num_stages - rest)


@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8).flatmap(
        lambda speeds: st.tuples(st.just(speeds), st.integers(len(speeds), 80))
    )
)
def test_weighted_counts_place_every_layer(case: tuple[list[float], int]) -> None:
    speeds, num_units = case
    counts = weighted_counts(num_units, speeds)
    assert sum(counts) == num_units and min(counts) >= 1 and len(counts) == len(speeds)
    share = np.array(speeds) / sum(speeds) * num_units
    if share.min() >= 1:
        assert np.abs(np.array(counts) - share).max() < 1 + 1e-9


@pytest.mark.parametrize("cut", [lambda: min_max_cuts(np.ones((3, 2)))])
def test_fewer_units_than_stages_are_refused(cut) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="at least one layer"):
        cut()
    with pytest.raises(InputError, match="at least one layer"):
        weighted_counts(2, (1.0, 1.0, 1.0))
