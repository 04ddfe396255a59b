"""How tokens and experts travel between the devices of a group: byte matrices, one after another.

A journey is a list of byte matrices that are exchanged in turn, each an uneven all_to_all in a
lowered plan. The cheapest way is taken; ties go to the first named.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.expert.lending import Lending, moved
from strategies.expert.link_cost import Links, MeanBandwidth, Topology, exchange_s

__all__ = [
    "copies_back",
    "copies_out",
    "copies_s",
    "copy_ways",
    "journey_s",
    "tokens_back",
    "tokens_out",
]

Floats = NDArray[np.float64]
Journey = tuple[Floats, ...]


def journey_s(links: Links, journey: Journey) -> float:
    """Return the time of exchanges one after another [s]."""
    return float(sum(exchange_s(links, matrix) for matrix in journey))


def tokens_out(links: Links, nbytes: ArrayLike) -> Journey:
    """Return how tokens go to their experts: directly, or over the NIC of their own rail first.

    By rail a token crosses to the device in the same place of the other node and goes on inside it,
    as in DeepEP's normal kernels (docs/legacy.md there): then a busy receiver's NIC is spared and
    the node's others carry its tokens.

    Args:
        links: of the group. nbytes: [B] from source to device, shape (D, D).
    """
    direct = np.array(nbytes, np.float64)
    np.fill_diagonal(direct, 0.0)
    if isinstance(links, MeanBandwidth) or not links.rail.size:
        return (direct,)
    across, inside = _by_rail(links, direct)
    return min(((direct,), (across, inside)), key=lambda way: journey_s(links, way))


def tokens_back(links: Links, nbytes: ArrayLike) -> Journey:
    """Return how results go back to their sources: the same ways in reverse.

    Args:
        links: of the group. nbytes: [B] from source to device of the way out, shape (D, D).
    """
    direct = np.array(nbytes, np.float64).T
    np.fill_diagonal(direct, 0.0)
    if isinstance(links, MeanBandwidth):
        return (direct.T,)  # eq. 6 takes the time of the way out four times
    if not links.rail.size:
        return (direct,)
    across, inside = _by_rail(links, direct.T)
    return min(((direct,), (inside.T, across.T)), key=lambda way: journey_s(links, way))


def _by_rail(links: Topology, direct: Floats) -> Journey:
    _, node = np.unique(links.nodes, return_inverse=True)
    source, device = np.indices(direct.shape)
    near = node[source] == node[device]
    via = np.where(near, device, links.rail[source, node[device]])
    across, inside = np.zeros_like(direct), np.zeros_like(direct)
    np.add.at(across, (source, via), direct)
    np.add.at(inside, (via, device), direct)
    np.fill_diagonal(inside, 0.0)
    return across, inside


def copy_ways(links: Topology, lending: Lending, nbytes: float) -> dict[str, Journey]:
    """Return the ways that copies of experts may travel.

    "direct": the home sends to every host. "relay": to its node's hosts and to one host of every
    other node, which then serves the rest of its node. "chain": each host passes chunks on to the
    next, the hosts of a node in a row, so that each device and each NIC carries an expert once; the
    chunks that fill the chain are counted as bytes of every edge.

    Args:
        links: of the group. lending: who holds what. nbytes: [B] of one expert.
    """
    ways: dict[str, Journey] = {}
    if "direct" in links.ways:
        ways["direct"] = (np.asarray(moved(lending) * nbytes, np.float64),)
    size = len(links.nodes)
    first, then, chain = (np.zeros((size, size), np.float64) for _ in range(3))
    device = np.arange(size)
    for e in np.flatnonzero(lending.hosts.sum(axis=1) > 1):
        home = int(lending.home[e])
        far = links.nodes != links.nodes[home]
        order = np.lexsort((device, links.nodes, far, device != home))
        row = order[lending.hosts[e, order]]  # home, its node, then node by node
        head = np.r_[False, np.diff(links.nodes[row]) != 0]
        from_head = np.maximum.accumulate(np.where(head, np.arange(row.size), 0))
        direct = head | (from_head == 0)
        first[home, row[direct]] += nbytes
        then[row[from_head[~direct]], row[~direct]] += nbytes
        fill = min(links.chunk, nbytes) * (row.size - 2)
        chain[row[:-1], row[1:]] += nbytes + fill
    np.fill_diagonal(first, 0.0)
    if "relay" in links.ways:
        ways["relay"] = (first, then) if then.any() else (first,)
    if "chain" in links.ways:
        ways["chain"] = (chain,)
    return ways


def copies_out(links: Topology, lending: Lending, nbytes: float) -> Journey:
    """Return how parameters go from homes to hosts: the cheapest of :func:`copy_ways`."""
    ways = list(copy_ways(links, lending, nbytes).values())
    return ways[int(np.argmin(_each_s(links, ways)))]


def copies_back(links: Topology, lending: Lending, nbytes: float) -> Journey:
    """Return how gradients go from hosts to homes: the reverse, summed where ways meet."""
    ways = [_reverse(way) for way in copy_ways(links, lending, nbytes).values()]
    return ways[int(np.argmin(_each_s(links, ways)))]


def copies_s(
    links: Topology, lending: Lending, param_bytes: float, gradient_bytes: float
) -> tuple[float, float]:
    """Return the times of :func:`copies_out` and :func:`copies_back` [s]."""
    out = list(copy_ways(links, lending, param_bytes).values())
    same = param_bytes == gradient_bytes
    back = out if same else list(copy_ways(links, lending, gradient_bytes).values())
    times = _each_s(links, [*out, *map(_reverse, back)])
    return min(times[: len(out)]), min(times[len(out) :])


def _reverse(way: Journey) -> Journey:
    return tuple(matrix.T for matrix in way[::-1])


def _each_s(links: Links, ways: list[Journey]) -> list[float]:
    """Time of each journey [s], all matrices priced at once."""
    found = iter(exchange_s(links, np.array([m for way in ways for m in way])).tolist())
    return [sum(next(found) for _ in way) for way in ways]
