"""ZeRO: replicas share what each would otherwise keep whole."""

from __future__ import annotations

from typing import Literal

import msgspec

from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.layers import not_by_segment, unlike_microbatches
from sim.problem import Problem
from strategies.base import Space, draft_or_default, fill
from strategies.registry import register

__all__ = ["ZERO", "Zero", "ZeroKnobs"]

Stage = Literal[0, 1, 2, 3]


class ZeroKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``zero``.

    Args:
        stage: what is shared out: nothing (0), optimizer states (1), gradients too (2), parameters
            too (3). Stages 2 and 3 run layer by layer, where the draft names no other segments.
        buffers: segments gathered, and gradients before their sum, that a chip keeps under stages
            2 and 3; 0 for the rings of ``offload``, two of each without it.
    """

    stage: Stage = 1
    buffers: int = 0


class Zero:
    """Each replica updates its share (Rajbhandari et al. 2020).

    Stage 1 gathers the updated parameters once a step. Stage 2 sums each microbatch's gradient of a
    layer into shards behind its backward. Stage 3 gathers a layer's parameters before its forward
    and before its backward instead of once a step.
    """

    name = "zero"
    axis = "data"
    paper = "Rajbhandari et al. 2020, arXiv:1910.02054, sections 5.1 to 5.3"
    owns = frozenset({"data.zero", "data.buffers"})
    knobs = ZeroKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[ZeroKnobs]:
        """Sharded states and whole ones, where there is more than one replica; then 3 and 2."""
        pin = problem.job.pins.zero
        if draft is not None and _replicas(problem, draft) == 1:
            if pin:
                return Space((), "one replica has nobody to share its states with")
            return Space((ZeroKnobs(stage=0),))
        why = not_by_segment(problem, draft_or_default(problem, draft))
        why = why or (unlike_microbatches(draft) if draft is not None else "")
        stages: tuple[Stage, ...] = (1, 0) if why else (1, 0, 3, 2)
        return Space(tuple(ZeroKnobs(stage=s) for s in stages if pin in (None, s)), why)

    def apply(self, problem: Problem, draft: PlanDraft, knobs: ZeroKnobs) -> PlanDraft:
        """Set the stage.

        Raises:
            InputError: there is one replica only, or fewer than no buffers.
        """
        if knobs.stage and _replicas(problem, draft) == 1:
            raise InputError(
                "one replica has nobody to share its optimizer states with",
                key="data.zero",
                found=str(knobs.stage),
                expected="0",
            )
        if knobs.buffers < 0:
            raise InputError(
                "a ring has at least one buffer",
                key="data.buffers",
                found=str(knobs.buffers),
                expected="at least 1, or 0 for the rings of offload",
            )
        data = msgspec.structs.replace(draft.data, zero=knobs.stage, buffers=knobs.buffers)
        return fill(draft, self.name, knobs, data=data)


def _replicas(problem: Problem, draft: PlanDraft) -> int:
    return 1 + max(c.replica for c in draft_or_default(problem, draft).cells)


ZERO = register(Zero())
