"""Balancers: published examples, plans by hand, and what all of them promise."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from sim.errors import InputError
from strategies.expert.balancers import balancer_names, get_balancer
from strategies.expert.eplb import owned, rebalance, replicate
from strategies.expert.fastermoe import fastermoe, fastermoe_release, means
from strategies.expert.layer_cost import (
    LayerCosts,
    LayerTimes,
    MeanBandwidth,
    PerToken,
    layer_times,
    predicted_of,
    released,
    scheduled_s,
    topology,
)
from strategies.expert.lending import Lending, checked, copies, loads, static, tokens
from strategies.expert.pro_prophet import pro_prophet
from strategies.expert.spread import spread
from tests.unit.test_layer_cost import MACHINES, WIDTHS, whole_numbers, zipf


def seconds(costs, counts, lending, scheduled=True):
    return predicted_of(costs, layer_times(costs, counts, lending), scheduled)


def lent(lending):
    """Lent experts and their hosts."""
    return {
        int(e): np.flatnonzero(lending.hosts[e]).tolist()
        for e in np.flatnonzero(lending.hosts.sum(axis=1) > 1)
    }


def on(machine, size=8, work=2e-7, expert=2e6, chips=None, fnec=2e-4):
    return LayerCosts(
        token_bytes=2048.0,
        experts=PerToken(forward=work, backward=2 * work),
        links=topology(MACHINES[machine], chips or range(size)),
        param_bytes=expert,
        gradient_bytes=expert,
        fnec_s=fnec,
        bnec_s=2 * fnec,
    )


def drawn(seed, num_experts=8, size=8, tokens_each=512, exponent=1.2):
    random = np.random.default_rng(seed)
    share = random.permutation(np.arange(1, num_experts + 1.0) ** -exponent)
    share /= share.sum()
    rows = [random.multinomial(tokens_each, random.dirichlet(300 * share)) for _ in range(size)]
    return np.array(rows).T


FLAT = LayerCosts(  # a token 1 s forward, 2 s backward, 0.25 s on the way; an expert 3 s
    token_bytes=1.0,
    experts=PerToken(forward=1.0, backward=2.0),
    links=MeanBandwidth(exchange=((1e18, 4.0),), trans=1.0, agg=1.0),
    param_bytes=3.0,
    gradient_bytes=3.0,
)


# -- Pro-Prophet ----------------------------------------------------------------------------------

REFERENCE = [  # model, k, Zipf exponent, blocking (lent, ms), scheduled (lent, ms)
    ("S", 1, 1.0, (0, 6.37), (1, 5.43)),
    ("S", 1, 1.2, (0, 7.89), (1, 5.53)),
    ("S", 2, 1.0, (1, 11.30), (1, 7.60)),
    ("S", 2, 1.2, (1, 11.89), (1, 8.07)),
    ("M", 1, 1.2, (0, 24.21), (1, 19.28)),
    ("M", 2, 1.0, (1, 39.05), (1, 24.52)),
    ("M", 2, 1.2, (1, 41.03), (1, 25.89)),
    ("L", 1, 1.0, (0, 66.59), (0, 66.59)),
    ("L", 2, 1.2, (1, 151.65), (1, 91.27)),
]


@pytest.mark.parametrize(("model", "k", "exponent", "blocking", "scheduled"), REFERENCE)
def test_pro_prophet_with_the_released_constants(model, k, exponent, blocking, scheduled):
    # The references come from one unknown draw of the counts; ours are expectations.
    costs = released(WIDTHS[model], 2 * WIDTHS[model], 16)
    counts = whole_numbers(zipf(exponent, k))
    for hidden, (number, ms) in ((False, blocking), (True, scheduled)):
        plan = pro_prophet(counts, costs, 16, scheduled=hidden)
        assert len(lent(plan)) == number
        assert seconds(costs, counts, plan, hidden) * 1e3 == pytest.approx(ms, rel=5e-3)


def test_pro_prophet_lends_the_second_miniatures_expert():
    counts = np.array([[4, 3], [0, 1]])
    assert lent(pro_prophet(counts, FLAT, 1, alpha=0.0)) == {0: [0, 1]}
    assert lent(pro_prophet(counts, FLAT, 1)) == {}  # 7 - 1 < 3 means of 4


def test_pro_prophet_keeps_the_length_of_the_best_list():
    # Lending one of two equally hot experts does not help, lending both does.
    counts = np.full((4, 4), 1)
    counts[:2] = 30
    plan = pro_prophet(counts, msgspec.structs.replace(FLAT, token_bytes=0.0), 4, alpha=0.1)
    assert lent(plan) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


def test_pro_prophet_takes_the_next_expert_of_a_device():
    counts = np.full((4, 2), 1)
    counts[:2] = 50
    assert sorted(lent(pro_prophet(counts, FLAT, 2, alpha=0.1))) == [0, 1]


def test_pro_prophet_leaves_out_the_devices_with_fewest_tokens():
    counts = np.full((4, 4), 10)
    counts[2] = [40, 0, 90, 5]
    plan = pro_prophet(counts, FLAT, 4, excluded=2, alpha=1.0)
    assert lent(plan) == {2: [0, 2]}
    assert lent(pro_prophet(counts, FLAT, 0, alpha=0.0)) == {}


# -- FasterMoE ------------------------------------------------------------------------------------


def test_fastermoe_by_hand():
    counts = np.full((4, 4), 1)
    counts[0], counts[1] = 20, 6
    known = means(FLAT, 4, 27.0)
    assert (known.compute_s, known.send_s, known.model_s) == (1.0, 0.25, 3.0)
    # unshadowed 3*80 + 4*0.25*80 = 320; one: load 20, 44 (its 24 and 20), 24, 24: 3*44 + 6 = 138;
    # two: 26, 26, 30, 30: 3*30 + 12 = 102; three: 27, 27, 27, 31: 93 + 18 rises
    assert sorted(lent(fastermoe(counts, FLAT, 4, factor=1.0))) == [0, 1]
    assert sorted(lent(fastermoe(counts, FLAT, 1, factor=1.0))) == [0]
    # release: 4*80 = 320; 4*24 + 3 = 99; 4*4 + 6 = 22; 4*4 + 9 rises
    assert sorted(lent(fastermoe_release(counts, FLAT, 4))) == [0, 1]
    assert all(h == [0, 1, 2, 3] for h in lent(fastermoe_release(counts, FLAT, 4)).values())


def test_fastermoe_leaves_even_layers_alone():
    assert lent(fastermoe(np.full((4, 4), 5), FLAT, 4, factor=1.0)) == {}
    dear = msgspec.structs.replace(FLAT, param_bytes=1e6)
    counts = np.full((4, 4), 1)
    counts[0] = 20
    assert lent(fastermoe(counts, dear, 4)) == lent(fastermoe_release(counts, dear, 4)) == {}


def test_means_on_a_machine():
    costs = on("one NIC")
    known = means(costs, 8, 800.0)
    # a NIC of four sends 4 x 4 x 100 tokens; one copy crosses, then three leave each port
    assert known.send_s == pytest.approx((1600 * 2048 / 2e9 + 10e-6) / 800)
    assert known.model_s == pytest.approx(2e6 / 2e9 + 10e-6 + 6e6 / 10e9 + 2e-6)


def test_pro_prophet_does_not_lend_for_a_gain_that_is_rounding():
    """Ten tokens less for the fullest device; the fullest receiver and all else stay."""
    counts = np.array([[1000, 10], [300, 0]])
    for work, hosts in ((1e-19, {}), (1e-15, {0: [0, 1]})):
        costs = msgspec.structs.replace(
            released(64, 128, 2), experts=PerToken(forward=work, backward=2 * work), fnec_s=1.0,
            bnec_s=1.0,
        )  # fmt: skip
        before, after = (
            seconds(costs, counts, plan)
            for plan in (
                static(2, 2),
                Lending(hosts=np.array([[1, 1], [0, 1]], bool), home=np.arange(2)),
            )
        )
        assert after < before
        assert lent(pro_prophet(counts, costs, 1, alpha=0.0)) == hosts


def test_hidden_copies_cost_nothing_to_the_last_bit():
    costs = released(64, 128, 2)
    random = np.random.default_rng(5)
    for _ in range(200):
        parts = dict(zip(("dispatch", "combine", "fec", "bec"), random.random(4), strict=True))
        copied = dict(zip(("trans", "agg"), random.random(2), strict=True))
        slow = msgspec.structs.replace(costs, fnec_s=1.0, bnec_s=1.0)
        assert scheduled_s(slow, LayerTimes(**parts, **copied)) == scheduled_s(
            slow, LayerTimes(**parts, trans=0.0, agg=0.0)
        )


# -- EPLB -----------------------------------------------------------------------------------------


def test_eplb_places_as_its_readme_says():
    # github.com/deepseek-ai/EPLB, README: two layers, 16 slots, 4 groups, 2 nodes, 8 devices.
    layers = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    printed = [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    for load, theirs in zip(layers, printed, strict=True):
        ours = rebalance(np.array(load, float), 16, 4, 2, 8)
        pairs = zip(ours.reshape(8, 2).tolist(), np.reshape(theirs, (8, 2)).tolist(), strict=True)
        assert all(sorted(a) == sorted(b) for a, b in pairs)


def test_eplb_is_global_where_nodes_do_not_divide_the_groups():
    load = np.array([9.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    placed = rebalance(load, 8, 3, 2, 4)
    assert np.bincount(placed, minlength=6).tolist() == [3, 1, 1, 1, 1, 1]
    assert (np.bincount(rebalance(load, 8, 2, 2, 4), minlength=6) >= 1).all()
    with pytest.raises(InputError, match="slots a multiple of 4"):
        rebalance(load, 7, 3, 2, 4)
    with pytest.raises(InputError, match="groups divide experts"):
        rebalance(load, 8, 4, 2, 4)


def test_eplb_replicas_leave_the_least_share():
    # Replicas one by one are optimal for the largest load per replica: against all ways to share 8.
    random = np.random.default_rng(2)
    for _ in range(20):
        load = random.integers(0, 50, 4).astype(float)
        _, number = replicate(load, 8)
        ways = [w for w in itertools.product(range(1, 6), repeat=4) if sum(w) == 8]
        assert (load / number).max() == min((load / np.array(w)).max() for w in ways)


def test_eplb_keeps_groups_on_their_node():
    placed = rebalance(np.arange(12.0), 16, 4, 2, 8).reshape(2, 8)
    groups = [set((node // 3).tolist()) for node in placed]
    assert not groups[0] & groups[1]
    assert sorted(len(g) for g in groups) == [2, 2]


def test_eplb_as_a_lending():
    counts = drawn(1, 16, 8)
    plan = get_balancer("eplb")(counts, on("one NIC"), 1)
    checked(plan, 1)
    assert plan.hosts.sum(axis=0).max() <= 3
    plain = loads(tokens(counts, static(16, 8))).max()
    assert loads(tokens(counts, plan, [0] * 4 + [1] * 4)).max() < plain


@pytest.mark.parametrize("num_experts", [8, 16, 10])
def test_eplb_leaves_every_device_as_many_experts_as_memory_is_planned_for(num_experts):
    usual = np.bincount(static(num_experts, 8).home, minlength=8)
    for seed in range(40):
        counts, budget = drawn(seed, num_experts, 8, exponent=2.0), seed % 4
        first = get_balancer("eplb")(counts, on("one NIC"), budget)
        again = get_balancer("eplb")(counts, on("one NIC"), budget, first)
        for plan in (first, again):
            checked(plan, budget)
            assert np.bincount(plan.home, minlength=8).tolist() == usual.tolist()
        assert (again.home == first.home).all()  # homes in use stay


def test_owners_are_hosts_where_that_can_be_and_stay_where_they_were():
    """Against all ways to own three experts on each of two devices."""
    random = np.random.default_rng(4)
    kept = 0
    for _ in range(60):
        hosts = random.random((6, 2)) < 0.6
        hosts[np.arange(6), random.integers(0, 2, 6)] = True
        old = random.permutation(np.repeat([0, 1], 3))
        ways = [np.array(w) for w in itertools.product((0, 1), repeat=6) if sum(w) == 3]
        costs = [((~hosts[np.arange(6), w]).sum(), (w != old).sum()) for w in ways]
        plan = owned(hosts, old, np.zeros(6), 3)
        checked(plan, 3)
        assert ((~hosts[np.arange(6), plan.home]).sum(), (plan.home != old).sum()) == min(costs)
        if not min(costs)[0]:
            assert (plan.hosts == hosts).all()
            kept += 1
    assert 20 < kept < 60


def test_an_expert_that_its_device_cannot_own_gets_a_copy_at_another():
    """Device 0 holds three experts that are nowhere else and owns two; the lightest moves home."""
    hosts = np.array([[1, 0], [1, 0], [1, 0], [0, 1]], bool)
    plan = owned(hosts, np.array([0, 0, 0, 1]), np.array([9.0, 2.0, 8.0, 7.0]), 1)
    assert plan.home.tolist() == [0, 1, 0, 1]
    assert plan.hosts.tolist() == [[True, False], [True, True], [True, False], [False, True]]
    # Expert 2 goes home to device 2, which has no room for three copies: expert 4's goes.
    hosts = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 1], [0, 1, 1], [0, 1, 1]], bool)
    plan = owned(hosts, np.array([0, 0, 2, 1, 1, 2]), np.array([9.0, 8.0, 8.0, 9.0, 4.0, 7.0]), 1)
    assert plan.home.tolist() == [0, 0, 2, 1, 1, 2]
    changed = np.zeros((6, 3), bool)
    changed[2, 2] = changed[4, 2] = True
    assert (plan.hosts == hosts ^ changed).all()


# -- ours -----------------------------------------------------------------------------------------


def test_spread_keeps_a_plan_that_nothing_can_pay_for():
    costs, counts = on("one NIC"), drawn(3)
    plan = spread(counts, costs, 2)
    later = drawn(4)
    assert spread(later, costs, 2, previous=plan, search_s=1.0) is plan
    again = spread(later, costs, 2, previous=plan, search_s=1e-6)
    assert again is not plan
    assert seconds(costs, later, again) < seconds(costs, later, plan)
    assert spread(later, costs, 0, previous=plan, search_s=1.0) is not plan  # no room any more
    by_name = get_balancer("spread")(later, costs, 2, plan)
    assert seconds(costs, later, by_name) <= seconds(costs, later, plan)


def test_spread_fills_the_budget_with_copies_that_nothing_waits_for():
    counts = drawn(5)
    hidden, dear = on("one node", expert=1e4, fnec=1.0), on("one node", expert=1e7, fnec=0.0)
    plan = spread(counts, hidden, 2)
    times = layer_times(hidden, counts, plan)
    assert copies(plan).tolist() == [2] * 8
    assert seconds(hidden, counts, plan) == pytest.approx(
        2 * (times.dispatch + times.combine) + times.fec + times.bec
    )
    few = spread(counts, dear, 2)
    assert copies(few).sum() < 16
    later = drawn(5) + np.random.default_rng(0).integers(0, 40, (8, 8))
    tight = Lending(hosts=few.hosts, home=few.home, split="balanced")
    assert loads(tokens(later, plan)).max() <= loads(tokens(later, tight)).max()


def test_spread_prefers_the_own_node():
    # One hot expert, tokens of node 0 only: a copy on the other node would pay the NIC for nothing.
    counts = np.full((8, 8), 4)
    counts[0, :4], counts[0, 4:] = 400, 0
    plan = spread(counts, on("one NIC", expert=1e6, fnec=0.0), 1)
    assert set(lent(plan)[0]) <= {0, 1, 2, 3}


# -- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", balancer_names())
@pytest.mark.parametrize("num_experts", [8, 16])
def test_balancers_keep_their_promises(name, num_experts):
    balancer = get_balancer(name)
    for seed in range(4):
        costs, counts = on("one NIC"), drawn(seed, num_experts, 8)
        before = counts.copy()
        plan = balancer(counts, costs, 2)
        again = balancer(counts.copy(), on("one NIC"), 2)
        assert (counts == before).all()
        assert (plan.hosts == again.hosts).all() and (plan.home == again.home).all()
        assert (plan.split, plan.slack) == (again.split, again.slack)
        checked(plan, 2)
        assert plan.hosts.sum(axis=0).max() <= num_experts // 8 + 2


@pytest.mark.parametrize("name", balancer_names())
def test_balancers_take_layers_without_tokens_or_with_one_device(name):
    balancer = get_balancer(name)
    checked(balancer(np.zeros((8, 8), np.int64), on("one NIC"), 1))
    checked(balancer(np.array([[7], [2]]), on("one NIC", size=1), 1))


def test_unknown_balancer():
    with pytest.raises(InputError, match="none or fastermoe"):
        get_balancer("magic")
