"""Prices that somebody states: seconds (or flows) by the text form of an op.

Measured models, miniature plans and tests use them instead of the machine's cost functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.cost.prices import FlowSpec, Prices
from sim.errors import InputError
from sim.plan.graph import OpGraph
from sim.plan.kinds import KINDS
from sim.plan.op import Op

__all__ = ["Late", "StatedFlow", "late_units", "stated_prices"]

Late = Callable[[int], ArrayLike | None]
"""node -> resolved late amount (scalar, vector over members, or matrix members x members), or None
for a node whose amounts are all known beforehand."""


class StatedFlow(msgspec.Struct, frozen=True, kw_only=True):
    """A stated flow: bytes that share named links with whatever else uses them.

    Args:
        links: names of the links crossed. nbytes: [B], or [B] per unit of a late amount.
        weight: member flows that cross each of the links, for a folded node.
        cap: [B/s] most one member gets. fixed_s: [s] before the bytes start to move.
    """

    links: tuple[str, ...]
    nbytes: float
    weight: int = 1
    cap: float = float("inf")
    fixed_s: float = 0.0


def stated_prices(
    graph: OpGraph,
    seconds: Mapping[str, float | StatedFlow],
    link_rates: Mapping[str, float] | None = None,
    late: Late | None = None,
    default: float | None = None,
) -> Prices:
    """Price every node of a graph by name.

    An op is looked up as, most specific first: its full text ``2F0.1[x]``; stage, kind and label
    ``2F[x]``; kind and label ``F[x]``; stage and kind ``2F``; kind ``F``. All of these with the
    rank in front (``rank 1 F``) come before those without. A transfer goes by its SEND. BARRIER
    and kinds that only bookkeep are free unless stated.

    Args:
        graph: the op graph.
        seconds: text -> [s], or a flow; per unit where the op has a late amount.
        link_rates: link name -> [B/s], in the order in which links are numbered.
        late: resolved late amounts, see ``Late``.
        default: [s] of ops that are not stated; None refuses them.

    Raises:
        InputError: an op is not stated, or a flow names an unknown link.
    """
    rates = dict(link_rates or {})
    number = {name: i for i, name in enumerate(rates)}
    n = graph.num_nodes
    fixed, nbytes = np.zeros(n), np.zeros(n)
    flows: dict[int, tuple[FlowSpec, ...]] = {}
    found: dict[tuple[int, Op], float | StatedFlow] = {}
    for node, op in enumerate(graph.ops):
        rank = graph.actors[graph.actor[node]].rank
        value = found.get((rank, op))
        if value is None:
            value = found[rank, op] = _look_up(op, rank, seconds, default)
        amount = late(node) if late is not None else None
        units = 1.0 if amount is None else late_units(graph, node, amount)
        if not isinstance(value, StatedFlow):
            fixed[node] = value * units
            continue
        unknown = [x for x in value.links if x not in number]
        if unknown:
            raise InputError(
                f"the flow of {op.name} crosses an unknown link",
                found=unknown[0],
                expected=", ".join(number) or "link_rates",
            )
        fixed[node], nbytes[node] = value.fixed_s, value.nbytes * units
        if nbytes[node] > 0:
            links = tuple((number[x], value.weight) for x in value.links)
            flows[node] = (FlowSpec(links, float(nbytes[node]), value.cap),)
    return Prices(
        seconds=fixed,
        flows=flows,
        link_rates=tuple(rates.values()),
        link_names=tuple(rates),
        nbytes=nbytes,
    )


def late_units(graph: OpGraph, node: int, amount: ArrayLike) -> float:
    """Reduce a late amount to the units that set a node's time.

    A scalar is itself. Of a vector over members, compute takes its own rank's entry, a collective
    the largest. Of a matrix (sender, receiver), a collective takes what the busiest member
    receives from others, compute what its own rank receives from all. Members are those of the
    group that the op names, or else of the first of the rank's groups that has as many.

    Raises:
        InputError: the amount's shape fits no group of the node's rank.
    """
    values = np.asarray(amount, dtype=np.float64)
    if values.ndim == 0:
        return float(values)
    local = graph.wire[node] < 0
    if values.ndim == 2:
        if values.shape[0] != values.shape[1]:
            raise InputError(
                f"late amount of {graph.label(node)} is a matrix of members x members",
                found=" x ".join(map(str, values.shape)),
                expected="as many rows as columns",
            )
        if not local:
            return float((values.sum(0) - np.diagonal(values)).max())
        values = values.sum(0)
    if not local:
        return float(values.max())
    return float(values[_position(graph, node, values)])


def _position(graph: OpGraph, node: int, values: NDArray[np.float64]) -> int:
    """Index of the node's rank in the group that the vector is over."""
    actor, role = graph.actors[graph.actor[node]], graph.ops[node].group
    groups: list[tuple[int, ...]] = [
        w.group
        for w in graph.wires
        if len(w.group) == len(values) and (not role or role in w.roles)
    ]
    for group in groups:
        for rank in actor.ranks:
            if rank in group:
                return group.index(rank)
    if len(values) == len(graph.classes):
        return int(actor.rank)
    raise InputError(
        f"late amount of {graph.label(node)} fits none of its rank's groups",
        found=f"{len(values)} entries",
        expected="one per member of a group, or one per rank",
    )


def _look_up(
    op: Op, rank: int, seconds: Mapping[str, float | StatedFlow], default: float | None
) -> float | StatedFlow:
    for key in _keys(op, rank):
        if key in seconds:
            return seconds[key]
    if default is not None:
        return default
    if KINDS[op.kind].passive or op.kind == "BARRIER":
        return 0.0
    raise InputError(
        f"no time is stated for {op.name} of rank {rank}",
        found=", ".join(sorted(seconds)[:8]),
        expected=" or ".join(dict.fromkeys(_names(op))),
    )


def _names(op: Op) -> Iterator[str]:
    stage = str(op.stage) if op.stage >= 0 else ""
    yield op.name
    if op.label:
        yield f"{stage}{op.kind}[{op.label}]"
        yield f"{op.kind}[{op.label}]"
    yield f"{stage}{op.kind}"
    yield op.kind


def _keys(op: Op, rank: int) -> Iterator[str]:
    for name in _names(op):
        yield f"rank {rank} {name}"
    yield from _names(op)
