"""Replicas on unlike accelerators: every replica is a pipeline on one pool, all have the same cuts.

The second family of plans (AMP, Whale): pool k holds dp_k replicas with their own tp and
recomputation, and each takes m_k microbatches so that sum(dp_k m_k) microbatch is the global batch;
gradients are weighted by tokens, so the mathematics is the same. Structures are cut by total work
over total speed; in the rest microbatches and layers are shared out by speed, and times are exact:
each pool's pipeline by the recurrence, then one gradient sum over all replicas of a stage.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.collective import collective_cost
from sim.model.amounts import dtype_bytes
from strategies.base import divisors
from strategies.search.costs import Costs
from strategies.search.mixed import MixedPlan, common_layers, mixed_seconds
from strategies.search.options import Choices, knobs_for, modes_of, screening_knobs
from strategies.search.passes import Way
from strategies.search.pools import Pool, slots
from strategies.search.screen import fits
from strategies.search.slab import Knobs, Slab
from strategies.search.space import MAX_MICROBATCH
from strategies.search.split import share_out
from strategies.search.wires import stage_cells
from strategies.tensor.megatron import tp_sizes

__all__ = ["search_replicas"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST = 24
"""Most structures of one microbatch size, subset and number of stages that are looked into."""
TAILS = 10
"""Multiple of ``MOST`` whose gradient sum is priced to choose those."""
MOST_IN_ALL = 400
"""Most structures that are looked into, those with the least bound first."""


def search_replicas(
    costs: Costs,
    pools: tuple[Pool, ...],
    choices: Choices,
    incumbent: float,
    keep: int,
    pruned: Counter[str],
    late: Callable[[bool], bool] = lambda found: False,
) -> tuple[list[MixedPlan], int, int]:
    """The best plans of this family.

    Args:
        costs: of the problem. pools, choices: what may be used.
        incumbent: [s] structures whose bound is above are cut ("bound").
        keep: how many to return. pruned: counts by rule, updated.
        late: asked now and then, with whether a plan has been found; True ends the search.

    Returns:
        Plans, best first; how many structures there are; how many were evaluated.
    """
    coarse: list[tuple[float, tuple[_Part, ...], float]] = []
    space = evaluated = 0
    if choices.dp is not None or choices.ep not in (None, 1) or len(pools) < 2:
        return [], 0, 0
    promising: list[_Start] = []
    tails: dict[object, float] = {}
    for per_pool in _families(costs, pools, choices):
        if late(bool(promising)):
            break
        size, found = _starts(costs, per_pool, incumbent, tails, pruned)
        space += size
        promising += found
    promising.sort(key=lambda s: s.least)
    for done, start in enumerate(promising):
        if late(bool(coarse)):
            break
        limit = min(incumbent, coarse[keep - 1][0] if len(coarse) >= keep else math.inf)
        if start.least > limit or done >= MOST_IN_ALL:
            pruned["bound" if start.least > limit else "beam"] += len(promising) - done
            break
        first = _plans(costs, start.parts, choices, start.bound, pruned, all_of_them=False)
        evaluated += len(first)
        coarse += [(plan.seconds, start.parts, start.bound) for plan in first]
        coarse = sorted(coarse, key=lambda c: c[0])[: 2 * keep]
    best: list[MixedPlan] = []
    for _, parts, bound in coarse:
        if late(bool(best)):
            break
        plans = _plans(costs, parts, choices, bound, Counter(), all_of_them=True)
        evaluated += len(plans)
        best += sorted(plans, key=lambda p: p.seconds)[:2]
    return sorted(best, key=lambda p: p.seconds)[:keep], space, evaluated


class _Part(msgspec.Struct, frozen=True):
    """One pool's replicas before microbatches and layers are shared out."""

    pool: Pool
    tp: int
    recompute: int
    dp: int
    stages: int
    microbatch: int
    way: Way
    layer_s: float


class _Start(msgspec.Struct, frozen=True):
    """A structure: its parts, total work over total speed [s], and that plus its gradient sum."""

    parts: tuple[_Part, ...]
    bound: float
    least: float


def _starts(
    costs: Costs,
    per_pool: list[list[_Part]],
    incumbent: float,
    tails: dict[object, float],
    pruned: Counter[str],
) -> tuple[int, list[_Start]]:
    """How many structures a family has, and its most promising ones."""
    total = costs.problem.job.global_batch // per_pool[0][0].microbatch
    bounds = total * costs.passes.num_layers / _speeds(per_pool)
    rows = np.argwhere(bounds <= incumbent)
    pruned["bound"] += bounds.size - len(rows)
    order = np.argsort(bounds[tuple(rows.T)], kind="stable")[: TAILS * MOST]
    pruned["beam"] += len(rows) - len(order)
    found = []
    for row in rows[order].tolist():
        parts = tuple(options[i] for options, i in zip(per_pool, row, strict=True))
        key = tuple((p.pool.name, p.tp, p.dp, p.stages) for p in parts)
        if key not in tails:
            tails[key] = _least_sum(costs, parts)
        bound = float(bounds[tuple(row)])
        found.append(_Start(parts, bound, bound + tails[key]))
    near = sorted((s for s in found if s.least <= incumbent), key=lambda s: s.least)
    pruned["bound"] += len(found) - len(near)
    pruned["beam"] += len(near[MOST:])
    return bounds.size, near[:MOST]


