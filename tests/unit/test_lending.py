"""Lent experts: who holds what, and where tokens are computed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sim.errors import InputError
from strategies.expert.lending import (
    Lending,
    checked,
    copies,
    loads,
    moved,
    rehomed,
    shares,
    static,
    tokens,
    traffic,
)


def lent(pairs, num_experts=4, num_devices=4, split="local", slack=0.0):
    base = static(num_experts, num_devices)
    hosts = base.hosts.copy()
    for expert, devices in pairs.items():
        hosts[expert, devices] = True
    return Lending(hosts=hosts, home=base.home, split=split, slack=slack)


def test_static_places_contiguous_blocks():
    assert static(8, 4).home.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert static(2, 4).home.tolist() == [0, 2]
    assert copies(static(8, 4)).tolist() == [0, 0, 0, 0]


def test_second_miniature():
    counts = np.array([[4, 3], [0, 1]])
    plain = tokens(counts, static(2, 2))
    assert loads(plain).tolist() == [7, 1]
    assert traffic(plain).tolist() == [[0, 0], [3, 0]]
    shared = tokens(counts, lent({0: [1]}, 2, 2))
    assert loads(shared).tolist() == [4, 4]
    assert traffic(shared).tolist() == [[0, 0], [0, 0]]


def test_local_sends_the_rest_home():
    counts = np.zeros((4, 4), np.int64)
    counts[0] = [5, 6, 7, 8]
    placed = tokens(counts, lent({0: [2]}))
    assert placed[0].tolist() == [[5, 0, 0, 0], [6, 0, 0, 0], [0, 0, 7, 0], [8, 0, 0, 0]]


def test_even_uses_the_hosts_of_the_own_node():
    counts = np.zeros((4, 4), np.int64)
    counts[0] = [6, 6, 5, 7]
    placed = tokens(counts, lent({0: [1, 2]}, split="even"), [0, 0, 1, 1])
    assert placed[0].tolist() == [[3, 3, 0, 0], [3, 3, 0, 0], [0, 0, 5, 0], [0, 0, 7, 0]]
    placed = tokens(counts, lent({0: [1]}, split="even"), [0, 0, 1, 1])
    assert loads(placed).sum() == 24 and abs(loads(placed)[0] - loads(placed)[1]) <= 2


def test_balanced_keeps_tokens_in_their_node():
    counts = np.zeros((4, 4), np.int64)
    counts[0] = 10
    placed = tokens(counts, lent({0: [2]}, split="balanced"), [0, 0, 1, 1])
    assert loads(placed).tolist() == [20, 0, 20, 0]
    assert traffic(placed).tolist() == [[0] * 4, [10, 0, 0, 0], [0] * 4, [0, 0, 10, 0]]


def test_slack_keeps_tokens_at_home():
    counts = np.zeros((4, 4), np.int64)
    counts[0], counts[1] = [8, 2, 2, 2], [0, 2, 0, 0]
    everywhere = {0: [0, 1, 2, 3]}
    tight = tokens(counts, lent(everywhere, split="balanced"))
    assert loads(tight).tolist() == [4, 4, 4, 4]
    loose = tokens(counts, lent(everywhere, split="balanced", slack=1.0))
    assert traffic(loose).sum() == 0


def test_moved_and_rehomed_count_experts():
    lending = lent({0: [1, 3], 1: [3]})
    assert moved(lending).tolist() == [[0, 1, 0, 1], [0, 0, 0, 1], [0] * 4, [0] * 4]
    assert copies(lending).tolist() == [0, 1, 0, 2]
    swapped = msgspec.structs.replace(lending, home=np.array([1, 1, 2, 3]))
    assert rehomed(lending, swapped).tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4, [0] * 4]


def test_shares_are_sums_of_tokens():
    counts = np.random.default_rng(3).integers(0, 50, (6, 3))
    for split in ("local", "even", "balanced"):
        lending = lent({0: [1, 2], 5: [0]}, 6, 3, split)
        placed, found = tokens(counts, lending, [0, 0, 1]), shares(counts, lending, [0, 0, 1])
        assert (found.sent == placed.sum(axis=0)).all()
        assert (found.work == placed.sum(axis=1)).all()


def test_refusals():
    good = lent({0: [1]})
    with pytest.raises(InputError, match=r"expert 0 is not at home.*device 0"):
        checked(msgspec.structs.replace(good, hosts=np.zeros((4, 4), bool)))
    with pytest.raises(InputError, match=r"device 1 has no room.*found 1; expected at most 0"):
        checked(good, budget=0)
    with pytest.raises(InputError, match="no device of the group"):
        checked(msgspec.structs.replace(good, home=np.array([0, 1, 2, 4])))
    with pytest.raises(InputError, match="do not fit each other"):
        checked(msgspec.structs.replace(good, home=np.array([0, 1])))
    with pytest.raises(InputError, match="local, even or balanced"):
        checked(msgspec.structs.replace(good, slack=-1.0))
    with pytest.raises(InputError, match=r"\(3, 4\); expected \(experts, sources\) \(4, 4\)"):
        tokens(np.zeros((3, 4), np.int64), good)
    with pytest.raises(InputError, match="smallest -1"):
        tokens(np.full((4, 4), -1), good)
    with pytest.raises(InputError, match="float64"):
        shares(np.zeros((4, 4)), good)
    with pytest.raises(InputError, match="one node for each of 4"):
        tokens(np.zeros((4, 4), np.int64), good, [0, 1])
    with pytest.raises(InputError, match="at least one of each"):
        static(0, 4)
    assert checked(good, budget=1) is good


@pytest.mark.parametrize("slack", [0.0, 1e3, np.inf])
def test_counts_up_to_what_is_exact_are_shared_out_and_more_are_refused(slack):
    """Sums of the largest stay whole; one step above they would wrap or round."""
    hosts = np.array([[True, True], [False, True]])
    lending = Lending(hosts=hosts, home=np.array([0, 1]), split="balanced", slack=slack)
    most = np.array([[2**53 - 4, 0], [1, 2]])
    assert shares(most, lending).work.sum() == 2**53 - 1
    for counts in (most + 1, np.full((2, 2), 2**62)):
        with pytest.raises(InputError, match="sends this many tokens"):
            shares(counts, lending)
