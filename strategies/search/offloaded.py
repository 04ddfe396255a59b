"""Offloaded plans of a search: relax the accelerators' memory, then repair what does not fit.

The best structures of the relaxed searches are handed to the planner of the three integers, in the
order of their relaxed times. A structure whose bound is no better than the best plan found is left
out, so what is left out could not have been better.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from sim.engine.simulate import Run, simulate
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.report import report_of
from strategies.compose import compose
from strategies.offload.autohete import OFFLOAD, AutoHeteKnobs
from strategies.offload.planner import plan_offload
from strategies.offload.policies import STEPS, short_of
from strategies.search.board import GRACE_S, Effort, Progress
from strategies.search.extremes import bases_of, draft_named, drafts_of, extremes, too_large
from strategies.search.finalists import Contender
from strategies.search.hosted import ENDS, Shortfall, shortfall
from strategies.search.options import Choices
from strategies.search.pools import Pool
from strategies.search.relax import Relaxed, Structure, relaxed
from strategies.search.result import Finalist
from strategies.search.slab import structure_key

__all__ = ["Offloaded", "Repaired", "offloaded"]

MOST = 40
"""Most simulations of the planner for one draft and one set of knobs besides the integers."""
CORNERS = 2
"""Most extremes (all layers or none) of a draft that are simulated before the planner begins."""


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """An offloaded plan that fits.

    Args:
        finalist: with the relaxed estimate, and the time between steps by the engine.
        contender: its draft and structure. run: of its plan, ``STEPS`` steps.
        structure: what was repaired. proven: the planner left nothing that could be faster.
    """

    finalist: Finalist
    contender: Contender
    run: Run
    structure: Structure
    proven: bool


class Offloaded(msgspec.Struct, kw_only=True):
    """What the search over offloaded plans came to; filled while it runs.

    Attributes:
        found: plans, best first. relaxed: the relaxed searches.
        tried, skipped: structures repaired or found too large, and cut by their bound.
        refused: why structures cannot be offloaded -> how many. extremes: why the planner did not
            look between all and nothing on the host -> how many drafts.
        short: the smallest shortfall with all layers on the host. stopped: before its end.
    """

    found: list[Repaired] = []
    relaxed: Relaxed = msgspec.field(default_factory=Relaxed)
    tried: int = 0
    skipped: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    extremes: Counter[str] = msgspec.field(default_factory=Counter)
    short: Shortfall | None = None
    stopped: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What was tried and what could not be, in words."""
        words = f"offloading: {self.tried} structures planned, {self.skipped} cut by their bound"
        refused = [f"not offloaded, {n} of them: {why}" for why, n in self.refused.most_common(3)]
        unproven = bool(self.found) and not self.found[0].proven
        more = ["offloading: what lives on the host is not proven best"] if unproven else []
        between = [
            f"all layers or none on the host, {n} times: {why}"
            for why, n in self.extremes.most_common(1)
        ]
        return (words, *refused, *between, *more)


def offloaded(
    problem: Problem,
    pools: tuple[Pool, ...],
    choices: Choices,
    *,
    effort: Effort,
    best: float = math.inf,
    deadline: float = math.inf,
    contention: bool = True,
    progress: Progress | None = None,
) -> Offloaded:
    """Search offloaded plans; Ctrl-C and the deadline keep what is found.

    Args:
        problem, pools, choices: as of the search. effort: of the relaxed searches.
        best: score that plans must beat. deadline: of ``time.monotonic``.
        contention: transfers share links. progress: called with ("offload", i, of how many).
    """
    state = Offloaded()
    why = _refused(choices)
    if why:
        state.refused[why] += 1
        return state
    try:
        state.relaxed = relaxed(problem, pools, choices, effort, deadline, progress)
        repair = _Repair(problem, choices, contention, best, deadline, state)
        for i, structure in enumerate(state.relaxed.structures):
            if progress is not None:
                progress("offload", i + 1, len(state.relaxed.structures))
            repair.run(structure)
            if repair.late():
                state.stopped = True
                break
    except KeyboardInterrupt:
        state.stopped = True
    state.stopped |= state.relaxed.stopped
    state.found.sort(key=lambda r: r.finalist.score)
    return state


