"""What each site does to hold its share of a structure, and how fast it is by itself.

What the accelerators of a site do not hold is recomputed, or has its optimizer on the site's hosts:
of the layers as few as it takes. A site's steps depend on nobody else's, so its pace is that of a
plan of its chips alone: a fixed part (host traffic, sums) and so much per microbatch, from two
simulations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from sim.cost.ledger import peak_memory
from sim.engine.simulate import simulate
from sim.errors import InputError
from sim.plan.draft import DataKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.placement import Recompute
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.report import report_of
from strategies.compose import compose
from strategies.data.local_sgd import LocalKnobs
from strategies.lowering.updates import Clipping
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.policies import STEPS
from strategies.recompute.recompute import recompute_modes
from strategies.search.hosted import shortfall
from strategies.search.options import Choices
from strategies.search.sites import SiteStructure, draft_of_sites

__all__ = ["SiteWay", "SiteWays"]

LOCAL = LocalKnobs(inner=8, overlap=True, bits=8, fragments=4)
"""How sites exchange where only memory is asked for: with all states that an exchange needs."""


class SiteWay(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which all sites hold a structure.

    Args:
        start: draft, sites with their recomputation. hosts: knobs of what lives on hosts, or None.
        fixed_s, pace_s: [s] of a step, and of each microbatch of a replica more, per site.
    """

    start: PlanDraft
    hosts: AutoHeteKnobs | None
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
        self._known: dict[tuple[bytes, AutoHeteKnobs | None], float] = {}

    def of(self, structure: SiteStructure) -> Iterator[SiteWay]:
        """Yield the ways that fit into the accelerators, with the sites' paces."""
        shares = structure.shares[0]
        for start, hosts in self._starts(structure, shares):
            try:
                full = self.full(start, hosts, LOCAL)
                if shortfall(lower(self.problem, full), self.problem).nbytes:
                    continue
                rows = [
                    self._pace(start, hosts, first, dp, m)
                    for first, dp, m in zip(*_replicas(structure), shares, strict=True)
                ]
            except InputError as error:
                self.refused[error.message] += 1
                continue
            fixed, pace = zip(*rows, strict=True)
            yield SiteWay(start=start, hosts=hosts, fixed_s=fixed, pace_s=pace)

    def full(self, start: PlanDraft, hosts: AutoHeteKnobs | None, knobs: LocalKnobs) -> PlanDraft:
        """Complete a draft: what lives on hosts, and how sites exchange.

        Raises:
            InputError: they do not go together.
        """
        chosen = [("offload", hosts)] if hosts is not None else []
        return compose(self.problem, [*chosen, ("local_sgd", knobs)], start=start)

    # -- pace

    def _pace(
        self, start: PlanDraft, hosts: AutoHeteKnobs | None, first: int, dp: int, m: int
    ) -> tuple[float, float]:
        """Fixed time and time per microbatch of a site's steps [s]."""
        few = max(1, m // 2)
        less, more = (self._step(start, hosts, first, dp, x) for x in (few, max(m, few + 1)))
        pace = (more - less) / (max(m, few + 1) - few)
        return max(0.0, less - few * pace), pace

    def _step(
        self, start: PlanDraft, hosts: AutoHeteKnobs | None, first: int, dp: int, m: int
    ) -> float:
        """Pace of the steps of a site alone, whose replicas begin at the ``first`` [s]."""
        mine = [c for c in start.cells if first <= c.replica < first + dp]
        cells = tuple(msgspec.structs.replace(c, replica=c.replica - first) for c in mine)
        data = DataKnobs(microbatches=(m,) * dp)
        alone = msgspec.structs.replace(start, cells=cells, data=data)
        batch = dp * m * start.pipeline.microbatch
        job = msgspec.structs.replace(self.problem.job, global_batch=batch)
        problem = msgspec.structs.replace(self.problem, job=job)
        kinds = [n.accelerator for n in problem.machine.nodes for _ in range(*n.chips)]
        away = hosts is not None and kinds[cells[0].chips[0]] in hosts.accelerators
        key = (msgspec.json.encode((cells, data, start.pipeline)), hosts if away else None)
        if key not in self._known:
            if away:
                alone = compose(problem, [("offload", hosts)], start=alone)
            steps = STEPS if away else 1
            run = simulate(lower(problem, alone), problem, steps=steps, contention=self.contention)
            self._known[key] = report_of(run, problem).metrics.step_time_s
        return self._known[key]

    # -- memory

    def _starts(
        self, structure: SiteStructure, shares: tuple[int, ...]
    ) -> Iterator[tuple[PlanDraft, AutoHeteKnobs | None]]:
        """Drafts of a structure, and what they keep on hosts, whose accelerators hold them."""
        modes, sites = self._modes(), range(len(structure.pools))
        lacks = {m: self._short(structure, shares, m) for m in modes}
        ways: list[list[Recompute | None]] = []
        for site in sites:
            own: list[Recompute | None] = [*[m for m in modes if not lacks[m][site]][:1]]
            hosted = "offload" not in self.choices.forbid and self.choices.offload != "no"
            if own != [modes[0]] and hosted:
                own.append(None)
            ways.append(own)
        for chosen in itertools.product(*ways):
            kept: list[Recompute] = [m or "none" for m in chosen]
            away = [k for k, m in enumerate(chosen) if m is None]
            draft = draft_of_sites(self.problem, structure, shares, kept)
            if not away:
                yield draft, None
            for again in (0, self.problem.model.num_layers) if away else ():
                hosts = self._hosts(structure, draft, away, again)
                if hosts is not None:
                    yield draft, hosts

    def _modes(self) -> list[Recompute]:
        if self.choices.recompute is not None:
            return [self.choices.recompute]
        return list(recompute_modes(self.problem))

    def _short(
        self, structure: SiteStructure, shares: tuple[int, ...], mode: Recompute
    ) -> list[bool]:
        """Which sites lack memory under a mode with nothing on their hosts."""
        draft = draft_of_sites(self.problem, structure, shares, [mode] * len(structure.pools))
        return self._lacking(lower(self.problem, self.full(draft, None, LOCAL)), structure)

    def _lacking(self, plan: Plan, structure: SiteStructure) -> list[bool]:
        ends = list(itertools.accumulate(_dps(structure)))
        lacks = [False] * len(ends)
        for (_, replica), ledger in peak_memory(plan, self.problem).items():
            site = next(k for k, end in enumerate(ends) if replica < end)
            lacks[site] |= ledger.peak_bytes > ledger.limit_bytes
        return lacks

    def _hosts(
        self, structure: SiteStructure, draft: PlanDraft, away: list[int], again: int
    ) -> AutoHeteKnobs | None:
        """The fewest layers whose optimizer must be on the hosts of these sites, None if too many.

        What is on the chip falls with every layer that leaves, so the number is found by halving;
        embedding and head leave last.
        """
        n = self.problem.model.num_layers
        kinds = tuple(dict.fromkeys(structure.pools[k].accelerator for k in away))
        rest = {p.accelerator for k, p in enumerate(structure.pools) if k not in away}
        if rest & set(kinds):
            self.refused["sites of one kind of accelerator would keep unlike things on hosts"] += 1
            return None
        clipping: Clipping = "global" if self.problem.job.dtype == "fp16" else "none"
        base = AutoHeteKnobs(checkpointed=again, accelerators=kinds, clipping=clipping)

        def with_layers(count: int) -> AutoHeteKnobs:
            return msgspec.structs.replace(base, optimizer=min(count, n), outer=count > n)

        def fits(count: int) -> bool:
            full = self.full(draft, with_layers(count), LOCAL)
            return not any(self._lacking(lower(self.problem, full), structure))

        try:
            count = _fewest(fits, n + 1)
        except InputError as error:
            self.refused[error.message] += 1
            return None
        return None if count is None else with_layers(count)


def _fewest(fits: Callable[[int], bool], most: int) -> int | None:
    """The smallest of 1 to ``most`` that fits, where all above do; None if not even that."""
    if not fits(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _dps(structure: SiteStructure) -> list[int]:
    return [s.dp for s in structure.slabs]


def _replicas(structure: SiteStructure) -> tuple[list[int], list[int]]:
    """First replica of each site, and how many it has."""
    dps = _dps(structure)
    return list(itertools.accumulate(dps, initial=0))[:-1], dps
