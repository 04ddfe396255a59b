"""Times and memory of all candidates of a slab at once."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.ledger import live_microbatches
from sim.model.amounts import dtype_bytes
from sim.problem import Problem
from strategies.search.grid import Collectives, Grid
from strategies.search.passes import Passes, Way
from strategies.search.recurrence import StageTimes, Sync
from strategies.search.slab import Slab
from strategies.search.wires import Wires

__all__ = ["Costs"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Costs:
    """Prices candidates of one problem; everything worked out is kept.

    Attributes:
        passes: per way to run layers. wires: communication.
        in_step: equal messages share the links they cross, unless a call says otherwise.
        even: layers are shared out by number, not by time.
    """

    def __init__(self, problem: Problem, in_step: bool = True, even: bool = False) -> None:
        self.problem = problem
        self.in_step = in_step
        self.even = even
        self.passes = Passes(problem)
        self.wires = Wires(problem.machine)
        self._last: tuple[object, Grid] | None = None

    # -- per way --------------------------------------------------------------------------------

    def _ways(self, slab: Slab) -> tuple[list[Way], Ints]:
        """Distinct ways of a slab, and the number of each group's, shape (n, G)."""
        ways: list[Way] = []
        number = np.zeros(slab.tp.shape, np.int64)
        for g, pool in enumerate(slab.pools):
            code = slab.tp[:, g] * 4 + slab.recompute[:, g]
            known, inverse = np.unique(code, return_inverse=True)
            number[:, g] = inverse.reshape(-1) + len(ways)
            ways += [Way.of(pool, int(c) // 4, int(c) % 4, slab) for c in known]
        return ways, number

    def ways_of_stages(self, slab: Slab) -> tuple[list[Way], Ints]:
        """Ways, and the way of each virtual stage, shape (n, V)."""
        ways, number = self._ways(slab)
        group, _ = slab.groups()
        chosen = np.take_along_axis(number, group, axis=1)
        return ways, np.tile(chosen, (1, slab.knobs.chunks))

    def shards(self, slab: Slab, replicas: int | None = None) -> int:
        """Ranks among which optimizer states are divided; of more replicas than the slab's own."""
        return (replicas or slab.dp) if slab.knobs.zero else 1

    # -- splitting layers -----------------------------------------------------------------------

    def layer_times(self, slab: Slab) -> tuple[Floats, Floats]:
        """Time of an inner layer on each virtual stage, and what first and last have besides [s].

        Returns:
            Two arrays, shape (n, V): forward, backward and recomputation together.
        """
        ways, stage = self.ways_of_stages(slab)
        if self.even:
            return np.ones(stage.shape), np.zeros(stage.shape)
        passes = self.passes
        total = passes.num_layers
        layer, head, tail = (np.zeros(len(ways)) for _ in range(3))
        for i, way in enumerate(ways):
            sums = passes.seconds(way)[:3].sum(axis=0)
            steps = np.diff(sums)
            inner = steps[1:-1] if total > 2 else steps
            layer[i] = max(float(inner.mean()), 1e-15)
            head[i], tail[i] = float(steps[0]) - layer[i], float(steps[-1]) - layer[i]
        extra = np.zeros(stage.shape)
        extra[:, 0] += head[stage[:, 0]]
        extra[:, -1] += tail[stage[:, -1]]
        return layer[stage], np.maximum(extra, 0.0)

    def most_layers(self, slab: Slab, shards: int | None = None) -> Ints:
        """Layers that each stage has memory for, shape (n, V); 0 where not even one fits.

        With several chunks per position memory is shared between them, so nothing is known before
        they are split: the answer is L.

        Args:
            slab: structures. shards: replicas that share optimizer states, when they are more than
                the slab's.
        """
        ways, stage = self.ways_of_stages(slab)
        total = self.passes.num_layers
        if slab.knobs.chunks > 1:
            return np.full(stage.shape, total, np.int64)
        live = self._live(slab)
        stages = slab.num_stages
        most = np.zeros(stage.shape, np.int64)
        growth = [self.passes.growth(w, self.shards(slab, shards)) for w in ways]
        limits = np.array([self.passes.limit(w.pool) for w in ways])
        for p in range(stages):
            role = 3 if stages == 1 else 1 if p == 0 else 2 if p == stages - 1 else 0
            idle = np.stack([g[0][role] for g in growth])
            busy = np.stack([g[1][role] for g in growth])
            fits = idle + busy * live[p][0][0] <= limits[:, None]
            count = np.where(fits.all(axis=1), total, np.argmin(fits, axis=1))
            most[:, p] = count[stage[:, p]]
        return most

    def _live(self, slab: Slab) -> tuple[tuple[tuple[int, ...], ...], ...]:
        k, p, m = slab.knobs, slab.num_stages, slab.num_microbatches
        if k.schedule == "1f1b":
            return tuple(((min(m, p - s),),) for s in range(p))
        return live_microbatches(k.schedule, slab.num_stages, slab.num_microbatches, k.chunks)

    # -- memory ---------------------------------------------------------------------------------

    def memory(self, slab: Slab, shards: int | None = None) -> tuple[Floats, Floats]:
        """Predicted peak of each position, and its limit [B], shape (n, P) each.

        Args:
            slab: candidates with layers. shards: as for ``most_layers``.
        """
        ways, number = self._ways(slab)
        group, _ = slab.groups()
        low, high = slab.ranges()
        live = self._live(slab)
        stages, chunks = slab.num_stages, slab.knobs.chunks
        peak, limit = np.zeros(group.shape), np.zeros(group.shape)
        where = np.take_along_axis(number, group, axis=1)
        hosted = np.arange(chunks) * stages + np.arange(stages)[:, None]
        for i, way in enumerate(ways):
            rows, place = np.nonzero(where == i)
            limit[rows, place] = self.passes.limit(way.pool)
            first = low[rows[:, None], hosted[place]]
            last = high[rows[:, None], hosted[place]]
            for turn in range(max(map(len, live))):
                # A position with fewer maximal vectors repeats its last one.
                held = np.array([x[min(turn, len(x) - 1)] for x in live])[place]
                nbytes = self.passes.memory(way, self.shards(slab, shards), first, last, held)
                peak[rows, place] = np.maximum(peak[rows, place], nbytes)
        return peak, limit

    # -- times ----------------------------------------------------------------------------------

    def compute_only(self, slab: Slab) -> StageTimes:
        """Passes without transfers: what no network makes shorter."""
        ways, stage = self.ways_of_stages(slab)
        low, high = slab.ranges()
        tables = np.stack([self.passes.seconds(w)[:3] for w in ways])
        took = [tables[stage, k, high] - tables[stage, k, low] for k in range(3)]
        none = np.zeros(stage.shape)
        tp = np.array([w.tp for w in ways])[stage]
        return StageTimes(
            forward=took[0],
            backward=took[1] if slab.shape.splits else took[1] + took[2],
            weight=took[2],
            send_f=none,
            send_b=none,
            gather_f=none,
            gather_b=none,
            gathers=(tp > 1) & (not slab.knobs.sequence_parallel),
        )

    def times(self, slab: Slab, in_step: bool | None = None) -> StageTimes:
        """Passes and transfers.

        Args:
            slab: candidates with layers. in_step: None for ``self.in_step``.
        """
        in_step = self.in_step if in_step is None else in_step
        send_f, send_b, gather_f, gather_b = self._boundaries(slab, in_step)
        return msgspec.structs.replace(
            self.compute_only(slab),
            send_f=send_f,
            send_b=send_b,
            gather_f=gather_f,
            gather_b=gather_b,
        )

    def _boundaries(self, slab: Slab, in_step: bool) -> tuple[Floats, Floats, Floats, Floats]:
        passes, job = self.passes, self.problem.job
        _, high = slab.ranges()
        sent_f, sent_b, got_f, got_b = (np.zeros(high.shape) for _ in range(4))
        if high.shape[1] == 1:
            return sent_f, sent_b, got_f, got_b
        per_token = slab.microbatch * job.sequence_length * job.activation_bytes
        grid, chunks = self._grid(slab), slab.knobs.chunks
        gathers = not slab.knobs.sequence_parallel
        crossing = passes.elements[high]
        for elements in np.unique(passes.elements[1:-1]):
            nbytes = float(per_token * elements)
            down, up = (
                np.tile(grid.pairs(self.wires.transfer, nbytes, in_step, shift), (1, chunks))
                for shift in (1, -1)
            )
            own = np.array([self.wires.gather(c, nbytes) if gathers else 0.0 for c in grid.cells])
            gathered = np.tile(own[grid.of], (1, chunks))
            mine = crossing[:, :-1] == elements
            sent_f[:, :-1][mine], got_f[:, 1:][mine] = down[:, :-1][mine], gathered[:, 1:][mine]
            sent_b[:, 1:][mine], got_b[:, :-1][mine] = up[:, 1:][mine], gathered[:, :-1][mine]
        return sent_f, sent_b, got_f, got_b

    def _grid(self, slab: Slab) -> Grid:
        """The cells of a slab; times and sync of one slab are asked for in a row."""
        key = (
            tuple(p.name for p in slab.pools), slab.dp, slab.knobs.scatter,
            slab.tp.tobytes(), slab.pp.tobytes(),
        )  # fmt: skip
        if self._last is None or key != self._last[0]:
            self._last = (key, Grid(slab))
        return self._last[1]

    # -- after the passes -----------------------------------------------------------------------

    def sync(
        self,
        slab: Slab,
        in_step: bool | None = None,
        exact: bool = True,
        shards: int | None = None,
    ) -> Sync:
        """Gradient sums, updates and gathered parameters.

        Args:
            slab: candidates with layers. in_step: as for ``times``.
            exact: price every size of a collective; False interpolates between a few of them.
            shards: replicas that share optimizer states, when they are more than the slab's.
        """
        in_step = self.in_step if in_step is None else in_step
        job, passes = self.problem.job, self.passes
        ways, stage = self.ways_of_stages(slab)
        low, high = slab.ranges()
        first, last = passes.starts[low], passes.starts[high]
        tp = np.array([w.tp for w in ways])[stage]
        dense, experts = passes.table.rank_params(first, last, tp, 1)
        _, owned = passes.table.rank_params(first, last, tp, slab.ep)
        parts = self.shards(slab, shards)
        summed = dense + (experts if slab.ep == 1 else 0.0)
        update = np.zeros(stage.shape)
        mine = dense / parts + owned / max(1, parts // slab.ep)
        for i, way in enumerate(ways):
            rows = stage == i
            sums = passes.seconds(way)[3]
            update[rows] = passes.update(way, mine[rows], (sums[high] - sums[low])[rows])
        zero = np.zeros(stage.shape)
        reduced, parted, gathered, joined = zero, zero, zero, zero
        if slab.dp > 1:
            width = dtype_bytes(job.reduction_dtype)
            kind = "reduce_scatter" if slab.knobs.zero else "all_reduce"
            price = Collectives(self.wires, self._grid(slab), slab.knobs.chunks, in_step, exact)
            reduced = price(kind, summed * width, 1)
            if slab.knobs.zero:
                gathered = price("all_gather", summed * job.param_bytes, 1)
            if slab.ep > 1 and slab.dp > slab.ep:
                parted = price(kind, owned * width, slab.ep)
                if slab.knobs.zero:
                    joined = price("all_gather", owned * job.param_bytes, slab.ep)
        return Sync(
            reduce=reduced,
            reduce_experts=parted,
            update=update,
            unshard=gathered,
            unshard_experts=joined,
            embed=self._tied(slab, in_step),
            barrier=np.zeros(len(slab)),
            queued=self._queued(slab) if in_step else None,
        )

    def _queued(self, slab: Slab) -> Bools:
        """Where sums wait for those of the next position, shape (n, P)."""
        if slab.dp == 1 or slab.num_stages == 1:
            return np.zeros((len(slab), slab.num_stages), np.bool_)
        shared = self._grid(slab).pairs(self.wires.same_nic, 0.0, True, 1) > 0
        shared[:, -1] = False
        return shared

    def _tied(self, slab: Slab, in_step: bool) -> Floats:
        """All-reduce of a parameter that the first and the last stage share [s], shape (n,)."""
        found = np.zeros(len(slab))
        width = dtype_bytes(self.problem.job.reduction_dtype)
        for a, b, params in self.passes.table.tied:
            if slab.num_stages > 1 and a == 0 and b >= self.passes.starts[-2]:
                nbytes = float(params * width)
                # The last stage lies one before the first, around the end.
                found += self._grid(slab).pairs(self.wires.tied, nbytes, in_step, -1)[:, 0]
        return found