def _refused(choices: Choices) -> str:
    if choices.recompute == "selective":
        return "layers keep everything or their inputs, recompute=selective is pinned"
    if choices.families == "replicas":
        return "unlike replicas are not offloaded, families=replicas is pinned"
    return ""


class _Repair:
    """Repairs structures one after the other.

    Attributes:
        best: the score to beat. state: what was found.
    """

    def __init__(
        self,
        problem: Problem,
        choices: Choices,
        contention: bool,
        best: float,
        deadline: float,
        state: Offloaded,
    ) -> None:
        self.problem, self.choices, self.contention = problem, choices, contention
        self.best, self.deadline, self.state = best, deadline, state

    def late(self) -> bool:
        """Whether nothing new may be started; without a plan the search goes on a little."""
        if self.best < math.inf and self.state.relaxed.stopped:
            return True
        grace = 0.0 if self.best < math.inf else GRACE_S
        return time.monotonic() - self.deadline > grace

    def run(self, structure: Structure) -> None:
        """Plan what of a structure lives on the host, under every set of knobs around it."""
        refused: dict[str, int] = {}
        planned = False
        for draft in drafts_of(self.problem, structure.slab, self.choices):
            space = OFFLOAD.space(self.problem, draft)
            if not space.values:
                refused[space.reason] = 1
            for base in bases_of(space.values):
                if self._cut(structure) or (planned and self.late()):
                    break
                try:
                    self._plan(structure, draft, base)
                    planned = True
                except InputError as error:
                    refused[error.message] = 1
        if planned:
            self.state.tried += 1
        elif refused:
            self.state.refused.update(refused)
        else:
            self.state.skipped += 1

    def _cut(self, structure: Structure) -> bool:
        return structure.bound_s * structure.price >= self.best

    def _plan(self, structure: Structure, draft: PlanDraft, base: AutoHeteKnobs) -> None:
        """Try the extremes, which are quickly known, then what the planner finds between them."""
        corners = extremes(self.problem, draft, base, self.choices)
        self._note_shortfall([plan for knobs, plan in corners if knobs.optimizer])
        if too_large([plan for _, plan in corners], self.problem):
            return
        began = time.monotonic()
        known = 0
        for knobs, plan in corners:
            if knobs.optimizer and known < CORNERS and not short_of(plan, self.problem):
                self._keep(structure, draft, knobs, proven=False)
                known += 1
        each = max((time.monotonic() - began) / max(known, 1), 1e-3)
        most = min(MOST, max((self.deadline - time.monotonic()) / each, 1.0))
        try:
            planned = plan_offload(self.problem, draft, base, most=int(most))
        except InputError as error:
            if not known:
                raise
            self.state.extremes[error.message] += 1
            return
        if not planned.best.short:
            self._keep(structure, draft, planned.best.knobs, proven=planned.proven)

    def _note_shortfall(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            lacks, known = shortfall(plan, self.problem), self.state.short
            if lacks.nbytes and (known is None or lacks.nbytes < known.nbytes):
                self.state.short = lacks

    def _keep(
        self, structure: Structure, draft: PlanDraft, knobs: AutoHeteKnobs, *, proven: bool
    ) -> None:
        """Simulate a choice as it will be reported and keep it, unless a pin forbids it."""
        full = compose(self.problem, [("offload", knobs)], start=draft_named(draft, knobs))
        plan = lower(self.problem, full)
        pinned = {"none": False, "full": True}.get(self.choices.recompute or "")
        layers = [s for s in plan.placement.segments if s.name not in ENDS]
        if pinned is not None and any((s.recompute == "full") != pinned for s in layers):
            return
        run = simulate(plan, self.problem, steps=STEPS, contention=self.contention)
        seconds = report_of(run, self.problem).metrics.step_time_s
        finalist = Finalist(
            plan=plan,
            estimate_s=structure.estimate_s,
            step_time_s=seconds,
            score=seconds * structure.price,
        )
        contender = Contender(
            draft=full,
            estimate_s=structure.estimate_s,
            price=structure.price,
            structure=structure_key(structure.slab),
            plan_bound_s=structure.bound_s,
        )
        known = [r for r in self.state.found if r.finalist.plan.hash != plan.hash]
        self.state.found = [
            *known,
            Repaired(
                finalist=finalist,
                contender=contender,
                run=run,
                structure=structure,
                proven=proven,
            ),
        ]
        self.best = min(self.best, finalist.score)
