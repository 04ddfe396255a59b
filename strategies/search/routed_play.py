"""Finalists whose experts' load is uneven, as the job's routing says: each with its best balancer.

Estimates take even routing, so they are bounds of such plans: contenders are looked at in the order
of their estimates until the next cannot beat the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sim.problem import Problem
from strategies.search.finalists import Contender, play
from strategies.search.options import Choices
from strategies.search.result import Finalist
from strategies.search.routed import Imbalance, balances, best_balance

__all__ = ["play_routed"]

MOST = 3
"""Most contenders with spread experts that are simulated."""


def play_routed(
    problem: Problem,
    contenders: Sequence[Contender],
    choices: Choices,
    *,
    contention: bool = True,
    late: Callable[[], bool] = lambda: False,
) -> tuple[list[tuple[Finalist, Contender]], bool]:
    """Simulate contenders under the job's routing and sort them by what is minimised.

    Args:
        problem: with a job that names its routing. contenders: best estimate first.
        choices: "balanced" may be forbidden. contention: transfers share links.
        late: True when no other plan than the one in progress may be simulated.

    Returns:
        Finalists, best first, each with its contender; and whether the search ran to its end.
    """
    found: list[tuple[Finalist, Contender]] = []
    best, spread, imbalance = float("inf"), 0, Imbalance(problem)
    for contender in contenders:
        if contender.estimate_s * contender.price >= best:
            break
        if contender.draft.expert.ep == 1:
            more, complete = play(problem, [contender], 1, contention=contention, late=late)
        elif spread < MOST:
            more = _balanced(problem, contender, choices, contention, imbalance, best)
            spread += len(more)
            complete = not late()
        else:
            continue
        found += more
        best = min([best, *(f.score for f, _ in more)])
        if not complete:
            return sorted(found, key=lambda f: f[0].score), False
    return sorted(found, key=lambda f: f[0].score), True


def _balanced(
    problem: Problem,
    contender: Contender,
    choices: Choices,
    contention: bool,
    imbalance: Imbalance,
    best: float,
) -> list[tuple[Finalist, Contender]]:
    """A contender with its best balancer; none where closed forms say that it cannot win."""
    played = best_balance(
        problem,
        contender.draft,
        balances(problem, contender.draft, choices),
        imbalance,
        below=best / contender.price - contender.estimate_s,
        contention=contention,
    )
    if played is None:
        return []
    finalist = Finalist(
        plan=played.plan,
        estimate_s=contender.estimate_s,
        step_time_s=played.step_s,
        score=played.step_s * contender.price,
    )
    return [(finalist, msgspec.structs.replace(contender, draft=played.draft))]
