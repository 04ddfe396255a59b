"""Find three integers for every pipeline position: bound all choices, simulate the promising ones.

The integer program (``strategies.offload.program``) gives the choice with the least bound and says
when nothing fits. The event engine then decides. Where all choices can be listed they are simulated
in order of their bounds, until the next bound is no better than the best step found: that is what
simulating all of them would find. Otherwise the search moves one position at a time, each in order
of the bounds, and then asks the program for choices it has not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import msgspec
import numpy as np

from sim.plan.draft import PlanDraft
from sim.problem import Problem
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.bounds import bounds_of
from strategies.offload.forms import Bounds
from strategies.offload.policies import Outcome, outcome_of
from strategies.offload.program import Choice, best_choice
from strategies.offload.units import knobs_with

__all__ = ["Planned", "plan_offload"]

LISTED = 1_000_000
"""Choices up to which all are listed."""
ASKED = 30
"""Further choices that the program is asked for."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What the search found.

    Args:
        best: the fastest choice that fits, or one that does not when none does.
        weighed, simulated: choices whose memory was worked out, and that were simulated.
        proven: no choice left could be faster.
        bound_s: no choice has a shorter step [s]; the best step when proven, 0 when nothing fits.
    """

    best: Outcome
    weighed: int
    simulated: int
    proven: bool
    bound_s: float

    @property
    def gap(self) -> float:
        """Share of the best step by which some choice might be shorter."""
        return 1 - self.bound_s / self.best.step_s if self.best.step_s else 0.0


def plan_offload(
    problem: Problem, start: PlanDraft, base: AutoHeteKnobs | None = None, *, most: int = 500
) -> Planned:
    """Return the fastest (checkpointed, parameters, optimizer) of every position that fits.

    Bounds hold for the steady pace. A few simulated steps may be shorter while the host's queues
    still fill, so a choice's step is the longer of the simulated one and its bound.

    Args:
        problem: see there. start: a complete draft without offloading, one chunk per position.
        base: knobs other than the integers. most: simulations after which to stop unproven.

    Raises:
        InputError: the draft cannot be offloaded, or its layers are not equal.
    """
    base = base or AutoHeteKnobs()
    bounds = bounds_of(problem, start, base)
    first = best_choice(bounds)
    if first is None:
        return Planned(best=_short(bounds, base), weighed=0, simulated=0, proven=True, bound_s=0.0)
    search = _Search(problem, start, base, bounds, most)
    if prod(prod(size) for size in bounds.sizes) <= LISTED:
        search.walk(range(len(bounds.sizes)), first[0])
    else:
        search.move(*first)
    return Planned(
        best=search.best,
        weighed=len(search.seen),
        simulated=search.simulated,
        proven=search.proven,
        bound_s=search.best.step_s if search.proven else search.bound,
    )


def _short(bounds: Bounds, base: AutoHeteKnobs) -> Outcome:
    """What is short when nothing fits."""
    chip = best_choice(msgspec.structs.replace(bounds, on_host=()))
    if chip is None:
        return Outcome(knobs=base, short="accelerator memory")
    return Outcome(knobs=knobs_with(base, chip[0]), short="host memory")


class _Search:
    """A search on its way.

    Attributes:
        best, at: the best outcome so far and its choice. seen: choices that were weighed.
        bound: [s] that no choice beats. proven: no choice left could be faster.
    """

    def __init__(
        self,
        problem: Problem,
        start: PlanDraft,
        base: AutoHeteKnobs,
        bounds: Bounds,
        most: int,
    ) -> None:
        self.problem, self.start, self.base, self.bounds = problem, start, base, bounds
        self.most, self.simulated, self.bound, self.proven = most, 0, 0.0, False
        self.best, self.at = Outcome(knobs=base, short="accelerator memory"), Choice()
        self.seen: dict[Choice, float] = {}

    @property
    def step(self) -> float:
        """[s] of the best so far."""
        return np.inf if self.best.short else self.best.step_s

    def weigh(self, choice: Choice, bound: float) -> None:
        """Simulate a choice if it fits."""
        if choice in self.seen:
            return
        found = outcome_of(self.problem, self.start, knobs_with(self.base, choice))
        if not found.short:
            self.simulated += 1
            found = msgspec.structs.replace(found, step_s=max(found.step_s, bound))
        self.seen[choice] = found.step_s or np.inf
        if self.seen[choice] < self.step or (self.best.short and not self.at):
            self.best, self.at = found, choice

    def walk(self, free: Sequence[int], at: Choice) -> bool:
        """Weigh the choices of some positions, the others' given, in order of their bounds.

        Returns whether no choice of theirs could be faster.
        """
        for choice, bound in _listed(self.bounds, free, at):
            self.bound = bound
            if bound >= self.step:
                break
            if self.simulated >= self.most:
                return False
            self.weigh(choice, bound)
        self.proven = len(free) == len(at)
        return True

    def move(self, choice: Choice, bound: float) -> None:
        """Move one position at a time, then ask the program for choices not seen."""
        self.weigh(choice, bound)
        before = np.inf
        while self.step < before and self.simulated < self.most:
            before = self.step
            for s in range(len(choice)):
                self.walk([s], self.at or choice)
        self.bound = bound
        for _ in range(ASKED):
            if self.simulated >= self.most:
                return
            found = best_choice(self.bounds, self.seen)
            if found is None or found[1] >= self.step:
                self.proven = True
                return
            self.bound = max(self.bound, found[1])
            self.weigh(*found)


def _listed(bounds: Bounds, free: Sequence[int], at: Choice) -> Iterator[tuple[Choice, float]]:
    """Choices of some positions that fit, with their bounds, least first."""
    sizes = [size for s in free for size in bounds.sizes[s]]
    axes = np.ix_(*[np.arange(size) for size in sizes])
    arrays = [[np.asarray(count) for count in triple] for triple in at]
    for k, s in enumerate(free):
        arrays[s] = list(axes[3 * k : 3 * k + 3])
    step = np.broadcast_to(bounds.step(arrays), sizes).reshape(-1)
    order = np.flatnonzero(np.broadcast_to(bounds.fits(arrays), sizes))
    for index in order[np.argsort(step[order], kind="stable")].tolist():
        counts = [int(x) for x in np.unravel_index(index, sizes)]
        choice = list(at)
        for k, s in enumerate(free):
            c, p, o = counts[3 * k : 3 * k + 3]
            choice[s] = (c, p, o)
        yield tuple(choice), float(step[index])
