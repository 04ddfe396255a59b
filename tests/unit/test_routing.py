"""Routing as data: statistics against arrays made by hand, and what is no routing."""

from __future__ import annotations

import numpy as np
import pytest

from sim.errors import InputError
from strategies.expert.routing import Routing, for_sources, load_ratio, statistics


def by_hand():
    """Two steps, one layer, four experts on two devices, two sources."""
    first = [[[6, 2], [1, 1], [2, 4], [1, 3]]]
    then = [[[2, 2], [1, 3], [4, 4], [3, 1]]]
    return Routing(np.array([first, then]))


def test_statistics_of_a_small_run():
    found = statistics(by_hand(), 2, lags=(1, 2))
    assert found.shares == pytest.approx(((0.5 + 0.6) / 2, (0.5 + 0.4) / 2))
    assert found.load.mean == pytest.approx((1.0 + 1.2) / 2)
    assert found.load.max == pytest.approx(1.2)
    assert found.group_load.mean == pytest.approx((7 / 5 + 7 / 5) / 2)
    assert found.layer_load == pytest.approx((1.1, 1.1))
    assert found.worst_share == pytest.approx(0.6)
    assert found.drift[1] == found.first_last == pytest.approx(0.1)
    assert np.isnan(found.drift[2]) and np.isnan(found.correlation[2])
    assert found.top3 == pytest.approx((0.9 + 0.8) / 2)
    assert found.bottom3 == pytest.approx((0.6 + 0.6) / 2)
    # shares of shard 0: 0.7 and 0.3, then 0.3 and 0.5; of shard 1 the rest
    spreads = [0.2 / 0.5, 0.2 / 0.5, 0.1 / 0.4, 0.1 / 0.6]
    assert found.source_spread == pytest.approx(np.mean(spreads))


def test_the_hottest_shard_and_correlation():
    loads = np.array([[6, 2, 2, 2], [5, 3, 2, 2], [2, 6, 2, 2], [2, 2, 6, 2]])
    found = statistics(Routing(loads[:, None, :, None]), 4, lags=(1, 3))
    assert found.same_hottest == pytest.approx(1 / 3)
    share = loads / 12 - 0.25
    pairs = (share[:-1] * share[1:]).sum()
    scale = np.sqrt((share[:-1] ** 2).sum() * (share[1:] ** 2).sum())
    assert found.correlation[1] == pytest.approx(pairs / scale)
    assert found.correlation[3] == pytest.approx(-1 / 3)
    assert np.isnan(found.source_spread)


def test_even_routing_and_silent_layers():
    even = statistics(Routing(np.full((2, 1, 4, 2), 5)), 4)
    assert even.load == even.group_load == load_ratio(np.ones(3))
    assert even.drift[1] == even.source_spread == 0.0
    silent = statistics(Routing(np.zeros((2, 1, 4, 2), np.int64)), 2)
    assert silent.load.max == 1.0 and silent.shares == (0.0, 0.0)


def test_percentiles_of_loads():
    loads = np.ones((100, 2))
    loads[:, 0] = np.arange(1, 101)
    ratio = 2 * np.maximum(loads[:, 0], 1) / (loads[:, 0] + 1)
    found = load_ratio(loads)
    assert found.median == pytest.approx(np.median(ratio))
    assert found.p95 == pytest.approx(np.quantile(ratio, 0.95))


def test_sources_are_put_together_and_dealt_out():
    routing = Routing(np.random.default_rng(0).integers(0, 50, (3, 2, 5, 4)), "x")
    fewer = for_sources(routing, 2)
    assert (fewer.counts[..., 0] == routing.counts[..., :2].sum(axis=-1)).all()
    more = for_sources(fewer, 6)
    assert more.counts.shape == (3, 2, 5, 6)
    assert (for_sources(more, 2).counts == fewer.counts).all()
    parts = more.counts.reshape(3, 2, 5, 2, 3)
    assert (parts.max(axis=-1) - parts.min(axis=-1)).max() <= 1
    assert for_sources(routing, 4) is routing
    assert "put together" in fewer.origin and "dealt out" in more.origin
    with pytest.raises(InputError, match="regrouped"):
        for_sources(routing, 3)


@pytest.mark.parametrize(
    "counts",
    [
        np.zeros((1, 1, 1)),
        np.zeros((1, 1, 2, 1)),
        np.zeros((0, 1, 2, 1), int),
        -np.ones((1, 1, 1, 1), int),
    ],
)
def test_no_routing(counts):
    with pytest.raises(InputError):
        Routing(counts)


def test_experts_that_devices_cannot_share():
    with pytest.raises(InputError, match="equally many"):
        statistics(by_hand(), 3)
