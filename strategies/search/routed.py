"""Routing in a search: what uneven experts cost a plan, and which balancer serves it best.

A job may say how its tokens are routed. Then a plan whose experts are spread over replicas is as
fast as its fullest device, so its balancer is a choice like any other: structures are compared with
what closed forms say of it (strategies.expert.step_times), finalists are simulated under each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from strategies.expert.balancers import get_balancer
from strategies.expert.draft_costs import costs_of, expert_layers
from strategies.expert.layer_cost import LayerCosts
from strategies.expert.routing import Routing, for_sources, load_ratio
from strategies.expert.routing_synthetic import Popularity, drawn
from strategies.expert.step_times import Balancing, StepCosts, StepTimes, step_times
from strategies.search.options import Choices

__all__ = [
    "Balanced", "ExpertFacts", "Imbalance", "Unevenness", "balances", "best_balance", "even_note",
    "expert_facts", "fits_chips", "STEPS",
]  # fmt: skip

SAMPLE, LAYERS = 5, 4
"""Steps, and layers, that closed forms look at; the layers stand for all."""
SHOWN = 24
"""Steps over which a plan's distribution is shown."""
SEED = 0
STEPS = 6
"""Steps of a plan that are simulated: routing differs from one to the next."""


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


class Unevenness(msgspec.Struct, frozen=True, kw_only=True):
    """What routing costs a plan beyond even routing [s].

    Args:
        microbatch_s: of a microbatch. step_s: of a step besides: transfers that nothing hides.
    """

    microbatch_s: float = 0.0
    step_s: float = 0.0


