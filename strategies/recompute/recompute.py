"""Recomputation: keep all activations, drop the attention core, or keep layer inputs only."""

from __future__ import annotations

import msgspec

from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.placement import Recompute
from sim.problem import Problem
from strategies.base import Space, draft_or_default, fill, space_of
from strategies.registry import register

__all__ = ["RECOMPUTE", "Recomputation", "RecomputeKnobs", "recompute_modes"]


class RecomputeKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``recompute``.

    Args:
        modes: one for all stages, or one per pipeline stage.
    """

    modes: tuple[Recompute, ...] = ("none",)


def recompute_modes(problem: Problem) -> tuple[Recompute, ...]:
    """Modes that mean something for the model: "selective" needs an attention core that is kept."""
    core = any(s.core for b in problem.model.blocks for s in b.saved)
    return ("none", "selective", "full") if core else ("none", "full")


class Recomputation:
    """None, selective or full recomputation, per stage."""

    name = "recompute"
    axis = "recompute"
    paper = "Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, section 5"
    owns = frozenset({"cells.recompute"})
    knobs = RecomputeKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[RecomputeKnobs]:
        """The same mode on every stage; least recomputation first."""
        pin = problem.job.pins.recompute
        modes = recompute_modes(problem)
        left = [m for m in modes if pin in (None, m)]
        reason = f"the job pins {pin}, which means nothing for this model ({', '.join(modes)} do)"
        return space_of((RecomputeKnobs(modes=(m,)) for m in left), reason)

    def apply(self, problem: Problem, draft: PlanDraft, knobs: RecomputeKnobs) -> PlanDraft:
        """Set each cell's mode.

        Raises:
            InputError: neither one mode nor one per stage, or "selective" without a core.
        """
        given = draft_or_default(problem, draft)
        stages = 1 + max(c.stage for c in given.cells)
        modes = knobs.modes * stages if len(knobs.modes) == 1 else knobs.modes
        known = recompute_modes(problem)
        if len(modes) != stages or any(m not in known for m in modes):
            raise InputError(
                "recomputation needs one mode, or one per stage",
                key="recompute.modes",
                found=" ".join(knobs.modes) or "none given",
                expected=f"1 or {stages} of {', '.join(known)}",
            )
        cells = tuple(msgspec.structs.replace(c, recompute=modes[c.stage]) for c in given.cells)
        return fill(given, self.name, knobs, cells=cells)


RECOMPUTE = register(Recomputation())
