"""What uneven routing costs a plan by closed forms, on the rows that the plan itself would run.

A draft's tables say what its controller does: which rows are drawn, which balancer with which
keywords. The closed forms read them there, so that they, the plan and its report speak of one run.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.plan.draft import PlanDraft
from sim.plan.plan import Table
from sim.problem import Problem
from strategies.expert.balanced import BALANCED, LENT, ROUTING, BalancedKnobs
from strategies.expert.controllers import searching
from strategies.expert.draft_costs import costs_of, expert_layers
from strategies.expert.layer_cost import LayerCosts
from strategies.expert.routing import Routing
from strategies.expert.routing_synthetic import Popularity, drawn
from strategies.expert.step_times import Balancing, StepCosts, StepTimes, step_times

__all__ = ["LAYERS", "SAMPLE", "Imbalance", "Unevenness", "times_of"]

SAMPLE, LAYERS = 5, 4
"""Steps, the first of which is left out, and layers that closed forms look at."""
SEED = 0


class Unevenness(msgspec.Struct, frozen=True, kw_only=True):
    """What routing costs a plan beyond even routing [s].

    Args:
        microbatch_s: of a microbatch. step_s: of a step besides: transfers that nothing hides.
    """

    microbatch_s: float = 0.0
    step_s: float = 0.0


class Imbalance:
    """What routing costs, by closed forms; each group of chips and balancer once.

    Args:
        problem: with a job that names its routing.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: dict[bytes, Unevenness] = {}
        self._tables: dict[bytes, Table] = {}

    def of(self, draft: PlanDraft, knobs: BalancedKnobs | None) -> Unevenness:
        """Return the cost of a draft under knobs in a steady step, on its first group of experts.

        The first step lends nothing whatever the balancer, so it is left out.

        Args:
            draft: with cells, sizes and cuts. knobs: of ``balanced``, None for even routing.
        """
        if knobs is None:
            return Unevenness()
        cells = [c for c in draft.cells if c.replica < draft.expert.ep]
        sizes = (draft.pipeline.microbatch, draft.data.microbatches[0], draft.pipeline.cuts)
        key = msgspec.json.encode((cells, draft.expert, sizes, draft.tensor, knobs))
        if key not in self._known:
            self._known[key] = self._priced(draft, knobs)
        return self._known[key]

    def _priced(self, draft: PlanDraft, knobs: BalancedKnobs) -> Unevenness:
        popularity = Popularity(balanced=True)
        plain = BalancedKnobs(popularity=popularity)
        even, real = self.times(draft, plain, 1), self.times(draft, knobs)
        usual = float((even.exchange_s + even.expert_s)[0])
        work = (real.exchange_s + real.expert_s)[1:]
        stages = 1 + max(c.stage for c in draft.cells)
        layers = sum(b.num_experts > 0 for b in self.problem.model.blocks)
        each = layers / stages / min(layers, LAYERS)
        return Unevenness(
            microbatch_s=max(0.0, float(work.mean()) - usual) * each,
            step_s=float((real.exposed_s + real.plan_s)[1:].mean()) * each,
        )

    def with_routing(self, draft: PlanDraft, knobs: BalancedKnobs) -> PlanDraft:
        """Return the draft with the table of its routing, which is read or named once."""
        numbers = (draft.expert.ep, draft.pipeline.microbatch, draft.data.microbatches[0])
        where = (draft.pipeline.cuts, draft.cells[0].cp, draft.offload.segments)
        if knobs.trace:  # counts are given, whatever a step holds
            numbers = (draft.expert.ep, 0, 0)
        key = msgspec.json.encode((numbers, where, knobs.popularity, knobs.trace))
        if key not in self._tables:
            plain = BalancedKnobs(popularity=knobs.popularity, trace=knobs.trace)
            self._tables[key] = BALANCED.apply(self.problem, draft, plain).tables[ROUTING]
        return msgspec.structs.replace(draft, tables=draft.tables | {ROUTING: self._tables[key]})

    def times(self, draft: PlanDraft, knobs: BalancedKnobs, steps: int = SAMPLE) -> StepTimes:
        """Steps of one microbatch by closed forms, as the plan of this draft would route them.

        Args:
            draft: with cells, sizes and cuts. knobs: of ``balanced``. steps: from the first.
        """
        start = self.with_routing(draft, knobs)
        return times_of(self.problem, BALANCED.apply(self.problem, start, knobs), knobs, steps)


def times_of(problem: Problem, draft: PlanDraft, knobs: BalancedKnobs, steps: int) -> StepTimes:
    """Steps of one microbatch of a balanced draft by closed forms; some layers stand for all.

    Args:
        problem: see there. draft: with the tables of ``balanced``. knobs: that it was made with.
        steps: from the first.
    """
    lent = draft.tables[LENT].parameters
    search_s = knobs.search_s if "search" in draft.amounts else 0.0
    layers = expert_layers(problem, draft)[:LAYERS]
    known: dict[tuple[int, bool], LayerCosts] = {}
    costs = []
    for layer in layers:
        key = (layer.position, layer.before < 0)
        if key not in known:
            known[key] = costs_of(problem, draft, layer, search_s)
        costs.append(known[key])
    balancing = Balancing(
        balancer=searching(lent["balancer"], lent["options"]),
        budget=lent["budget"],
        period=lent["period"],
        fresh=lent["fresh"],
        scheduled=knobs.overlap,
    )
    return step_times(
        Routing(_rows(draft.tables[ROUTING], [x.key for x in layers], steps), ROUTING),
        StepCosts(layers=tuple(costs), state_bytes=lent["state_bytes"]),
        balancing,
        tokens=lent["tokens"],
    )


def _rows(table: Table, keys: list[str], steps: int) -> NDArray[np.int64]:
    """Counts of the first steps of some layers as a run has them, (T, L, E, S)."""
    if table.origin == "file":
        given = np.stack([table.values[k][:steps] for k in keys], axis=1).astype(np.int64)
        return given[np.minimum(np.arange(steps), len(given) - 1)]
    numbers = dict(table.parameters)
    names = numbers.pop("keys")
    counts = drawn(steps=steps, layers=len(names), seed=SEED, table=ROUTING, **numbers).counts
    return counts[:, [names.index(k) for k in keys]]
