"""The generator of routing against closed forms, and what it is calibrated to."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sim.errors import InputError, PlanError
from sim.plan.generators import generated_rows
from strategies.expert.routing import for_sources, statistics
from strategies.expert.routing_calibrate import LAER_E8K2, LAER_E16K4, calibrate, compared
from strategies.expert.routing_synthetic import Popularity, drawn

SIZES = {"steps": 6, "layers": 3, "experts": 8, "sources": 4, "tokens": 1000}
HOW = Popularity(sigma=0.8, step=0.2, concentration=50.0)


def test_every_source_sends_all_its_tokens():
    counts = drawn(**SIZES, popularity=HOW).counts
    assert counts.shape == (6, 3, 8, 4)
    assert (counts.sum(axis=2) == 1000).all()


def test_a_short_run_is_the_beginning_of_a_long_one():
    long = drawn(**SIZES, popularity=HOW, seed=3).counts
    short = drawn(**{**SIZES, "steps": 2}, popularity=HOW, seed=3).counts
    assert (long[:2] == short).all()
    assert (drawn(**SIZES, popularity=HOW, seed=4).counts != long).any()
    assert (drawn(**SIZES, sigma=0.8, step=0.2, concentration=50.0, seed=3).counts == long).all()


def test_the_generator_of_plans_draws_the_same_kind():
    parameters = {"keys": ["l1", "l3"], "experts": 4, "sources": 2, "tokens": 50, "sigma": 1.0}
    rows = generated_rows("routing", "moe-routing", parameters, 0, 3)
    assert [sorted(row) for row in rows] == [["l1", "l3"]] * 3
    assert np.shape(rows[0]["l1"]) == (4, 2)
    assert np.sum(rows[2]["l3"], axis=0).tolist() == [50, 50]
    assert rows[:2] == generated_rows("routing", "moe-routing", parameters, 0, 2)
    for wrong in ({"sigma": "x"}, {"skew": 1.0}, {"tokens": 0}, {"zipf": 1.0}):
        with pytest.raises(PlanError, match="refuses"):
            generated_rows("routing", "moe-routing", parameters | wrong, 0, 1)


def test_shares_of_sources_vary_as_dirichlet_says():
    sizes = {"steps": 400, "layers": 1, "experts": 4, "sources": 16, "tokens": 10**7}
    counts = drawn(**sizes, concentration=30.0).counts / 10**7
    p = 0.25
    assert counts.mean() == pytest.approx(p)
    expected = math.sqrt((1 - p) / (p * 31))
    assert counts.std() / p == pytest.approx(expected, rel=0.02)


def test_multinomial_without_sources_of_their_own():
    sizes = {"steps": 400, "layers": 1, "experts": 4, "sources": 16, "tokens": 100}
    counts = drawn(**sizes).counts
    assert counts.var() == pytest.approx(100 * 0.25 * 0.75, rel=0.05)


@pytest.mark.parametrize("phi", [0.5, 0.9])
def test_log_shares_are_correlated_as_ar1(phi):
    sizes = {"steps": 1500, "layers": 4, "experts": 8, "sources": 1, "tokens": 10**9}
    share = drawn(**sizes, phi=phi, step=0.3).counts[..., 0] / 10**9
    level = np.log(share) - np.log(share).mean(axis=2, keepdims=True)
    variance = 0.3**2 / (1 - phi**2) * (1 - 1 / 8)  # less the mean over the experts
    assert level.var() == pytest.approx(variance, rel=0.15)
    for lag in (1, 3):
        found = (level[lag:] * level[:-lag]).mean() / level.var()
        assert found == pytest.approx(phi**lag, abs=0.05)


def test_a_random_walk_starts_at_its_base():
    sizes = {"steps": 200, "layers": 40, "experts": 8, "sources": 1, "tokens": 10**9}
    share = drawn(**sizes, phi=1.0, step=0.1).counts[..., 0] / 10**9
    assert share[0] == pytest.approx(np.full((40, 8), 1 / 8), abs=1e-3)
    level = np.log(share) - np.log(share).mean(axis=2, keepdims=True)
    assert level[100].var() == pytest.approx(100 * 0.01 * 7 / 8, rel=0.2)


def test_zipf_gives_the_shares_of_its_ranks():
    counts = drawn(steps=1, layers=2, experts=16, sources=1, tokens=10**9, zipf=1.1).counts
    rank = np.arange(1, 17) ** -1.1
    expected = np.sort(rank / rank.sum())
    for layer in range(2):
        assert np.sort(counts[0, layer, :, 0]) / 10**9 == pytest.approx(expected, abs=1e-4)
    assert (counts[0, 0] != counts[0, 1]).any()
    assert expected[-3:].sum() == pytest.approx(0.583, abs=1e-3)  # published figures of the shape


def test_the_first_layer_moves_more():
    sizes = {"steps": 50, "layers": 2, "experts": 8, "sources": 1, "tokens": 10**9}
    share = drawn(**sizes, step=0.05, first_layer=4.0).counts[..., 0] / 10**9
    change = np.abs(np.diff(np.log(share), axis=0)).mean(axis=(0, 2))
    assert change[0] == pytest.approx(4 * change[1], rel=0.3)


def test_a_forced_router_is_even():
    counts = drawn(**{**SIZES, "tokens": 1003}, balanced=True).counts
    assert (counts.sum(axis=2) == 1003).all()
    assert counts.max() - counts.min() == 1
    total = counts.sum(axis=3)
    assert (total.max() - total.min()) <= 1


@pytest.mark.parametrize(
    "numbers",
    [
        {"sigma": -1.0},
        {"phi": 1.5},
        {"step": math.nan},
        {"sigma": 1.0, "zipf": 1.0},
        {"concentration": 0.01},
        {"skew": 1.0},
        {"steps": 0},
    ],
)
def test_refused(numbers):
    with pytest.raises(InputError):
        drawn(**(SIZES | numbers))


@pytest.mark.parametrize("target", [LAER_E8K2, LAER_E16K4], ids=["e8k2", "e16k4"])
def test_calibrated_to_the_published_trace(target):
    found = calibrate(target)
    rows = {name: (want, got) for name, want, got in compared(found)}
    for name, (want, got) in rows.items():
        if name.startswith(("share", "drift", "source")):
            assert got == pytest.approx(want, rel=0.12), name
    want, got = rows["fullest rank / mean"]
    assert got == pytest.approx(want, rel=0.06)  # not fitted
    again = drawn(
        steps=target.steps,
        layers=target.layers,
        experts=target.experts,
        sources=32,
        tokens=target.tokens,
        seed=7,
        popularity=found.popularity,
    )
    other = statistics(for_sources(again, 8), 4)
    assert other.shares == pytest.approx(target.shares, rel=0.15)  # of another seed
