"""Price a collective: the cheapest legal way to run it on the machine at hand."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import msgspec

from sim.cost.ways import (
    Edge,
    Phase,
    Places,
    alone,
    exchange,
    hierarchical,
    ring,
    total_s,
    tree,
)
from sim.errors import InputError
from sim.hardware.machine import Machine

__all__ = [
    "KINDS",
    "CollectiveCost",
    "MeshCost",
    "collective_cost",
    "mesh_all_reduce",
    "places",
]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "p2p")
_MACHINES_KEPT = 16
_COSTS_KEPT = 4096
"""Most collectives of one machine that are remembered: equal layers ask for the same ones."""
MAX_FLOWS = 512
"""A collective with more flows between nodes than this (a wide all_to_all) is priced by formula."""


class CollectiveCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one collective of one group costs.

    Args:
        kind: of collective. algorithm: "ring", "tree", "hierarchical", "direct" or "none".
        seconds: [s] with ``share`` groups side by side and nothing else on the links.
        fixed_s: [s] what of it passes before (or around) the flows.
        flows: (source chip, destination chip, bytes [B]) that cross nodes and run at once after
            ``fixed_s``; () where the collective stays inside a node, moves single messages, or has
            more than ``MAX_FLOWS`` of them.
        flow_caps: [B/s] most that each flow gets, links apart.
        nbytes_per_chip: [B] most that one chip sends. reason: why this algorithm, in words.
    """

    kind: str
    algorithm: str
    seconds: float
    fixed_s: float
    flows: tuple[tuple[int, int, float], ...] = ()
    flow_caps: tuple[float, ...] = ()
    nbytes_per_chip: float = 0.0
    reason: str = ""


_PLACES: OrderedDict[int, Places] = OrderedDict()
"""By machine identity; each holds its machine, so an identity is never reused while here."""


_KEPT: WeakKeyDictionary[Places, dict[Hashable, CollectiveCost]] = WeakKeyDictionary()


def places(machine: Machine) -> Places:
    """Return where the machine's chips are, worked out once per machine."""
    found = _PLACES.get(id(machine))
    if found is None or found.machine is not machine:
        found = _PLACES[id(machine)] = Places(machine)
        while len(_PLACES) > _MACHINES_KEPT:
            _PLACES.popitem(last=False)
    return found


def collective_cost(
    machine: Machine,
    kind: str,
    chips: Sequence[int],
    nbytes: float,
    *,
    share: float = 1.0,
    matrix: Sequence[Sequence[float]] | None = None,
    algorithm: str = "",
) -> CollectiveCost:
    """Price one collective.

    Legal ways: on one site a ring, over nodes also hierarchical; over several sites hierarchical
    only, because a flat ring would wait for the long hop in every one of its steps; a tree for
    all_reduce and broadcast anywhere. The cheapest is taken; ties go to the first named.

    Args:
        machine: where. kind: one of ``KINDS``. chips: members, in rank order.
        nbytes: [B] of the whole tensor: the sum (all_reduce), the gathered result (all_gather), the
            input (reduce_scatter), what each member holds for all (all_to_all), the message (p2p).
        share: equal groups that run side by side over the same links between nodes.
        matrix: [B] (sender, receiver) of an uneven all_to_all, in place of ``nbytes``.
        algorithm: forces a way, for studies; "" picks.

    Raises:
        InputError: an unknown kind or way, or a way that the group does not admit.
    """
    if kind not in KINDS:
        raise InputError("unknown collective", key="kind", found=kind, expected=" ".join(KINDS))
    where = places(machine)
    known = _KEPT.setdefault(where, {})
    key = (kind, tuple(chips), nbytes, share, algorithm)
    if matrix is None and key in known:
        return known[key]
    found = _priced(where, kind, chips, nbytes, share, matrix, algorithm)
    if matrix is None:
        if len(known) >= _COSTS_KEPT:
            known.clear()
        known[key] = found
    return found


def _priced(
    where: Places,
    kind: str,
    chips: Sequence[int],
    nbytes: float,
    share: float,
    matrix: Sequence[Sequence[float]] | None,
    algorithm: str,
) -> CollectiveCost:
    group = list(chips) if kind in ("all_to_all", "p2p") else where.in_order(chips)
    if len(group) < 2 or (nbytes <= 0 and matrix is None):
        return CollectiveCost(kind=kind, algorithm="none", seconds=0.0, fixed_s=0.0)
    if kind in ("all_to_all", "p2p"):
        ways = {"direct": exchange(where, group, _matrix(kind, len(group), nbytes, matrix), kind)}
    else:
        ways = _ways(where, kind, group, nbytes)
    if algorithm:
        if not ways.get(algorithm):
            raise InputError(
                f"no such way to run {kind} on this group",
                key="algorithm",
                found=algorithm,
                expected=" ".join(n for n, w in ways.items() if w),
            )
        ways = {algorithm: ways[algorithm]}
    times = {n: total_s(where, w, share) for n, w in ways.items() if w or kind == "all_to_all"}
    best = min(times, key=lambda n: times[n])
    others = ", ".join(f"{n} {t:.3g} s" for n, t in times.items() if n != best)
    reason = f"{best} {times[best]:.3g} s" + (f" against {others}" if others else ", the only way")
    return _cost(where, kind, best, ways[best], share, reason)


