"""Plans of sites that step by themselves, searched: ``strategies.search.sites`` says which.

Structures are looked into in the order of their bounds. For each way in which its sites hold it,
microbatches are shared out by the sites' paces. The best are simulated whole, under every way to
exchange that local SGD offers. Of those the mildest is taken that is nearly as fast as any:
convergence is not simulated, so exchanges used in time, fewer local steps and full precision come
before the last ``MILD`` of speed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from sim.engine.simulate import Run, simulate
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.report import report_of
from strategies.data.local_sgd import LOCAL_SGD, LocalKnobs
from strategies.expert.balanced import BalancedKnobs
from strategies.search.board import Progress
from strategies.search.options import Choices
from strategies.search.pools import Pool
from strategies.search.routed import balances, fits_chips
from strategies.search.site_memory import complete
from strategies.search.site_ways import SiteWay, SiteWays
from strategies.search.sites import (
    SiteStructure,
    name_of_sites,
    site_pools,
    site_structures,
    why_no_sites,
)

__all__ = ["MILD", "Rounds", "SitePlan", "rounds_of_sites"]

MILD = 1.02
"""A milder way to exchange may be slower than the fastest by this factor."""
MOST = 48
"""Most structures that are looked into, those with the least bound first."""
REFINED = 4
"""Ways whose sites are simulated, those with the least estimate first."""
ROUNDS = 12
"""Rounds simulated: a slow site falls behind for some before all keep its pace."""


class SitePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of this family.

    Args:
        structure, way, shares: whose. knobs: how sites exchange. balance: of the experts, None
            where routing is even. draft: complete.
        plan, run: lowered, and a few rounds of it. batch_s: [s] per global batch.
    """

    structure: SiteStructure
    way: SiteWay
    shares: tuple[int, ...]
    knobs: LocalKnobs
    balance: BalancedKnobs | None
    draft: PlanDraft
    plan: Plan
    run: Run
    batch_s: float

    @property
    def batches(self) -> int:
        """Global batches in a step of the plan."""
        return self.knobs.inner // self.knobs.fragments


class _Candidate(msgspec.Struct, frozen=True, kw_only=True):
    structure: SiteStructure
    way: SiteWay
    shares: tuple[int, ...]
    step_s: float


class Rounds(msgspec.Struct, kw_only=True):
    """What the search came to; filled while it runs.

    Attributes:
        found: plans, best first. space: structures. tried, cut: looked into, and cut by bounds.
        refused: why structures could not be planned -> how many. why_not: why none were looked at.
        stopped: before its end.
    """

    found: list[SitePlan] = []
    space: int = 0
    tried: int = 0
    cut: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    why_not: str = ""
    stopped: bool = False


