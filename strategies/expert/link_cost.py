"""What the exchanges of a lending layer cost on the links: by a mean bandwidth, or on a machine.

Two pricings. :class:`MeanBandwidth` is Pro-Prophet's; :class:`Topology` gives each byte matrix the
price that ``sim.cost.collective`` gives an uneven all_to_all on the same chips, from arrays that
are worked out once, so that a planner can price many matrices at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.cost.collective import places
from sim.cost.ways import PRIVATE
from sim.errors import InputError
from sim.hardware.machine import Curve, Machine
from sim.hardware.route import curve_factor

__all__ = [
    "Crossing",
    "Links",
    "MeanBandwidth",
    "Topology",
    "crossing",
    "exchange_s",
    "link_loads",
    "topology",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class MeanBandwidth(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One bandwidth for each operation (Pro-Prophet, arXiv:2411.10003, eq. 1, 4 and 5).

    Args:
        exchange: ((largest size [B], rate [B/s]), ...) by size of what the fullest device receives;
            the last rate also holds above.
        trans, agg: [B/s] of sending parameters and of summing gradients.
    """

    exchange: tuple[tuple[float, float], ...]
    trans: float
    agg: float


class PathClass(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of devices whose paths are alike.

    Args:
        latency: [s]. rate: [B/s] of one message alone. curve: share of it by size.
        capped: one flow does not fill the links (a cap or a curve), so it may be the slowest.
    """

    latency: float
    rate: float
    curve: Curve
    capped: bool


class Topology(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """The links between the devices of one group.

    Args:
        links: links that each pair's bytes cross, padded with -1, shape (D, D, H); numbered 0 to
            X - 1 in ``rates``.
        rates: [B/s] of each link, already shared with equal groups side by side, shape (X,).
        pair: class of each pair, shape (D, D), -1 on the diagonal. classes: see ``PathClass``.
        nodes: node of each device, shape (D,).
        rail: device of each node that stands for a device there, shape (D, N): the one in the same
            place of its node. Empty where a node has one NIC for all.
        ways: how experts may travel: "direct", "relay" and "chain", see ``copy_ways``.
        chunk: [B] pieces that a chain passes on.
    """

    links: Ints
    rates: Floats
    pair: Ints
    classes: tuple[PathClass, ...]
    nodes: Ints
    rail: Ints
    ways: tuple[str, ...] = ("direct", "relay", "chain")
    chunk: float = 262144.0


Links = MeanBandwidth | Topology


def topology(
    machine: Machine,
    chips: Sequence[int],
    *,
    share: float = 1.0,
    ways: tuple[str, ...] = ("direct", "relay", "chain"),
) -> Topology:
    """Return the links between chips of a machine.

    Args:
        machine: where. chips: members of the group, in rank order.
        share: equal groups that run side by side over the same links between nodes.
        ways: how experts may travel.

    Raises:
        InputError: a chip twice or unknown, or an unknown way.
    """
    if len(set(chips)) != len(chips) or set(ways) - {"direct", "relay", "chain"} or not ways:
        raise InputError(
            "a group needs each chip once, and known ways for its experts",
            key="chips",
            found=f"{list(chips)}, {' '.join(ways)}",
            expected="chips that differ; direct, relay or chain",
        )
    where, number = places(machine), dict[int, int]()
    classes: dict[PathClass, int] = {}
    size = len(chips)
    routes = [[where.path(a, b, "all_to_all") for b in chips] for a in chips]
    longest = max((len(r.links) for row in routes for r in row), default=0)
    links = np.full((size, size, max(longest, 1)), -1, np.int64)
    pair = np.full((size, size), -1, np.int64)
    for i, row in enumerate(routes):
        for j, route in enumerate(row):
            if i == j:
                continue
            for h, x in enumerate(route.links):
                links[i, j, h] = number.setdefault(x, len(number))
            slowest = min((machine.links[x].rate for x in route.links), default=route.rate)
            found = PathClass(
                latency=route.latency,
                rate=route.rate,
                curve=route.curve,
                capped=bool(route.curve) or route.rate < slowest,
            )
            pair[i, j] = classes.setdefault(found, len(classes))
    rates = [
        machine.links[x].rate / (1.0 if machine.links[x].kind in PRIVATE else share) for x in number
    ]
    nodes = np.array([where.node[c] for c in chips], np.int64)
    return Topology(
        links=links,
        rates=np.array(rates, np.float64),
        pair=pair,
        classes=tuple(classes),
        nodes=nodes,
        rail=_rail(machine, chips, nodes),
        ways=ways,
    )


def _rail(machine: Machine, chips: Sequence[int], nodes: Ints) -> Ints:
    names = np.unique(nodes)
    cards = {(n, machine.nodes[n].nic_of(c)) for c, n in zip(chips, nodes.tolist(), strict=True)}
    if len(names) < 2 or len(cards) == len(names):
        return np.zeros((len(chips), 0), np.int64)
    members = [np.flatnonzero(nodes == n) for n in names]
    place = np.zeros(len(chips), np.int64)
    for own in members:
        place[own] = np.arange(own.size)
    return np.stack([own[place % own.size] for own in members], axis=1)


def exchange_s(links: Links, nbytes: ArrayLike) -> Floats:
    """Return the time of exchanging byte matrices [s], each alone and directly, shape (...).

    Args:
        links: pricing. nbytes: [B] from source to device, shape (..., D, D); the diagonal stays.
    """
    amount = np.asarray(nbytes, np.float64)
    if isinstance(links, MeanBandwidth):
        received = amount.sum(axis=-2) - np.diagonal(amount, axis1=-2, axis2=-1)
        most = received.max(axis=-1, initial=0.0)
        bounds = np.array([size for size, _ in links.exchange[:-1]])
        rates = np.array([rate for _, rate in links.exchange])
        return np.asarray(most / rates[np.searchsorted(bounds, most)], np.float64)
    index = _index(links)
    flat = amount.reshape(-1, links.pair.size)
    slowest = (link_loads(links, flat) / links.rates).max(axis=1, initial=0.0)
    latency = np.zeros(len(flat))
    for kind, pairs in index.classes:
        if not kind.capped and (latency >= kind.latency).all():
            continue
        sizes = flat[:, pairs]
        latency = np.maximum(latency, np.where((sizes > 0).any(axis=1), kind.latency, 0.0))
        if kind.capped:
            alone = sizes / (kind.rate * curve_factor(kind.curve, sizes))
            slowest = np.maximum(slowest, alone.max(axis=1, initial=0.0))
    return np.asarray((slowest + latency).reshape(amount.shape[:-2]), np.float64)


def link_loads(links: Topology, nbytes: Floats) -> Floats:
    """Return the bytes over each link [B], shape (K, X), of K matrices as rows, (K, D * D)."""
    if not links.rates.size:
        return np.zeros((len(nbytes), 0))
    direct = _index(links).direct
    return np.add.reduceat(nbytes[:, direct.pairs], direct.starts, axis=1)


class Crossing(NamedTuple):
    """Which pairs, numbered row by row, cross which links.

    Args:
        pairs: link after link. starts: where each link's begin. links: those that any pair crosses.
    """

    pairs: Ints
    starts: Ints
    links: Ints


def crossing(table: Ints) -> Crossing:
    """Return the pairs over each link of a table of each pair's links, (D, D, H), -1 for none."""
    flat = table.reshape(-1, table.shape[-1])
    pair, place = np.nonzero(flat >= 0)
    link = flat[pair, place]
    order = np.argsort(link, kind="stable")
    found, starts = np.unique(link[order], return_index=True)
    return Crossing(pair[order], starts, found)


class _Index(NamedTuple):
    """A topology in the order in which sums need it.

    Args:
        direct: pairs over each link. classes: kinds of paths and their pairs, the longest latency
            first.
    """

    direct: Crossing
    classes: list[tuple[PathClass, Ints]]


@lru_cache(maxsize=64)
def _index(links: Topology) -> _Index:
    flat = links.pair.ravel()
    classes = [(kind, np.flatnonzero(flat == c)) for c, kind in enumerate(links.classes)]
    return _Index(
        direct=crossing(links.links),
        classes=sorted(classes, key=lambda each: -each[0].latency),
    )
