"""Routing in a search: what uneven experts cost a plan, and which balancer serves it best.

A job may say how its tokens are routed. Then a plan whose experts are spread over replicas is as
fast as its fullest device, so its balancer is a choice like any other: structures are compared with
what closed forms say of it (strategies.expert.step_times), finalists are simulated under each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from sim.cost.ledger import peak_memory
from sim.engine.simulate import Run, simulate
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.report import report_of
from strategies.compose import compose
from strategies.expert.balanced import BALANCED, BalancedKnobs
from strategies.expert.routing import load_ratio
from strategies.expert.routing_synthetic import Popularity
from strategies.search.options import Choices
from strategies.search.routed_times import LAYERS, Imbalance, times_of

__all__ = [
    "STEPS", "Balanced", "ExpertFacts", "added_s", "balances", "best_balance", "even_note",
    "expert_facts", "fits_chips",
]  # fmt: skip

STEPS = 1 + 8
"""Steps of a plan that are simulated, the first of which lends nothing and is left out: whole
periods of the balancers offered, because routing differs from one step to the next."""
EPLB = BalancedKnobs(balancer="eplb", period=4)
"""Offered besides: experts change their homes, with their states, so not in every step. Not offered
is "fastermoe-release", which stands for released code in comparisons with the paper's rule."""
PROMISING = 2
"""Knobs that lend, the best by closed forms, under which a contender is simulated."""


class Balanced(msgspec.Struct, frozen=True, kw_only=True):
    """A draft with its balancer.

    Args:
        draft, knobs: see there. plan, run: lowered, and a few steps of it. step_s: [s] of a step.
    """

    draft: PlanDraft
    knobs: BalancedKnobs
    plan: Plan
    run: Run
    step_s: float


def balances(problem: Problem, draft: PlanDraft, choices: Choices) -> list[BalancedKnobs]:
    """Knobs of ``balanced`` that a draft may have under the job's routing; none where it has none.

    Args:
        problem: whose job. draft: with its experts. choices: "balanced" forbidden leaves plain
            expert parallelism.
    """
    routing = problem.job.routing
    if routing is None or draft.expert.ep == 1:
        return []
    space = BALANCED.space(problem, draft).values
    if not space:
        return []
    popularity = msgspec.convert(routing.numbers, Popularity)
    found = [
        msgspec.structs.replace(k, popularity=popularity, trace=routing.trace)
        for k in (*space, EPLB)
    ]
    if "balanced" in choices.forbid:
        return [k for k in found if k.balancer == "none"]
    fewer = [msgspec.structs.replace(k, slots=1) for k in found if k.balancer != "none"]
    return [*found, *fewer]


def even_note(problem: Problem) -> str:
    """What is assumed of routing where the job says nothing, "" where it says or has no experts."""
    if problem.job.routing is not None or not any(b.num_experts for b in problem.model.blocks):
        return ""
    return "every expert gets as many tokens: the job names no routing"


class ExpertFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How the experts of a plan are balanced, by closed forms over the steps that are simulated.

    Args:
        balancer, slots, period: see strategies.expert.balanced. ep: replicas that share experts.
        load, static_load: fullest device over the mean, and with plain expert parallelism.
        balance_degree: standard deviation of the devices' tokens, of a microbatch; mean over steps
            and layers. rb: that of plain expert parallelism over it (Pro-Prophet), likewise.
        transfer_s, exposed_s: [s] that lent experts travel in a step, and what of it nothing hides.
    """

    balancer: str
    ep: int
    slots: int
    period: int
    load: float
    static_load: float
    balance_degree: float
    rb: float
    transfer_s: float
    exposed_s: float

    @property
    def text(self) -> str:
        """In words."""
        how = "stay where they are"
        if self.slots:
            often = "every step" if self.period == 1 else f"every {self.period} steps"
            how = f"lent by {self.balancer}, {self.slots} to a chip, searched {often}"
        return (
            f"{how}; fullest chip {self.load:.2f} times the mean, {self.static_load:.2f} unbalanced"
            f" (balance degree {self.balance_degree:.0f} tokens, RB {self.rb:.1f}); transfers "
            f"{1e3 * self.transfer_s:.1f} ms, exposed {1e3 * self.exposed_s:.1f} ms; the first "
            "step is left out"
        )


def fits_chips(plan: Plan, problem: Problem) -> bool:
    """Whether every cell's accelerator holds what it must."""
    ledgers = peak_memory(plan, problem).values()
    return all(x.peak_bytes <= x.limit_bytes for x in ledgers)


