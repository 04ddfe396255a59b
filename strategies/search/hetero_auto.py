"""HeteroAuto: H2's two-stage search (arXiv:2505.17548; h2.md 2.4).

Stage 1 gives every accelerator type one group of stages. Stage 2 keeps its number of replicas, cuts
types into sub-groups of nodes that choose tensor parallelism, recomputation and layers for
themselves, and prunes with stage 1's step time as the incumbent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from sim.errors import InfeasibleError
from sim.problem import Problem
from strategies.search.board import Effort, Progress
from strategies.search.pools import Pool, pools_of, split_pool
from strategies.search.result import SearchResult
from strategies.search.search import search

__all__ = ["hetero_auto", "sub_groupings"]

SHARES = (2, 4)
"""A type's nodes are cut in halves, and in a quarter and the rest, both ways round."""


def sub_groupings(pools: tuple[Pool, ...]) -> list[tuple[Pool, ...]]:
    """Ways to cut pools into sub-groups: one pool at a time, then all of them in halves."""
    found = []
    for i, pool in enumerate(pools):
        nodes = len(pool.nodes)
        cuts = sorted({c for s in SHARES for c in (nodes // s, nodes - nodes // s)} - {0, nodes})
        for cut in cuts:
            parts = split_pool(pool, (cut, nodes - cut))
            found.append((*pools[:i], *parts, *pools[i + 1 :]))
    if len(pools) > 1 and all(len(p.nodes) > 1 for p in pools):
        halves = (
            split_pool(p, (len(p.nodes) // 2, len(p.nodes) - len(p.nodes) // 2)) for p in pools
        )
        found.append(tuple(itertools.chain.from_iterable(halves)))
    return found


def hetero_auto(
    problem: Problem,
    *,
    pins: Mapping[str, Any] | None = None,
    top: int = 8,
    progress: Progress | None = None,
    contention: bool = True,
    effort: Effort | None = None,
) -> SearchResult:
    """Find the best pipeline over all accelerator types in H2's two stages.

    Args:
        problem: cluster, model, job. pins: as for ``search``; they hold in both stages.
        top, progress, contention, effort: as for ``search``.

    Returns:
        The better of both stages; space, evaluated and wall time are of both together.

    Raises:
        InfeasibleError: no pipeline over all types fits.
    """
    began = time.monotonic()
    fixed = {"families": "pipeline", "all_types": True, "orders": "memory", **(pins or {})}
    pools = pools_of(problem.machine)
    first = search(
        problem, pins=fixed, top=top, progress=progress, contention=contention, effort=effort
    )
    best, results = first, [first]
    replicas = first.plan.placement.num_replicas
    for grouping in sub_groupings(pools):
        try:
            found = search(
                problem,
                pins={**fixed, "dp": replicas},
                top=top,
                progress=progress,
                contention=contention,
                effort=effort,
                pools=grouping,
                incumbent=best.finalists[0].score,
            )
        except InfeasibleError:
            continue  # nothing in this grouping beats the incumbent, or fits
        results.append(found)
        if found.finalists[0].score < best.finalists[0].score:
            best = found
    return msgspec.structs.replace(
        best,
        space=sum(r.space for r in results),
        evaluated=sum(r.evaluated for r in results),
        exact=sum(r.exact for r in results),
        bound_s=min(r.bound_s for r in results),
        wall_s=time.monotonic() - began,
    )
