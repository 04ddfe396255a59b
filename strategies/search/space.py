"""The blocks of a search space: which pools in which order, replicas, microbatch, and options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from sim.problem import Problem
from strategies.base import divisors
from strategies.search.costs import Costs
from strategies.search.options import Choices, fill_share, modes_of
from strategies.search.passes import Way
from strategies.search.pools import Pool, slots
from strategies.search.slab import Knobs, Slab
from strategies.search.structures import Block, Option, grow
from strategies.tensor.megatron import tp_sizes

__all__ = ["blocks_of", "pool_options", "pool_orders"]

MAX_MICROBATCH = 64


def pool_orders(pools: tuple[Pool, ...], choices: Choices) -> list[tuple[Pool, ...]]:
    """Subsets of the pools in every order that is tried."""
    sizes = range(len(pools), 0 if not choices.all_types else len(pools) - 1, -1)
    found = []
    for size in sizes:
        for subset in itertools.combinations(pools, size):
            every = choices.orders == "all" or (choices.orders == "auto" and len(pools) <= 3)
            found += list(itertools.permutations(subset)) if every else [subset]
    return found


def blocks_of(
    costs: Costs,
    pools: tuple[Pool, ...],
    choices: Choices,
    *,
    rich: bool = True,
    knobs: Sequence[Knobs] = (),
    probe: bool = True,
) -> list[Block]:
    """All blocks, the one with the lowest bound first.

    Args:
        costs: of the problem. pools: to choose from. choices: pins.
        rich: every number of stages a pool has room for; False the largest only.
        knobs: that plans may have, which decide what filling is sure to cost.
        probe: leave out options that cannot hold one layer.
    """
    problem = costs.problem
    chosen: list[tuple[tuple[Pool, ...], tuple[tuple[Option, ...], ...], tuple[int, int, int]]] = []
    known: dict[tuple[object, ...], tuple[Option, ...]] = {}
    for microbatch, dp, ep in _batches(problem, choices, pools):
        for order in pool_orders(pools, choices):
            options = []
            for pool in order:
                key = (pool.name, len(pool.nodes), microbatch, dp, ep)
                if key not in known:
                    known[key] = pool_options(costs, pool, microbatch, dp, ep, choices, rich, probe)
                options.append(known[key])
            if all(options):
                chosen.append((order, tuple(options), (microbatch, dp, ep)))
    fill = fill_share(knobs, costs.passes.forward_share()) if knobs else 0.0
    found = [_block(costs, *c, fill) for c in chosen]
    return sorted(found, key=lambda b: b.bound)


def _block(
    costs: Costs,
    order: tuple[Pool, ...],
    options: tuple[tuple[Option, ...], ...],
    batch: tuple[int, int, int],
    fill: float,
) -> Block:
    microbatch, dp, ep = batch
    m = costs.problem.job.global_batch // (dp * microbatch)
    total = np.zeros(1)
    for group in options[::-1]:
        pp, rate = np.array([(o.pp, o.rate) for o in group]).T
        total = grow(total, rate / pp, pp, m, fill).max(keepdims=True)
    return Block(
        pools=order,
        options=options,
        dp=dp,
        microbatch=microbatch,
        num_microbatches=m,
        ep=ep,
        bound=costs.passes.num_layers / float(total[0]),
        fill=fill,
    )


def _batches(
    problem: Problem, choices: Choices, pools: tuple[Pool, ...]
) -> list[tuple[int, int, int]]:
    """(microbatch, dp, ep) that divide the batch, the replicas and the experts."""
    batch = problem.job.global_batch
    experts = {b.num_experts for b in problem.model.blocks if b.num_experts}
    largest = max((p.num_chips for p in pools), default=1)
    measured = {t.microbatch for t in problem.model.times}
    found = []
    for microbatch in divisors(batch):
        if choices.microbatch is not None:
            if microbatch != choices.microbatch:
                continue
        elif microbatch > MAX_MICROBATCH or (measured and microbatch not in measured):
            continue
        for dp in divisors(batch // microbatch):
            if dp > largest or choices.dp not in (None, dp):
                continue
            sizes = [e for e in divisors(dp) if all(x % e == 0 for x in experts)]
            for ep in sizes if experts else [1]:
                if choices.ep in (None, ep):
                    found.append((microbatch, dp, ep))
    return found


def pool_options(
    costs: Costs,
    pool: Pool,
    microbatch: int,
    dp: int,
    ep: int,
    choices: Choices,
    rich: bool,
    probe: bool = True,
) -> tuple[Option, ...]:
    """Ways to run a group on a pool, those that cannot hold one layer left out (rule c)."""
    problem, passes = costs.problem, costs.passes
    found = []
    sizes, _ = tp_sizes(problem, pool.chips)
    for tp in sizes:
        if choices.tp not in (None, tp):
            continue
        room = min(len(slots(pool, tp)) // dp, passes.num_layers)
        if choices.pp is not None:
            room = min(room, choices.pp)
        modes = modes_of(problem, choices) if room else ()
        if len(modes) > 1 and _always_fits(costs, pool, tp, microbatch, dp, ep, choices):
            modes = modes[:1]
        for mode in modes:
            single = Slab(
                pools=(pool,),
                dp=dp,
                microbatch=microbatch,
                num_microbatches=1,
                ep=ep,
                knobs=_leanest(problem, choices, tp, dp),
                tp=np.array([[tp]]),
                pp=np.array([[1]]),
                recompute=np.array([[mode]]),
                layers=np.zeros((1, 0), np.int64),
            )
            way = Way.of(pool, tp, mode, single)
            idle, busy = passes.growth(way, costs.shards(single))
            if probe and idle[0, 0] + busy[0, 0] > passes.limit(pool):
                continue
            layer = passes.least_layer(way)
            stages = range(1, room + 1) if rich else (room,)
            found += [Option(tp, pp, mode, pp / layer) for pp in stages]
    return tuple(found)


def _always_fits(
    costs: Costs, pool: Pool, tp: int, microbatch: int, dp: int, ep: int, choices: Choices
) -> bool:
    """Whether the whole model fits on one cell without recomputation, whatever the knobs (rule e).

    Then every stage of every plan does: no stage holds more layers, nor more microbatches than
    twice the stages there can be, which is more than any schedule keeps in flight.
    """
    passes = costs.passes
    m = costs.problem.job.global_batch // (dp * microbatch)
    way = Way(pool, tp, 0, microbatch, False, ep, 0, False)
    shards = dp if choices.zero == 1 else 1
    idle, busy = passes.growth(way, shards)
    peak = idle[3, -1] + busy[3, -1] * min(m, 2 * passes.num_layers)
    return bool(peak <= passes.limit(pool))


def _leanest(problem: Problem, choices: Choices, tp: int, dp: int) -> Knobs:
    """Knobs with the least memory that the pins leave."""
    measured = any(b.kind == "measured" for b in problem.model.blocks)
    legal = tp > 1 and not measured and problem.job.sequence_length % tp == 0
    return Knobs(
        zero=1 if dp > 1 and choices.zero in (None, 1) else 0,
        sequence_parallel=legal and choices.sequence_parallel in (None, True),
    )
