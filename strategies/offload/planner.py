"""Find three integers for every pipeline position: bound all choices, simulate the promising ones.

The integer program (``strategies.offload.program``) gives the choice with the least bound and says
when nothing fits. The event engine then decides. Of several positions one moves at a time, through
its choices in order of their bounds. Then all choices are simulated in this order, until the next
bound is no better than the best step found: that is what simulating all of them would find. Where
they are too many to be listed the program is asked for the next one, a limited number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import msgspec
import numpy as np

from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.problem import Problem
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.bounds import bounds_of
from strategies.offload.forms import CHECKPOINTED, Bounds, Floats, Form
from strategies.offload.policies import Outcome, outcome_of_plan
from strategies.offload.program import Choice, UndecidedError, best_choice
from strategies.offload.units import Triple, knobs_with, plan_with

__all__ = ["SOLVED_S", "Planned", "plan_offload", "settled"]

LISTED = 1_000_000
"""Choices up to which all are listed."""
ASKED = 30
"""Further choices that the program is asked for."""
PATIENCE = 15
"""Simulations without a better step after which a position stops moving."""
SOLVED_S = 60.0
"""How long the integer program may take [s]."""
NOT_FASTER = "no choice beats the step known"
"""Stands for what is short where only time is."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What the search found.

    Args:
        best: the fastest choice that fits, or one that does not when none does (or none beats the
            step that was to be beaten).
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
    problem: Problem,
    start: PlanDraft,
    base: AutoHeteKnobs | None = None,
    *,
    most: int = 500,
    beat: float = np.inf,
    late: Callable[[], bool] = lambda: False,
    recompute: bool | None = None,
    seconds: float = SOLVED_S,
) -> Planned:
    """Return the fastest (checkpointed, parameters, optimizer) of every position that fits.

    A choice counts with the longer of its ``settled`` step and its bound, lest it had not settled.

    Args:
        problem: see there. start: a complete draft without offloading, one chunk per position.
        base: knobs other than the integers. most: simulations after which to stop unproven.
        beat: [s] of a step known from elsewhere; choices that are no faster are of no interest.
        late: True ends the search unproven after the simulation in progress.
        recompute: True or False for all layers or none checkpointed, None for as many as is best.
        seconds: [s] that the integer program may take each time it is asked.

    Raises:
        InputError: the draft has no cells or cannot be offloaded, its layers are not equal,
            ``most`` or ``beat`` admits nothing, or the integer program finds no choice in its time.
    """
    _check(start, most, beat)
    base = base or AutoHeteKnobs()
    bounds = bounds_of(problem, start, base)
    if recompute is not None:
        bounds = _pinned(bounds, recompute)
    try:
        first = best_choice(bounds, seconds=seconds)
    except UndecidedError as error:
        raise InputError(
            "no choice of what lives on the host was found in time",
            key="offload",
            found=str(error),
            expected="fewer positions, or the integers themselves",
        ) from None
    if first is None:
        return Planned(best=_short(bounds, base), weighed=0, simulated=0, proven=True, bound_s=0.0)
    if first[1] >= beat:
        known = Outcome(knobs=base, short=NOT_FASTER)
        return Planned(best=known, weighed=0, simulated=0, proven=True, bound_s=first[1])
    search = _Search(problem, start, base, bounds, most, beat, late, seconds)
    if len(bounds.sizes) > 1:
        search.move(*first)
    if prod(prod(size) for size in bounds.sizes) <= LISTED:
        search.walk()
    else:
        search.ask(first[1])
    best = search.best
    if not best.short and best.step_s >= beat:
        best = Outcome(knobs=base, short=NOT_FASTER)
    return Planned(
        best=best,
        weighed=len(search.seen),
        simulated=search.simulated,
        proven=search.proven,
        bound_s=(search.step if search.step < np.inf else 0.0) if search.proven else search.bound,
    )


def _check(start: PlanDraft | None, most: int, beat: float) -> None:
    if start is None or not start.cells:
        raise InputError(
            "nothing to offload: the draft has no cells", key="start",
            found="none" if start is None else "an empty draft", expected="a complete draft",
        )  # fmt: skip
    for key, given, fits in (("most", most, most >= 0), ("beat", beat, beat > 0)):
        if not fits:
            expected = "0 or more" if key == "most" else "above 0"
            raise InputError(
                "a limit that admits nothing", key=key, found=str(given), expected=expected
            )


