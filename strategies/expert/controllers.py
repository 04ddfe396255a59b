"""The controller of a plan that lends experts: from routing counts to what its ops amount to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.plan.tables import controller
from strategies.expert.balancers import Balancer, get_balancer
from strategies.expert.expert_cost import expert_s
from strategies.expert.journeys import copies_back, copies_out, journey_s, tokens_back, tokens_out
from strategies.expert.layer_cost import LayerCosts, nodes_of
from strategies.expert.lend_input import costs_of_layers, parameters
from strategies.expert.lend_rows import SPLITS, counts_of, last_lending, last_turn, row_of
from strategies.expert.lending import Lending, moved, rehomed, shares, static
from strategies.expert.link_cost import MeanBandwidth
from strategies.expert.pro_prophet import pro_prophet
from strategies.expert.spread import spread

__all__ = ["lend_experts", "searching"]

Floats = NDArray[np.float64]
Row = dict[str, Any]


@controller("lend-experts")
def lend_experts(
    read: Mapping[str, Row],
    *,
    balancer: str,
    options: Mapping[str, Any],
    budget: int,
    period: int,
    fresh: bool,
    tokens: float,
    state_bytes: float,
    costs: Sequence[Mapping[str, Any]],
    layers: Mapping[str, int],
    experts: int = 0,
    devices: int = 0,
) -> Row:
    """Say where a step's tokens go, and which experts are lent for it.

    A search on a step's counts makes the lending of the next step (with ``fresh`` its own); until
    the next search it stays. The first step lends nothing. Every microbatch routes as the whole
    step does.

    Args:
        read: "routing", layer -> counts (E, S); "lent@1", the row before.
        balancer: see strategies.expert.balancers. options: its keywords.
        budget: copies that a device has room for. period: steps from one search to the next.
        fresh: search before the transfers of a step.
        tokens: routed copies per source and microbatch. state_bytes: [B] that an expert takes along
            when its home changes, besides parameters.
        costs: see strategies.expert.layer_cost.costs_to_plain. layers: layer -> which of them.
        experts, devices: E and D, which the counts must have; 0 takes any.

    Raises:
        PlanError: parameters or tables that no plan of ours has.

    Returns:
        "searched" 1 or 0. Of every layer "load" and "load_b", each device's forward and backward
        over that of even tokens (D,); "dispatch", "combine" and their second halves ".1" [B],
        "move" and "reduce" [B], each (D, D), with their parts ".0" and ".1"; "tokens" of each
        device (D,); and the lending that the search made.
    """
    given = parameters(
        {
            "balancer": balancer, "options": options, "budget": budget, "period": period,
            "fresh": fresh, "tokens": tokens, "state_bytes": state_bytes, "costs": costs,
            "layers": layers, "experts": experts, "devices": devices,
        }
    )  # fmt: skip
    before, search = row_of(read, "lent@1"), searching(balancer, options)
    turn = (last_turn(before) + 1) % period if before else 0
    row: Row = {"turn": turn, "searched": float(turn == 0)}
    known = costs_of_layers(given, not before)
    for layer, number in layers.items():
        counts, at = counts_of(row_of(read, "routing"), layer, given), known[number]
        last, homes = static(*counts.shape), np.zeros((counts.shape[1],) * 2, np.int64)
        if before:
            last, homes = last_lending(before, layer, counts.shape)
        plan = last if turn else search(counts, at, budget, last)
        if fresh:
            homes = rehomed(last, plan)
        used = plan if fresh else last
        found = _amounts(counts, used, at, tokens)
        found |= _copies(used, at, homes.astype(np.float64) * (at.param_bytes + state_bytes))
        found |= {
            "hosts": plan.hosts.astype(int),
            "home": plan.home,
            "split": SPLITS.index(plan.split),
            "slack": plan.slack,
            "homes": rehomed(last, plan),
        }
        for key, value in found.items():
            row[f"{layer}.{key}"] = value.tolist() if isinstance(value, np.ndarray) else value
    return row


def searching(name: str, options: Mapping[str, Any]) -> Balancer:
    """Return a balancer with keywords of its own.

    Args:
        name: see strategies.expert.balancers. options: keywords of "pro-prophet" and "spread".

    Raises:
        InputError: no balancer of this name.
    """
    if name == "pro-prophet" and options:
        return lambda counts, costs, budget, _=None, /: pro_prophet(
            counts, costs, budget, **options
        )
    if name == "spread" and options:
        return lambda counts, costs, budget, previous=None, /: spread(
            counts, costs, budget, previous=previous, **options
        )
    return get_balancer(name)


def _amounts(
    counts: NDArray[np.int64], lending: Lending, costs: LayerCosts, tokens: float
) -> dict[str, Any]:
    """Loads and exchanges of one microbatch."""
    placed = shares(counts, lending, nodes_of(costs))
    total, (_, devices) = float(counts.sum()), counts.shape
    scale = tokens * devices / total if total else 0.0
    even = static(*counts.shape)
    spread = even.hosts * (tokens * devices / len(counts))
    ours = expert_s(costs.experts, placed.work * scale)
    usual = expert_s(costs.experts, spread)
    nbytes = placed.sent * (scale * costs.token_bytes)
    out, back = tokens_out(costs.links, nbytes), tokens_back(costs.links, nbytes)
    if isinstance(costs.links, MeanBandwidth):
        back = (out[0].T,)
    empty = np.zeros_like(nbytes)
    return {
        "load": ours[0] / usual[0],
        "load_b": ours[1] / usual[1],
        "tokens": placed.work.sum(axis=0) * scale,
        "dispatch": out[0],
        "dispatch.1": out[1] if len(out) > 1 else empty,
        "combine": back[0],
        "combine.1": back[1] if len(back) > 1 else empty,
    }


def _copies(lending: Lending, costs: LayerCosts, changed: Floats) -> dict[str, Any]:
    """Transfers of experts, and the parts of them that pass behind each of two layers' work.

    What lies between the layers is filled first, the rest passes behind the experts (Pro-Prophet,
    arXiv:2411.10003, section 5).
    """
    if isinstance(costs.links, MeanBandwidth):
        sent = moved(lending).astype(np.float64)
        out, back = sent * costs.param_bytes, sent.T * costs.gradient_bytes
    else:
        (out,) = copies_out(costs.links, lending, costs.param_bytes)
        (back,) = copies_back(costs.links, lending, costs.gradient_bytes)
    out = out + changed
    late = _share(costs.fnec_s, journey_s(costs.links, (out,)))
    early = _share(costs.bnec_s, journey_s(costs.links, (back,)))
    return {
        "move": out,
        "move.0": out * (1 - late),
        "move.1": out * late,
        "reduce": back,
        "reduce.0": back * early,
        "reduce.1": back * (1 - early),
    }


def _share(window_s: float, needed_s: float) -> float:
    return min(1.0, window_s / needed_s) if needed_s > 0 else 1.0
