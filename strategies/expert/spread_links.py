"""Links as a search sees them: many exchanges and sets of copies priced at once."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.hardware.route import curve_factor
from strategies.expert.layer_cost import LayerCosts
from strategies.expert.link_cost import MeanBandwidth, Topology, crossing, exchange_s, link_loads

__all__ = ["MachineWires", "MeanWires", "Wires", "soft_max", "wires_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Wires(Protocol):
    """Prices of exchanges and copies."""

    def exchanged(self, nbytes: Floats) -> tuple[Floats, Floats]:
        """Return the time and the soft maximum of exchanges (K, D, D) [s], shapes (K,)."""

    def carried(self, home: int, rows: Bools) -> Floats:
        """Return what copies of an expert at ``home`` to hosts (K, D) use, shape (K, X)."""

    def copied(self, carried: Floats) -> tuple[Floats, Floats]:
        """Return the times of sending copies and of summing their gradients [s], shapes (K,)."""


def wires_of(costs: LayerCosts) -> Wires:
    """Return the links of a layer."""
    links = costs.links
    if isinstance(links, MeanBandwidth):
        return MeanWires(costs, links)
    return MachineWires(costs, links)


def soft_max(values: Floats) -> Floats:
    """Return the norm of order 8 over the last axis."""
    squared = values * values
    fourth = squared * squared
    return np.asarray((fourth * fourth).sum(axis=-1) ** 0.125, np.float64)


class MeanWires:
    """Mean bandwidths: the fullest receiver, and copies by their number (eq. 1, 4 and 5)."""

    def __init__(self, costs: LayerCosts, links: MeanBandwidth) -> None:
        self.links = links
        self.per_copy = costs.param_bytes / links.trans, costs.gradient_bytes / links.agg

    def exchanged(self, nbytes: Floats) -> tuple[Floats, Floats]:
        """See ``Wires``."""
        seconds = exchange_s(self.links, nbytes)
        received = nbytes.sum(axis=1) - np.diagonal(nbytes, axis1=1, axis2=2)
        most = np.maximum(received.max(axis=1), 1.0)
        return seconds, soft_max(received / most[:, None]) * seconds

    def carried(self, home: int, rows: Bools) -> Floats:
        """See ``Wires``: the share of devices that hold a lent expert."""
        number = rows.sum(axis=1, keepdims=True)
        return np.where(number > 1, number / rows.shape[1], 0.0)

    def copied(self, carried: Floats) -> tuple[Floats, Floats]:
        """See ``Wires``."""
        held = carried.sum(axis=1)
        return held * self.per_copy[0], held * self.per_copy[1]


class MachineWires:
    """Links of a machine. Copies go in a chain, or directly where that is no way; sums as they."""

    def __init__(self, costs: LayerCosts, links: Topology) -> None:
        self.links, self.param_bytes = links, costs.param_bytes
        self.gradients = costs.gradient_bytes / costs.param_bytes
        self.alone = _alone(links, costs.param_bytes)
        self.by_rail = []
        if links.rail.size:
            _, node = np.unique(links.nodes, return_inverse=True)
            device = np.arange(node.size)
            via = np.where(node[:, None] == node, device, links.rail[:, node])
            self.by_rail = [
                crossing(links.links[device[:, None], via]),
                crossing(links.links[via, device]),
            ]

    def exchanged(self, nbytes: Floats) -> tuple[Floats, Floats]:
        """See ``Wires``; tokens go by rail where that is quicker."""
        links, flat = self.links, nbytes.reshape(len(nbytes), -1)
        seconds = exchange_s(links, nbytes)
        soft = soft_max(link_loads(links, flat) / links.rates)
        if self.by_rail:
            parts = [
                np.add.reduceat(flat[:, c.pairs], c.starts, axis=1) / links.rates[c.links]
                for c in self.by_rail
                if c.links.size
            ]
            latency = len(parts) * max(c.latency for c in links.classes)
            rail = latency + np.sum([part.max(axis=1) for part in parts], axis=0)
            better = rail < seconds
            seconds = np.where(better, rail, seconds)
            soft = np.where(better, np.sum([soft_max(part) for part in parts], axis=0), soft)
        return seconds, soft

    def carried(self, home: int, rows: Bools) -> Floats:
        """See ``Wires``: copies over each link."""
        links, size = self.links, rows.shape[1]
        device = np.arange(size)
        far = links.nodes != links.nodes[home]
        order = np.lexsort((device, links.nodes, far, device != home))
        member = rows[:, order]
        k, i = np.nonzero(member[:, 1:])
        before = np.zeros_like(i)
        if "chain" in links.ways:
            before = np.maximum.accumulate(np.where(member, device, 0), axis=1)[k, i]
        over = links.links[order[before], order[i + 1]] + 1
        slots = over + (links.rates.size + 1) * k[:, None]
        loads = np.bincount(slots.ravel(), minlength=len(rows) * (links.rates.size + 1))
        return np.asarray(loads.reshape(len(rows), -1)[:, 1:], np.float64)

    def copied(self, carried: Floats) -> tuple[Floats, Floats]:
        """See ``Wires``."""
        each = np.maximum(carried / self.links.rates, np.where(carried > 0, self.alone, 0.0))
        trans = each.max(axis=1, initial=0.0) * self.param_bytes
        return trans, trans * self.gradients


def _alone(links: Topology, nbytes: float) -> Floats:
    """Time per byte of one message alone over each link [s/B], the quickest of its paths, (X,)."""
    rates = [c.rate * float(curve_factor(c.curve, nbytes)) for c in links.classes]
    best = np.zeros(links.rates.size + 1)
    paths = np.array([*rates, 0.0])[links.pair]
    np.maximum.at(best, links.links + 1, np.broadcast_to(paths[..., None], links.links.shape))
    return np.asarray(1.0 / best[1:], np.float64)
