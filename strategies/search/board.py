"""Where the plans of a search stand: exact times, the best so far, effort and deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.search.costs import Costs
from strategies.search.options import Choices, knobs_for
from strategies.search.screen import exact_times
from strategies.search.shortlist import Incumbent, Shortlist
from strategies.search.slab import Knobs, Slab, plan_key, structure_key

__all__ = ["Board", "Effort", "Progress"]

Floats = NDArray[np.float64]
Progress = Callable[[str, int, int], None]
"""(what, done, of how many), called now and then."""
GRACE_S = 30.0
"""How long a search goes on behind its deadline while nothing has been found [s]."""
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


class Board:
    """Plans judged so far.

    Attributes:
        evaluated: plans whose time was estimated or computed. exact: those by the recurrence.
        ranked: the best plans by exact time. firsts: structure -> its best plan.
        incumbent: the best scores. stopped: True when the deadline or Ctrl-C ended the search.
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
        self.evaluated = self.exact = 0
        self.stopped = False
        self._knobs: dict[tuple[object, ...], list[Knobs]] = {}
        self.ranked = Shortlist(max(4 * keep, 64))
        self.incumbent = Incumbent(keep)
        self.firsts: dict[bytes, tuple[float, Slab]] = {}

    def late(self, found: bool = False) -> bool:
        """Whether the deadline has passed; nothing new is started then.

        While no plan has been found the search goes on, for ``GRACE_S`` at most; unless what it
        has to beat is known.

        Args:
            found: a plan is known that this board does not hold.
        """
        found = found or bool(self.firsts) or self.incumbent.seeded
        if time.monotonic() - self.deadline > (0.0 if found else GRACE_S):
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

    def knobs(self, slab: Slab) -> list[Knobs]:
        """Legal knobs of a slab of one number of stages."""
        tps = frozenset(np.unique(slab.tp).tolist())
        return self.legal(slab.num_stages, slab.num_microbatches, slab.dp, tps)

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
            self.incumbent.add(scores, slab)
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

    def legal(self, stages: int, m: int, dp: int, tps: frozenset[int]) -> list[Knobs]:
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
