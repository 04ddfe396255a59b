"""hetlab's simulator: what a cluster, a job and a plan are, and how a plan spends time.

The names below are what studies need; they load when first used, so that ``import sim`` is cheap::

    problem = sim.load_problem("v100_t4", "gpt2_355m", "v100_t4")
    chips = range(problem.machine.num_chips)
    draft = sim.uniform(problem.model, problem.job.global_batch, chips, pp=4)
    plan = sim.lower(problem, draft)
    report = sim.report_of(sim.simulate(plan, problem), problem)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.engine.faults import ChipLoss, Injector, LinkChange, Straggler
    from sim.engine.simulate import Run, simulate
    from sim.errors import HetlabError
    from sim.plan.draft import PlanDraft
    from sim.plan.io import load_plan, save_plan
    from sim.plan.lower import lower
    from sim.plan.plan import Plan
    from sim.plan.uniform import uniform
    from sim.plan.validate import validate
    from sim.problem import Problem, load_problem
    from sim.report.report import Report, report_of

_HOMES = {
    "sim.engine.faults": ("ChipLoss", "Injector", "LinkChange", "Straggler"),
    "sim.engine.simulate": ("Run", "simulate"),
    "sim.errors": ("HetlabError",),
    "sim.plan.draft": ("PlanDraft",),
    "sim.plan.io": ("load_plan", "save_plan"),
    "sim.plan.lower": ("lower",),
    "sim.plan.plan": ("Plan",),
    "sim.plan.uniform": ("uniform",),
    "sim.plan.validate": ("validate",),
    "sim.problem": ("Problem", "load_problem"),
    "sim.report.report": ("Report", "report_of"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ChipLoss",
    "HetlabError",
    "Injector",
    "LinkChange",
    "Plan",
    "PlanDraft",
    "Problem",
    "Report",
    "Run",
    "Straggler",
    "load_plan",
    "load_problem",
    "lower",
    "report_of",
    "save_plan",
    "simulate",
    "uniform",
    "validate",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
