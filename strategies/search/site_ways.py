"""How fast each site is by itself, in every way that holds its share of a structure.

A site's steps depend on nobody else's, so its pace is that of a plan of its chips alone: a fixed
part (host traffic, sums) and so much per microbatch, by closed forms, then from two simulations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from sim.cost.host_links import update_seconds
from sim.cost.ledger import knobs_of
from sim.cost.offload import host_ledgers
from sim.engine.simulate import simulate
from sim.errors import InputError
from sim.plan.draft import DataKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.report import report_of
from strategies.compose import compose
from strategies.expert.balanced import BalancedKnobs
from strategies.offload.autohete import AutoHeteKnobs
from strategies.search.costs import Costs
from strategies.search.hosted import shortfall
from strategies.search.options import Choices
from strategies.search.relax import without_memory
from strategies.search.routed import balances
from strategies.search.routed_times import Imbalance
from strategies.search.site_memory import LOCAL, SiteMemory, complete, modes, replicas_of
from strategies.search.sites import SiteStructure, draft_of_sites, pace_of
from strategies.search.slab import RECOMPUTE

__all__ = ["SiteWay", "SiteWays"]

SETTLED = 5
"""Steps that a site alone is simulated where hosts update: the first fill its queues."""


class SiteWay(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which all sites hold a structure.

    Args:
        start: draft, sites with their recomputation. hosts: knobs of what lives on hosts, or None.
        balance: of the experts, None where routing is even.
        fixed_s, pace_s: [s] of a step, and of each microbatch of a replica more, per site.
    """

    start: PlanDraft
    hosts: AutoHeteKnobs | None
    balance: BalancedKnobs | None
    fixed_s: tuple[float, ...]
    pace_s: tuple[float, ...]

    def step_s(self, shares: Sequence[int]) -> float:
        """Time of a step of the slowest site under these shares [s]."""
        rows = zip(self.fixed_s, self.pace_s, shares, strict=True)
        return max(fixed + m * pace for fixed, pace, m in rows)