def _speeds(per_pool: list[list[_Part]]) -> Floats:
    """Layers per second of every combination, one axis per pool."""
    found = np.zeros(())
    for options in per_pool:
        own = np.array([p.dp * p.stages / p.layer_s for p in options])
        found = np.add.outer(found, own)
    return found


def _families(
    costs: Costs, pools: tuple[Pool, ...], choices: Choices
) -> Iterator[list[list[_Part]]]:
    """Options of every pool, per microbatch size, subset of the pools and number of stages."""
    problem, passes = costs.problem, costs.passes
    measured = {t.microbatch for t in problem.model.times}
    sizes = [
        b
        for b in divisors(problem.job.global_batch)
        if choices.microbatch in (None, b)
        and (choices.microbatch is not None or b <= MAX_MICROBATCH)
        and (not measured or b in measured)
    ]
    subsets = [
        s
        for n in range(len(pools), 1, -1)
        for s in itertools.combinations(pools, n)
        if n == len(pools) or not choices.all_types
    ]
    tps = {p.name: tp_sizes(problem, p.chips)[0] for p in pools}
    for microbatch, subset in itertools.product(sizes, subsets):
        most = min(len(slots(p, 1)) for p in subset)
        for stages in range(1, min(most, passes.num_layers) + 1):
            if choices.pp not in (None, stages):
                continue
            per_pool = [_parts(costs, p, choices, microbatch, stages, tps[p.name]) for p in subset]
            if all(per_pool):
                yield per_pool


def _parts(
    costs: Costs,
    pool: Pool,
    choices: Choices,
    microbatch: int,
    stages: int,
    sizes: Sequence[int],
) -> list[_Part]:
    found = []
    for tp in sizes:
        dp = len(slots(pool, tp)) // stages
        if dp == 0 or choices.tp not in (None, tp):
            continue
        for mode in modes_of(costs.problem, choices):
            way = Way(pool, tp, mode, microbatch, False, 1, 0, False)
            layer = costs.passes.least_layer(way)
            found.append(_Part(pool, tp, mode, dp, stages, microbatch, way, layer))
    return found


def _plans(
    costs: Costs,
    parts: tuple[_Part, ...],
    choices: Choices,
    bound: float,
    pruned: Counter[str],
    *,
    all_of_them: bool,
) -> list[MixedPlan]:
    """Plans of one structure that fit, one per set of knobs and sharing of microbatches.

    Without ``all_of_them`` only the sharing nearest to the speeds under the screening knobs.
    """
    problem = costs.problem
    total = problem.job.global_batch // parts[0].microbatch
    found: list[MixedPlan] = []
    knobs = knobs_for(
        problem, choices, num_stages=parts[0].stages, num_microbatches=1, dp=2,
        tps=frozenset(p.tp for p in parts),
    )  # fmt: skip
    knobs = [k for k in knobs if not k.scatter and k.chunks == 1]
    dps = [p.dp for p in parts]
    sharings = share_out([p.stages / p.layer_s for p in parts], dps, total)
    if costs.even:
        each, rest = divmod(total, sum(dps))
        sharings = [(each,) * len(dps)] if not rest else []
    if not all_of_them and knobs:
        knobs, sharings = [screening_knobs(knobs)], sharings[:1]
    for shares in sharings:
        for k in knobs:
            slabs = [_slab(p, m, k) for p, m in zip(parts, shares, strict=True)]
            layers = common_layers(costs, slabs)
            if layers is None:
                pruned["memory"] += 1
                continue
            placed = [s.with_layers(layers) for s in slabs]
            if not all(fits(costs, s, shards=sum(p.dp for p in parts))[0] for s in placed):
                pruned["memory"] += 1
                continue
            seconds = mixed_seconds(costs, placed)
            found.append(MixedPlan(parts=tuple(placed), seconds=seconds, bound=bound))
    return found


def _least_sum(costs: Costs, parts: tuple[_Part, ...]) -> float:
    """Least time of the gradient sum [s]: some stage has at least its share of the parameters."""
    passes, job, machine = costs.passes, costs.problem.job, costs.problem.machine
    fine, stages = max(p.tp for p in parts), parts[0].stages
    dense, experts = passes.table.rank_params(0, passes.starts[-1], fine, 1)
    nbytes = float(dense + experts) / stages * dtype_bytes(job.reduction_dtype)
    chips = [
        cell[0] for p in parts for cell in stage_cells(p.pool, p.tp, stages, p.dp, 0, False).chips
    ]
    return collective_cost(machine, "reduce_scatter", chips, nbytes).seconds


def _slab(part: _Part, m: int, knobs: Knobs) -> Slab:
    return Slab(
        pools=(part.pool,),
        dp=part.dp,
        microbatch=part.microbatch,
        num_microbatches=m,
        knobs=knobs,
        tp=np.array([[part.tp]]),
        pp=np.array([[part.stages]]),
        recompute=np.array([[part.recompute]]),
        layers=np.zeros((1, 0), np.int64),
    )