def settled(problem: Problem, start: PlanDraft, base: AutoHeteKnobs, choice: Choice) -> Outcome:
    """Weigh and, where it fits, simulate a choice.

    Raises:
        InputError: the knobs are illegal for this draft.
    """
    plan = plan_with(problem, start, base, choice)
    return outcome_of_plan(plan, problem, knobs_with(base, choice))


def _short(bounds: Bounds, base: AutoHeteKnobs) -> Outcome:
    """What is short when nothing fits."""
    try:
        chip = best_choice(msgspec.structs.replace(bounds, on_host=()))
    except UndecidedError:
        chip = None
    if chip is None:
        return Outcome(knobs=base, short="accelerator memory")
    return Outcome(knobs=knobs_with(base, chip[0]), short="host memory")


def _pinned(bounds: Bounds, recompute: bool) -> Bounds:
    """The bounds with one more limit, which only all or no layers checkpointed keep."""
    barred: dict[tuple[int, int], Floats] = {}
    for s, size in enumerate(bounds.sizes):
        kept = bounds.layers[s] if recompute else 0
        barred[s, CHECKPOINTED] = np.where(np.arange(size[CHECKPOINTED]) == kept, 0.0, 2.0)
    limit = (Form(counts=barred), 1.0)
    return msgspec.structs.replace(bounds, on_chip=(*bounds.on_chip, limit))


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
        beat: float,
        late: Callable[[], bool],
        seconds: float = SOLVED_S,
    ) -> None:
        self.problem, self.start, self.base, self.bounds = problem, start, base, bounds
        self.beat, self.late, self.seconds = beat, late, seconds
        self.most, self.simulated, self.bound, self.proven = most, 0, 0.0, False
        self.best, self.at = Outcome(knobs=base, short="accelerator memory"), Choice()
        self.seen: dict[Choice, float] = {}

    @property
    def step(self) -> float:
        """[s] of the best so far, or what is to be beaten."""
        return self.beat if self.best.short else min(self.beat, self.best.step_s)

    @property
    def over(self) -> bool:
        """Whether nothing more may be simulated."""
        return self.simulated >= self.most or self.late()

    def weigh(self, choice: Choice, bound: float) -> None:
        """Simulate a choice if it fits."""
        if choice in self.seen:
            return
        found = settled(self.problem, self.start, self.base, choice)
        if not found.short:
            self.simulated += 1
            found = msgspec.structs.replace(found, step_s=max(found.step_s, bound))
        self.seen[choice] = found.step_s or np.inf
        if self.seen[choice] < self.step or (self.best.short and not self.at):
            # The first of all is where moves begin, faster than what is to be beaten or not.
            self.best, self.at = found, choice

    def walk(self) -> None:
        """Weigh all choices in order of their bounds."""
        every = range(len(self.bounds.sizes))
        for choice, bound in _listed(self.bounds, every, [(0, 0, 0) for _ in every]):
            self.bound = bound
            if bound >= self.step:
                break
            if self.over:
                return
            self.weigh(choice, bound)
        self.proven = True

    def move(self, choice: Choice, bound: float) -> None:
        """Weigh a choice, then such as differ from the best in one position, while that helps."""
        if not self.over:
            self.weigh(choice, bound)
        before = np.inf
        while self.step < before and not self.over:
            before = self.step
            for s in range(len(self.at)):
                self._move_one(s)

    def _move_one(self, s: int) -> None:
        last, step = self.simulated, self.step
        for choice, bound in _listed(self.bounds, [s], self.at):
            if bound >= self.step or self.over or self.simulated >= last + PATIENCE:
                break
            self.weigh(choice, bound)
            if self.step < step:
                last, step = self.simulated, self.step

    def ask(self, bound: float) -> None:
        """Weigh choices that the program finds among those not seen; ``bound`` holds for all."""
        self.bound = bound
        for _ in range(ASKED):
            if self.over:
                return
            try:
                found = best_choice(self.bounds, self.seen, seconds=self.seconds)
            except UndecidedError:
                return
            if found is None or found[1] >= self.step:
                self.proven = True
                return
            self.bound = max(self.bound, found[1])
            self.weigh(*found)


def _listed(
    bounds: Bounds, free: Sequence[int], at: Sequence[Triple]
) -> Iterator[tuple[Choice, float]]:
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
