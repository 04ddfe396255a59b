"""Static routes between chips, and what one message costs on them.

Routing is fixed when the machine is built: inside a node chip port to chip port; inside an island
NIC to NIC; between islands through the uplinks, trunks and WAN links of the route with the least
latency. Which links a path crosses never depends on load.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.errors import InputError
from sim.hardware.machine import Curve, Link, Machine, Node, Path, Rounds

__all__ = [
    "curve_factor", "in_collective", "island_routes", "path", "route_key", "transfer_time"
]  # fmt: skip

_HOP_S = 1e-12
"""[s] added per link in the route search only, so that equal latencies prefer fewer links."""
_MACHINES_KEPT = 16
_PATHS_KEPT = 1 << 18

Edge = tuple[str, str, int | None]
"""(from vertex, to vertex, index in Machine.links or None where nothing limits)."""


def path(
    machine: Machine,
    src_chip: int,
    dst_chip: int,
    nic_src: int | None = None,
    nic_dst: int | None = None,
) -> Path:
    """Return the links that bytes from one chip to another cross.

    Same chip: no links and an infinite rate. Same node: source port out, destination port in (the
    NIC arguments play no part). Same island: NIC out, NIC in. Otherwise the route between the two
    islands lies in between. The rate is the smallest on the way, so the weaker end rules
    (``min(BW_i, BW_j)``, measured to hold within 4 % across vendors, DLSlime tables).

    Args:
        machine: the resolved cluster.
        src_chip, dst_chip: chip indices, 0 <= index < machine.num_chips.
        nic_src, nic_dst: NIC index in its node; None takes the NIC the chip is affine to.

    Raises:
        InputError: a chip or NIC index that does not exist.
    """
    router = _ROUTERS.get(id(machine))
    if router is None or router.machine is not machine:
        router = _remember(machine)
    found = router.cache.get((src_chip, dst_chip, nic_src, nic_dst))
    if found is not None:
        return found
    return router.find(src_chip, dst_chip, nic_src, nic_dst)


def curve_factor(curve: Curve, nbytes: ArrayLike) -> NDArray[np.float64]:
    """Return the share of the nominal rate that messages of these sizes reach.

    Straight lines between the points in (log size, log share); the first and last share hold
    outside them. In this form the time ``nbytes / share`` never falls with size as long as it does
    not fall from one point of the curve to the next; lines in (log size, share) would let it.

    Args:
        curve: ((nbytes [B], share), ...) sorted by size; () means 1 everywhere.
        nbytes: [B], any shape.

    Returns:
        Shares, shape of nbytes.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    if not curve:
        return np.ones_like(sizes)
    points = np.log(np.array(curve, dtype=np.float64))
    logs = np.log(np.maximum(sizes, curve[0][0]))
    return np.asarray(np.exp(np.interp(logs, points[:, 0], points[:, 1])), dtype=np.float64)


def in_collective(route: Path, kind: str) -> Path:
    """Return the path as messages of this collective see it: with its own latency and curve."""
    found = route.collectives.get(kind)
    if found is None:
        return route
    return msgspec.structs.replace(route, latency=found[0], curve=found[1], collectives={})


def transfer_time(route: Path, nbytes: float) -> float:
    """Return the time [s] of one message alone on its path.

    ``latency + nbytes / (rate * share(nbytes))`` with the share of :func:`curve_factor`.

    Args:
        route: from :func:`path`.
        nbytes: [B] of the message.
    """
    if nbytes <= 0.0:
        return route.latency
    return route.latency + nbytes / (route.rate * _share(route.curve, nbytes))


def _share(curve: Curve, nbytes: float) -> float:
    """Scalar twin of :func:`curve_factor`, without the cost of small arrays."""
    if not curve:
        return 1.0
    low_size, low = curve[0]
    if nbytes <= low_size:
        return low
    for size, share in curve[1:]:
        if nbytes <= size:
            part = math.log(nbytes / low_size) / math.log(size / low_size)
            return low * math.exp(part * math.log(share / low))
        low_size, low = size, share
    return low


def route_key(island_from: str, island_to: str) -> str:
    """Return the key of an ordered pair of islands in ``Machine.routes``."""
    return f"{island_from}>{island_to}"