def rounds_of_sites(
    problem: Problem,
    pools: Sequence[Pool],
    choices: Choices,
    *,
    best: float = math.inf,
    contention: bool = True,
    late: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Rounds:
    """Search plans whose sites step by themselves; Ctrl-C keeps what is found.

    Args:
        problem, pools, choices: as of the search. best: [s] per batch that plans must beat.
        contention: transfers share links. late: True when nothing new may be started.
        progress: called with ("sites", i, of how many).
    """
    state = Rounds(why_not=why_no_sites(problem, pools, choices))
    if state.why_not or "local_sgd" in choices.forbid:
        return state
    even, ways = "uneven" in choices.forbid, SiteWays(problem, choices, contention)
    known: list[_Candidate] = []
    try:
        every = site_structures(problem, site_pools(problem, pools), choices, even=even)
        state.space = len(every)
        for i, structure in enumerate(every[:MOST]):
            if structure.bound_s >= best:
                state.cut = len(every) - i
                break
            if late():
                state.stopped = True
                break
            if progress is not None:
                progress("sites", i + 1, min(len(every), MOST))
            known += [c for c in _candidates(ways, structure, even) if c.step_s < best]
            known.sort(key=lambda c: c.step_s)
            state.tried += 1
        for lends in (True, False):
            # Closed forms say what lending gives, so the best without is simulated as well.
            some = [c for c in known if _lends(c.way) == lends]
            for candidate in _refined(ways, some, even, late):
                played = _Played(problem, ways, candidate, contention).best()
                if played:
                    state.found.append(played)
                    break
        state.stopped |= bool(known) and late()
    except KeyboardInterrupt:
        state.stopped = True
    state.found.sort(key=lambda p: p.batch_s)
    state.refused = ways.refused
    return state


def _candidates(ways: SiteWays, structure: SiteStructure, even: bool) -> list[_Candidate]:
    """A structure in every way that fits, under the shares that suit it best."""
    return [_candidate(structure, way, even) for way in ways.of(structure)]


def _refined(
    ways: SiteWays, known: Sequence[_Candidate], even: bool, late: Callable[[], bool]
) -> list[_Candidate]:
    """The most promising candidates with paces of sites that were simulated, best first."""
    found: list[_Candidate] = []
    for rough in known[:REFINED]:
        if late():
            break
        way = ways.simulated(rough.structure, rough.way, rough.shares)
        if way is not None:
            found.append(_candidate(rough.structure, way, even))
    return sorted(found, key=lambda c: c.step_s)


def _lends(way: SiteWay) -> bool:
    return way.balance is not None and way.balance.balancer != "none"


def _candidate(structure: SiteStructure, way: SiteWay, even: bool) -> _Candidate:
    shares = structure.shares[0] if even else _best_shares(structure, way)
    return _Candidate(structure=structure, way=way, shares=shares, step_s=way.step_s(shares))


def _best_shares(structure: SiteStructure, way: SiteWay) -> tuple[int, ...]:
    """Microbatches per replica under which the slowest site is fastest: all are looked at."""
    dps = [s.dp for s in structure.slabs]
    total = sum(d * m for d, m in zip(dps, structure.shares[0], strict=True))
    heads = itertools.product(*(range(1, total // d + 1) for d in dps[:-1]))
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for head in heads:
        left = total - sum(d * m for d, m in zip(dps, head, strict=False))
        if left > 0 and left % dps[-1] == 0:
            shares = (*head, left // dps[-1])
            best = min(best, (way.step_s(shares), shares))
    return best[1]


class _Played:
    """Simulates a candidate whole."""

    def __init__(
        self, problem: Problem, ways: SiteWays, candidate: _Candidate, contention: bool
    ) -> None:
        self.problem, self.ways, self.contention = problem, ways, contention
        self.candidate = candidate
        counts = [
            (m,) * slab.dp
            for slab, m in zip(candidate.structure.slabs, candidate.shares, strict=True)
        ]
        start = candidate.way.start
        data = msgspec.structs.replace(start.data, microbatches=tuple(itertools.chain(*counts)))
        name = name_of_sites(candidate.structure, candidate.shares)
        self.start = msgspec.structs.replace(start, data=data, name=name)

    def best(self) -> SitePlan | None:
        """Under the mildest way to exchange that is nearly as fast as any, the best balancer.

        What an exchange takes comes from a round of one step; how fast each way is, from that.
        """
        offered = [k for k in LOCAL_SGD.space(self.problem, self.start).values if k.inner]
        step_s, whole_s = self.candidate.step_s, self._exchange_s()

        def pace(knobs: LocalKnobs) -> float:
            each = whole_s * knobs.bits / 32 / knobs.inner
            return max(step_s, each) if knobs.overlap else step_s + each

        near = [k for k in offered if pace(k) <= MILD * min(map(pace, offered))]
        balance = self._balance()
        for knobs in sorted(near, key=lambda k: (k.overlap, k.inner, -k.bits)):
            found = self._simulated(knobs, balance)
            if found:
                return found
        return None

    def _exchange_s(self) -> float:
        """What everybody waits for an exchange in full precision [s]."""
        try:
            draft = complete(
                self.problem, self.start, self.candidate.way.hosts, LocalKnobs(inner=1)
            )
        except InputError:
            return math.inf
        run = simulate(lower(self.problem, draft), self.problem, contention=self.contention)
        graph, out = run.layout.graph, run.outcome
        ways = [k for k, op in enumerate(graph.ops) if op.kind == "ALL_REDUCE"]
        return float(max(out.end[k] - out.start[k] for k in ways))

    def _balance(self) -> BalancedKnobs | None:
        """The most promising balancer, by closed forms on the first site."""
        offered = balances(self.problem, self.start, self.ways.choices)
        if not offered:
            return None
        m = self.candidate.shares[0]

        def costs(knobs: BalancedKnobs) -> float:
            found = self.ways.imbalance.of(self.start, knobs)
            return m * found.microbatch_s + found.step_s

        lends = self.candidate.way.balance
        most = lends.slots if lends is not None else 0
        fit = [k for k in offered if k.slots <= most and k.balancer != "none"]
        if not _lends(self.candidate.way):
            fit = [k for k in offered if k.balancer == "none"]
        return min(fit, key=costs)

    def _simulated(self, knobs: LocalKnobs, balance: BalancedKnobs | None) -> SitePlan | None:
        """The candidate exchanged and balanced in one way, None where that cannot be."""
        candidate = self.candidate
        try:
            draft = complete(self.problem, self.start, candidate.way.hosts, knobs, balance)
            plan = lower(self.problem, draft)
        except InputError as error:
            self.ways.refused[error.message] += 1
            return None
        if not fits_chips(plan, self.problem):
            return None
        run = simulate(plan, self.problem, steps=ROUNDS, contention=self.contention)
        seconds = report_of(run, self.problem).metrics.step_time_s / knobs.inner * knobs.fragments
        if balance == candidate.way.balance:
            # The pace of these rounds may still be shorter than the steady one.
            seconds = max(seconds, candidate.step_s)
        return SitePlan(
            structure=candidate.structure,
            way=candidate.way,
            shares=candidate.shares,
            knobs=knobs,
            balance=balance,
            draft=draft,
            plan=plan,
            run=run,
            batch_s=seconds,
        )
