"""Times and loads of the layers of many steps, whose lendings are given."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.expert.journeys import journey_s, tokens_back, tokens_out
from strategies.expert.layer_cost import (
    LayerCosts,
    copy_bytes,
    exchange_s,
    expert_s,
    nodes_of,
    times_of,
)
from strategies.expert.lending import Lending, Shares, rehomed, shares, static
from strategies.expert.link_cost import MeanBandwidth

__all__ = ["StepPrices", "priced", "static_loads"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class StepPrices(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What every layer of every step takes, each by itself.

    Args:
        dispatch, combine: [s] of one exchange to the experts and one back, (T, L).
        fec, bec: [s] forward and backward of the fullest device's experts, (T, L).
        trans, agg: [s] of parameters to hosts and gradients back, (T, L).
        loads: tokens that each device computes, (T, L, D).
        nbytes: [B] of lent experts on the fullest device, all layers together, (T,).
    """

    dispatch: Floats
    combine: Floats
    fec: Floats
    bec: Floats
    trans: Floats
    agg: Floats
    loads: Ints
    nbytes: Floats


def priced(
    counts: Ints,
    costs: Sequence[LayerCosts],
    lendings: Sequence[Sequence[Lending]],
    state_bytes: float = 0.0,
) -> StepPrices:
    """Price all layers of all steps; steps in a row under one lending together.

    An expert whose home changes travels with its parameters and states before everything else.

    Args:
        counts: shape (T, L, E, S). costs: of each layer. lendings: [layer][step].
        state_bytes: [B] of an expert besides its parameters.
    """
    shape, devices = counts.shape[:2], counts.shape[3]
    times = np.zeros((6, *shape))
    loads = np.zeros((*shape, devices), np.int64)
    copies = np.zeros((shape[0], devices))
    for number, (each, row) in enumerate(zip(costs, lendings, strict=True)):
        for steps in _runs(row):
            lending, before = row[steps[0]], row[max(steps[0] - 1, 0)]
            placed = [shares(counts[t, number], lending, nodes_of(each)) for t in steps]
            times[:, steps, number] = _times(each, placed, lending)
            changed = rehomed(before, lending) * (each.param_bytes + state_bytes)
            times[4, steps[0], number] += float(exchange_s(each.links, changed))
            loads[steps, number] = [p.work.sum(axis=0) for p in placed]
            copies[steps] += copy_bytes(each, lending)
    dispatch, combine, fec, bec, trans, agg = times
    return StepPrices(
        dispatch=dispatch,
        combine=combine,
        fec=fec,
        bec=bec,
        trans=trans,
        agg=agg,
        loads=loads,
        nbytes=copies.max(axis=1),
    )


def _runs(row: Sequence[Lending]) -> list[list[int]]:
    """Steps that follow one another under one lending."""
    found = list[list[int]]()
    for step, lending in enumerate(row):
        if found and row[found[-1][0]] is lending:
            found[-1].append(step)
        else:
            found.append([step])
    return found


def _times(costs: LayerCosts, placed: Sequence[Shares], lending: Lending) -> Floats:
    """Dispatch, combine, fec, bec, trans and agg of steps under one lending, (6, K)."""
    first = times_of(costs, placed[0], lending)
    one = np.array(
        [first.dispatch, first.combine, first.fec, first.bec, first.trans, first.agg], np.float64
    )
    found = np.repeat(one[:, None], len(placed), axis=1)
    if len(placed) == 1:
        return found
    forward, backward = expert_s(costs.experts, np.stack([p.work for p in placed]))
    nbytes = np.stack([p.sent for p in placed]).astype(np.float64) * costs.token_bytes
    found[0], found[1] = (t * costs.exchange_factor for t in _exchanges(costs, nbytes))
    found[2], found[3] = forward.max(axis=1), backward.max(axis=1)
    return found


def _exchanges(costs: LayerCosts, nbytes: Floats) -> tuple[Floats, Floats]:
    links = costs.links
    if isinstance(links, MeanBandwidth):
        both = exchange_s(links, nbytes)
        return both, both
    if not links.rail.size:
        back = np.swapaxes(nbytes, 1, 2)
        return exchange_s(links, nbytes), exchange_s(links, back)
    ways = [(tokens_out(links, one), tokens_back(links, one)) for one in nbytes]
    times = np.array([[journey_s(links, way) for way in pair] for pair in ways])
    return times[:, 0], times[:, 1]


def static_loads(counts: Ints) -> Ints:
    """Return the tokens of each device under plain expert parallelism, (T, L, D).

    Args:
        counts: shape (T, L, E, S), S = D.
    """
    home = static(*counts.shape[2:]).home
    found = np.zeros((*counts.shape[:2], counts.shape[3]), np.int64)
    total = counts.sum(axis=3)
    for expert, device in enumerate(home.tolist()):
        found[:, :, device] += total[:, :, expert]
    return found
