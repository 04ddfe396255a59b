"""Who gets how much of which link: max-min fair rates of fluid flows, from scratch.

A flow may be *folded*: it stands for several equal members that move ``nbytes`` [B] each. On a link
it weighs as many members as cross that link, so it takes ``weight * rate`` of the link's capacity
while each member moves at ``rate`` [B/s]. Fairness is per member: all rates rise together until a
link is full or a member reaches its own cap; the flows held back there keep their rate and the
others go on rising (progressive filling; Bertsekas and Gallager, Data Networks, 2nd ed., 6.5.2).

In a large component most changes move few rates. :func:`grow` solves the flows of the changed links
with the rest of the world held fixed, tests the result against the definition of max-min fairness
(each flow is at its cap or has a full link on which nobody is faster), and takes in the flows that
fail the test until none does.

Orders that could show in the result are fixed: links by index, flows by the order in which they
started.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from math import inf

from sim.engine.link import Flow, Link

__all__ = ["fill", "grow", "reach"]

#: Rates and loads this close, relatively, count as equal when fairness is tested.
_FAIR = 1e-12
#: Flows taken in from which on solving all that is connected is cheaper than testing on.
_MOST = 512


def reach(seed: Link, mark: int, most: int) -> tuple[list[Link], list[Flow]]:
    """Return the links and flows connected to ``seed``, marked with ``mark``, ready to be filled.

    Gives up, with part of them, once there are more than ``most`` flows. ``mark`` must be above
    every earlier one.
    """
    links, flows = [seed], []
    seed.seen = mark
    seed.want, seed.used = 0, 0.0
    for link in links:  # grows below
        for flow in link.flows:
            if flow.seen != mark:
                flow.seen = mark
                flows.append(flow)
                for other, weight in flow.path:
                    if other.seen != mark:
                        other.seen = mark
                        other.want, other.used = weight, 0.0
                        links.append(other)
                    else:
                        other.want += weight
        if len(flows) > most:
            return links, flows
    for flow in flows:
        flow.share = -1.0
    return links, flows


def fill(links: list[Link], flows: list[Flow]) -> None:
    """Set ``share`` [B/s] of the flows, and raise ``used`` [B/s] of the links by what they take.

    Takes what :func:`reach` returns: all flows on ``links`` that are not in ``flows`` have their
    share, and it is in ``used``. Cost O(F * path length + log L per link and rise).
    """
    if len(flows) == 1:
        flow = flows[0]
        share = flow.cap
        for link, weight in flow.path:
            share = min(share, max((link.capacity - link.used) / weight, 0.0))
        flow.share = share
        for link, weight in flow.path:
            link.used += weight * share
        return
    tightest = [((link.capacity - link.used) / link.want, link.index, link) for link in links]
    heapify(tightest)
    capped = sorted((flow.cap, flow.id, flow) for flow in flows if flow.cap < inf)
    at, num_capped, left = 0, len(capped), len(flows)
    while left:
        share = inf
        while tightest:
            noted, index, link = tightest[0]
            want = link.want
            if not want:
                heappop(tightest)
                continue
            share = (link.capacity - link.used) / want
            if share <= noted:
                share = max(share, 0.0)
                break
            heapreplace(tightest, (share, index, link))
        if at < num_capped and capped[at][0] <= share:
            share = capped[at][0]
            held = []
            while at < num_capped and capped[at][0] == share:
                held.append(capped[at][2])
                at += 1
        else:
            heappop(tightest)
            held = list(link.flows)
        for flow in held:
            if flow.share < 0.0:
                flow.share = share
                left -= 1
                for other, weight in flow.path:
                    other.want -= weight
                    other.used += weight * share


def grow(changed: list[Link], mark: int) -> tuple[list[Link], list[Flow], int]:
    """Solve around ``changed`` links only; return touched links, solved flows and the last mark.

    Sets ``share`` and ``used`` as :func:`fill` does; flows that are not returned keep their rate.
    The flows on all other links must have max-min fair rates already. ``mark`` must be above every
    earlier one.
    """
    inside: dict[Flow, None] = {}
    for link in changed:
        inside.update(dict.fromkeys(link.flows))
    while len(inside) <= _MOST:
        links = _open(inside, mark)
        fill(links, list(inside))
        more = _unfair(inside, links, mark)
        if not more:
            return links, list(inside), mark
        inside.update(more)
        mark += 1
    _connect(inside, mark)
    links = _open(inside, mark + 1)
    fill(links, list(inside))
    return links, list(inside), mark + 1


def _connect(inside: dict[Flow, None], mark: int) -> None:
    """Take in every flow that shares a link with one inside, and so on."""
    flows = list(inside)
    for flow in flows:  # grows below
        for link, _ in flow.path:
            if link.seen != mark:
                link.seen = mark
                more = [f for f in link.flows if f not in inside]
                inside.update(dict.fromkeys(more))
                flows += more


def _open(inside: dict[Flow, None], mark: int) -> list[Link]:
    """Mark the flows to solve and make their links ready, with everybody else's use in place."""
    links: list[Link] = []
    for flow in inside:
        flow.seen = mark
        flow.share = -1.0
        for link, weight in flow.path:
            if link.seen != mark:
                link.seen = mark
                link.want, link.used = 0, 0.0
                links.append(link)
            link.want += weight
    for link in links:
        link.used = sum(w * f.rate for f, w in link.flows.items() if f.seen != mark)
    return links


def _unfair(inside: dict[Flow, None], links: list[Link], mark: int) -> dict[Flow, None]:
    """Return the flows outside whose rates have to be solved again together with those inside."""
    fastest: dict[int, float] = {}  # the rate below which a flow is not held by the link
    for link in links:
        fastest[link.index] = _fastest(link, link.used, mark)
    more: dict[Flow, None] = {}
    for flow in inside:
        least = flow.share * (1 + _FAIR)
        if least < flow.cap and all(least < fastest[link.index] for link, _ in flow.path):
            for link, _ in flow.path:
                if fastest[link.index] < inf:
                    more.update((f, None) for f in link.flows if f.seen != mark and f.rate > least)
    for link in links:
        for flow in link.flows:
            if flow.seen == mark or flow in more:
                continue
            least = flow.rate * (1 + _FAIR)
            if least >= flow.cap:
                continue
            for other, _ in flow.path:
                top = fastest.get(other.index)
                if top is None:
                    top = fastest[other.index] = _fastest(other, other.load, mark)
                if least >= top:
                    break
            else:
                more[flow] = None
    return more


def _fastest(link: Link, used: float, mark: int) -> float:
    """Return the highest rate on a full link, infinity on a link with room to spare."""
    if used < link.capacity * (1 - _FAIR):
        return inf
    return max(f.share if f.seen == mark else f.rate for f in link.flows)
