"""Finalists whose experts' load is uneven, as the job's routing says: each with its best balancer.

Estimates take even routing, so they are bounds of such plans. Sizes of expert-parallel groups
differ most in what uneven experts cost, so the most promising contender of every size is simulated,
then a few more; promising is what is best with its balancer, or without any, by closed forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from sim.errors import InfeasibleError
from sim.problem import Problem
from strategies.search.finalists import Contender, play
from strategies.search.options import Choices
from strategies.search.result import Finalist
from strategies.search.routed import added_s, balances, best_balance
from strategies.search.routed_times import Imbalance

__all__ = ["in_turn", "play_routed"]

MOST = 2
"""Most contenders with spread experts that are simulated besides the best of every size."""
LOOKED = 2
"""Most contenders of a size that closed forms look at, by their estimates."""
FAR = 1.25
"""What closed forms put this far above the best is not simulated."""


def in_turn(
    contenders: Sequence[Contender], with_balance: Sequence[float], without: Sequence[float]
) -> list[Contender]:
    """Contenders to simulate: the best of every size, ``MOST`` more, all that spread no experts.

    Most promising first, both with their balancer and without any; so what is simulated where
    lending is forbidden is simulated where it is allowed.

    Args:
        contenders: with spread experts or whole ones.
        with_balance, without: scores by closed forms.
    """
    chosen: list[int] = []
    for scores in (with_balance, without):
        order = sorted(range(len(contenders)), key=scores.__getitem__)
        sizes: dict[int, int] = {}
        for k in order:
            sizes.setdefault(contenders[k].draft.expert.ep, k)
        firsts = sorted(sizes.values(), key=scores.__getitem__)
        rest = [k for k in order if k not in firsts]
        spread = [k for k in rest if contenders[k].draft.expert.ep > 1][:MOST]
        whole = [k for k in rest if contenders[k].draft.expert.ep == 1]
        chosen += [k for k in [*firsts, *spread, *whole] if k not in chosen]
    return [contenders[k] for k in chosen]


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

    Raises:
        InfeasibleError: none fits.
    """
    imbalance, contenders = Imbalance(problem), _first_of_sizes(contenders)
    scores: list[tuple[float, float]] = []
    for contender in contenders:
        if scores and late():
            break
        # Fewer slots matter less than sizes do; which are best is asked of those simulated.
        offered = [k for k in balances(problem, contender.draft, choices) if k.slots > 1]
        added = added_s(contender.draft, offered, imbalance)
        least = min(added.values(), default=0.0)
        plain = min((s for k, s in added.items() if k.balancer == "none"), default=0.0)
        scores.append(
            (
                (contender.estimate_s + least) * contender.price,
                (contender.estimate_s + plain) * contender.price,
            )
        )
    chosen = in_turn(contenders[: len(scores)], *zip(*scores, strict=True))
    found: list[tuple[Finalist, Contender]] = []
    best, complete = float("inf"), True
    for contender in chosen:
        if contender.estimate_s * contender.price >= best:
            continue
        if contender.draft.expert.ep == 1:
            more, complete = play(problem, [contender], 1, contention=contention, late=late)
        else:
            more = _balanced(problem, contender, choices, contention, imbalance, best, late)
            complete = not late()
        found += more
        best = min([best, *(f.score for f, _ in more)])
        if found and not complete:
            break
    if not found:
        raise InfeasibleError("no plan fits with its layers of experts written out", "memory")
    return sorted(found, key=lambda f: f[0].score), complete


def _first_of_sizes(contenders: Sequence[Contender]) -> list[Contender]:
    """The first ``LOOKED`` contenders of each size, and all that spread no experts."""
    seen: Counter[int] = Counter()
    found = []
    for contender in contenders:
        size = contender.draft.expert.ep
        seen[size] += 1
        if size == 1 or seen[size] <= LOOKED:
            found.append(contender)
    return found


def _balanced(
    problem: Problem,
    contender: Contender,
    choices: Choices,
    contention: bool,
    imbalance: Imbalance,
    best: float,
    late: Callable[[], bool],
) -> list[tuple[Finalist, Contender]]:
    """A contender with its best balancer; none where it does not fit under any or all are far."""

    def below(least: float) -> float:
        near = min(best / contender.price, contender.estimate_s + least)
        return FAR * near - contender.estimate_s

    played = best_balance(
        problem,
        contender.draft,
        balances(problem, contender.draft, choices),
        imbalance,
        below=below,
        contention=contention,
        late=late,
    )
    if played is None:
        return []
    finalist = Finalist(
        plan=played.plan,
        estimate_s=contender.estimate_s,
        step_time_s=played.step_s,
        score=played.step_s * contender.price,
    )
    return [(finalist, msgspec.structs.replace(contender, draft=played.draft, run=played.run))]
