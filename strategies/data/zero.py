"""ZeRO-1: replicas share the optimizer states instead of each keeping all of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.problem import Problem
from strategies.base import Space, draft_or_default, fill
from strategies.registry import register

__all__ = ["ZERO", "Zero", "ZeroKnobs"]


class ZeroKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``zero``: 1 for sharded optimizer states, 0 for whole ones."""

    stage: Literal[0, 1] = 1


class Zero:
    """Each replica updates its share, then gathers the parameters (Rajbhandari et al. 2020)."""

    name = "zero"
    axis = "data"
    paper = "Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1"
    owns = frozenset({"data.zero"})
    knobs = ZeroKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[ZeroKnobs]:
        """Sharded and whole, where there is more than one replica."""
        pin = problem.job.pins.zero
        if draft is not None and _replicas(problem, draft) == 1:
            if pin == 1:
                return Space((), "one replica has nobody to share its states with")
            return Space((ZeroKnobs(stage=0),))
        both = (ZeroKnobs(stage=1), ZeroKnobs(stage=0))
        return Space(tuple(k for k in both if pin in (None, k.stage)))

    def apply(self, problem: Problem, draft: PlanDraft, knobs: ZeroKnobs) -> PlanDraft:
        """Set the stage.

        Raises:
            InputError: there is one replica only.
        """
        if knobs.stage and _replicas(problem, draft) == 1:
            raise InputError(
                "one replica has nobody to share its optimizer states with",
                key="data.zero",
                found=str(knobs.stage),
                expected="0",
            )
        return fill(
            draft, self.name, knobs, data=msgspec.structs.replace(draft.data, zero=knobs.stage)
        )


def _replicas(problem: Problem, draft: PlanDraft) -> int:
    return 1 + max(c.replica for c in draft_or_default(problem, draft).cells)


ZERO = register(Zero())
