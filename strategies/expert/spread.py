"""Our planner: chooses which devices get each lent expert, and how its tokens are shared out.

Pro-Prophet lends to everybody but n and computes a token where it is or at home. Here the hosts are
a subset, chosen by what the links and the sources of the tokens make of it, and tokens go to the
nearest host with room. What is returned is the best of the search, of Pro-Prophet's plans with n of
0 and 1 and of no lending under the exact costs: on the counts that it plans from, it is never worse
than those.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.expert.layer_cost import LayerCosts, LayerTimes, layer_times, least_s, predicted_of
from strategies.expert.lending import Lending, copies, static
from strategies.expert.pro_prophet import planned
from strategies.expert.spare import hidden_spares
from strategies.expert.spread_state import Trials, Varied

__all__ = ["spread"]

_FAILURES = 2
"""Rounds without a better layer after which the search ends."""
_SAME = 2e-3
"""Candidates this close, relatively, are equal; then the fewest copies win."""
_LOOSE = 1e3
"""Slack that keeps every token where it is nearest."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def spread(
    counts: Ints,
    costs: LayerCosts,
    budget: int,
    *,
    previous: Lending | None = None,
    search_s: float = 0.0,
    scheduled: bool = True,
) -> Lending:
    """Return a lending within the budget.

    Greedy: the hottest expert of the fullest device gets the best of a few sets of hosts (the
    emptiest devices, the emptiest of each node, everybody); rounds that do not help are allowed for
    a while, since several experts may have to leave before the layer is faster, and then the expert
    that the fullest receiver waits for is taken. Meanwhile tokens stay near their sources. Where
    Pro-Prophet's plan is better than the result, the search starts again from there; where that is
    so or computing takes most of the time, a search that levels the devices is made too. At last
    come the spare copies that nothing waits for. Ties go to the lower index.

    Args:
        counts: tokens of each expert from each source, shape (E, S).
        costs: of the layer. budget: copies that each device has room for.
        previous: the lending in use. It competes with what the search finds.
        search_s: [s] that a step of this layer pays for a search, which is what nothing hides of it
            over the steps to the next one. Where no lending could gain more over the previous one,
            that is kept without a search.
        scheduled: cost of eq. 8, with hidden copies and sums; else of eq. 6.
    """
    plain = static(*counts.shape)
    found: list[_Priced] = []
    if previous is not None and copies(previous).max() <= budget:
        found.append(_priced(counts, costs, previous, scheduled))
        if found[0].seconds - least_s(costs, counts) <= search_s:
            return previous
    theirs = _Priced(*planned(counts, costs, budget, 0.0, 0, scheduled), None)
    near = _searched(counts, costs, budget, plain, scheduled, True)
    but_one = _Priced(*planned(counts, costs, budget, 0.0, 1, scheduled), None)
    found += [theirs, but_one, near]
    if theirs.seconds < near.seconds and copies(theirs.lending).any():
        found.append(_searched(counts, costs, budget, theirs.lending, scheduled, True))
    if theirs.seconds < near.seconds or _computes(near):
        found.append(_searched(counts, costs, budget, plain, scheduled, False))
    best = min(found, key=lambda each: each.seconds)
    if not scheduled or best.times is None or best.lending.split != "balanced":
        return best.lending
    more = _SAME * best.seconds
    limit = min(best.seconds + more, *(each.seconds for each in found if each not in (best, near)))
    for lending in hidden_spares(counts, costs, budget, best.lending, best.times, more):
        if _priced(counts, costs, lending, scheduled).seconds <= limit:
            return lending
    return best.lending


class _Priced(NamedTuple):
    """A lending, the layer's predicted time [s], and that of its parts where they are known."""

    lending: Lending
    seconds: float
    times: LayerTimes | None


def _priced(counts: Ints, costs: LayerCosts, lending: Lending, scheduled: bool) -> _Priced:
    times = layer_times(costs, counts, lending)
    return _Priced(lending, predicted_of(costs, times, scheduled), times)


def _computes(priced: _Priced) -> bool:
    """Whether the experts' work is most of the time."""
    times = priced.times
    return times is not None and times.fec + times.bec > 0.5 * priced.seconds


