"""Ways to run a collective on a machine: ring, binary tree, hierarchical, direct exchange.

A way is a list of phases that run one after another. In a phase every edge carries its bytes at
once, in chunks, so a phase lasts its latency and the longer of two times: the slowest edge's bytes
at the rate its path gives one message of the chunk's size, and the busiest link's bytes at its
rate. The latency of a ring is that of its hops in a row, as often as the data goes round.

Exact for equal links; with unequal ones an upper bound on the step-by-step execution, because a
slow hop and a distant hop need not meet on the critical path.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from sim.hardware.machine import Machine, Path
from sim.hardware.route import in_collective, path, transfer_time

__all__ = [
    "Edge",
    "Phase",
    "Places",
    "alone",
    "exchange",
    "hierarchical",
    "ring",
    "total_s",
    "tree",
]

PRIVATE = ("fabric", "pcie")
"""Link kinds that belong to one chip: groups side by side do not share them."""


class Edge(msgspec.Struct, frozen=True):
    """Bytes from one chip to another during a phase.

    Args:
        src, dst: chips. nbytes: [B] over the whole phase. chunk: [B] of one message.
        kind: of collective, "" for a message alone.
    """

    src: int
    dst: int
    nbytes: float
    chunk: float
    kind: str = ""


class Phase(msgspec.Struct, frozen=True):
    """Edges that run at once.

    Args:
        edges: see there. latency_s: [s] of the hops in a row.
        streams: True when the edges carry a steady stream, which a fluid flow stands for well;
            False for messages one after another over different edges.
    """

    edges: tuple[Edge, ...]
    latency_s: float
    streams: bool = True


class Places:
    """Where the chips of one machine are.

    Attributes:
        node: chip -> node index. site: chip -> site name.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.node = [n.index for n in machine.nodes for _ in range(*n.chips)]
        self.site = [n.site for n in machine.nodes for _ in range(*n.chips)]

    def path(self, src: int, dst: int, kind: str = "") -> Path:
        """The route between two chips, as messages of a collective see it, or one alone."""
        found = path(self.machine, src, dst)
        return in_collective(found, kind) if found.collectives else found

    def in_order(self, chips: Sequence[int]) -> list[int]:
        """Chips by site, island, node and number, so that a ring crosses each border once."""
        nodes = self.machine.nodes
        return sorted(
            chips, key=lambda c: (self.site[c], nodes[self.node[c]].island, self.node[c], c)
        )

    def split(self, chips: Sequence[int]) -> list[list[int]]:
        """Parts of a group: by site where it spans several, else by node."""
        by_site = len({self.site[c] for c in chips}) > 1
        parts: dict[object, list[int]] = defaultdict(list)
        for c in chips:
            parts[self.site[c] if by_site else self.node[c]].append(c)
        return list(parts.values())

    def stream_s(self, phase: Phase, share: float = 1.0) -> float:
        """Time of a phase without its latency [s] when ``share`` equal groups run side by side."""
        load: dict[int, float] = defaultdict(float)
        slowest = 0.0
        for edge in phase.edges:
            route = self.path(edge.src, edge.dst, edge.kind)
            slowest = max(slowest, edge.nbytes / alone(route, edge.chunk))
            for x in route.links:
                load[x] += edge.nbytes
        for x, nbytes in load.items():
            link = self.machine.links[x]
            side_by_side = 1.0 if link.kind in PRIVATE else share
            slowest = max(slowest, nbytes * side_by_side / link.rate)
        return slowest


def alone(route: Path, nbytes: float) -> float:
    """Rate [B/s] that one message of this size reaches alone on its route."""
    if nbytes <= 0.0 or math.isinf(route.rate):
        return route.rate
    return nbytes / (transfer_time(route, nbytes) - route.latency)


def ring(places: Places, kind: str, groups: Sequence[Sequence[int]], nbytes: float) -> list[Phase]:
    """Rings over several groups side by side; chips in ring order (Patarasuk and Yuan 2009).

    all_reduce sends 2 (n - 1) chunks of 1/n over every edge, all_gather and reduce_scatter half as
    many. A broadcast is a chain: n chunks follow one another, n - 1 hops long.

    Args:
        places: of the machine. kind: of collective. groups: of equal size n >= 2.
        nbytes: [B] of the whole tensor of one group.
    """
    n = len(groups[0])
    rounds = 2 if kind == "all_reduce" else 1
    chunk = nbytes / n
    edges, latency = [], 0.0
    for group in groups:
        pairs = list(zip(group, [*group[1:], group[0]], strict=True))
        hops = [places.path(a, b, kind).latency for a, b in pairs]
        if kind == "broadcast":
            pairs, hops = pairs[:-1], hops[:-1]
            latency = max(latency, sum(hops))
        else:
            latency = max(latency, rounds * (sum(hops) - min(hops)))
        edges += [Edge(a, b, rounds * (n - 1) * chunk, chunk, kind) for a, b in pairs]
    if kind != "broadcast":
        return [Phase(tuple(edges), latency)]
    fill = tuple(msgspec.structs.replace(e, nbytes=(n - 2) * chunk) for e in edges)
    body = tuple(msgspec.structs.replace(e, nbytes=nbytes) for e in edges)
    return [Phase(fill, latency, streams=False), Phase(body, 0.0)]


