"""Earlier systems as choices of the same integers, orders and waits.

Each is what its sources say of its policy, on this simulator's costs; none of its code. Where a
source leaves something open the choice is named in ``POLICIES``. As AutoHete's authors did, every
policy may recompute all layers or none, and the faster plan that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from sim.cost.ledger import knobs_of, peak_memory, server_memory
from sim.cost.offload import host_ledgers, nvme_ledgers
from sim.engine.simulate import simulate
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.metrics import SETTLED_STEPS, pace_between
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs

__all__ = [
    "POLICIES",
    "Outcome",
    "Policy",
    "outcome_of",
    "outcome_of_plan",
    "run_policy",
    "short_of",
]

STEPS = SETTLED_STEPS
"""Steps simulated."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice of knobs comes to.

    Args:
        knobs: the choice. short: what does not fit ("accelerator memory", "host memory", "NVMe"),
            "" when all fits. step_s: [s] of a step, 0 when it does not fit.
    """

    knobs: AutoHeteKnobs
    short: str = ""
    step_s: float = 0.0


Candidates = Callable[[Problem, AutoHeteKnobs], Iterator[AutoHeteKnobs]]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A system's policy.

    Args:
        name: of the system. source: where its policy is described, and what we had to choose.
        candidates: (problem, knobs with the recomputation set) -> choices, in the order in which
            the system would take the first that fits.
    """

    name: str
    source: str
    candidates: Candidates


def _with(base: AutoHeteKnobs, **changes: object) -> AutoHeteKnobs:
    return msgspec.structs.replace(base, **changes)


def _all_on_chip(problem: Problem, base: AutoHeteKnobs) -> Iterator[AutoHeteKnobs]:
    yield _with(base, clipping="global")


def _zero_offload(problem: Problem, base: AutoHeteKnobs) -> Iterator[AutoHeteKnobs]:
    n = problem.model.num_layers
    yield _with(base, optimizer=n, outer=True, clipping="global", priority=False, whole_steps=True)


def _zero_infinity(problem: Problem, base: AutoHeteKnobs) -> Iterator[AutoHeteKnobs]:
    n = problem.model.num_layers
    yield _with(
        base,
        parameters=n,
        optimizer=n,
        outer=True,
        clipping="global",
        priority=False,
        whole_steps=True,
    )


def _stronghold(problem: Problem, base: AutoHeteKnobs) -> Iterator[AutoHeteKnobs]:
    n = problem.model.num_layers
    way = "speculate" if problem.job.dtype == "fp16" else "none"
    for window in range(n, 1, -1):
        yield _with(
            base,
            parameters=n,
            optimizer=n,
            clipping=way,
            priority=False,
            whole_steps=True,
            parameter_buffers=window,
        )


def _patrickstar(problem: Problem, base: AutoHeteKnobs) -> Iterator[AutoHeteKnobs]:
    n = problem.model.num_layers
    steps = [(0, o) for o in range(n + 1)] + [(p, n) for p in range(1, n + 1)]
    for parameters, optimizer in steps:
        yield _with(
            base,
            parameters=parameters,
            optimizer=optimizer,
            clipping="global",
            priority=False,
            whole_steps=True,
        )


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy(
            name="all-on-gpu",
            source="nothing lives on the host",
            candidates=_all_on_chip,
        ),
        Policy(
            name="zero-offload",
            source=(
                "recalled of arXiv:2101.06840: parameters stay, gradients leave during the "
                "backward, the whole optimizer runs on the host behind it; delayed updates off"
            ),
            candidates=_zero_offload,
        ),
        Policy(
            name="zero-infinity",
            source=(
                "recalled of arXiv:2104.07857: parameters are fetched for every pass as well; no "
                "NVMe, a window of two layers is our choice"
            ),
            candidates=_zero_infinity,
        ),
        Policy(
            name="stronghold",
            source=(
                "its SC22 abstract: a window of layers, prefetch and host updates inside one "
                "iteration; the largest window that fits, and no clipping, are our choice"
            ),
            candidates=_stronghold,
        ),
        Policy(
            name="patrickstar",
            source=(
                "its documents: chunks stay on the chip as far as a warm-up says they fit, Adam on "
                "both sides; whole layers for chunks, optimizer first, are our choice"
            ),
            candidates=_patrickstar,
        ),
    )
}
"""Baselines by name."""


def short_of(plan: Plan, problem: Problem) -> str:
    """Return what memory a plan lacks, "" for none."""
    chips = (*peak_memory(plan, problem).values(), *server_memory(plan, problem).values())
    if any(x.verdict != "fits" for x in chips):
        return "accelerator memory"
    for what, ledgers in (("host memory", host_ledgers), ("NVMe", nvme_ledgers)):
        found = ledgers(plan, problem, knobs_of).values()
        if any(x.verdict == "does not fit" for x in found):
            return what
    return ""


def outcome_of(problem: Problem, start: PlanDraft, knobs: AutoHeteKnobs) -> Outcome:
    """Lower, weigh and, where it fits, simulate a choice of knobs.

    Args:
        problem: see there. start: a complete draft without offloading. knobs: the choice.

    Raises:
        InputError: the knobs are illegal for this draft.
    """
    plan = lower(problem, compose(problem, [("offload", knobs)], start=start))
    return outcome_of_plan(plan, problem, knobs)


def outcome_of_plan(plan: Plan, problem: Problem, knobs: AutoHeteKnobs) -> Outcome:
    """The same for a plan that is lowered already; its step is the report's."""
    short = short_of(plan, problem)
    if short:
        return Outcome(knobs=knobs, short=short)
    run = simulate(plan, problem, steps=STEPS)
    finish = np.zeros(STEPS)
    np.maximum.at(finish, run.layout.graph.step, run.outcome.end)
    pace = pace_between(np.maximum.accumulate(finish), 0.0, barrier=plan.barrier)
    return Outcome(knobs=knobs, step_s=pace.step_time_s)


def run_policy(problem: Problem, start: PlanDraft, name: str) -> Outcome:
    """Return the faster of a policy with and without recomputation that fits, or why none does.

    Args:
        problem: see there. start: a complete draft without offloading. name: in ``POLICIES``.

    Raises:
        KeyError: there is no such policy. InputError: the draft cannot be offloaded.
    """
    policy = POLICIES[name]
    found = []
    for checkpointed in (0, problem.model.num_layers):
        outcome = Outcome(knobs=AutoHeteKnobs())
        for knobs in policy.candidates(problem, AutoHeteKnobs(checkpointed=checkpointed)):
            outcome = outcome_of(problem, start, knobs)
            if not outcome.short:
                break
        found.append(outcome)
    return min(found, key=lambda o: (bool(o.short), o.step_s, o.knobs.checkpointed == 0))
