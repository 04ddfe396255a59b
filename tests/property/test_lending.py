"""Where tokens go: every one served once, and the balanced split against a linear program."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from strategies.expert.lending import Lending, loads, tokens, traffic


@st.composite
def layers(draw, most_experts=6, most_devices=5):
    """Counts, a lending of any hosts and homes, and nodes."""
    num_experts = draw(st.integers(1, most_experts))
    num_devices = draw(st.integers(1, most_devices))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    largest = draw(st.sampled_from([1, 5, 1000]))
    counts = random.integers(0, largest + 1, (num_experts, num_devices))
    counts[random.random(num_experts) < 0.2] = 0
    home = random.integers(0, num_devices, num_experts)
    hosts = random.random((num_experts, num_devices)) < draw(st.sampled_from([0.1, 0.4, 0.9]))
    hosts[np.arange(num_experts), home] = True
    split = draw(st.sampled_from(["local", "even", "balanced"]))
    slack = draw(st.sampled_from([0.0, 0.3]))
    nodes = random.integers(0, 3, num_devices)
    return counts, Lending(hosts=hosts, home=home, split=split, slack=slack), nodes


def least_load(counts, hosts):
    """Least load of the fullest device when tokens may be cut, as a linear program."""
    pairs = np.argwhere(hosts)
    num_experts, num_devices = hosts.shape
    each = np.zeros((num_experts, len(pairs) + 1))
    on = np.zeros((num_devices, len(pairs) + 1))
    on[:, -1] = -1.0
    for k, (e, d) in enumerate(pairs):
        each[e, k] = on[d, k] = 1.0
    cost = np.r_[np.zeros(len(pairs)), 1.0]
    found = linprog(cost, on, np.zeros(num_devices), each, counts.sum(axis=1))
    assert found.success
    return found.fun


@given(layers())
@settings(deadline=None, max_examples=150)
def test_every_token_is_served_once_on_a_host(layer):
    counts, lending, nodes = layer
    placed = tokens(counts, lending, nodes)
    assert (placed >= 0).all() and (placed.sum(axis=2) == counts).all()
    assert (placed.sum(axis=1)[~lending.hosts] == 0).all()


@given(layers())
@settings(deadline=None, max_examples=150)
def test_balanced_is_the_least_possible(layer):
    counts, lending, nodes = layer
    best = Lending(hosts=lending.hosts, home=lending.home, split="balanced")
    least = math.ceil(least_load(counts, lending.hosts) - 1e-6)
    assert loads(tokens(counts, best, nodes)).max() == least
    loose = Lending(hosts=lending.hosts, home=lending.home, split="balanced", slack=0.5)
    allowed = max(least, int(1.5 * counts.sum() / counts.shape[1]))
    placed = tokens(counts, loose, nodes)
    assert loads(placed).max() <= allowed


@given(layers())
@settings(deadline=None, max_examples=60)
def test_tokens_stay_where_there_is_room(layer):
    counts, lending, nodes = layer
    loose = Lending(hosts=lending.hosts, home=lending.home, split="balanced", slack=1e6)
    own = np.where(lending.hosts.sum(axis=1, keepdims=True) > 1, lending.hosts, False)
    placed = tokens(counts, loose, nodes)
    device = np.arange(counts.shape[1])
    assert (placed[:, device, device][own] == counts[own]).all()
    near = nodes[:, None] == nodes[None, :]
    away = np.where(near, 0, placed.sum(axis=0)).sum()
    alone = (lending.hosts[:, None, :] & near).any(axis=2)
    assert away == counts[~alone].sum()


@given(layers())
@settings(deadline=None, max_examples=60)
def test_balanced_is_never_fuller_than_the_others(layer):
    counts, lending, nodes = layer
    full = {}
    for split in ("local", "even", "balanced"):
        same = Lending(hosts=lending.hosts, home=lending.home, split=split)
        placed = tokens(counts, same, nodes)
        full[split] = loads(placed).max()
        assert traffic(placed).sum() + np.trace(placed.sum(axis=0)) == counts.sum()
    assert full["balanced"] <= min(full.values())