def island_routes(
    leave: Mapping[str, str],
    enter: Mapping[str, str],
    edges: Iterable[Edge],
    links: Sequence[Link],
) -> dict[str, tuple[int, ...]]:
    """Return the link indices between the NICs of every ordered pair of islands.

    Dijkstra on latency (ties: fewer edges). Pairs without a route are absent. From an island to
    itself the route is empty, unless its nodes meet in a switch with a capacity of its own.

    Args:
        leave, enter: island -> the vertex its nodes send into, and the one they receive from.
        edges: what joins the vertices. links: what the edges' indices refer to.
    """
    import networkx as nx  # only machines being built need it

    graph: Any = nx.DiGraph()
    graph.add_nodes_from((*leave.values(), *enter.values()))
    for start, end, index in edges:
        latency = 0.0 if index is None else links[index].latency
        graph.add_edge(start, end, index=index, weight=latency + _HOP_S)
    routes: dict[str, tuple[int, ...]] = {}
    for island, start in leave.items():
        found = nx.single_source_dijkstra_path(graph, start)
        for other, end in enter.items():
            if end in found:
                steps = pairwise(found[end])
                indices = (graph.edges[step]["index"] for step in steps)
                routes[route_key(island, other)] = tuple(i for i in indices if i is not None)
    return routes


class _Router:
    """Paths of one machine, found once each."""

    __slots__ = ("cache", "machine", "node_of")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cache: dict[tuple[int, int, int | None, int | None], Path] = {}
        self.node_of = [n.index for n in machine.nodes for _ in range(n.chips[1] - n.chips[0])]

    def find(self, src: int, dst: int, nic_src: int | None, nic_dst: int | None) -> Path:
        """Work out one path and keep it."""
        for chip in (src, dst):
            if not 0 <= chip < len(self.node_of):
                raise InputError(
                    f"{self.machine.name} has no chip {chip}",
                    found=str(chip),
                    expected=f"0 to {len(self.node_of) - 1}",
                )
        start = self.machine.nodes[self.node_of[src]]
        end = self.machine.nodes[self.node_of[dst]]
        if src == dst:
            found = Path(links=(), latency=0.0, rate=math.inf)
        elif start is end:
            out = start.chip_links[src - start.chips[0]][0]
            found = _along(self.machine, (out, start.chip_links[dst - start.chips[0]][1]))
        else:
            found = self._between(start, end, (src, dst), (nic_src, nic_dst))
        if len(self.cache) >= _PATHS_KEPT:
            self.cache.clear()
        self.cache[src, dst, nic_src, nic_dst] = found
        return found

    def _between(
        self,
        start: Node,
        end: Node,
        chips: tuple[int, int],
        nics: tuple[int | None, int | None],
    ) -> Path:
        affine_src = start.chip_nic[chips[0] - start.chips[0]]
        affine_dst = end.chip_nic[chips[1] - end.chips[0]]
        nic_src = affine_src if nics[0] is None else nics[0]
        nic_dst = affine_dst if nics[1] is None else nics[1]
        trunk = self.machine.routes[route_key(start.island, end.island)]
        links = (_nic(start, nic_src)[0], *trunk, _nic(end, nic_dst)[1])
        caps = []
        if nic_src != affine_src and start.nonaffine_rate:
            caps.append(start.nonaffine_rate)
        if nic_dst != affine_dst and end.nonaffine_rate:
            caps.append(end.nonaffine_rate)
        return _along(self.machine, links, caps)


_ROUTERS: OrderedDict[int, _Router] = OrderedDict()
"""By machine identity; a router holds its machine, so an identity here is never reused."""


def _remember(machine: Machine) -> _Router:
    router = _Router(machine)
    _ROUTERS[id(machine)] = router
    while len(_ROUTERS) > _MACHINES_KEPT:
        _ROUTERS.popitem(last=False)
    return router


def _nic(node: Node, nic: int) -> tuple[int, int]:
    """The NIC's links out and in."""
    if not 0 <= nic < node.nics:
        raise InputError(
            f"node {node.index} ({node.profile}) has no NIC {nic}",
            found=str(nic),
            expected=f"0 to {node.nics - 1}",
        )
    return node.nic_links[nic]


def _along(machine: Machine, links: tuple[int, ...], caps: Sequence[float] = ()) -> Path:
    latency, price, rate = 0.0, 0.0, math.inf
    curve: Curve = ()
    rounds: Rounds = {}
    for index in links:
        link = machine.links[index]
        latency += link.latency
        price += link.price_per_byte
        reached = min(link.rate, link.flow_cap) if link.flow_cap else link.rate
        if reached < rate or (reached == rate and not curve):
            rate, curve, rounds = reached, link.curve, link.collectives
    known = [machine.links[i].collectives for i in links]
    return Path(
        links=links,
        latency=latency,
        rate=min((rate, *caps)),
        curve=curve,
        price_per_byte=price,
        collectives={
            kind: (sum(each[kind][0] for each in known), own)
            for kind, (_, own) in rounds.items()
            if all(kind in each for each in known)
        },
    )
