"""Who gets how much of which link: max-min fair rates of fluid flows, from scratch.

A flow may be *folded*: it stands for several equal members that move ``nbytes`` [B] each. On a link
it weighs as many members as cross that link, so it takes ``weight * rate`` of the link's capacity
while each member moves at ``rate`` [B/s]. Fairness is per member: all rates rise together until a
link is full or a member reaches its own cap; the flows held back there keep their rate and the
others go on rising (progressive filling; Bertsekas and Gallager, Data Networks, 2nd ed., 6.5.2).

Orders that could show in the result are fixed: links by index, flows by the order in which they
started.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from math import inf

from sim.engine.link import Flow, Link

__all__ = ["fill", "reach"]


def reach(seed: Link, mark: int) -> tuple[list[Link], list[Flow]]:
    """Return the links and flows connected to ``seed``, marked with ``mark``, ready to be filled.

    ``mark`` must be above every earlier one.
    """
    links, flows = [seed], []
    seed.seen = mark
    seed.want, seed.unfilled, seed.used = 0, 0, 0.0
    for link in links:  # grows below
        for flow in link.flows:
            if flow.seen != mark:
                flow.seen = mark
                flow.share = -1.0
                flows.append(flow)
                for other, weight in flow.path:
                    if other.seen != mark:
                        other.seen = mark
                        other.want, other.unfilled, other.used = 0, 0, 0.0
                        links.append(other)
                    other.want += weight
                    other.unfilled += 1
    return links, flows


def fill(links: list[Link], flows: list[Flow]) -> None:
    """Set ``share`` [B/s] of every flow of one component, and ``used`` [B/s] of every link.

    Takes what :func:`reach` returns. Cost O(F * path length + log L per link and rise).
    """
    if len(flows) == 1:
        flow = flows[0]
        share = flow.cap
        for link, weight in flow.path:
            share = min(share, link.capacity / weight)
        _settle(flow, share)
        return
    tightest = [(link.capacity / link.want, link.index, link) for link in links if link.unfilled]
    heapify(tightest)
    capped = sorted((flow.cap, flow.id, flow) for flow in flows if flow.cap < inf)
    at, num_capped, left = 0, len(capped), len(flows)
    while left:
        share = inf
        while tightest:
            noted, index, link = tightest[0]
            if not link.unfilled:
                heappop(tightest)
                continue
            share = max((link.capacity - link.used) / link.want, 0.0)
            if share <= noted:
                break
            heapreplace(tightest, (share, index, link))
        if at < num_capped and capped[at][0] <= share:
            while at < num_capped and capped[at][0] <= share:
                flow = capped[at][2]
                at += 1
                if flow.share < 0.0:
                    _settle(flow, flow.cap)
                    left -= 1
            continue
        heappop(tightest)
        for flow in link.flows:
            if flow.share < 0.0:
                _settle(flow, share)
                left -= 1


def _settle(flow: Flow, share: float) -> None:
    """Fix the rate of a flow and take it off what its links have left."""
    flow.share = share
    for link, weight in flow.path:
        link.unfilled -= 1
        link.want -= weight
        link.used += weight * share
