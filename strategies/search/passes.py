"""Pass times and memory of runs of layers, per way to run them, as tables over layers.

A way is (pool, tp, recomputation) under a microbatch size, sequence parallelism, and expert
parallelism over dp replicas. A unit is a layer with what surrounds it: the first brings the blocks
before it along, the last those after it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.cost.cell import BlockClasses, CellSpec, cell_times, side_by_side
from sim.cost.compute import Shape, optimizer_time
from sim.cost.ledger import memory_limit
from sim.cost.memory import MemoryKnobs, stage_memory_terms
from sim.model.amounts import block_table
from sim.problem import Problem
from strategies.pipeline.partition import unit_starts
from strategies.search.pools import Pool
from strategies.search.slab import RECOMPUTE, Slab
from strategies.search.wires import stage_cells

__all__ = ["Passes", "Roles", "Way"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Roles = ("middle", "first", "last", "only")
"""What a stage has besides layers: nothing, the embedding, the head, both."""


class Way(NamedTuple):
    """How a group of stages is run."""

    pool: Pool
    tp: int
    recompute: int
    microbatch: int
    sequence_parallel: bool
    ep: int
    dp: int
    scatter: bool

    @classmethod
    def of(cls, pool: Pool, tp: int, recompute: int, slab: Slab) -> Way:
        """Return the way of a group of a slab; what makes no difference is left out."""
        k, spread = slab.knobs, slab.ep > 1
        return cls(
            pool,
            tp,
            recompute,
            slab.microbatch,
            k.sequence_parallel and tp > 1,
            slab.ep,
            slab.dp if spread else 0,
            k.scatter and spread,
        )


class Passes:
    """Tables of one problem.

    Attributes:
        starts: block index where each unit starts, and the number of blocks; length L + 1.
        num_layers: units L. equal: True when all units but the first and last are alike.
        elements: per token, what crosses a cut before unit i, shape (L + 1,); 0 at the ends.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        model, job = problem.model, problem.job
        self.starts = np.array(unit_starts(model), np.int64)
        self.num_layers = len(self.starts) - 1
        self.classes = BlockClasses(model)
        self.table = block_table(model, job.sequence_length, job.activation_bytes)
        units = [
            tuple(self.classes.member[a:b])
            for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)
        ]
        self.equal = len({len(u) and u for u in units[1:-1]}) <= 1
        self.elements = _crossing(problem, self.starts)
        self._seconds: dict[Way, Floats] = {}
        self._least: dict[Way, float] = {}
        self._memory: dict[tuple[object, ...], tuple[Floats, Floats]] = {}

    def seconds(self, way: Way) -> Floats:
        """Running sums over units of (F, I with recomputation, W, optimizer) [s], (4, L + 1)."""
        found = self._seconds.get(way)
        if found is None:
            found = self._seconds[way] = self._price(way)
        return found

    def least_layer(self, way: Way) -> float:
        """Passes of the fastest unit [s], never zero."""
        found = self._least.get(way)
        if found is None:
            steps = np.diff(self.seconds(way)[:3].sum(axis=0))
            found = self._least[way] = max(float(steps.min()), 1e-15)
        return found

    def forward_share(self) -> float:
        """Least share of F in all passes of a unit, over all ways priced so far."""
        found = 1.0
        for sums in self._seconds.values():
            steps = np.diff(sums[:3], axis=1)
            found = min(found, float((steps[0] / np.maximum(steps.sum(axis=0), 1e-30)).min()))
        return found

    def _price(self, way: Way) -> Floats:
        problem, machine = self.problem, self.problem.machine
        tp_chips: tuple[int, ...] = ()
        ep_chips: tuple[int, ...] = ()
        share = 1.0
        cells = stage_cells(way.pool, way.tp, 1, max(way.ep, 1), 0, way.scatter)
        if way.tp > 1:
            tp_chips = cells.chips[0]
        if way.ep > 1:
            all_cells = stage_cells(way.pool, way.tp, 1, way.dp, 0, False).chips
            groups = [
                tuple(c[t] for c in all_cells[first : first + way.ep])
                for first in range(0, way.dp, way.ep)
                for t in range(way.tp)
            ]
            ep_chips, share = groups[0], side_by_side(machine, groups[0], groups)
        spec = CellSpec(
            accelerator=way.pool.accelerator,
            shape=Shape(
                microbatch=way.microbatch,
                sequence_length=problem.job.sequence_length,
                tp=way.tp,
                ep=way.ep,
                sequence_parallel=way.sequence_parallel,
                recompute=RECOMPUTE[way.recompute],
            ),
            tp_chips=tp_chips,
            ep_chips=ep_chips,
            ep_share=share,
        )
        times = cell_times(problem, self.classes, spec)
        rows = np.stack(
            [
                times.forward,
                times.input_grad + times.recompute,
                times.weight_grad,
                self._updates(way),
            ]
        )
        sums = np.concatenate([np.zeros((4, 1)), np.cumsum(rows, axis=1)], axis=1)
        return np.asarray(sums[:, self.starts])

    def _updates(self, way: Way) -> Floats:
        """Measured optimizer time per block [s], 0 where none was measured."""
        found = np.zeros(len(self.problem.model.blocks))
        measured = self.classes.measured
        if measured is not None:
            for i, block in enumerate(self.problem.model.blocks):
                entry = measured.find(block, way.pool.accelerator, way.tp, way.microbatch)
                found[i] = entry.update if entry is not None else 0.0
        return found

    def update(self, way: Way, params: Floats, measured: Floats) -> Floats:
        """Optimizer time of stages [s]; measured where there is a measurement.

        Args:
            way: how. params: parameters a rank updates. measured: [s] sum of measured updates.
        """
        accelerator = self.problem.machine.accelerators[way.pool.accelerator]
        base = optimizer_time(accelerator, self.problem.job, 0.0)
        slope = (optimizer_time(accelerator, self.problem.job, 1e9) - base) / 1e9
        return np.where(measured > 0, measured, base + slope * params)

    def memory(self, way: Way, shards: int, first: Ints, last: Ints, live: Ints) -> Floats:
        """Peak memory of cells [B].

        Args:
            way: how. shards: of the optimizer states.
            first, last: units of each virtual stage, shape (..., V). live: microbatches in flight.
        """
        accelerator = self.problem.machine.accelerators[way.pool.accelerator]
        terms = stage_memory_terms(
            self.table,
            self.problem.job,
            accelerator,
            self.starts[first],
            self.starts[last],
            live,
            self._knobs(way, shards),
        )
        return np.asarray(sum(terms.values()))

    def _knobs(self, way: Way, shards: int) -> MemoryKnobs:
        return MemoryKnobs(
            microbatch=way.microbatch,
            tp=way.tp,
            ep=way.ep,
            recompute=RECOMPUTE[way.recompute],
            sequence_parallel=way.sequence_parallel,
            shards=shards,
        )

    def limit(self, pool: Pool) -> float:
        """Predicted peak up to which a cell fits [B]."""
        return memory_limit(self.problem.machine.accelerators[pool.accelerator], self.problem.job)

    def growth(self, way: Way, shards: int) -> tuple[Floats, Floats]:
        """Memory by number of layers: without activations, and per microbatch in flight [B].

        Returns:
            Two arrays, shape (4, L): by role of the stage (see ``Roles``) and layers 1 to L. Exact
            for one virtual stage per position and equal layers.
        """
        free = way._replace(dp=0, scatter=False)
        key = (free, shards)
        found = self._memory.get(key)
        if found is None:
            size = np.arange(1, self.num_layers + 1)
            total = self.num_layers
            # A middle stage is measured where it touches neither end as long as it can.
            low = np.minimum(np.maximum(total - 1 - size, 0), 1)
            first = np.stack([low, 0 * size, total - size, 0 * size])
            end = np.full_like(size, total)
            last = np.stack([np.minimum(low + size, total), size, end, end])
            zero = np.zeros((*first.shape, 1), np.int64)
            idle = self.memory(way, shards, first[..., None], last[..., None], zero)
            busy = self.memory(way, shards, first[..., None], last[..., None], zero + 1)
            found = self._memory[key] = (idle, busy - idle)
        return found


def _crossing(problem: Problem, starts: Ints) -> Ints:
    """Elements per token of the edges that cross each cut, shape (L + 1,)."""
    at = {b.name: i for i, b in enumerate(problem.model.blocks)}
    crossing = np.zeros(len(starts), np.int64)
    for edge in problem.model.edges:
        low, high = at[edge.src], at[edge.dst]
        crossing[(starts > low) & (starts <= high)] += edge.elements
    return crossing
