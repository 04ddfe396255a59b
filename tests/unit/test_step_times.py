"""Steps of a model with experts: a plan computed by hand, closed forms, and what must never be."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sim.errors import InputError
from strategies.expert.balancers import get_balancer
from strategies.expert.layer_cost import (
    LayerCosts,
    MeanBandwidth,
    PerToken,
    layer_times,
    released,
    scheduled_s,
)
from strategies.expert.lending import Lending, static
from strategies.expert.routing import Routing
from strategies.expert.routing_synthetic import drawn
from strategies.expert.step_times import Balancing, StepCosts, step_times

EVEN, HOT = [[2, 2], [2, 2]], [[4, 3], [0, 1]]
NONE = get_balancer("none")


def lend_all(counts, costs, budget, previous):
    """Lend the hottest expert to everybody unless its layer is even."""
    plain, total = static(*counts.shape), counts.sum(axis=1)
    if total.max() == total.min():
        return plain
    hosts = plain.hosts.copy()
    hosts[total.argmax()] = True
    return msgspec.structs.replace(plain, hosts=hosts)


def stay(counts, costs, budget, previous):
    """Search, and find nothing worth lending."""
    return static(*counts.shape)


def miniature(**more):
    """The second of the eight miniature plans: two blocks, two ranks."""
    block = LayerCosts(
        token_bytes=1.0,
        experts=PerToken(forward=0.25, backward=0.5),
        links=MeanBandwidth(exchange=((1e9, 4.0),), trans=1.0, agg=1.0),
        param_bytes=1.5,
        gradient_bytes=1.5,
        plan_s=0.25,
        **more,
    )
    behind = msgspec.structs.replace(block, fnec_s=1.0, bnec_s=2.0)
    return StepCosts(layers=(block, behind), after_s=3.0, optimizer_s=0.5)


def test_the_miniature_plan():
    routing = Routing(np.array([[EVEN, HOT]] * 2))
    found = step_times(routing, miniature(), Balancing(balancer=lend_all, budget=1))
    assert found.seconds.tolist() == [19.75, 14.5]
    assert found.exposed_s.tolist() == found.plan_s.tolist() == [0.0, 0.0]
    assert found.transfer_s.tolist() == [0.0, 3.0]
    assert found.loads[0].tolist() == [[4, 4], [7, 1]] and found.loads[1, 1].tolist() == [4, 4]
    assert found.copy_bytes.tolist() == [0.0, 3.0]
    assert found.balance_degree.tolist() == [0.0, 1.5] and found.rb.tolist() == [np.inf, 2.0]
    assert found.p50 == 17.125 and found.p95 == pytest.approx(19.4875)
    blocking = Balancing(balancer=lend_all, budget=1, scheduled=False)
    assert step_times(routing, miniature(), blocking).seconds.tolist() == [19.75, 17.5]


def test_the_first_layer_hides_nothing():
    routing = Routing(np.array([[HOT, EVEN]] * 2))
    found = step_times(routing, miniature(), Balancing(balancer=lend_all, budget=1))
    assert found.seconds.tolist() == [19.75, 17.5] and found.exposed_s[1] == 3.0


def test_what_its_window_does_not_hold_is_exposed():
    costs = miniature()
    large = msgspec.structs.replace(costs.layers[1], param_bytes=4.0, gradient_bytes=4.5)
    costs = msgspec.structs.replace(costs, layers=(costs.layers[0], large))
    routing = Routing(np.array([[EVEN, HOT]] * 2))
    found = step_times(routing, costs, Balancing(balancer=lend_all, budget=1))
    assert found.exposed_s[1] == 4.0 - 1.0 - 1.0 + max(0.0, 4.5 - 2.0 - 2.0)


def test_plans_come_from_the_step_before_and_are_kept():
    known = []

    def seen(counts, costs, budget, previous):
        known.append(int(counts[0, 0]))
        return static(*counts.shape)

    routing = Routing(np.arange(7)[:, None, None, None] * np.ones((1, 1, 2, 2), np.int64))
    costs = StepCosts(layers=miniature().layers[:1])
    step_times(routing, costs, Balancing(balancer=seen, budget=1, period=3))
    assert known == [0, 3]  # the one of step 6 would be for a step 7
    known.clear()
    step_times(routing, costs, Balancing(balancer=seen, budget=1, fresh=True))
    assert known == list(range(7))


@pytest.mark.parametrize(("planners", "wait"), [(1, 11.0), (2, 0.0)])
def test_a_slow_planner_holds_up_the_next_step(planners, wait):
    block = msgspec.structs.replace(miniature().layers[0], plan_s=14.0)
    behind = msgspec.structs.replace(block, fnec_s=1.0, bnec_s=2.0)
    costs = msgspec.structs.replace(miniature(), layers=(block, behind))
    routing = Routing(np.array([[EVEN, EVEN]] * 3))
    balancing = Balancing(balancer=stay, budget=0, planners=planners)
    found = step_times(routing, costs, balancing)
    # a plan starts with its dispatch, at 0 and 3, and is wanted with the next step at 16.5 and,
    # behind the dispatch of b0, at 17; one planner has the second plan at 28, two have it at 17
    assert (found.seconds - found.plan_s).tolist() == [16.5] * 3
    assert found.plan_s[:2].tolist() == [0.0, wait]
    # the next step's searches begin when the planner is free, at 0.5 of it behind the wait
    assert found.plan_s[2] == (pytest.approx(28.5 - 16.5 - 0.5) if planners == 1 else 0.0)
    fresh = Balancing(balancer=stay, budget=0, fresh=True)
    assert step_times(routing, costs, fresh).plan_s.tolist() == [28.0] * 3


def test_nobody_waits_for_plans_where_nothing_is_lent():
    dear = msgspec.structs.replace(miniature().layers[0], plan_s=14.0)
    costs = msgspec.structs.replace(miniature(), layers=(dear, dear))
    routing = Routing(np.array([[EVEN, HOT]] * 3))
    for fresh in (False, True):
        plain = Balancing(balancer=NONE, budget=0, fresh=fresh)
        assert step_times(routing, costs, plain).plan_s.tolist() == [0.0] * 3


def test_a_microbatch_is_timed_under_the_lending_of_its_step():
    known = []

    def watch(counts, costs, budget, previous):
        known.append(counts.tolist())
        return static(*counts.shape)

    routing = Routing(np.array([[HOT, np.zeros((2, 2))]] * 2, np.int64))
    found = step_times(routing, miniature(), Balancing(balancer=watch, budget=0), tokens=8.0)
    assert known[0] == HOT
    # Four copies a source are counted, so all is doubled; a layer without tokens has none.
    assert found.loads.tolist() == [[[14, 2], [0, 0]]] * 2


def test_layers_alike_are_the_cost_models_layers():
    """Eq. 8 summed, where the layer before takes as long: equal counts, windows of its own."""
    layer = released(512, 1024, 8)
    counts = drawn(steps=1, layers=1, experts=8, sources=8, tokens=2048, zipf=1.2).counts
    routing = Routing(np.tile(counts, (2, 3, 1, 1)))
    balancer = get_balancer("pro-prophet")
    found = step_times(
        routing, StepCosts(layers=(layer,) * 3), Balancing(balancer=balancer, budget=8)
    )
    lending = balancer(counts[0, 0], layer, 8)
    assert (lending.hosts.sum(axis=1) > 1).any()
    times = layer_times(layer, counts[0, 0], lending)
    dense = 3 * (layer.fnec_s + layer.bnec_s)
    hidden = scheduled_s(layer, times)
    first = hidden - max(0.0, times.trans - times.fec - layer.fnec_s) + times.trans
    first += times.agg - max(0.0, times.agg - times.bec - layer.bnec_s)
    assert found.seconds[1] == pytest.approx(first + 2 * hidden + dense)


def test_steps_under_one_lending_cost_what_each_costs():
    routing = drawn(steps=5, layers=2, experts=8, sources=4, tokens=512, sigma=1.0, step=0.2)
    layer = released(512, 1024, 4)
    kept = Balancing(balancer=get_balancer("pro-prophet"), budget=4, period=3)
    costs = StepCosts(layers=(layer,) * 2)
    whole = step_times(routing, costs, kept)
    plain = step_times(routing, costs, Balancing(balancer=NONE, budget=0))
    for t in range(5):
        each = [layer_times(layer, routing.counts[t, at], static(8, 4)) for at in range(2)]
        parts = sum(2 * (x.dispatch + x.combine) + x.fec + x.bec for x in each)
        assert plain.exchange_s[t] + plain.expert_s[t] == pytest.approx(parts)
    alone = Routing(routing.counts[:2])
    assert (step_times(alone, costs, kept).seconds == whole.seconds[:2]).all()
    assert (whole.loads.sum(axis=2) == 4 * 512).all()
    assert (plain.loads == plain.static_loads).all() and (plain.rb == 1.0).all()


def test_an_expert_that_moves_takes_its_states_along():
    def swapped(counts, costs, budget, previous):
        home = np.array([1, 0])
        return Lending(hosts=home[:, None] == np.arange(2), home=home)

    routing = Routing(np.array([[EVEN, EVEN]] * 3))
    costs = msgspec.structs.replace(miniature(), state_bytes=2.5)
    found = step_times(routing, costs, Balancing(balancer=swapped, budget=0))
    assert found.transfer_s.tolist() == [0.0, 2 * (1.5 + 2.5) / 4.0, 0.0]


def test_the_factor_on_exchanges_holds_in_every_step():
    routing = Routing(np.array([[HOT, EVEN]] * 3))
    plain = Balancing(balancer=NONE, budget=0)
    dear = miniature(exchange_factor=2.0)
    once, twice = (step_times(routing, c, plain).exchange_s for c in (miniature(), dear))
    assert once.tolist() == [5.0] * 3 and twice.tolist() == [10.0] * 3


def test_refused():
    routing = Routing(np.array([[EVEN, HOT]]))
    one = StepCosts(layers=miniature().layers[:1])
    with pytest.raises(InputError, match="unlike layers"):
        step_times(routing, one, Balancing(balancer=NONE, budget=0))
    with pytest.raises(InputError, match="every so many"):
        step_times(routing, miniature(), Balancing(balancer=NONE, budget=0, period=0))