def _ways(where: Places, kind: str, group: list[int], nbytes: float) -> dict[str, list[Phase]]:
    one_site = len({where.site[c] for c in group}) == 1
    ways = {
        "ring": ring(where, kind, [group], nbytes) if one_site else [],
        "hierarchical": hierarchical(where, kind, group, nbytes),
        "tree": tree(where, kind, group, nbytes),
    }
    if not any(ways.values()):
        ways["ring"] = ring(where, kind, [group], nbytes)
    return ways


def _matrix(
    kind: str, n: int, nbytes: float, matrix: Sequence[Sequence[float]] | None
) -> Sequence[Sequence[float]]:
    if matrix is not None:
        if len(matrix) != n or any(len(row) != n for row in matrix):
            raise InputError(
                "the matrix of an all_to_all does not fit its group",
                key="matrix",
                found=f"{len(matrix)} x {len(matrix[0]) if len(matrix) else 0}",
                expected=f"{n} x {n}",
            )
        return matrix
    if kind == "p2p":
        return [[nbytes if (i, j) == (0, 1) else 0.0 for j in range(n)] for i in range(n)]
    return [[nbytes / n] * n for _ in range(n)]


def _cost(
    where: Places,
    kind: str,
    name: str,
    phases: list[Phase],
    share: float,
    reason: str,
) -> CollectiveCost:
    """Split a way into the part that flows between nodes and the part that does not.

    The longest phase between nodes becomes flows; phases run one after another, so flows of two
    phases must not run at once.
    """
    times = [where.stream_s(p, share) for p in phases]
    between = [
        [e for e in p.edges if where.node[e.src] != where.node[e.dst]] if p.streams else []
        for p in phases
    ]
    crossing = [k for k, edges in enumerate(between) if edges]
    longest = max(crossing, key=lambda k: times[k]) if crossing else -1
    flows, caps = _flows(where, phases[longest], between[longest]) if crossing else ((), ())
    if len(flows) > MAX_FLOWS:
        flows, caps, longest = (), (), -1
        reason += f"; more than {MAX_FLOWS} flows, so a formula"
    sent: dict[int, float] = defaultdict(float)
    for phase in phases:
        for e in phase.edges:
            sent[e.src] += e.nbytes
    latency = sum(p.latency_s for p in phases)
    return CollectiveCost(
        kind=kind,
        algorithm=name,
        seconds=latency + sum(times),
        fixed_s=latency + sum(t for k, t in enumerate(times) if k != longest),
        flows=flows,
        flow_caps=caps,
        nbytes_per_chip=max(sent.values(), default=0.0),
        reason=reason,
    )


def _flows(
    where: Places, phase: Phase, between: list[Edge]
) -> tuple[tuple[tuple[int, int, float], ...], tuple[float, ...]]:
    """Flows of a phase, those over the same links joined, and a cap for each.

    All edges advance in step, so no flow ends before the slowest edge would alone, nor before what
    happens inside the nodes meanwhile; nor, where they carry unlike bytes, before the busiest link.
    """
    if len({e.nbytes for e in between}) > 1:
        floor = where.stream_s(phase)
    else:
        inside = tuple(e for e in phase.edges if where.node[e.src] == where.node[e.dst])
        alone_s = (e.nbytes / alone(where.path(e.src, e.dst, e.kind), e.chunk) for e in between)
        floor = max(where.stream_s(Phase(inside, 0.0)), *alone_s)
    joined: dict[tuple[int, ...], list[Edge]] = defaultdict(list)
    for e in between:
        joined[where.path(e.src, e.dst).links].append(e)
    flows = tuple((es[0].src, es[0].dst, sum(e.nbytes for e in es)) for es in joined.values())
    return flows, tuple(nbytes / floor for _, _, nbytes in flows)


class MeshCost(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce over a grid of chips with a ring per dimension.

    Args:
        seconds: [s]. mode: "one dimension after another" or "chunks in all dimensions at once".
        per_dimension: [s] that each dimension's links are busy.
    """

    seconds: float
    mode: str
    per_dimension: tuple[float, ...]


def mesh_all_reduce(
    shape: Sequence[int], nbytes: float, rate: float, chunked: bool, latency: float = 0.0
) -> MeshCost:
    """Price an all-reduce over a ring x ring (x ring ...) grid.

    Dimension i scatters and gathers what the dimensions before it left: nbytes / (d_0 ... d_(i-1)).
    Without chunks the dimensions take turns, and any order of the shape costs
    ``2 (1 - 1/n) nbytes / rate``; with many chunks the busiest dimension rules, and order matters.

    Args:
        shape: chips per dimension, the first scattered first. nbytes: [B] reduced.
        rate: [B/s] of each dimension's ring. chunked: perfect pipelining over the dimensions.
        latency: [s] per hop.

    Raises:
        InputError: a dimension without chips or a rate that is not positive.
    """
    if not shape or min(shape) < 1 or rate <= 0:
        raise InputError(
            "a mesh needs chips in every dimension and a rate",
            key="shape",
            found=f"{tuple(shape)} at {rate} B/s",
            expected="sizes >= 1 and a rate > 0",
        )
    left, busy, hops = nbytes, [], 0
    for size in shape:
        busy.append(2.0 * left * (size - 1) / size / rate)
        left /= size
        hops += 2 * (size - 1)
    mode = "chunks in all dimensions at once" if chunked else "one dimension after another"
    seconds = (max(busy) if chunked else sum(busy)) + hops * latency
    return MeshCost(seconds=seconds, mode=mode, per_dimension=tuple(busy))