def added_s(
    draft: PlanDraft, offered: Sequence[BalancedKnobs], imbalance: Imbalance
) -> dict[BalancedKnobs, float]:
    """Return what closed forms add to a draft's step of even routing under some knobs [s]."""
    costs = {knobs: imbalance.of(draft, knobs) for knobs in offered}
    m = max(draft.data.microbatches)
    return {knobs: m * cost.microbatch_s + cost.step_s for knobs, cost in costs.items()}


def best_balance(
    problem: Problem,
    draft: PlanDraft,
    offered: Sequence[BalancedKnobs],
    imbalance: Imbalance,
    *,
    below: Callable[[float], float] = lambda least: math.inf,
    contention: bool = True,
    late: Callable[[], bool] = lambda: False,
) -> Balanced | None:
    """Simulate a draft under no lending and under the most promising knobs that fit; the fastest.

    None if none fits, or all are far off.

    Args:
        problem: see there. draft: with its experts. offered: of ``balances``.
        imbalance: of the problem. below: from the least [s] that closed forms add to what they may
            add at most, beyond which nothing is simulated. contention: transfers share links.
        late: True when no other plan than the one in progress may be simulated.
    """
    added = added_s(draft, offered, imbalance)
    found: list[Balanced] = []
    lending, most = 0, below(min(added.values(), default=0.0))
    for knobs in sorted(offered, key=lambda k: (k.balancer != "none", added[k])):
        if lending == PROMISING or (found and late()):
            break
        if added[knobs] > most:
            continue
        start = imbalance.with_routing(draft, knobs)
        full = compose(problem, [("balanced", knobs)], start=start)
        plan = lower(problem, full)
        if fits_chips(plan, problem):
            run = simulate(plan, problem, steps=STEPS, contention=contention)
            seconds = report_of(run, problem).metrics.step_time_s
            found.append(Balanced(draft=full, knobs=knobs, plan=plan, run=run, step_s=seconds))
            lending += knobs.balancer != "none"
    return min(found, key=lambda b: b.step_s, default=None)


def expert_facts(problem: Problem, draft: PlanDraft) -> ExpertFacts | None:
    """Return what the balancer of a draft does, None for a draft without one.

    Args:
        problem: see there. draft: complete.
    """
    if "balanced" not in draft.knobs:
        return None
    knobs = msgspec.convert(draft.knobs["balanced"], BalancedKnobs)
    times = times_of(problem, draft, knobs, STEPS)
    loads, static = times.loads[1:], times.static_loads[1:]
    layers = sum(b.num_experts > 0 for b in problem.model.blocks)
    stages = 1 + max(c.stage for c in draft.cells)
    each = layers / stages / min(layers, LAYERS)
    degree, before = (x.std(axis=2).mean(axis=0) for x in (loads, static))
    return ExpertFacts(
        balancer=knobs.balancer,
        ep=draft.expert.ep,
        slots=knobs.slots if knobs.balancer != "none" else 0,
        period=knobs.period,
        load=load_ratio(loads).mean,
        static_load=load_ratio(static).mean,
        balance_degree=float(degree.mean()),
        rb=float(np.minimum(before / np.maximum(degree, 1e-9), 1e9).mean()),
        transfer_s=float(times.transfer_s[1:].mean()) * each,
        exposed_s=float(times.exposed_s[1:].mean()) * each,
    )
