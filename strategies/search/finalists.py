"""Simulate the best candidates with the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from sim.engine.simulate import Run, simulate
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from strategies.search.result import Finalist
from strategies.search.store import RunTable, run_key

__all__ = ["Contender", "next_best", "play"]


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate on its way into the engine.

    Args:
        draft: what to lower. estimate_s: [s] by the recurrence.
        price: what a second costs, 1 where time is the objective. structure: equal for plans that
            differ in layers or knobs only.
        plan_bound_s: [s] m * L / sum(stages / layer time) of its sizes. run: where it is simulated
            under a routing.
    """

    draft: PlanDraft
    estimate_s: float
    price: float = 1.0
    structure: bytes = b""
    plan_bound_s: float = 0.0
    run: Run | None = None


def _step_time(plan: Plan, problem: Problem, contention: bool) -> float:
    return simulate(plan, problem, contention=contention).makespan


def play(
    problem: Problem,
    contenders: Sequence[Contender],
    top: int,
    *,
    contention: bool = True,
    n_jobs: int = 1,
    store: RunTable | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    late: Callable[[], bool] = lambda: False,
) -> tuple[list[tuple[Finalist, Contender]], bool]:
    """Simulate contenders and sort them by what is minimised; Ctrl-C keeps what is known.

    The first ``top`` are simulated; then, in batches, those whose estimate is still below the best
    simulated time, because contention makes plans slower than estimated, seldom faster.

    Args:
        problem: what they are for. contenders: candidates, best estimate first.
        top: fewest to simulate. contention: transfers share links. n_jobs: processes.
        store: known step times. progress: called with (what, done, of how many).
        late: True when no other plan than the one in progress may be simulated.

    Returns:
        Finalists, best first, each with its contender; and whether the search ran to its end.
    """
    found: list[tuple[Finalist, Contender]] = []
    first, complete = 0, True
    while first < len(contenders) and complete:
        batch = contenders[first : first + top]
        best = min((f.score for f, _ in found), default=float("inf"))
        batch = [c for c in batch if c.estimate_s * c.price < best]
        if not batch:
            break
        more, complete = _play(problem, batch, contention, n_jobs, store, late)
        found += more
        first += top
        if progress is not None:
            progress("simulated", len(found), len(contenders))
    found.sort(key=lambda f: (not f[0].simulated, f[0].score))
    return found, complete


def _play(
    problem: Problem,
    contenders: Sequence[Contender],
    contention: bool,
    n_jobs: int,
    store: RunTable | None,
    late: Callable[[], bool],
) -> tuple[list[tuple[Finalist, Contender]], bool]:
    plans = [lower(problem, c.draft) for c in contenders]
    keys = [run_key(problem.hash, p.hash, p.version, contention=contention) for p in plans]
    known: list[float | None] = [store.get(k) if store is not None else None for k in keys]
    todo = [i for i, t in enumerate(known) if t is None]
    complete = True
    try:
        for i, took in _times(plans, todo, problem, contention, n_jobs):
            known[i] = took
            if store is not None:
                store.put(keys[i], plans[i].name, took)
            if late():
                complete = False
                break
    except KeyboardInterrupt:
        complete = False
    found = []
    for contender, plan, seconds in zip(contenders, plans, known, strict=True):
        step_time = contender.estimate_s if seconds is None else seconds
        finalist = Finalist(
            plan=plan,
            estimate_s=contender.estimate_s,
            step_time_s=step_time,
            score=step_time * contender.price,
            simulated=seconds is not None,
        )
        found.append((finalist, contender))
    return found, complete


def _times(
    plans: Sequence[Plan], todo: Sequence[int], problem: Problem, contention: bool, n_jobs: int
) -> Iterator[tuple[int, float]]:
    """(index, step time) of the plans to simulate, as they are done."""
    if n_jobs == 1 or len(todo) < 2:
        for i in todo:
            yield i, _step_time(plans[i], problem, contention)
        return
    from joblib import Parallel, delayed

    jobs = (delayed(_step_time)(plans[i], problem, contention) for i in todo)
    results = Parallel(n_jobs=n_jobs, return_as="generator")(jobs)
    yield from zip(todo, results, strict=True)


def next_best(played: Sequence[tuple[Finalist, Contender]]) -> str:
    """Name the best plan of another structure than the first's, and what it gives up, or ""."""
    best, winner = played[0]
    for finalist, contender in played[1:]:
        if contender.structure != winner.structure:
            return f"{finalist.plan.name}: +{100 * (finalist.score / best.score - 1):.1f} %"
    return ""
