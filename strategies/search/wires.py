"""What communication costs between the cells of a candidate: transfers, gathers, gradient sums.

Everything is priced by sim.cost on the chips the cells would get, once per pattern of chips in
nodes. Two answers each: alone on the links, as the engine prices without contention; and in step,
where the equal messages of all pieces and replicas of one boundary (or of the groups side by side)
share the links they cross, which is what lock-step replicas do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from sim.cost.cell import side_by_side
from sim.cost.collective import collective_cost, places
from sim.hardware.machine import Machine
from sim.hardware.route import path, transfer_time
from strategies.search.pools import Pool, slots

__all__ = ["Cells", "Wires", "hold_up", "stage_cells"]

Chips = tuple[int, ...]
Both = tuple[float, float]
"""(alone, in step) [s]."""


class Cells(NamedTuple):
    """The cells of one stage, one per replica.

    Args:
        chips: of each cell. pattern: what makes the cells of two stages alike.
        node: of the first cell, counted inside the pool.
    """

    chips: tuple[Chips, ...]
    pattern: tuple[object, ...]
    node: int


def stage_cells(pool: Pool, tp: int, pp: int, dp: int, index: int, scatter: bool) -> Cells:
    """Return the chips of stage ``index`` of a group of ``pp`` stages on a pool.

    Args:
        pool: where. tp: chips per cell. pp: stages of the group. dp: replicas.
        index: stage inside the group. scatter: see ``Knobs``.
    """
    places = slots(pool, tp)
    per_node = max(1, (pool.nodes[0][1] - pool.nodes[0][0]) // tp)
    if scatter:
        chosen = tuple(places[r * pp + index] for r in range(dp))
        return Cells(chosen, (pool.name, tp, dp, pp, index), index // per_node)
    first = index * dp
    pattern = (pool.name, tp, dp, first % per_node)
    return Cells(places[first : first + dp], pattern, first // per_node)


class Wires:
    """Prices of communication on one machine, each pattern worked out once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._pairs: dict[tuple[object, ...], Both] = {}
        self._gathers: dict[tuple[object, ...], float] = {}
        self._sums: dict[tuple[object, ...], Both] = {}

    def transfer(self, src: Cells, dst: Cells, nbytes: float) -> Both:
        """Time of one microbatch's transfer from a stage to the next, the slowest replica's [s].

        Args:
            src, dst: cells of both stages. nbytes: [B] of the whole tensor of one replica.
        """
        key = (src.pattern, dst.pattern, _apart(src, dst), nbytes)
        found = self._pairs.get(key)
        if found is None:
            found = self._pairs[key] = self._transfer(src.chips, dst.chips, nbytes)
        return found

    def _transfer(self, src: Sequence[Chips], dst: Sequence[Chips], nbytes: float) -> Both:
        slowest, latency, most = 0.0, 0.0, 0.0
        load: dict[int, float] = defaultdict(float)
        for a, b in zip(src, dst, strict=True):
            n = max(len(a), len(b))
            for p in range(n):
                route = path(self.machine, a[p * len(a) // n], b[p * len(b) // n])
                slowest = max(slowest, transfer_time(route, nbytes / n))
                latency = max(latency, route.latency)
                for x in route.links:
                    load[x] += nbytes / n
        for x, held in load.items():
            most = max(most, held / self.machine.links[x].rate)
        return slowest, max(slowest, latency + most)

    def gather(self, cells: Cells, nbytes: float) -> float:
        """Time to re-assemble a received tensor inside a cell [s]."""
        cell = cells.chips[0]
        key = (cells.pattern[0], len(cell), nbytes)
        found = self._gathers.get(key)
        if found is None:
            cost = collective_cost(self.machine, "all_gather", cell, nbytes)
            found = self._gathers[key] = cost.seconds
        return found

    def between(self, kind: str, cells: Cells, every: int, nbytes: float) -> Both:
        """Time of a collective over the replicas of a stage [s].

        Args:
            kind: of collective. cells: of the stage.
            every: a group takes every n-th replica (expert gradients), 1 for all.
            nbytes: [B] of the tensor.
        """
        key = (kind, cells.pattern, nbytes, every)
        found = self._sums.get(key)
        if found is None:
            groups = [
                tuple(cell[t] for cell in cells.chips[first::every])
                for first in range(every)
                for t in range(len(cells.chips[0]))
            ]
            share = side_by_side(self.machine, groups[0], groups)
            both = [
                collective_cost(self.machine, kind, groups[0], nbytes, share=x).seconds
                for x in (1.0, share)
            ]
            found = self._sums[key] = (both[0], both[1])
        return found

    def same_nic(self, here: Cells, after: Cells, nbytes: float = 0.0) -> Both:
        """Whether the sums of two stages hold one another up in a NIC: (0, 1) or (0, 0)."""
        key = ("nic", here.pattern, after.pattern, _apart(here, after))
        found = self._sums.get(key)
        if found is None:
            shared = hold_up(self.nics(here.chips), self.nics(after.chips))
            found = self._sums[key] = (0.0, float(shared))
        return found

    def nics(self, cells: Sequence[Chips]) -> dict[tuple[int, int], float]:
        """(node, NIC) -> rate [B/s] where a sum over these cells leaves a node; none inside one."""
        where = places(self.machine)
        if len({where.node[c] for cell in cells for c in cell}) < 2:
            return {}
        at = ((self.machine.nodes[where.node[c]], c) for cell in cells for c in cell)
        return {(n.index, n.nic_of(c)): n.nic_rate for n, c in at}

    def tied(self, first: Cells, last: Cells, nbytes: float) -> Both:
        """Time to add up a gradient that the first and the last stage share [s].

        Every owner of a slice does so with its counterpart in the same replica.

        Args:
            first, last: cells of both stages. nbytes: [B] of the whole parameter's gradient.
        """
        key = ("tied", first.pattern, last.pattern, _apart(first, last), nbytes)
        found = self._sums.get(key)
        if found is None:
            groups = []
            for a, b in zip(first.chips, last.chips, strict=True):
                n = max(len(a), len(b))
                groups += [(a[i * len(a) // n], b[i * len(b) // n]) for i in range(n)]
            size = nbytes / max(len(first.chips[0]), len(last.chips[0]))
            share = side_by_side(self.machine, groups[0], groups)
            both = [
                collective_cost(self.machine, "all_reduce", groups[0], size, share=x).seconds
                for x in (1.0, share)
            ]
            found = self._sums[key] = (both[0], both[1])
        return found


def _apart(src: Cells, dst: Cells) -> int:
    """Nodes between two stages, as far as that can matter: -2 to 2, 3 between pools."""
    if src.pattern[0] != dst.pattern[0]:
        return 3
    return max(-2, min(2, dst.node - src.node))


def hold_up(one: dict[tuple[int, int], float], other: dict[tuple[int, int], float]) -> bool:
    """Whether two sums share a NIC that cannot carry both at the pace of their slowest NIC.

    Args:
        one, other: NIC -> rate [B/s] of each sum.
    """
    pace = min([*one.values(), *other.values()], default=0.0)
    return any(one[x] < 2 * pace for x in one.keys() & other.keys())
