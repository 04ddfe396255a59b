"""What each site does to hold its share of a structure.

What the accelerators of a site do not hold is recomputed, or has its optimizer on the site's hosts:
of the layers as few as it takes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from sim.cost.ledger import peak_memory
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.placement import Recompute
from sim.plan.plan import Plan
from sim.problem import Problem
from strategies.compose import compose
from strategies.data.local_sgd import LocalKnobs
from strategies.expert.balanced import BalancedKnobs
from strategies.lowering.updates import Clipping
from strategies.offload.autohete import AutoHeteKnobs
from strategies.recompute.recompute import recompute_modes
from strategies.search.options import Choices
from strategies.search.sites import SiteStructure, draft_of_sites

__all__ = ["LOCAL", "SiteMemory", "complete", "modes", "replicas_of"]

LOCAL = LocalKnobs(inner=8, overlap=True, bits=8, fragments=4)
"""How sites exchange where only memory is asked for: with all states that an exchange needs."""


def complete(
    problem: Problem,
    start: PlanDraft,
    hosts: AutoHeteKnobs | None,
    knobs: LocalKnobs,
    balance: BalancedKnobs | None = None,
) -> PlanDraft:
    """Complete a draft: lent experts, what lives on hosts, and how sites exchange.

    Raises:
        InputError: they do not go together.
    """
    chosen: list[tuple[str, msgspec.Struct]] = [("local_sgd", knobs)]
    chosen += [("offload", hosts)] if hosts is not None else []
    chosen += [("balanced", balance)] if balance is not None else []
    return compose(problem, chosen, start=start)


def modes(problem: Problem, choices: Choices) -> list[Recompute]:
    """Modes of recomputation to try, least first."""
    if choices.recompute is not None:
        return [choices.recompute]
    return list(recompute_modes(problem))


def replicas_of(structure: SiteStructure) -> tuple[list[int], list[int]]:
    """First replica of each site, and how many it has."""
    dps = [s.dp for s in structure.slabs]
    return list(itertools.accumulate(dps, initial=0))[:-1], dps


class SiteMemory:
    """What fits where.

    Args:
        problem, choices: as of the search. refused: filled with why some could not be planned.
    """

    def __init__(self, problem: Problem, choices: Choices, refused: Counter[str]) -> None:
        self.problem, self.choices, self.refused = problem, choices, refused

    def starts(
        self, structure: SiteStructure, shares: tuple[int, ...], balance: BalancedKnobs | None
    ) -> Iterator[tuple[PlanDraft, AutoHeteKnobs | None]]:
        """Drafts of a structure, and what they keep on hosts, whose accelerators hold them."""
        every, sites = modes(self.problem, self.choices), range(len(structure.pools))
        lacks = {m: self._short(structure, shares, m, balance) for m in every}
        ways: list[list[Recompute | None]] = []
        for site in sites:
            own: list[Recompute | None] = [*[m for m in every if not lacks[m][site]][:1]]
            hosted = "offload" not in self.choices.forbid and self.choices.offload != "no"
            if own != [every[0]] and hosted:
                own.append(None)
            ways.append(own)
        for chosen in itertools.product(*ways):
            kept: list[Recompute] = [m or "none" for m in chosen]
            away = [k for k, m in enumerate(chosen) if m is None]
            draft = draft_of_sites(self.problem, structure, shares, kept)
            if not away:
                yield draft, None
            for again in (0, self.problem.model.num_layers) if away else ():
                hosts = self._hosts(structure, draft, away, again, balance)
                if hosts is not None:
                    # Recomputing beside that would only be slower.
                    yield draft, hosts
                    break

    def _short(
        self,
        structure: SiteStructure,
        shares: tuple[int, ...],
        mode: Recompute,
        balance: BalancedKnobs | None,
    ) -> list[bool]:
        """Which sites lack memory under a mode with nothing on their hosts."""
        draft = draft_of_sites(self.problem, structure, shares, [mode] * len(structure.pools))
        full = complete(self.problem, draft, None, LOCAL, balance)
        return self._lacking(lower(self.problem, full), structure)

    def _lacking(self, plan: Plan, structure: SiteStructure) -> list[bool]:
        ends = list(itertools.accumulate(replicas_of(structure)[1]))
        lacks = [False] * len(ends)
        for (_, replica), ledger in peak_memory(plan, self.problem).items():
            site = next(k for k, end in enumerate(ends) if replica < end)
            lacks[site] |= ledger.peak_bytes > ledger.limit_bytes
        return lacks

    def _hosts(
        self,
        structure: SiteStructure,
        draft: PlanDraft,
        away: list[int],
        again: int,
        balance: BalancedKnobs | None,
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
            full = complete(self.problem, draft, with_layers(count), LOCAL, balance)
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
