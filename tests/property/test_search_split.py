"""The layer split against all splits, and the structure bound against a linear program."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from strategies.search.split import compositions, moves, split_min_max
from strategies.search.structures import grow


@given(st.integers(1, 5), st.integers(0, 5), st.integers(0, 2**16))
def test_split_is_the_best_of_all_splits_that_memory_allows(
    stages: int, more: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num_layers = stages + more
    every = compositions(num_layers, stages)
    assert len(every) == math.comb(num_layers - 1, stages - 1)
    assert (every.sum(axis=1) == num_layers).all() and every.min() >= 1
    count = 6
    unit = rng.integers(1, 5, (count, stages)) * rng.choice([1.0, 0.37])
    extra = np.zeros((count, stages))
    extra[:, 0], extra[:, -1] = rng.integers(0, 9, count), rng.integers(0, 9, count)
    most = rng.integers(0, num_layers + 1, (count, stages))
    layers, possible = split_min_max(num_layers, unit, extra, most)
    for k in range(count):
        legal = every[(every <= most[k]).all(axis=1)]
        assert possible[k] == (len(legal) > 0)
        if possible[k]:
            best = (legal * unit[k] + extra[k]).max(axis=1).min()
            assert (layers[k] * unit[k] + extra[k]).max() == pytest.approx(best)
            assert layers[k].sum() == num_layers
            assert (layers[k] <= most[k]).all() and layers[k].min() >= 1


def test_moves_keep_every_layer() -> None:
    found = moves(np.array([3, 1, 2]), np.array([3, 2, 4]))
    assert found.tolist() == [[2, 2, 2], [2, 1, 3], [3, 2, 1]]


@given(st.integers(1, 6), st.integers(1, 8), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 999))
def test_structure_bound_is_below_the_linear_program(
    stages: int, m: int, fill: float, seed: int
) -> None:
    rate, num_layers = np.random.default_rng(seed).uniform(0.2, 3.0, stages), 10
    rows = np.zeros((stages, stages + 1))
    for p in range(stages):
        rows[p, :p], rows[p, p], rows[p, -1] = fill, m, -1
    best = linprog(
        [0.0] * stages + [1.0], A_ub=rows, b_ub=[0] * stages, A_eq=[[*rate, 0]], b_eq=[num_layers]
    )
    total = np.zeros(1)
    for p in reversed(range(stages)):
        total = grow(total, rate[p], np.ones(1), m, fill)
    assert num_layers / total[0] == pytest.approx(best.fun, rel=1e-6)
    alike = grow(np.zeros(1), np.array([1.5]), np.array([4.0]), m, fill)
    one_by_one = np.zeros(1)
    for _ in range(4):
        one_by_one = grow(one_by_one, np.array([1.5]), np.ones(1), m, fill)
    assert alike[0] == pytest.approx(one_by_one[0])