class SiteWays:
    """Ways of structures; paces of sites are found once.

    Args:
        problem, choices: as of the search. contention: transfers share links.

    Attributes:
        refused: why some could not be planned -> how many.
    """

    def __init__(self, problem: Problem, choices: Choices, contention: bool) -> None:
        self.problem, self.choices, self.contention = problem, choices, contention
        self.refused: Counter[str] = Counter()
        self.memory = SiteMemory(problem, choices, self.refused)
        self.imbalance, self.costs = Imbalance(problem), Costs(without_memory(problem))
        self._known: dict[tuple[bytes, AutoHeteKnobs | None], float] = {}

    def of(self, structure: SiteStructure) -> Iterator[SiteWay]:
        """Yield the ways that fit, with estimates of the sites' paces."""
        shares = structure.shares[0]
        least = [modes(self.problem, self.choices)[0]] * len(structure.pools)
        plain = draft_of_sites(self.problem, structure, shares, least)
        for balance in self._balances(plain):
            for start, hosts in self.memory.starts(structure, shares, balance):
                try:
                    plan = lower(self.problem, complete(self.problem, start, hosts, LOCAL, balance))
                    if shortfall(plan, self.problem).nbytes:
                        continue
                    rows = self._estimates(structure, start, balance, plan)
                except InputError as error:
                    self.refused[error.message] += 1
                    continue
                fixed, pace = zip(*rows, strict=True)
                yield SiteWay(start=start, hosts=hosts, balance=balance, fixed_s=fixed, pace_s=pace)

    def simulated(
        self, structure: SiteStructure, way: SiteWay, shares: Sequence[int]
    ) -> SiteWay | None:
        """A way with paces of sites that were simulated, None where that cannot be planned."""
        try:
            rows = [
                self._pace(way.start, way.hosts, way.balance, first, dp, m)
                for first, dp, m in zip(*replicas_of(structure), shares, strict=True)
            ]
        except InputError as error:
            self.refused[error.message] += 1
            return None
        fixed, pace = zip(*rows, strict=True)
        return msgspec.structs.replace(way, fixed_s=fixed, pace_s=pace)

    def _estimates(
        self,
        structure: SiteStructure,
        start: PlanDraft,
        balance: BalancedKnobs | None,
        plan: Plan,
    ) -> list[tuple[float, float]]:
        """Fixed time and time per microbatch of each site by closed forms [s].

        Gradients leave for hosts behind the last microbatch: their updates pass behind its
        backward and the next forward, about one microbatch, and what is left holds everybody up.
        """
        job, machine = self.problem.job, self.problem.machine
        per_param = job.optimizer_bytes + knobs_of(plan, plan.placement.cells[0]).outer_bytes
        held = {
            machine.nodes[n].site: update_seconds(machine.nodes[n], job) * x.terms["optimizer"]
            for n, x in host_ledgers(plan, self.problem, knobs_of).items()
        }
        found = []
        for slab, (first, dp) in zip(
            structure.slabs, zip(*replicas_of(structure), strict=True), strict=True
        ):
            alone = _alone(start, first, dp, slab.num_microbatches)
            mode = np.array([[RECOMPUTE.index(alone.cells[0].recompute)]])
            fixed, pace = pace_of(self.costs, msgspec.structs.replace(slab, recompute=mode))
            uneven = self.imbalance.of(alone, balance)
            host_s = held.get(slab.pools[0].site, 0.0) / per_param
            fixed += max(0.0, host_s - pace) + uneven.step_s
            found.append((fixed, pace + uneven.microbatch_s))
        return found

    def _balances(self, draft: PlanDraft) -> list[BalancedKnobs | None]:
        """Balancers that structures are compared under: none, and one of ours that lends little."""
        offered = balances(self.problem, draft, self.choices)
        found = [k for k in offered if k.balancer == "none"]
        ours = [k for k in offered if (k.balancer, k.slots) == ("spread", 1)]
        found += sorted(ours, key=lambda k: -k.period)[:1]
        return [*found] or [None]

    # -- pace

    def _pace(
        self,
        start: PlanDraft,
        hosts: AutoHeteKnobs | None,
        balance: BalancedKnobs | None,
        first: int,
        dp: int,
        m: int,
    ) -> tuple[float, float]:
        """Fixed time and time per microbatch of a site's steps [s].

        Simulated with even routing; what the job's costs beyond that is worked out.
        """
        stages = 1 + max(c.stage for c in start.cells)
        away = hosts is not None and self._kind(start, first) in hosts.accelerators
        # What passes to hosts may hide behind all of a step; else few microbatches say it.
        few = max(1, m // 2) if away else min(2 * stages, m)
        counts = few, max(m, few + 1) if away else few + stages
        alone = [_alone(start, first, dp, x) for x in counts]
        less, more = (self._step(draft, hosts if away else None) for draft in alone)
        pace = (more - less) / (counts[1] - few)
        uneven = self.imbalance.of(alone[0], balance)
        return max(0.0, less - few * pace) + uneven.step_s, pace + uneven.microbatch_s

    def _kind(self, draft: PlanDraft, replica: int) -> str:
        """Accelerator of a replica."""
        chip = next(c.chips[0] for c in draft.cells if c.replica == replica)
        return next(n.accelerator for n in self.problem.machine.nodes if chip < n.chips[1])

    def _step(self, alone: PlanDraft, hosts: AutoHeteKnobs | None) -> float:
        """Pace of the steps of a site alone [s]."""
        cells, data, pipeline = alone.cells, alone.data, alone.pipeline
        batch = sum(data.microbatches) * pipeline.microbatch
        job = msgspec.structs.replace(self.problem.job, global_batch=batch)
        problem = msgspec.structs.replace(self.problem, job=job)
        what = (cells, data, pipeline, alone.expert, alone.tensor)
        key = (msgspec.json.encode(what), hosts)
        if key not in self._known:
            if hosts is not None:
                alone = compose(problem, [("offload", hosts)], start=alone)
            steps = SETTLED if hosts is not None else 1
            run = simulate(lower(problem, alone), problem, steps=steps, contention=self.contention)
            self._known[key] = report_of(run, problem).metrics.step_time_s
        return self._known[key]


def _alone(start: PlanDraft, first: int, dp: int, m: int) -> PlanDraft:
    """The replicas of one site, which begin at the ``first``, with ``m`` microbatches each."""
    mine = [c for c in start.cells if first <= c.replica < first + dp]
    cells = tuple(msgspec.structs.replace(c, replica=c.replica - first) for c in mine)
    return msgspec.structs.replace(start, cells=cells, data=DataKnobs(microbatches=(m,) * dp))
