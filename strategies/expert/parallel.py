"""Expert parallelism: consecutive replicas of a stage share its experts."""

from __future__ import annotations

import msgspec

from sim.errors import InputError
from sim.plan.draft import ExpertKnobs, PlanDraft
from sim.problem import Problem
from strategies.base import Space, divisors, draft_or_default, fill, kept_by_pin, space_of
from strategies.registry import register

__all__ = ["EXPERT", "Expert", "ExpertParallelKnobs"]


class ExpertParallelKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``expert``: replicas that share one set of experts."""

    ep: int = 1


def _sizes(problem: Problem, draft: PlanDraft) -> tuple[list[int], str]:
    experts = {b.num_experts for b in problem.model.blocks if b.num_experts}
    if not experts:
        return [], "the model has no routed experts"
    dp = 1 + max(c.replica for c in draft.cells)
    sizes = [d for d in divisors(dp) if all(e % d == 0 for e in experts)]
    reason = f"ep must divide the {dp} replicas and {' and '.join(map(str, sorted(experts)))}"
    widths = {(c.stage, c.tp * c.cp) for c in draft.cells}
    if len(widths) > 1 + max(c.stage for c in draft.cells):
        return [1], "some stage's replicas are unlike, so they cannot share experts"
    return sizes, reason + " experts"


class Expert:
    """Tokens travel to their experts by all-to-all (Lepikhin et al. 2020, section 3)."""

    name = "expert"
    axis = "expert"
    paper = "Lepikhin et al. 2020, arXiv:2006.16668"
    owns = frozenset({"expert.ep"})
    knobs = ExpertParallelKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[ExpertParallelKnobs]:
        """Divisors of the replicas that divide the experts too."""
        sizes, reason = _sizes(problem, draft_or_default(problem, draft))
        left = kept_by_pin(sizes, problem.job.pins.ep)
        if sizes and not left:
            reason = f"the job pins ep to {problem.job.pins.ep}; {reason}"
        return space_of((ExpertParallelKnobs(ep=ep) for ep in left), reason)

    def apply(self, problem: Problem, draft: PlanDraft, knobs: ExpertParallelKnobs) -> PlanDraft:
        """Set the size.

        Raises:
            InputError: no experts, or ep divides neither them nor the replicas.
        """
        sizes, reason = _sizes(problem, draft_or_default(problem, draft))
        if knobs.ep not in (sizes or [1]):
            raise InputError(
                reason,
                key="expert.ep",
                found=str(knobs.ep),
                expected=" or ".join(map(str, sizes or [1])),
            )
        return fill(draft, self.name, knobs, expert=ExpertKnobs(ep=knobs.ep))


EXPERT = register(Expert())
