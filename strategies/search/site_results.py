"""Plans of sites that step by themselves as the result of a search, alone or in competition."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from sim.problem import Problem
from strategies.search.finalists import Contender, next_best
from strategies.search.hosted import busiest_stream, hosted_stages
from strategies.search.result import Finalist, OffloadFacts, SearchResult, SiteFacts
from strategies.search.rounds import Rounds, SitePlan
from strategies.search.routed import expert_facts

__all__ = ["of_sites", "price_of_sites"]


def price_of_sites(problem: Problem, accelerators: Sequence[str]) -> float:
    """What a second of chips of these types costs, or 1 where time is the objective."""
    if problem.job.objective != "cost":
        return 1.0
    kinds = problem.machine.accelerators
    return sum(kinds[name].price_per_s for name in accelerators)


def of_sites(problem: Problem, state: Rounds, other: SearchResult | None) -> SearchResult:
    """The better of the plans that were found and those of sites, with the effort of both.

    Args:
        problem: see there. state: with or without plans. other: of the rest of the search, None
            where nothing fits; then there is a plan of sites.
    """
    notes = _notes(state)
    price = _price(problem, state.found[0]) if state.found else 1.0
    if other is not None and (
        not state.found or state.found[0].batch_s * price >= other.finalists[0].score
    ):
        return msgspec.structs.replace(
            other,
            notes=(*other.notes, *notes),
            space=other.space + state.space,
            evaluated=other.evaluated + state.tried,
            stopped=other.stopped or state.stopped,
        )
    played = [(_finalist(problem, p), _contender(p)) for p in state.found]
    finalists = [f for f, _ in played]
    if other is not None:
        finalists = sorted([*finalists, *other.finalists], key=lambda f: f.score)
        played += [
            (f, Contender(draft=state.found[0].draft, estimate_s=f.estimate_s, structure=b"step"))
            for f in other.finalists[:1]
        ]
    best = state.found[0]
    return SearchResult(
        problem=problem,
        plan=best.plan,
        run=best.run,
        finalists=tuple(finalists),
        space=state.space + (other.space if other else 0),
        evaluated=state.tried + (other.evaluated if other else 0),
        exact=other.exact if other else 0,
        pruned=other.pruned if other else {},
        wall_s=0.0,
        bound_s=best.structure.bound_s,
        plan_bound_s=best.structure.bound_s,
        whole=False,
        stopped=state.stopped or (other.stopped if other else False),
        binding=busiest_stream(best.run),
        next_best=next_best(sorted(played, key=lambda p: p[0].score)),
        pools=best.structure.pools,
        offload=_hosted(best),
        notes=(*(other.notes if other else ()), *notes),
        sites=_sites(best),
        experts=expert_facts(problem, best.draft),
        draft=best.draft,
    )


def _price(problem: Problem, plan: SitePlan) -> float:
    cells = plan.plan.placement.cells
    return price_of_sites(problem, [c.accelerator for c in cells for _ in c.ranks])


def _finalist(problem: Problem, plan: SitePlan) -> Finalist:
    return Finalist(
        plan=plan.plan,
        estimate_s=plan.way.step_s(plan.shares) * plan.batches,
        step_time_s=plan.batch_s * plan.batches,
        score=plan.batch_s * _price(problem, plan),
        batches=plan.batches,
    )


def _contender(plan: SitePlan) -> Contender:
    slab = plan.structure.slabs[0]
    sizes = (slab.microbatch, slab.tp.tolist(), slab.num_stages, slab.ep)
    return Contender(
        draft=plan.draft,
        estimate_s=plan.way.step_s(plan.shares),
        structure=repr(("sites", sizes)).encode(),
        plan_bound_s=plan.structure.bound_s,
    )


def _hosted(plan: SitePlan) -> OffloadFacts | None:
    if plan.way.hosts is None:
        return None
    kinds = " and ".join(plan.way.hosts.accelerators)
    why = f"{kinds} would not hold their share; all others keep everything on the chip"
    return OffloadFacts(why=why, stages=hosted_stages(plan.plan), proven=False)


def _sites(plan: SitePlan) -> tuple[SiteFacts, ...]:
    rows = zip(
        plan.structure.pools, plan.structure.slabs, plan.shares, plan.way.fixed_s, plan.way.pace_s,
        strict=True,
    )  # fmt: skip
    return tuple(
        SiteFacts(
            site=pool.site,
            accelerator=pool.accelerator,
            replicas=slab.dp,
            microbatches=m,
            step_s=fixed + m * pace,
        )
        for pool, slab, m, fixed, pace in rows
    )


def _notes(state: Rounds) -> tuple[str, ...]:
    """What was tried, in words; nothing where it could not be."""
    if state.why_not or not state.space:
        return ()
    words = f"sites that step by themselves: {state.tried} of {state.space} structures planned"
    words += f", {state.cut} cut by bounds" if state.cut else ""
    words += "" if state.found else "; none is faster"
    refused = [f"not planned, {n} of them: {why}" for why, n in state.refused.most_common(2)]
    loss = ["what local steps cost in convergence is not simulated"] if state.found else []
    return tuple(itertools.chain([words], refused, loss))