def balances(problem: Problem, draft: PlanDraft, choices: Choices) -> list[BalancedKnobs]:
    """Knobs of ``balanced`` that a draft may have under the job's routing; none where it has none.

    Args:
        problem: whose job. draft: with its experts. choices: "balanced" forbidden leaves plain
            expert parallelism.
    """
    routing = problem.job.routing
    if routing is None or draft.expert.ep == 1:
        return []
    popularity = msgspec.convert(routing.numbers, Popularity)
    found = [
        msgspec.structs.replace(k, popularity=popularity, trace=routing.trace)
        for k in BALANCED.space(problem, draft).values
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
    """How the experts of a plan are balanced; loads by closed forms over a few steps.

    Args:
        balancer, slots, period: see strategies.expert.balanced. ep: replicas that share experts.
        load, static_load: fullest device over the mean, and with plain expert parallelism.
        balance_degree: standard deviation of the devices' tokens, of a microbatch; mean over steps
            and layers. rb: that of plain expert parallelism over it (Pro-Prophet), likewise.
        transfer_s, exposed_s: [s] that lent experts travel in a step, and what of it nothing hides.
        step_p50_s, step_p95_s: [s] of a step of the job: the simulated one, and how it varies with
            the load of the first group by closed forms.
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
    step_p50_s: float
    step_p95_s: float

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
            f"{1e3 * self.transfer_s:.1f} ms, exposed {1e3 * self.exposed_s:.1f} ms; step p50 "
            f"{self.step_p50_s:.4g} s, p95 {self.step_p95_s:.4g} s"
        )


class Imbalance:
    """What routing costs, by closed forms; each group of chips and balancer once.

    Args:
        problem: with a job that names its routing.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: dict[bytes, tuple[int, Unevenness]] = {}

    def of(self, draft: PlanDraft, knobs: BalancedKnobs | None) -> Unevenness:
        """Return the cost of a draft under knobs, on the first group of its experts.

        Args:
            draft: with cells, sizes and cuts. knobs: of ``balanced``, None for even routing.
        """
        if knobs is None:
            return Unevenness()
        cells = [c for c in draft.cells if c.replica < draft.expert.ep]
        key = msgspec.json.encode((cells, draft.expert.ep, draft.pipeline.cuts, knobs))
        if key not in self._known:
            self._known[key] = (draft.pipeline.microbatch, self._priced(draft, knobs))
        size, found = self._known[key]
        # Loads follow shares of tokens, so a microbatch of another size costs in proportion.
        scaled = found.microbatch_s * draft.pipeline.microbatch / size
        return msgspec.structs.replace(found, microbatch_s=scaled)

    def _priced(self, draft: PlanDraft, knobs: BalancedKnobs) -> Unevenness:
        even, real = self.times(draft, None), self.times(draft, knobs)
        work = [t.exchange_s + t.expert_s for t in (even, real)]
        stages = 1 + max(c.stage for c in draft.cells)
        layers = sum(b.num_experts > 0 for b in self.problem.model.blocks)
        each = layers / stages / min(layers, LAYERS)
        return Unevenness(
            microbatch_s=max(0.0, float((work[1] - work[0]).mean())) * each,
            step_s=float((real.exposed_s + real.plan_s).mean()) * each,
        )

    def times(
        self, draft: PlanDraft, knobs: BalancedKnobs | None, steps: int = SAMPLE
    ) -> StepTimes:
        """Simulate some steps of one microbatch by closed forms; even routing without knobs."""
        layers = expert_layers(self.problem, draft)[:LAYERS]
        known: dict[tuple[int, bool], LayerCosts] = {}
        costs = []
        for layer in layers:
            key = (layer.position, layer.before < 0)
            if key not in known:
                known[key] = costs_of(self.problem, draft, layer, knobs.search_s if knobs else 0.0)
            costs.append(known[key])
        routing = _routing(self.problem, draft, len(layers), knobs, steps)
        balancing = Balancing(
            balancer=get_balancer(knobs.balancer if knobs else "none"),
            budget=knobs.slots if knobs else 0,
            period=knobs.period if knobs else 1,
            fresh=knobs.fresh if knobs else False,
            scheduled=knobs.overlap if knobs else True,
        )
        return step_times(routing, StepCosts(layers=tuple(costs)), balancing)


def _routing(
    problem: Problem, draft: PlanDraft, layers: int, knobs: BalancedKnobs | None, steps: int
) -> Routing:
    """Counts of microbatches."""
    block = next(b for b in problem.model.blocks if b.num_experts)
    tokens = draft.pipeline.microbatch * problem.job.sequence_length * block.top_k
    if knobs is not None and knobs.trace:
        from strategies.expert.routing_files import load_routing

        found = for_sources(load_routing(knobs.trace), draft.expert.ep).counts
        found = found[:steps, :layers]
        scale = tokens / found.sum(axis=(2, 3), keepdims=True) * draft.expert.ep
        return Routing(np.rint(found * scale).astype(np.int64), knobs.trace)
    popularity = Popularity(balanced=True) if knobs is None else knobs.popularity
    return drawn(
        steps=steps,
        layers=layers,
        experts=block.num_experts,
        sources=draft.expert.ep,
        tokens=tokens,
        seed=SEED,
        popularity=popularity,
    )


def fits_chips(plan: Plan, problem: Problem) -> bool:
    """Whether every cell's accelerator holds what it must."""
    ledgers = peak_memory(plan, problem).values()
    return all(x.peak_bytes <= x.limit_bytes for x in ledgers)


def best_balance(
    problem: Problem,
    draft: PlanDraft,
    offered: Sequence[BalancedKnobs],
    imbalance: Imbalance,
    *,
    below: float = math.inf,
    contention: bool = True,
) -> Balanced | None:
    """Simulate a draft under the most promising of some knobs and under no lending; the faster.

    None if none fits or is promising.

    Args:
        problem: see there. draft: with its experts. offered: of ``balances``.
        imbalance: of the problem. below: [s] that closed forms may add to a step at most.
        contention: transfers share links.
    """
    m, fit = max(draft.data.microbatches), []
    for knobs in offered:
        full = compose(problem, [("balanced", knobs)], start=draft)
        plan = lower(problem, full)
        if fits_chips(plan, problem):
            cost = imbalance.of(draft, knobs)
            fit.append((m * cost.microbatch_s + cost.step_s, knobs, full, plan))
    fit.sort(key=lambda f: f[0])
    found = []
    for added, knobs, full, plan in [*fit[:1], *(f for f in fit[1:] if f[1].balancer == "none")]:
        if added < below:
            run = simulate(plan, problem, steps=STEPS, contention=contention)
            seconds = report_of(run, problem).metrics.step_time_s
            found.append(Balanced(draft=full, knobs=knobs, plan=plan, run=run, step_s=seconds))
    return min(found, key=lambda b: b.step_s, default=None)


def expert_facts(problem: Problem, draft: PlanDraft, batch_s: float) -> ExpertFacts | None:
    """Return what the balancer of a draft does, None for a draft without one.

    Args:
        problem: see there. draft: complete. batch_s: [s] of a step of the job, by the engine.
    """
    if "balanced" not in draft.knobs:
        return None
    knobs = msgspec.convert(draft.knobs["balanced"], BalancedKnobs)
    times = Imbalance(problem).times(draft, knobs, SHOWN)
    static = load_ratio(times.static_loads)
    layers = sum(b.num_experts > 0 for b in problem.model.blocks)
    stages = 1 + max(c.stage for c in draft.cells)
    each = layers / stages / min(layers, LAYERS)
    work = draft.data.microbatches[0] * (times.exchange_s + times.expert_s) + times.exposed_s
    steps = batch_s + each * (work - work.mean())
    p50, p95 = np.percentile(steps, (50, 95))
    return ExpertFacts(
        balancer=knobs.balancer,
        ep=draft.expert.ep,
        slots=knobs.slots if knobs.balancer != "none" else 0,
        period=knobs.period,
        load=times.load.mean,
        static_load=static.mean,
        balance_degree=float(times.balance_degree.mean()),
        rb=float(np.minimum(times.rb, 1e9).mean()),
        transfer_s=float(times.transfer_s.mean()) * each,
        exposed_s=float(times.exposed_s.mean()) * each,
        step_p50_s=float(p50),
        step_p95_s=float(p95),
    )
