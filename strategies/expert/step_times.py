"""Training steps of a model with routed experts, one after another, under a balancer.

A step knows the counts of the step before when its experts travel, and is scored with its own
(Pro-Prophet, arXiv:2411.10003, section 5). A layer of experts and the dense work around it follow
one another on all devices as fast as the fullest device: exchange of counts, dispatch, experts,
combine. Under a schedule an expert's parameters pass behind the experts and the dense work before
its layer, its gradients behind the same work's backward; the first layer has nothing before it, so
its transfers are exposed. Contention between operations is left to the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.expert.balancers import get_balancer
from strategies.expert.layer_cost import LayerCosts
from strategies.expert.lending import Lending, static
from strategies.expert.routing import LoadRatio, Routing, load_ratio
from strategies.expert.step_prices import StepPrices, priced, static_loads

__all__ = ["Balancing", "StepCosts", "StepTimes", "step_times"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Chooses = Callable[[Ints, LayerCosts, int, Lending | None], Lending]


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the parts of a step cost.

    Args:
        layers: of each layer of experts, in order. ``fnec_s`` and ``bnec_s`` are the dense work
            between the experts before and these, 0 in the first layer; ``plan_s`` a search.
        before_s, after_s: [s] forward before the first experts; all other dense work.
        counts_s: [s] of gathering a layer's counts.
        sync_s, optimizer_s: [s] sum of dense gradients; update.
        state_bytes: [B] that an expert takes along when its home changes, besides parameters.
    """

    layers: tuple[LayerCosts, ...]
    before_s: float = 0.0
    after_s: float = 0.0
    counts_s: float = 0.0
    sync_s: float = 0.0
    optimizer_s: float = 0.0
    state_bytes: float = 0.0


