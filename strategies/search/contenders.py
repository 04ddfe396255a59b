"""Candidates on their way into the engine: the best of both families, and of every expert size."""

from __future__ import annotations

import msgspec

from strategies.search.board import Board
from strategies.search.drafts import draft_of
from strategies.search.evaluate import Evaluator
from strategies.search.finalists import Contender
from strategies.search.mixed import MixedPlan, draft_of_mixed
from strategies.search.pools import Pool
from strategies.search.slab import Slab, structure_key
from strategies.search.space import blocks_of
from strategies.search.verdict import structure_bound

__all__ = ["contenders_of", "other_sizes"]

ALIKE = 3
"""Most finalists that differ in layers and knobs only."""


def contenders_of(
    evaluator: Evaluator, mixed: list[MixedPlan], top: int
) -> list[tuple[Contender, Slab | None]]:
    """Return the ``top`` plans of both families, best first, each with its slab if it has one.

    Args:
        evaluator: of the first family, done. mixed: plans of the second. top: how many.
    """
    problem = evaluator.costs.problem
    found: list[tuple[float, Contender, Slab | None]] = []
    for score, slab in evaluator.best(top, ALIKE):
        found.append((score, _contender(evaluator, score, slab), slab))
    for plan in mixed:
        price = sum(float(evaluator.price(s)[0]) for s in plan.parts)
        price = price if problem.job.objective == "cost" else 1.0
        contender = Contender(
            draft=draft_of_mixed(problem, plan),
            estimate_s=plan.seconds,
            price=price,
            structure=b"|".join(structure_key(s) for s in plan.parts),
            plan_bound_s=plan.bound,
        )
        found.append((plan.seconds * price, contender, None))
    found.sort(key=lambda f: f[0])
    return [(c, slab) for _, c, slab in found[:top]]


def _contender(evaluator: Evaluator, score: float, slab: Slab) -> Contender:
    price = float(evaluator.price(slab)[0])
    return Contender(
        draft=draft_of(evaluator.costs.problem, slab),
        estimate_s=score / price,
        price=price,
        structure=structure_key(slab),
        plan_bound_s=structure_bound(evaluator.costs, slab),
    )


def other_sizes(
    evaluator: Evaluator, pools: tuple[Pool, ...], found: list[tuple[Contender, Slab | None]]
) -> list[tuple[Contender, Slab | None]]:
    """Return the best plan of each expert-parallel size that has none among the contenders.

    Even routing says little of how sizes compare; those that it cut are searched by themselves.

    Args:
        evaluator: done. pools: that it searched. found: contenders there are.
    """
    known = {c.draft.expert.ep for c, _ in found}
    more = _best_of_sizes(evaluator, known)
    knobs, choices = evaluator.legal(1, 1, 1, frozenset({1})), evaluator.choices
    blocks = blocks_of(evaluator.costs, pools, choices, rich=False, knobs=tuple(knobs[:1]))
    sizes = {b.ep for b in blocks} if choices.families != "replicas" else set()
    for ep in sorted(sizes - known):
        if evaluator.late(found=True):
            break
        alone = Evaluator(
            evaluator.costs,
            msgspec.structs.replace(choices, ep=ep),
            evaluator.effort,
            1,
            deadline=evaluator.deadline,
        )
        alone.run(pools)
        more += _best_of_sizes(alone, known)
        evaluator.evaluated += alone.evaluated
        evaluator.exact += alone.exact
    return [(_contender(evaluator, score, slab), slab) for score, slab in more]


def _best_of_sizes(board: Board, known: set[int]) -> list[tuple[float, Slab]]:
    """The best judged plan of each expert-parallel size that is not known yet, and is from then."""
    found = []
    for score, slab in sorted(board.firsts.values(), key=lambda f: f[0]):
        if slab.ep not in known:
            known.add(slab.ep)
            found.append((score, slab))
    return found
