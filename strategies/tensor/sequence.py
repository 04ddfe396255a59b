"""Sequence parallelism: what tensor parallelism leaves whole is split along the sequence."""

from __future__ import annotations

import msgspec

from sim.errors import InputError
from sim.plan.draft import PlanDraft, TensorKnobs
from sim.problem import Problem
from strategies.base import Space, fill
from strategies.registry import register

__all__ = ["SEQUENCE", "Sequence", "SequenceKnobs"]


class SequenceKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``sequence``: whether it is on."""

    enabled: bool = True


def _refusal(problem: Problem, draft: PlanDraft | None) -> str:
    sizes = sorted({c.tp for c in draft.cells}) if draft else []
    if sizes and sizes[-1] == 1:
        return "without tensor parallelism there is nothing to split along the sequence"
    if any(b.kind == "measured" for b in problem.model.blocks):
        return "the measured times of this model say nothing about sequence parallelism"
    length = problem.job.sequence_length
    for tp in sizes:
        if length % tp:
            return f"tp {tp} does not divide the sequence length {length}"
    return ""


class Sequence:
    """All-reduces become reduce-scatter and all-gather (Korthikanti et al. 2022, section 4.2.2)."""

    name = "sequence"
    axis = "tensor"
    paper = "Korthikanti et al. 2022, arXiv:2205.05198"
    owns = frozenset({"tensor.sequence_parallel"})
    knobs = SequenceKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[SequenceKnobs]:
        """On or off where cells have tp > 1."""
        why = _refusal(problem, draft)
        return Space(() if why else (SequenceKnobs(), SequenceKnobs(enabled=False)), why)

    def apply(self, problem: Problem, draft: PlanDraft, knobs: SequenceKnobs) -> PlanDraft:
        """Set the switch.

        Raises:
            InputError: it is on where there is nothing to split, or the sequence does not divide.
        """
        why = _refusal(problem, draft) if knobs.enabled else ""
        if why:
            raise InputError(why, key="tensor.sequence_parallel", found="on", expected="off")
        return fill(draft, self.name, knobs, tensor=TensorKnobs(sequence_parallel=knobs.enabled))


SEQUENCE = register(Sequence())