def _searched(
    counts: Ints, costs: LayerCosts, budget: int, start: Lending, scheduled: bool, near: bool
) -> _Priced:
    """Search from a lending, spreading tokens near their sources or levelling devices."""
    layer = Varied(counts, costs, start.home, scheduled, near)
    for expert in np.flatnonzero(start.hosts.sum(axis=1) > 1).tolist():
        trials = layer.tried(expert, start.hosts[expert : expert + 1])
        layer.take(expert, trials, _choice(trials))
    best, best_s, failures = layer.hosts.copy(), layer.seconds, 0
    tried = np.zeros(len(counts), np.int64)
    while failures < _FAILURES:
        expert = _target(layer, tried, failures)
        if expert < 0:
            break
        tried[expert] += 1
        trials = layer.tried(expert, _rows(layer, expert, budget))
        layer.take(expert, trials, _choice(trials))
        if layer.seconds < best_s * (1.0 - 1e-9):
            best, best_s, failures = layer.hosts.copy(), layer.seconds, 0
        else:
            failures += 1
    found = [
        msgspec.structs.replace(start, hosts=best, split="balanced", slack=slack)
        for slack in ((0.0, _LOOSE) if near else (0.0,))
    ]
    priced = [_priced(counts, costs, lending, scheduled) for lending in found]
    return min(priced, key=lambda each: each.seconds)


def _target(layer: Varied, tried: Ints, failures: int) -> int:
    """The expert to move next, -1 where none is left; each at most twice.

    The one with most tokens on the fullest device; after a round that did not help the one that the
    fullest receiver gets most of; then the one most of whose tokens travel; then the one with most
    copies.
    """
    if failures % 3 == 0:
        weight = layer.work[:, layer.fullest()]
    elif failures % 3 == 1:
        weight = layer.received()
    else:
        weight = np.where(tried == 0, layer.travelling(), 0.0)
    weight = np.where(tried < 2, weight, 0.0)
    if not weight.any():
        weight = np.where(tried == 0, layer.hosts.sum(axis=1) - 1, 0)
    return int(np.argmax(weight)) if weight.any() else -1


def _rows(layer: Varied, expert: int, budget: int) -> Bools:
    """Sets of hosts worth a try: the k emptiest devices at all, in each node, and everybody."""
    size = layer.hosts.shape[1]
    home, now = int(layer.home[expert]), layer.hosts[expert]
    held = layer.hosts.sum(axis=0) - np.bincount(layer.home, minlength=size)
    room = (held < budget) | now
    load = np.where(room, layer.without(expert), np.inf)
    load[home] = -1.0
    order = np.argsort(load, kind="stable")
    rank = np.empty(size, np.int64)
    rank[order] = np.arange(size)
    node_rank = np.empty(size, np.int64)
    by_node = np.lexsort((rank, layer.node))
    node_rank[by_node] = (
        np.arange(size)
        - np.flatnonzero(np.r_[True, np.diff(layer.node[by_node]) > 0])[layer.node[by_node]]
    )
    most = np.unique(np.minimum([2, 3, 4, 6, 8, 12, 16, 24, 32, size], size))
    own = layer.node == layer.node[home]
    sets = [rank < k for k in most]
    for k in (1, 2, 4):
        sets += [node_rank < k, own & (node_rank < k)]
    sets += [now, now | (rank < 2), own, rank < 1]
    held_by = np.flatnonzero(now & (rank > 0))
    fullest = held_by[np.argsort(-rank[held_by])][:2]
    sets += [now & (rank != rank[d]) for d in fullest]
    rows = np.array(sets) & room
    rows[:, home] = True
    first: list[int] = sorted({row.tobytes(): k for k, row in enumerate(rows)}.values())
    return np.asarray(rows[first], bool)


def _choice(trials: Trials) -> int:
    """The quickest candidate; among those as quick the one with fewest copies."""
    close = trials.score <= trials.score.min() * (1.0 + _SAME)
    number = np.where(close, trials.rows.sum(axis=1), trials.rows.shape[1] + 1)
    return int(np.argmin(number))
