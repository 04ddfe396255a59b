"""Earlier systems as strategies: AutoHete's machinery under their policies.

``strategies.offload.policies`` says where each policy comes from and what was chosen here.
"""

from __future__ import annotations

from sim.plan.draft import PlanDraft
from sim.problem import Problem
from strategies.base import Space
from strategies.offload.autohete import AutoHete, AutoHeteKnobs
from strategies.offload.policies import POLICIES, Policy
from strategies.registry import register

__all__ = ["BASELINES", "Baseline"]


class Baseline(AutoHete):
    """What one earlier system may choose, in the order in which it takes the first that fits.

    Args:
        policy: of the system.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name
        self.paper = policy.source

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[AutoHeteKnobs]:
        """The policy's choices without recomputation, then those with all layers recomputed."""
        able = super().space(problem, draft)
        if not able.values:
            return able
        whole = any(k.parameters for k in able)
        found = [
            knobs
            for checkpointed in (0, problem.model.num_layers)
            for knobs in self.policy.candidates(problem, AutoHeteKnobs(checkpointed=checkpointed))
            if whole or not knobs.parameters
        ]
        why = "" if found else "ZeRO-1 and 2 keep whole parameters on every chip"
        return Space(tuple(found), why)


BASELINES = tuple(register(Baseline(policy)) for policy in POLICIES.values())
