"""HeteroAuto: H2's two-stage search (arXiv:2505.17548; h2.md 2.4).

Stage 1 gives every accelerator type one group of stages. Stage 2 keeps its number of replicas, cuts
types into sub-groups of nodes that choose tensor parallelism, recomputation and layers for
themselves, and prunes with stage 1's step time as the incumbent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sim.errors import InfeasibleError
from sim.problem import Problem
from strategies.search.board import Effort, Progress
from strategies.search.pools import Pool, split_pool
from strategies.search.result import SearchResult
from strategies.search.search import search
from strategies.search.store import RunTable

__all__ = ["hetero_auto", "sub_grouped", "sub_groupings"]

SHARES = (2, 4)
"""A type's nodes are cut in halves, and in a quarter and the rest, both ways round."""
SECONDS = 120.0
"""How long stage 2 may take [s]."""


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


def sub_grouped(
    first: SearchResult,
    *,
    pins: Mapping[str, Any] | None = None,
    top: int = 8,
    progress: Progress | None = None,
    store: RunTable | str | Path | None = None,
    contention: bool = True,
    effort: Effort | None = None,
    n_jobs: int = 1,
    seconds: float = SECONDS,
) -> SearchResult:
    """Refine a pipeline by sub-groups of its types: stage 2.

    Args:
        first: what a search found; its replicas and the order of its types are kept.
        pins, top, progress, store, contention, effort, n_jobs: as for ``search``.
        seconds: [s] after which no other way to cut the types is begun.

    Returns:
        The better of both stages, with space, evaluated and wall time of both together, and in
        ``sub_groups`` what was tried and what it gave.
    """
    began = time.monotonic()
    if first.offload:
        return msgspec.structs.replace(first, sub_groups="none tried: the plan offloads")
    if not first.pools:
        return msgspec.structs.replace(first, sub_groups="none tried: replicas are unlike")
    fixed = {
        **(pins or {}),
        "families": "pipeline", "all_types": True, "orders": "memory",
        "dp": first.plan.placement.num_replicas,
    }  # fmt: skip
    groupings = sub_groupings(first.pools)
    best, results, tried = first, [first], 0
    for grouping in groupings:
        left = seconds - (time.monotonic() - began)
        if left <= 0:
            break
        tried += 1
        try:
            found = search(
                first.problem,
                budget=left,
                pins=fixed,
                top=top,
                progress=progress,
                store=store,
                contention=contention,
                effort=effort,
                pools=grouping,
                incumbent=best.finalists[0].score,
                n_jobs=n_jobs,
            )
        except InfeasibleError:
            continue  # nothing in this grouping beats the incumbent, or fits
        results.append(found)
        if found.finalists[0].score < best.finalists[0].score:
            best = found
    took = time.monotonic() - began
    said = f"{tried} of {len(groupings)} ways to cut the types tried in {took:.1f} s, "
    return msgspec.structs.replace(
        _together(best, results, said),
        wall_s=first.wall_s + took,
        stopped=first.stopped or tried < len(groupings),
    )


def _together(best: SearchResult, results: list[SearchResult], said: str) -> SearchResult:
    """The best of several results, the first of which is stage 1's, with the effort of all."""
    gain = 100 * (1 - best.finalists[0].score / results[0].finalists[0].score)
    return msgspec.structs.replace(
        best,
        space=sum(r.space for r in results),
        evaluated=sum(r.evaluated for r in results),
        exact=sum(r.exact for r in results),
        bound_s=min(r.bound_s for r in results),
        next_best=best.next_best or results[0].next_best,
        sub_groups=said + (f"{gain:.2f} % better" if gain > 0 else "none is better"),
    )


def hetero_auto(
    problem: Problem,
    *,
    pins: Mapping[str, Any] | None = None,
    top: int = 8,
    progress: Progress | None = None,
    contention: bool = True,
    effort: Effort | None = None,
    seconds: float = SECONDS,
) -> SearchResult:
    """Find the best pipeline over all accelerator types in H2's two stages.

    Args:
        problem: cluster, model, job. pins: as for ``search``; they hold in both stages.
        top, progress, contention, effort: as for ``search``. seconds: [s] of stage 2.

    Returns:
        The better of both stages; space, evaluated and wall time are of both together.

    Raises:
        InfeasibleError: no pipeline over all types fits.
    """
    fixed = {"families": "pipeline", "all_types": True, "orders": "memory", **(pins or {})}
    first = search(
        problem, pins=fixed, top=top, progress=progress, contention=contention, effort=effort
    )
    return sub_grouped(
        first, pins=pins, top=top, progress=progress, contention=contention, effort=effort,
        seconds=seconds,
    )  # fmt: skip