def tree(places: Places, kind: str, group: Sequence[int], nbytes: float) -> list[Phase]:
    """Binomial tree of whole messages: ceil(log2 n) steps down, and as many up for an all_reduce.

    Its messages follow one another over different edges, so it never becomes flows; it wins only
    where latency rules. [] for kinds whose members hold different parts.

    Args:
        places: of the machine. kind: of collective. group: chips. nbytes: [B] of the whole tensor.
    """
    if kind not in ("all_reduce", "broadcast"):
        return []
    n = len(group)
    steps = []
    for level in range(math.ceil(math.log2(n))):
        gap = 1 << level
        pairs = [(i, i + gap) for i in range(0, n - gap, 2 * gap)]
        edges = tuple(Edge(group[a], group[b], nbytes, nbytes, kind) for a, b in pairs)
        latency = max(places.path(e.src, e.dst, kind).latency for e in edges)
        steps.append(Phase(edges, latency, streams=False))
    down = steps[::-1]
    return [_reversed(s) for s in steps] + down if kind == "all_reduce" else down


def _reversed(phase: Phase) -> Phase:
    """The same edges the other way."""
    edges = tuple(Edge(e.dst, e.src, e.nbytes, e.chunk, e.kind) for e in phase.edges)
    return Phase(edges, phase.latency_s, phase.streams)


def hierarchical(places: Places, kind: str, group: Sequence[int], nbytes: float) -> list[Phase]:
    """Level by level: reduce_scatter inside, the collective across, all_gather inside.

    The levels are sites, then nodes. Equal parts of size g run g collectives of 1/g of the bytes
    across, side by side. Unequal parts work through one leader each: they reduce to it, the leaders
    exchange, and it broadcasts (all_reduce and broadcast only).

    Returns:
        Phases, or [] where the group has one level only or the kind has no such form.
    """
    parts = places.split(group)
    if len(parts) == 1 or len(parts) == len(group):
        return _flat(places, kind, group, nbytes) if len(parts) == len(group) else []
    sizes = {len(p) for p in parts}
    if len(sizes) == 1:
        return _equal_parts(places, kind, parts, nbytes)
    if kind not in ("all_reduce", "broadcast"):
        return []
    down = _across(places, parts, lambda p: _inside(places, "broadcast", p, nbytes))
    leaders = [p[0] for p in parts]
    across = _best(places, kind, leaders, nbytes)
    if kind == "broadcast":
        return across + down
    up = [_reversed(s) for s in down[::-1]]
    return up + across + down


def _flat(places: Places, kind: str, group: Sequence[int], nbytes: float) -> list[Phase]:
    """One chip per part: nothing is inside, so the ring across is all there is."""
    sites = {places.site[c] for c in group}
    return ring(places, kind, [group], nbytes) if len(sites) == len(group) else []


def _equal_parts(places: Places, kind: str, parts: list[list[int]], nbytes: float) -> list[Phase]:
    size = len(parts[0])
    rows = [[p[i] for p in parts] for i in range(size)]
    if kind == "broadcast":
        across = _best(places, kind, rows[0], nbytes)
        return across + _across(places, parts, lambda p: _inside(places, kind, p, nbytes))
    into = _across(places, parts, lambda p: _inside(places, "reduce_scatter", p, nbytes))
    out = _across(places, parts, lambda p: _inside(places, "all_gather", p, nbytes))
    across = ring(places, kind, rows, nbytes / size)
    if kind == "all_gather":
        return across + out
    return into + across + (out if kind == "all_reduce" else [])


def _inside(places: Places, kind: str, part: list[int], nbytes: float) -> list[Phase]:
    if len(part) == 1:
        return []
    return hierarchical(places, kind, part, nbytes) or ring(places, kind, [part], nbytes)


def _best(places: Places, kind: str, group: Sequence[int], nbytes: float) -> list[Phase]:
    ways = [ring(places, kind, [group], nbytes), tree(places, kind, group, nbytes)]
    return min(ways, key=lambda w: total_s(places, w))


def _across(
    places: Places, parts: list[list[int]], phases_of: Callable[[list[int]], list[Phase]]
) -> list[Phase]:
    """The same in all parts side by side; phase k of every part starts together."""
    each = [phases_of(p) for p in parts]
    found = []
    for k in range(max(map(len, each))):
        now = [phases[k] for phases in each if k < len(phases)]
        edges = tuple(e for phase in now for e in phase.edges)
        streams = all(phase.streams for phase in now)
        found.append(Phase(edges, max(phase.latency_s for phase in now), streams))
    return found


def exchange(
    places: Places,
    group: Sequence[int],
    matrix: Sequence[Sequence[float]],
    kind: str = "all_to_all",
) -> list[Phase]:
    """Direct exchange: every pair's bytes at once (all_to_all, even or not).

    The busiest link sets the time; one latency, that of the farthest pair.

    Args:
        places: of the machine. group: chips. matrix: [B] (sender, receiver); the diagonal stays.
        kind: of collective.
    """
    pairs = [
        (a, b, float(matrix[i][j]))
        for i, a in enumerate(group)
        for j, b in enumerate(group)
        if i != j and matrix[i][j] > 0
    ]
    if not pairs:
        return []
    latency = max(places.path(a, b, kind).latency for a, b, _ in pairs)
    return [Phase(tuple(Edge(a, b, size, size, kind) for a, b, size in pairs), latency)]


def total_s(places: Places, phases: Sequence[Phase], share: float = 1.0) -> float:
    """Time of all phases one after another [s]."""
    return sum(p.latency_s + places.stream_s(p, share) for p in phases)
