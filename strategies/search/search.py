"""The one entry point: ``search(problem)`` returns the best plan and what it rests on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sim.engine.simulate import simulate
from sim.errors import HetlabError, InfeasibleError, StoppedError, UsageError
from sim.problem import Problem
from strategies.search.board import GRACE_S, Effort, Progress
from strategies.search.contenders import contenders_of, other_sizes
from strategies.search.costs import Costs
from strategies.search.evaluate import Evaluator
from strategies.search.finalists import Contender, next_best, play
from strategies.search.mixed import MixedPlan
from strategies.search.offloaded import offloaded
from strategies.search.options import choices_of
from strategies.search.pools import Pool, pools_of
from strategies.search.repaired import Offloaded
from strategies.search.replicas import search_replicas
from strategies.search.rescue import competing, rescued, still_infeasible
from strategies.search.result import Finalist, SearchResult
from strategies.search.rounds import rounds_of_sites
from strategies.search.routed import even_note, expert_facts
from strategies.search.routed_play import play_routed
from strategies.search.site_results import of_sites, price_of_sites
from strategies.search.slab import Slab
from strategies.search.store import RunTable
from strategies.search.verdict import binding_constraint, infeasible

__all__ = ["search"]

WIDEN = 4
"""Most simulated plans, as a multiple of ``top``."""


def search(
    problem: Problem,
    *,
    budget: float | None = None,
    pins: Mapping[str, Any] | None = None,
    top: int = 8,
    progress: Progress | None = None,
    store: RunTable | str | Path | None = None,
    contention: bool = True,
    effort: Effort | None = None,
    pools: tuple[Pool, ...] | None = None,
    incumbent: float | None = None,
    n_jobs: int = 1,
) -> SearchResult:
    """Find the best plan for a problem.

    Closed form over the structures, the exact recurrence over the best of them, the engine over the
    ``top``. Unlike pipelines and unlike replicas are both searched. Ctrl-C and the budget return
    the best found so far.

    Args:
        problem: cluster, model, job; the job's pins and objective hold.
        budget: [s] after which nothing new is started, None for no limit; without a plan by then
            the search goes on for ``strategies.search.board.GRACE_S`` at most.
        pins: knobs taken out of the search, see strategies.search.options.Choices; they win over
            the job's.
        top: fewest plans that are simulated. progress: called with (what, done, of how many).
        store: a run table (or its path): simulations it knows are not repeated.
        contention: transfers share links. effort: how much is looked at.
        pools: chips to plan for, in the order of stages; None for all of the machine's.
        incumbent: score [s, or USD per step] that plans must beat to be of interest.
        n_jobs: processes that simulate finalists.

    Raises:
        InfeasibleError: nothing fits, or not within the job's step time; names the cell that is
            short, by how much, and the cheapest change.
        UsageError: an unknown pin, or a budget that ended before any plan was found.
        HetlabError: Ctrl-C before any plan was found.
    """
    began = time.monotonic()
    choices = choices_of(problem, pins)
    costs = Costs(problem, in_step=contention, even="uneven" in choices.forbid)
    chosen = pools if pools is not None else pools_of(problem.machine, choices.accelerators)
    deadline = began + budget if budget is not None else math.inf
    evaluator = Evaluator(
        costs, choices, effort or Effort(), top, deadline=deadline, progress=progress
    )
    if incumbent is not None:
        evaluator.incumbent.seed(incumbent)
    if choices.families != "replicas":
        evaluator.run(chosen)
    mixed = _replicas(evaluator, chosen, top)
    contenders = contenders_of(evaluator, mixed, WIDEN * top)
    if problem.job.routing is not None and contenders:
        contenders += other_sizes(evaluator, chosen, contenders)
    away = partial(
        offloaded, problem, chosen, choices, effort=evaluator.effort, deadline=deadline,
        contention=contention, progress=progress,
    )  # fmt: skip
    by_sites = partial(_by_sites, evaluator, chosen, contention)
    if not contenders:
        try:
            found = _rescued(evaluator, chosen, away, began, budget, incumbent)
        except InfeasibleError as error:
            found = by_sites(None, error)
        else:
            found = by_sites(found)
    else:
        table = RunTable(store) if isinstance(store, str | Path) else store
        found = _played(evaluator, mixed, contenders, top, contention, n_jobs, table)
        if choices.offload == "yes" and incumbent is None and not evaluator.stopped:
            found = competing(found, away(best=found.finalists[0].score))
        found = by_sites(found)
    _check_limit(problem, found.finalists[0])
    if found.plan.placement.ep > 1 and even_note(problem):
        found = msgspec.structs.replace(found, notes=(*found.notes, even_note(problem)))
    return msgspec.structs.replace(found, wall_s=time.monotonic() - began)


def _played(
    evaluator: Evaluator,
    mixed: list[MixedPlan],
    contenders: list[tuple[Contender, Slab | None]],
    top: int,
    contention: bool,
    n_jobs: int,
    store: RunTable | None,
) -> SearchResult:
    """Simulate the contenders, under the job's routing where it names one."""
    problem, drafts = evaluator.costs.problem, [c for c, _ in contenders]
    late = partial(evaluator.late, found=True)
    if problem.job.routing is not None and any(c.draft.expert.ep > 1 for c in drafts):
        played, complete = play_routed(
            problem, drafts, evaluator.choices, contention=contention, late=late
        )
    else:
        played, complete = play(
            problem, drafts, top, contention=contention, n_jobs=n_jobs, store=store,
            progress=evaluator.progress, late=late,
        )  # fmt: skip
    evaluator.stopped |= not complete
    winner = played[0][1].structure
    slab = next(slab for contender, slab in contenders if contender.structure == winner)
    return _result(evaluator, mixed, played, slab, contention)