class Balancing(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is balanced.

    Args:
        balancer: of ``strategies.expert.balancers``. budget: copies that each device has room for.
        first: balancer of the first layer, whose transfers nothing hides; None means the same.
        period: steps from one search to the next.
        fresh: search when the step's own counts are known, and wait for it.
        scheduled: transfers pass behind the layer before; else they are exposed.
        planners: processes that search side by side, each for its own layers.
    """

    balancer: Chooses
    budget: int
    first: Chooses | None = None
    period: int = 1
    fresh: bool = False
    scheduled: bool = True
    planners: int = 1


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What came out, by step, or by step and layer.

    Args:
        seconds: [s] of a step, (T,). exchange_s, expert_s: [s] of it, dispatches and combines, and
            experts, (T,). transfer_s: [s] that parameters and gradients travel, (T,).
        exposed_s: [s] of those that nothing hides, (T,). plan_s: [s] that a step waits for plans,
            (T,).
        loads: tokens that each device computes, (T, L, D). static_loads: without a balancer.
        copy_bytes: [B] of parameters and gradients of lent experts on the fullest device, (T,).
    """

    seconds: Floats
    exchange_s: Floats
    expert_s: Floats
    transfer_s: Floats
    exposed_s: Floats
    plan_s: Floats
    loads: Ints
    static_loads: Ints
    copy_bytes: Floats

    @property
    def p50(self) -> float:
        """Median step [s]."""
        return float(np.median(self.seconds))

    @property
    def p95(self) -> float:
        """95th percentile of the steps [s]."""
        return float(np.quantile(self.seconds, 0.95))

    @property
    def load(self) -> LoadRatio:
        """Fullest device over the mean."""
        return load_ratio(self.loads)

    @property
    def balance_degree(self) -> Floats:
        """Standard deviation of the devices' tokens, mean over steps, (L,) (Pro-Prophet, 6)."""
        return np.asarray(self.loads.std(axis=2).mean(axis=0), np.float64)

    @property
    def rb(self) -> Floats:
        """Balance degree without a balancer over that with it, (L,); inf where it is even now."""
        before = self.static_loads.std(axis=2).mean(axis=0)
        after = self.balance_degree
        return np.where(after > 0, before / np.where(after > 0, after, 1.0), np.inf)


def step_times(
    routing: Routing, costs: StepCosts, balancing: Balancing, *, tokens: float = 0.0
) -> StepTimes:
    """Simulate all steps of a run.

    Args:
        routing: S = D sources. costs: of L layers. balancing: how.
        tokens: routed copies of a source in what is timed, a microbatch of a step whose counts the
            balancer knows; 0 for all of them.

    Raises:
        InputError: layers that are not those of the routing, or a period below 1.
    """
    _check(routing, costs, balancing)
    counts = routing.counts
    searched = _searched(len(counts), balancing)
    lendings = _lendings(counts, costs, balancing)
    counts = _scaled(counts, tokens) if tokens else counts
    found = priced(counts, costs.layers, lendings, costs.state_bytes)
    trans, agg = _exposed(costs, found, balancing)
    transfer = found.trans.sum(axis=1) + found.agg.sum(axis=1)
    exchange = 2 * (found.dispatch + found.combine).sum(axis=1)
    experts = (found.fec + found.bec).sum(axis=1)
    dense = sum(each.fnec_s + each.bnec_s for each in costs.layers)
    fixed = dense + costs.before_s + costs.after_s + costs.sync_s + costs.optimizer_s
    fixed += costs.counts_s * len(costs.layers)
    exposed = trans.sum(axis=1) + agg.sum(axis=1)
    seconds = fixed + exchange + experts + exposed
    plan = _waits(costs, found, trans, seconds, searched, balancing)
    return StepTimes(
        seconds=seconds + plan,
        exchange_s=exchange,
        expert_s=experts,
        transfer_s=transfer,
        exposed_s=exposed,
        plan_s=plan,
        loads=found.loads,
        static_loads=static_loads(counts),
        copy_bytes=found.nbytes,
    )


def _check(routing: Routing, costs: StepCosts, balancing: Balancing) -> None:
    if routing.counts.shape[1] != len(costs.layers):
        raise InputError(
            "costs and routing have unlike layers",
            key="layers",
            found=f"{len(costs.layers)} and {routing.counts.shape[1]}",
            expected="one cost per layer of experts",
        )
    if balancing.period < 1 or balancing.planners < 1:
        raise InputError(
            "a search comes every so many steps, from at least one planner",
            key="period",
            found=f"period {balancing.period}, {balancing.planners} planners",
            expected="1 or more",
        )


def _scaled(counts: Ints, tokens: float) -> Ints:
    """Counts of so many copies per source in the same shares; layers without any have none."""
    total = counts.sum(axis=(2, 3), keepdims=True)
    scale = np.where(total > 0, tokens * counts.shape[3] / np.maximum(total, 1), 0.0)
    return np.rint(counts * scale).astype(np.int64)


def _searched(steps: int, balancing: Balancing) -> NDArray[np.bool_]:
    """Steps in which a search is made, (T,)."""
    return np.asarray(np.arange(steps) % balancing.period == 0)


def _lendings(counts: Ints, costs: StepCosts, balancing: Balancing) -> list[list[Lending]]:
    """Lending of every layer and step: [layer][step]."""
    due, found = _searched(len(counts), balancing), list[list[Lending]]()
    for number, each in enumerate(costs.layers):
        choose = balancing.balancer
        if number == 0 and balancing.first is not None:
            choose = balancing.first
        now, row = static(*counts.shape[2:]), list[Lending]()
        for step in range(len(counts)):
            known = step if balancing.fresh else step - 1
            if known >= 0 and due[known]:
                now = choose(counts[known, number], each, balancing.budget, now)
            row.append(now)
        found.append(row)
    return found


def _exposed(costs: StepCosts, found: StepPrices, balancing: Balancing) -> tuple[Floats, Floats]:
    """What of the transfers nothing hides [s], (T, L) each."""
    if not balancing.scheduled:
        return found.trans, found.agg
    forward = np.array([each.fnec_s for each in costs.layers[1:]])
    backward = np.array([each.bnec_s for each in costs.layers[1:]])
    trans, agg = found.trans.copy(), found.agg.copy()
    trans[:, 1:] -= np.minimum(trans[:, 1:], found.fec[:, :-1] + forward)
    agg[:, 1:] -= np.minimum(agg[:, 1:], found.bec[:, :-1] + backward)
    return trans, agg


def _waits(
    costs: StepCosts,
    found: StepPrices,
    trans: Floats,
    seconds: Floats,
    searched: NDArray[np.bool_],
    balancing: Balancing,
) -> Floats:
    """What a step waits for plans [s], (T,).

    A search starts with its layer's dispatch and runs on a host, layer after layer; the next step
    waits where its parameters would leave before the plan is there. Where nothing is ever lent
    nobody searches.
    """
    if balancing.balancer is get_balancer("none"):
        return np.zeros(len(seconds))
    plans = np.array([each.plan_s for each in costs.layers])
    if balancing.fresh:
        return np.asarray(searched * plans.sum(), np.float64)
    dense = np.array([each.fnec_s for each in costs.layers])
    layer = costs.counts_s + found.dispatch + found.fec + found.combine + dense + trans
    begin = costs.before_s + np.cumsum(layer, axis=1) - layer + dense + trans + costs.counts_s
    leave = np.concatenate(
        [np.full((len(seconds), 1), costs.before_s), (begin + found.dispatch)[:, :-1]], axis=1
    )
    waits, free = np.zeros(len(seconds)), np.zeros(balancing.planners)
    for step in range(len(seconds) - 1):
        end = seconds[step] + waits[step]
        for number in range(plans.size if searched[step] else 0):
            who = number % balancing.planners
            free[who] = max(free[who], waits[step] + begin[step, number]) + plans[number]
            late = free[who] - end - leave[step + 1, number]
            waits[step + 1] = max(waits[step + 1], late)
        free = np.maximum(free - end, 0.0)
    return waits
