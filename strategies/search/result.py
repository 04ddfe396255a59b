"""What a search found, and what it rests on."""

from __future__ import annotations

import msgspec

from sim.engine.simulate import Run
from sim.plan.draft import PlanDraft
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.document import PlanDocument
from strategies.search.hosted import HostedStage
from strategies.search.options import FORBIDDEN
from strategies.search.pools import Pool
from strategies.search.routed import ExpertFacts

__all__ = ["Finalist", "OffloadDocument", "OffloadFacts", "SearchResult", "SiteFacts", "Without"]


class Finalist(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was simulated.

    Args:
        plan: complete. estimate_s: [s] step time by the recurrence, messages in step.
        step_time_s: [s] by the engine, or the estimate when the search was stopped before.
        score: what was minimised: the time of a batch, or [USD] per batch.
        simulated: True when ``step_time_s`` is the engine's.
        batches: of the job in a step of the plan.
    """

    plan: Plan
    estimate_s: float
    step_time_s: float
    score: float
    simulated: bool = True
    batches: int = 1


class OffloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Why the best plan offloads, and what it keeps on the host.

    Args:
        why: in words. stages: per pipeline position. proven: nothing else on the host is faster for
            this structure.
    """

    why: str
    stages: tuple[HostedStage, ...]
    proven: bool


class SiteFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One site of a plan whose sites step by themselves.

    Args:
        site, accelerator: where. replicas: of it. microbatches: of each. step_s: [s] of a step of
            the site alone.
    """

    site: str
    accelerator: str
    replicas: int
    microbatches: int
    step_s: float

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"{self.replicas} replicas on {self.accelerator} take {self.microbatches} "
            f"microbatches each, {self.step_s:.4g} s a step"
        )


class Without(msgspec.Struct, frozen=True, kw_only=True):
    """The search without one strategy.

    Args:
        name: what was forbidden. plan: the best plan then, "" where nothing fits.
        tokens_per_s: of it, 0 where nothing fits. chips: that hold a rank of it.
        gain: share by which the whole search's plan is faster; 0 for nothing, and where nothing
            fits without. unfit: why nothing fits, or "".
    """

    name: str
    plan: str = ""
    tokens_per_s: float = 0.0
    chips: int = 0
    gain: float = 0.0
    unfit: str = ""

    @property
    def text(self) -> str:
        """In words."""
        what = FORBIDDEN[self.name]
        if self.unfit:
            return f"without {what}: nothing fits, {self.unfit}"
        gave = f"gave {100 * self.gain:.1f} %" if self.gain > 5e-4 else "gave nothing"
        return (
            f"without {what}: {self.tokens_per_s:,.0f} tokens/s on {self.chips} chips "
            f"({self.plan}); it {gave}"
        )


class OffloadDocument(PlanDocument, frozen=True, kw_only=True):
    """Answer of ``hetlab plan`` where offloading, or steps of sites, were looked at.

    Args:
        offload: None when the best plan does not offload. notes: as of ``SearchResult``.
        sites: that step by themselves, () when none do. experts: as of ``SearchResult``.
        without: the same search without one strategy each, where asked for.
    """

    offload: OffloadFacts | None
    notes: tuple[str, ...]
    sites: tuple[SiteFacts, ...] = ()
    experts: ExpertFacts | None = None
    without: tuple[Without, ...] = ()


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan and how it was found.

    Args:
        problem: what was planned. plan: the best one. run: its simulation, one step.
        finalists: simulated plans, best first.
        space: plans of the space; before their layers are split, unless ``whole``.
        evaluated: plans whose time was estimated or computed; exact: those by the recurrence.
        pruned: rule -> how many of the space were cut (see strategies.search.structures).
        wall_s: [s] of the whole search.
        bound_s: [s] m * L / sum(stages / layer time), the least over all structures that fit into
            memory; step times of the space cannot be below it.
        plan_bound_s: [s] the same for the sizes of the best plan.
        whole: the space was evaluated completely by the recurrence. stopped: it was cut short by
            the budget or by Ctrl-C.
        binding: which constraint bound the plan, in words. next_best: what the best plan of
            another structure gives up, in words, or "".
        pools: of the best plan, in the order of stages; () for unlike replicas.
        sub_groups: what sub-groups of a type were tried and gave, in words, or "".
        offload: what the best plan keeps on the host, None when it does not offload; then ``run``
            has several steps, whose pace is the step time, and ``bound_s`` is ``plan_bound_s``, the
            passes of its structure alone.
        notes: what was tried of offloading, refused, or short without it, in words.
        sites: that step by themselves; then a step of the plan is several batches of the job, and
            ``run`` has several of those steps.
        experts: how they are balanced, None where the job names no routing or none are spread.
        draft: of the best plan.
    """

    problem: Problem
    plan: Plan
    run: Run
    finalists: tuple[Finalist, ...]
    space: int
    evaluated: int
    exact: int
    pruned: dict[str, int]
    wall_s: float
    bound_s: float
    plan_bound_s: float
    whole: bool
    stopped: bool
    binding: str
    next_best: str
    pools: tuple[Pool, ...] = ()
    sub_groups: str = ""
    offload: OffloadFacts | None = None
    notes: tuple[str, ...] = ()
    sites: tuple[SiteFacts, ...] = ()
    experts: ExpertFacts | None = None
    draft: PlanDraft = PlanDraft()

    @property
    def step_time_s(self) -> float:
        """Step time of the best plan [s]."""
        return self.finalists[0].step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the best plan."""
        best = self.finalists[0]
        return self.problem.job.tokens * best.batches / best.step_time_s

    @property
    def gap(self) -> float:
        """Time of a batch under the best plan over the bound of the space, minus 1."""
        return self.step_time_s / self.finalists[0].batches / self.bound_s - 1.0

    @property
    def plan_gap(self) -> float:
        """Step time over the bound of the plan's own sizes, minus 1: filling, sums, unevenness."""
        return self.step_time_s / self.finalists[0].batches / self.plan_bound_s - 1.0

    def __repr__(self) -> str:
        """One line: plan, step time, effort."""
        return (
            f"SearchResult({self.plan.name}: {self.step_time_s:.4g} s a step, "
            f"{self.evaluated:,} of {self.space:,} evaluated in {self.wall_s:.2f} s)"
        )
