"""Closed form over all structures, exact recurrence over the best; what is left is for the engine.

Small spaces are evaluated whole: every knob, every split of the layers, by the recurrence. Larger
ones are screened as H2 does: structures are compared under one set of knobs with the fastest
bottleneck split; the best are then tried under every legal set of knobs and their splits refined by
single layers, each time by the exact recurrence.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.search.costs import Costs
from strategies.search.options import Choices, knobs_for, screening_knobs
from strategies.search.pools import Pool
from strategies.search.screen import (
    CHUNK,
    by_stages,
    compute_bound,
    count_splits,
    every_split,
    exact_times,
    place_layers,
    rough_times,
)
from strategies.search.shortlist import Incumbent, Shortlist
from strategies.search.slab import Knobs, Slab, plan_key, structure_key
from strategies.search.space import blocks_of
from strategies.search.structures import (
    Block,
    count_structures,
    enumerate_block,
    structures_by_stages,
)
from strategies.search.tune import refine, tune

__all__ = ["Effort", "Evaluator", "Progress"]

Floats = NDArray[np.float64]
Progress = Callable[[str, int, int], None]
"""(what, done, of how many), called now and then."""


FIRSTS = 16
"""Plans of a slab that are remembered as possibly the best of their structure."""


NEAR = 1.05
"""Plans whose bound is up to this much above the incumbent are still computed, for the engine."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much is looked at.

    Args:
        exhaustive: spaces with at most this many plans (structures x knobs x splits) are evaluated
            whole. shortlist: structures kept for the exact recurrence.
        tuned: structures tried under all knobs.
        refined: plans whose layers are moved one by one. rounds: of such moves.
        coarse: blocks looked at first, with all chips of each pool, to find an incumbent.
    """

    exhaustive: int = 60_000
    shortlist: int = 1_024
    tuned: int = 96
    refined: int = 12
    rounds: int = 6
    coarse: int = 16


class Evaluator:
    """One search over unlike pipelines.

    Attributes:
        space: structures times knobs (times splits where they are enumerated). evaluated: plans
            whose time was estimated or computed. exact: those by the recurrence.
        pruned: rule -> structures (plans, where enumerated) cut.
        bound: [s] least m * L / sum(stages / layer time) of the structures that fit.
        ranked: the best plans by exact time. firsts: structure -> its best plan.
        whole: True when the space was evaluated whole.
    """

    def __init__(
        self,
        costs: Costs,
        choices: Choices,
        effort: Effort,
        keep: int,
        *,
        deadline: float = math.inf,
        progress: Progress | None = None,
    ) -> None:
        self.costs, self.choices, self.effort = costs, choices, effort
        self.deadline, self.progress = deadline, progress
        self.pruned: Counter[str] = Counter()
        self.space = self.evaluated = self.exact = 0
        self.bound = math.inf
        self.whole = False
        self.stopped = False
        self._knobs: dict[tuple[object, ...], list[Knobs]] = {}
        self.ranked = Shortlist(max(4 * keep, 64))
        self.incumbent = Incumbent(keep)
        self.firsts: dict[bytes, tuple[float, Slab]] = {}

    # -- helpers --------------------------------------------------------------------------------

    def late(self) -> bool:
        """Whether the deadline has passed; nothing new is started then."""
        if time.monotonic() > self.deadline:
            self.stopped = True
        return self.stopped

    def tell(self, what: str, done: int, total: int) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(what, done, total)

    def price(self, slab: Slab) -> Floats:
        """What a second of each candidate costs, or 1 where time is the objective, shape (n,)."""
        if self.costs.problem.job.objective != "cost":
            return np.ones(len(slab))
        kinds = self.costs.problem.machine.accelerators
        per_chip = np.array([kinds[p.accelerator].price_per_s for p in slab.pools])
        return np.asarray(slab.dp * (slab.tp * slab.pp * per_chip).sum(axis=1))

    def _limit(self, block: Block, value: float) -> float:
        """The incumbent as a time: with costs, what the cheapest structure may take."""
        if self.costs.problem.job.objective != "cost":
            return value
        kinds = self.costs.problem.machine.accelerators
        least = sum(
            min(o.tp * o.pp for o in group) * kinds[pool.accelerator].price_per_s
            for pool, group in zip(block.pools, block.options, strict=True)
        )
        return value / (least * block.dp) if least > 0 else math.inf

    def knobs(self, slab: Slab) -> list[Knobs]:
        """Legal knobs of a slab of one number of stages."""
        tps = frozenset(np.unique(slab.tp).tolist())
        return self._legal(slab.num_stages, slab.num_microbatches, slab.dp, tps)

    def judge(self, slabs: list[Slab]) -> None:
        """Exact times of candidates with layers, into ``ranked``."""
        slabs = [s for s in slabs if len(s)]
        prices = [self.price(s) for s in slabs]
        # With costs the bound that saves work would need a price; then all are computed.
        cut = NEAR * self.incumbent.value if all((p == 1).all() for p in prices) else math.inf
        times = exact_times(self.costs, slabs, cut)
        for slab, price, found in zip(slabs, prices, times, strict=True):
            scores = found * price
            self.exact += len(slab)
            self.incumbent.add(scores)
            self.ranked.add(slab, scores)
            for row in np.argsort(scores)[:FIRSTS].tolist():
                key = structure_key(slab, row)
                if scores[row] < self.firsts.get(key, (math.inf, None))[0]:
                    self.firsts[key] = (float(scores[row]), slab.take(slice(row, row + 1)))

    def best(self, count: int, alike: int) -> list[tuple[float, Slab]]:
        """The best plans, at most ``alike`` of one structure, in order."""
        found = self.ranked.best(count, alike)
        known = {plan_key(slab) for _, slab in found}
        others = [f for f in self.firsts.values() if plan_key(f[1]) not in known]
        return sorted([*found, *others], key=lambda f: f[0])[:count]

    # -- the search -----------------------------------------------------------------------------

    def run(self, pools: tuple[Pool, ...]) -> None:
        """Search; results are in the attributes. Ctrl-C and the deadline keep what is found."""
        try:
            self._run(pools)
        except KeyboardInterrupt:
            self.stopped = True

    def _run(self, pools: tuple[Pool, ...]) -> None:
        blocks = blocks_of(self.costs, pools, self.choices, knobs=self._possible_knobs())
        total = self.costs.passes.num_layers
        sizes = [self._size(b) for b in blocks]
        self.whole = sum(s for s, _ in sizes) <= self.effort.exhaustive
        self.space = int(sum(s if self.whole else n for s, n in sizes))
        if self.whole:
            for i, block in enumerate(blocks):
                self.tell("plans", i, len(blocks))
                self._whole_block(block)
                if self.late():
                    return
            return
        screened = Shortlist(self.effort.shortlist)
        plain = blocks_of(self.costs, pools, self.choices, rich=False, knobs=(self._plain_knobs(),))
        best = Incumbent(self.incumbent.size)
        best.scores = list(self.incumbent.scores)
        for block in plain[: self.effort.coarse]:
            self._screen(block, total, screened, best)
        blocks = blocks_of(self.costs, pools, self.choices, knobs=(self._plain_knobs(),))
        screened = Shortlist(self.effort.shortlist)
        for i, block in enumerate(blocks):
            self.tell("structures", i, len(blocks))
            if self.late():
                break
            self._screen(block, total, screened, best)
        tune(self, screened)
        refine(self)

    def _possible_knobs(self) -> list[Knobs]:
        """Knobs of every schedule that may occur, for what filling is sure to cost."""
        return knobs_for(
            self.costs.problem, self.choices, num_stages=2, num_microbatches=2, dp=1,
            tps=frozenset({1}),
        ) or [Knobs()]  # fmt: skip

    def _plain_knobs(self) -> Knobs:
        return screening_knobs(self._possible_knobs())

    def _size(self, block: Block) -> tuple[float, float]:
        """(plans with all splits, structures times knobs) of a block."""
        total = self.costs.passes.num_layers
        plans = structures = 0.0
        tps = frozenset({o.tp for g in block.options for o in g})
        for p, count in enumerate(structures_by_stages(block, total).tolist()):
            if count and self.choices.pp in (None, p):
                options = self._legal(p, block.num_microbatches, block.dp, tps)
                structures += count * len(options)
                plans += sum(count * float(count_splits(total, p * k.chunks)) for k in options)
        return plans, structures

    def _legal(self, stages: int, m: int, dp: int, tps: frozenset[int]) -> list[Knobs]:
        """Legal knobs; they depend on less than the arguments say, so they are kept by that."""
        key = (stages == 1, m % stages == 0, dp > 1, tps)
        if key not in self._knobs:
            self._knobs[key] = knobs_for(
                self.costs.problem,
                self.choices,
                num_stages=stages,
                num_microbatches=m,
                dp=dp,
                tps=tps,
            )
        return self._knobs[key]

    def _whole_block(self, block: Block) -> None:
        total = self.costs.passes.num_layers
        limit = self._limit(block, self.incumbent.value)
        found = enumerate_block(block, total, limit, self.pruned, self.choices.pp)
        for slab in by_stages(found) if found is not None else ():
            for knobs in self.knobs(slab):
                legal = self._sequence_rows(slab, knobs)
                step = max(1, CHUNK // max(1, count_splits(total, slab.num_stages * knobs.chunks)))
                for first in range(0, len(legal), step):
                    part = legal.take(slice(first, first + step)).with_knobs(knobs)
                    plans = every_split(self.costs, part, self.pruned)
                    self._note(plans)
                    self.judge([plans])

    def _note(self, placed: Slab) -> None:
        """Count candidates that fit, and keep the least bound among them."""
        self.evaluated += len(placed)
        if len(placed):
            unit, _ = self.costs.layer_times(placed)
            rate = (1.0 / unit[:, : placed.num_stages]).sum(axis=1).max()
            work = placed.num_microbatches * self.costs.passes.num_layers
            self.bound = min(self.bound, work / float(rate))

    def _sequence_rows(self, slab: Slab, knobs: Knobs) -> Slab:
        """Rows for which sequence parallelism means something."""
        return slab.take(slab.tp.max(axis=1) > 1) if knobs.sequence_parallel else slab

    def _screen(self, block: Block, total: int, screened: Shortlist, best: Incumbent) -> None:
        """Estimate the structures of a block, and run its most promising ones exactly."""
        limit = self._limit(block, best.value)
        if block.bound > limit:
            self.pruned["bound"] += count_structures(block, total, self.choices.pp)
            return
        found = enumerate_block(block, total, limit, self.pruned, self.choices.pp)
        promising = Shortlist(best.size)
        for slab in by_stages(found) if found is not None else ():
            options = self.knobs(slab)
            if not options:
                continue
            for first in range(0, len(slab), CHUNK):
                part = slab.take(slice(first, first + CHUNK)).with_knobs(screening_knobs(options))
                placed = place_layers(self.costs, part, self.pruned)
                self._note(placed)
                if len(placed):
                    least = compute_bound(self.costs, placed) * self.price(placed)
                    self.pruned["bound"] += int((least > best.value).sum())
                    placed = placed.take(least <= best.value)
                if len(placed):
                    scores = rough_times(self.costs, placed) * self.price(placed)
                    screened.add(placed, scores)
                    promising.add(placed, scores)
        slabs = [s for score, s in promising.best(best.size) if score < 1.1 * best.value]
        for slab, exact in zip(slabs, exact_times(self.costs, slabs), strict=True):
            best.add(exact * self.price(slab))
