"""Offloaded plans of a search: relax the accelerators' memory, then repair what does not fit.

The best structures of the relaxed searches are handed to the planner of the three integers, in the
order of their bounds. A structure whose bound is no better than the best plan found is left
out, so what is left out could not have been better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from sim.engine.simulate import simulate
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.report import report_of
from strategies.compose import compose
from strategies.offload.autohete import OFFLOAD, AutoHeteKnobs
from strategies.offload.planner import SOLVED_S, plan_offload
from strategies.offload.policies import STEPS, short_of
from strategies.search.board import GRACE_S, Effort, Progress
from strategies.search.extremes import bases_of, draft_named, drafts_of, extremes, too_large
from strategies.search.finalists import Contender
from strategies.search.hosted import shortfall
from strategies.search.options import Choices
from strategies.search.pools import Pool
from strategies.search.relax import Structure, relaxed
from strategies.search.repaired import Offloaded, Repaired
from strategies.search.result import Finalist
from strategies.search.slab import structure_key

__all__ = ["offloaded"]

QUICK, LONG = 6, 60
"""Most simulations of the planner for a draft and its knobs: at first, and for the best of them."""
POLISHED = 2
"""Structures that are planned at length."""
SECONDS = 120.0
"""How long structures are repaired where no budget says otherwise [s]."""
LEAST_S = 0.1
"""What the integer program is given at least [s]."""
PINNED = {"none": False, "full": True}
"""Pinned recomputation -> whether all layers are checkpointed."""


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
        structures = state.relaxed.structures
        for i, structure in enumerate(structures):
            if repair.late():
                state.left += len(structures) - i
                break
            if progress is not None:
                progress("offload", i + 1, len(structures))
            repair.run(structure, QUICK)
        for structure in repair.best_structures():
            if not repair.late():
                repair.run(structure, LONG)
        state.stopped |= repair.cut_short
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
        best: the score to beat. state: what was found. deadline: of time.monotonic, of a budget.
        until: the same, or where there is none the end of the search's own patience.
        cut_short: something was not started because the deadline had passed.
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
        self.until = time.monotonic() + SECONDS if deadline == math.inf else deadline
        self.cut_short = False

    @property
    def left_s(self) -> float:
        """How long new work may still be started [s]; without a plan a little longer."""
        end = self.until
        if self.best == math.inf:
            end = max(end, self.deadline + GRACE_S)
        return end - time.monotonic()

    def late(self) -> bool:
        """Whether nothing new may be started."""
        stopped = self.state.relaxed.stopped and self.best < math.inf
        late = stopped or self.left_s < 0
        self.cut_short |= late and self.deadline < math.inf
        return late

    def best_structures(self) -> list[Structure]:
        """The best structures that are not proven yet."""
        chosen: dict[bytes, Repaired] = {}
        for r in sorted(self.state.found, key=lambda r: r.finalist.score):
            chosen.setdefault(r.contender.structure, r)
        left = [r.structure for key, r in chosen.items() if key not in self.state.proven]
        return left[:POLISHED]

    def run(self, structure: Structure, most: int) -> None:
        """Plan what of a structure lives on the host, under every set of knobs around it.

        Args:
            structure: to repair. most: simulations of the planner for each set of knobs.
        """
        refused: dict[str, int] = {}
        planned, late, proven = False, False, True
        for draft in drafts_of(self.problem, structure.slab, self.choices):
            space = OFFLOAD.space(self.problem, draft)
            if not space.values:
                refused[space.reason] = 1
            for base in bases_of(space.values):
                late = late or self.late()
                if self._cut(structure) or late:
                    break
                try:
                    proven &= self._plan(structure, draft, base, most)
                    planned = True
                except InputError as error:
                    refused[error.message] = 1
        if proven and not late:
            self.state.proven.add(structure_key(structure.slab))
        if most != QUICK:
            return
        if planned:
            self.state.tried += 1
        elif late:
            self.state.left += 1
        elif refused:
            self.state.refused.update(refused)
        else:
            self.state.skipped += 1

    def _cut(self, structure: Structure) -> bool:
        return structure.bound_s * structure.price >= self.best

    def _plan(self, structure: Structure, draft: PlanDraft, base: AutoHeteKnobs, most: int) -> bool:
        """Ask the planner; while nothing is known begin with what is quickly known, an extreme.

        Returns:
            Whether nothing else under these knobs is faster than the best known now.
        """
        corners = extremes(self.problem, draft, base, self.choices)
        self._note_shortfall([plan for knobs, plan in corners if knobs.optimizer])
        if too_large([plan for _, plan in corners], self.problem):
            return True
        fit = [k for k, plan in corners if k.optimizer and not short_of(plan, self.problem)]
        if fit and self.best == math.inf:
            self._keep(structure, draft, fit[0])
        try:
            planned = plan_offload(
                self.problem,
                draft,
                base,
                most=most,
                beat=self.best / structure.price,
                late=self.late,
                seconds=min(SOLVED_S, max(LEAST_S, self.left_s)),
                recompute=PINNED.get(self.choices.recompute or ""),
            )
        except InputError as error:
            if not fit:
                raise
            for knobs in fit:
                self._keep(structure, draft, knobs)
            self.state.extremes[error.message] += 1
            return False
        if not planned.best.short:
            self._keep(structure, draft, planned.best.knobs, planned.best.step_s)
        return planned.proven

    def _note_shortfall(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            lacks, known = shortfall(plan, self.problem), self.state.short
            if lacks.nbytes and (known is None or lacks.nbytes < known.nbytes):
                self.state.short = lacks

    def _keep(
        self, structure: Structure, draft: PlanDraft, knobs: AutoHeteKnobs, least_s: float = 0.0
    ) -> None:
        """Simulate a choice as it will be reported and keep it.

        The pace of a few steps may still be shorter than the steady one; it counts as the bound.
        """
        full = compose(self.problem, [("offload", knobs)], start=draft_named(draft, knobs))
        plan = lower(self.problem, full)
        run = simulate(plan, self.problem, steps=STEPS, contention=self.contention)
        seconds = report_of(run, self.problem).metrics.step_time_s
        finalist = Finalist(
            plan=plan,
            estimate_s=structure.estimate_s,
            step_time_s=seconds,
            score=max(seconds, least_s) * structure.price,
        )
        contender = Contender(
            draft=full,
            estimate_s=structure.estimate_s,
            price=structure.price,
            structure=structure_key(structure.slab),
            plan_bound_s=structure.bound_s,
        )
        others = [r for r in self.state.found if r.finalist.plan.hash != plan.hash]
        self.state.found = [
            *others,
            Repaired(
                finalist=finalist,
                contender=contender,
                run=run,
                structure=structure,
            ),
        ]
        self.best = min(self.best, finalist.score)
