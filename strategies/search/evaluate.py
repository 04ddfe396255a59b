"""Closed form over all structures, exact recurrence over the best; what is left is for the engine.

Small spaces are evaluated whole: every knob, every split of the layers, by the recurrence. Larger
ones are screened as H2 does: structures are compared under one set of knobs with the fastest
bottleneck split; the best are then tried under every legal set of knobs and their splits refined by
single layers, each time by the exact recurrence.
"""

from __future__ import annotations

import math
from collections import Counter

from strategies.search.board import Board, Effort, Progress
from strategies.search.costs import Costs
from strategies.search.options import Choices, knobs_for, screening_knobs
from strategies.search.pools import Pool
from strategies.search.screen import (
    CHUNK,
    by_stages,
    compute_bound,
    count_splits,
    every_split,
    place_layers,
    rough_times,
)
from strategies.search.shortlist import Shortlist
from strategies.search.slab import Knobs, Slab
from strategies.search.space import blocks_of
from strategies.search.structures import (
    Block,
    count_structures,
    enumerate_block,
    structures_by_stages,
)
from strategies.search.tune import refine, tune

__all__ = ["Evaluator"]

SURE = 1.1
"""Estimates up to this much above the incumbent are worth an exact time while structures are
screened."""


class Evaluator(Board):
    """One search over unlike pipelines.

    Attributes:
        space: structures times knobs (times splits where they are enumerated).
        pruned: rule -> structures (plans, where enumerated) cut.
        bound: [s] least m * L / sum(stages / layer time) of the structures that fit.
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
        super().__init__(costs, choices, effort, keep, deadline=deadline, progress=progress)
        self.pruned: Counter[str] = Counter()
        self.space = 0
        self.bound = math.inf
        self.whole = False

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
        small = sum(s for s, _ in sizes) <= self.effort.exhaustive
        self.whole = small and not self.costs.even
        self.space = int(sum(s if self.whole else n for s, n in sizes))
        if self.whole:
            for i, block in enumerate(blocks):
                self.tell("plans", i, len(blocks))
                self._whole_block(block)
                if self.late():
                    return
            return
        plain = blocks_of(self.costs, pools, self.choices, rich=False, knobs=(self._plain_knobs(),))
        screened = Shortlist(self.effort.shortlist)
        for block in plain[: self.effort.coarse]:
            self._screen(block, total, screened)
            if self.late():
                return
        blocks = blocks_of(self.costs, pools, self.choices, knobs=(self._plain_knobs(),))
        screened = Shortlist(self.effort.shortlist)
        for i, block in enumerate(blocks):
            self.tell("structures", i, len(blocks))
            if self.late():
                break
            self._screen(block, total, screened)
        tune(self, screened)
        if not self.costs.even:
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
                options = self.legal(p, block.num_microbatches, block.dp, tps)
                structures += count * len(options)
                plans += sum(count * float(count_splits(total, p * k.chunks)) for k in options)
        return plans, structures

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

    def _screen(self, block: Block, total: int, screened: Shortlist) -> None:
        """Estimate the structures of a block, and run its most promising ones exactly."""
        best = self.incumbent
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
        self.judge([s for score, s in promising.best(best.size) if score < SURE * best.value])
