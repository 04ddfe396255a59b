"""What every node of an op graph costs: seconds, or flows on shared links."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.plan.op import Op

__all__ = ["FlowSpec", "Prices"]


class FlowSpec(msgspec.Struct, frozen=True, gc=False):
    """One fluid flow of a node (a folded node's flow stands for several equal ones).

    Args:
        links: (link index, number of member flows that cross it). nbytes: [B] of one member flow.
        cap: [B/s] most one member flow gets.
    """

    links: tuple[tuple[int, int], ...]
    nbytes: float
    cap: float = float("inf")


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of a graph's nodes.

    Args:
        seconds: [s] per node; for a node with flows, the fixed part before they start.
        flows: node -> flows that run at once; the node ends when all have.
        link_rates: [B/s] per link index. link_names: per link index.
        nbytes: [B] per node, for reports. flops: [FLOP] per node.
        wires: node -> link indices its formula-priced bytes cross, for the link report.
        alone: node -> (fixed part [s], what the bytes then take when no other stream is on their
            links [s]), where that is less than ``seconds`` or more than the flows' caps say.
        carried: node -> (link index, bytes [B]) that all members of the node put on links apart
            from what its flows put there: with ``link_bytes`` of the network it adds up to every
            byte. A folded node's members use links that its representative does not.
        inner_comm_s: role of a group -> [s] per node, that a compute op spends in collectives of
            such groups inside it.
        rank_keys: per rank, what its flows look like, when some class of the graph holds ranks that
            differ in it: the graph must then be laid out again with these keys apart. () when not.
        slows: node -> (link index, share of the link's rate that is left while the node runs).
        answers: (op of an ``on`` block, rank that runs it, sender of the message) -> fixed seconds
            and the flows after them.
        assumptions: what the prices rest on, in words.
    """

    seconds: NDArray[np.float64]
    flows: dict[int, tuple[FlowSpec, ...]] = {}
    link_rates: tuple[float, ...] = ()
    link_names: tuple[str, ...] = ()
    nbytes: NDArray[np.float64] | None = None
    flops: NDArray[np.float64] | None = None
    wires: dict[int, tuple[int, ...]] = {}
    alone: dict[int, tuple[float, float]] = {}
    carried: dict[int, tuple[tuple[int, float], ...]] = {}
    inner_comm_s: dict[str, NDArray[np.float64]] = {}
    rank_keys: tuple[int, ...] = ()
    slows: dict[int, tuple[int, float]] = {}
    answers: Mapping[tuple[Op, int, int], tuple[float, tuple[FlowSpec, ...]]] = {}
    assumptions: tuple[str, ...] = ()