def _by_sites(
    evaluator: Evaluator,
    pools: tuple[Pool, ...],
    contention: bool,
    found: SearchResult | None,
    error: InfeasibleError | None = None,
) -> SearchResult:
    """The better of what was found, nothing with an error, and of sites that step by themselves."""
    problem = evaluator.costs.problem
    best, price = math.inf, 1.0
    if found is not None:
        chips = [p.accelerator for p in pools for _ in p.chips]
        price = price_of_sites(problem, chips)
        best = found.finalists[0].score / price if price > 0 else math.inf
    state = rounds_of_sites(
        problem,
        pools,
        evaluator.choices,
        best=best,
        contention=contention,
        late=lambda: evaluator.late(found=found is not None),
        progress=evaluator.progress,
    )
    if found is None and not state.found:
        raise error or InfeasibleError("no plan fits", "memory")
    return of_sites(problem, state, found)


def _rescued(
    evaluator: Evaluator,
    pools: tuple[Pool, ...],
    away: Callable[[], Offloaded],
    began: float,
    budget: float | None,
    incumbent: float | None,
) -> SearchResult:
    """Where nothing was found: the best offloaded plan, or why there is none either."""
    if incumbent is not None:
        raise InfeasibleError(f"no plan beats {incumbent:.6g}", "the incumbent")
    if evaluator.stopped:
        raise _cut_short(budget, time.monotonic() - began)
    error, short = infeasible(evaluator.costs, pools, evaluator.choices)
    if evaluator.choices.offload == "no":
        raise error
    state = away()
    if state.found:
        return rescued(evaluator.costs.problem, state, error, short, evaluator.choices.zero)
    if state.stopped:
        raise _cut_short(budget, time.monotonic() - began)
    raise still_infeasible(error, state)


def _cut_short(budget: float | None, took: float) -> HetlabError:
    """Why a search that was stopped has no plan."""
    if budget is not None and took > budget:
        return UsageError(
            f"the budget of {budget:g} s ended before a plan was found, after {took:.0f} s (up to "
            f"{GRACE_S:.0f} s more go into a first plan); give at least "
            f"{max(1, math.ceil(2 * took))} s, or pin a knob"
        )
    return StoppedError("stopped before a plan was found")


def _result(
    evaluator: Evaluator,
    mixed: list[MixedPlan],
    played: list[tuple[Finalist, Contender]],
    slab: Slab | None,
    contention: bool,
) -> SearchResult:
    """Put down what was found; ``slab`` is the winner, None for unlike replicas."""
    best, winner = played[0]
    problem = evaluator.costs.problem
    run = winner.run or simulate(best.plan, problem, contention=contention)
    return SearchResult(
        problem=problem,
        plan=best.plan,
        run=run,
        experts=expert_facts(problem, winner.draft),
        draft=winner.draft,
        finalists=tuple(f for f, _ in played),
        space=evaluator.space,
        evaluated=evaluator.evaluated,
        exact=evaluator.exact,
        pruned={k: v for k, v in sorted(evaluator.pruned.items()) if v},
        wall_s=0.0,
        bound_s=min([evaluator.bound, *(m.bound for m in mixed)]),
        plan_bound_s=winner.plan_bound_s,
        whole=evaluator.whole,
        stopped=evaluator.stopped,
        binding=(
            binding_constraint(evaluator.costs, slab, winner.estimate_s)
            if slab is not None
            else "compute of the replicas, and their gradient sum"
        ),
        next_best=next_best(played),
        pools=slab.pools if slab is not None else (),
    )


def _replicas(evaluator: Evaluator, pools: tuple[Pool, ...], top: int) -> list[MixedPlan]:
    """The second family, unless the first was cut short or is all that is asked for."""
    stopped = evaluator.stopped and evaluator.firsts
    if evaluator.choices.families == "pipeline" or stopped:
        return []
    try:
        mixed, space, evaluated = search_replicas(
            evaluator.costs,
            pools,
            evaluator.choices,
            evaluator.incumbent.value,
            top,
            evaluator.pruned,
            evaluator.late,
        )
    except KeyboardInterrupt:
        evaluator.stopped = True
        return []
    evaluator.space += space
    evaluator.evaluated += evaluated
    evaluator.exact += evaluated
    return mixed


def _check_limit(problem: Problem, best: Finalist) -> None:
    limit, took = problem.job.limits.max_step_time_s, best.step_time_s / best.batches
    if limit and took > limit:
        raise InfeasibleError(
            f"the fastest plan ({best.plan.name}) takes {took:.4g} s a step, "
            f"{took - limit:.4g} s more than the job allows",
            f"limits.max_step_time of {limit:.4g} s",
        )
