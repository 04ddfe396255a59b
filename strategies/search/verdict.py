"""Why the best plan is not better, and what to change when nothing fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from sim.errors import InfeasibleError
from strategies.search.costs import Costs
from strategies.search.drafts import name_of
from strategies.search.options import Choices, knobs_for, screening_knobs
from strategies.search.pools import Pool
from strategies.search.recurrence import step_times
from strategies.search.screen import by_stages
from strategies.search.slab import Slab
from strategies.search.space import blocks_of
from strategies.search.split import split_min_max
from strategies.search.structures import enumerate_block

__all__ = ["binding_constraint", "infeasible", "structure_bound"]

WORTH = 0.005
"""A constraint binds when lifting it saves more than this share of the step."""
BLOCKS_TRIED = 64


def structure_bound(costs: Costs, slab: Slab) -> float:
    """The bound m * L / sum(stages / layer time) of one candidate's sizes [s]."""
    unit, _ = costs.layer_times(slab.take(slice(0, 1)))
    stages = slab.num_stages
    rate = float((1.0 / unit[0, :stages]).sum())
    return slab.num_microbatches * costs.passes.num_layers / rate


def binding_constraint(costs: Costs, slab: Slab, seconds: float) -> str:
    """Name what bound a candidate: memory, the slowest stage, filling, or the gradient sum.

    Args:
        costs: of the problem. slab: the candidate, one row. seconds: [s] its exact step time.
    """
    free = _without_memory(costs, slab)
    if free is not None:
        better, where = free
        if better < seconds * (1 - WORTH):
            saved = 100 * (1 - better / seconds)
            return f"memory of {where}: without its limit {saved:.1f} % less time"
    times, sync = costs.times(slab), costs.sync(slab)
    stages, m = slab.num_stages, slab.num_microbatches
    work = (times.forward + times.backward)[0] + (times.weight[0] if slab.shape.splits else 0)
    per_stage = work.reshape(-1, stages).sum(axis=0)
    slowest = int(np.argmax(per_stage))
    tail = float((sync.reduce + sync.update + sync.unshard)[0].max() + sync.embed[0])
    compute = m * float(per_stage[slowest])
    rest = {
        "filling the pipeline": seconds - compute - tail,
        "the gradient sum and the update": tail,
    }
    group, _ = slab.groups()
    pool = slab.pools[int(group[0, slowest])]
    name, most = max(rest.items(), key=lambda kv: kv[1])
    busy = f"compute of stage {slowest} on {pool.name}, busy {100 * compute / seconds:.0f} %"
    if most > 0.1 * seconds:
        return f"{busy}; then {name}, {100 * most / seconds:.0f} %"
    return busy


def _without_memory(costs: Costs, slab: Slab) -> tuple[float, str] | None:
    """Step time without memory limits and recomputation, and where memory was full."""
    if slab.knobs.chunks > 1:
        return None
    free = msgspec.structs.replace(slab, recompute=np.zeros_like(slab.recompute))
    total = costs.passes.num_layers
    unit, extra = costs.layer_times(free)
    layers, _ = split_min_max(total, unit, extra, np.full(unit.shape, total))
    free = free.with_layers(layers)
    seconds = float(step_times(free.shape, costs.times(free), costs.sync(free))[0])
    full = np.flatnonzero(costs.most_layers(slab)[0] <= slab.layers[0])
    group, _ = slab.groups()
    saving = np.flatnonzero(slab.recompute[0][group[0]] > 0)
    places = full if len(full) else saving
    if not len(places):
        return None
    stage = int(places[0])
    return seconds, f"{slab.pools[int(group[0, stage])].name} (stage {stage})"


def _closest(
    costs: Costs, pools: tuple[Pool, ...], choices: Choices
) -> tuple[float, str, str, float] | None:
    """The plan that is short of the least memory: (bytes, cell, plan, share of the limit)."""
    best: tuple[float, str, str, float] | None = None
    problem, total = costs.problem, costs.passes.num_layers
    for block in blocks_of(costs, pools, choices, probe=False)[:BLOCKS_TRIED]:
        found = enumerate_block(block, total, math.inf, Counter(), choices.pp, max_rows=2_000)
        for slab in by_stages(found) if found is not None else ():
            options = knobs_for(
                problem, choices, num_stages=slab.num_stages, dp=slab.dp,
                num_microbatches=slab.num_microbatches, tps=frozenset(np.unique(slab.tp).tolist()),
            )  # fmt: skip
            if not options:
                continue
            lean = slab.with_knobs(screening_knobs(options))
            if lean.knobs.chunks > 1:
                continue
            unit, extra = costs.layer_times(lean)
            most = np.maximum(costs.most_layers(lean), 1)
            room = most.sum(axis=1) >= total
            most = np.where(room[:, None], most, total)
            layers, _ = split_min_max(total, unit, extra, most)
            placed = lean.with_layers(layers)
            peak, limit = costs.memory(placed)
            short = (peak - limit).max(axis=1)
            row = int(np.argmin(short))
            if best is None or short[row] < best[0]:
                stage = int(np.argmax((peak - limit)[row]))
                group, _ = placed.groups()
                pool = placed.pools[int(group[row, stage])]
                share = float(peak[row, stage] / limit[row, stage])
                where = f"stage {stage} on {pool.name}"
                best = (float(short[row]), where, name_of(placed, row), share)
    return best


def infeasible(
    costs: Costs, pools: tuple[Pool, ...], choices: Choices
) -> tuple[InfeasibleError, float]:
    """The error to raise when no plan fits: the cell, the shortfall, the cheapest change.

    Returns:
        The error, and what the closest plan is short of [B], 0 where memory is not what is short.
    """
    problem = costs.problem
    found = _closest(costs, pools, choices)
    if found is None:
        error = InfeasibleError(
            f"no plan of {problem.model.name} on {problem.machine.name} has legal sizes; "
            f"global batch {problem.job.global_batch}, {costs.passes.num_layers} layers",
            _pins_in_words(choices) or "divisibility",
        )
        return error, 0.0
    short, where, plan, share = found
    if short <= 0:
        error = InfeasibleError(
            f"no plan of {problem.model.name} on {problem.machine.name} keeps all pins; memory is "
            f"not what is short, {plan} would fit",
            _pins_in_words(choices) or "divisibility",
        )
        return error, 0.0
    change = _change(costs, pools, choices) or (
        f"{100 * (share - 1):.0f} % more memory there, or more chips of its type"
    )
    error = InfeasibleError(
        f"no plan of {problem.model.name} fits on {problem.machine.name}: the closest ({plan}) is "
        f"short of {short / 1e9:.2f} GB; cheapest change: {change}",
        f"memory of {where}",
    )
    return error, short


def _pins_in_words(choices: Choices) -> str:
    free = Choices()
    names = Choices.__struct_fields__
    set_ = [f"{n}={getattr(choices, n)}" for n in names if getattr(choices, n) != getattr(free, n)]
    return "pins " + " ".join(set_) if set_ else ""


def _change(costs: Costs, pools: tuple[Pool, ...], choices: Choices) -> str:
    """The first pin without which something fits, or "" when none helps alone."""
    free = Choices()
    order: Sequence[str] = ("recompute", "zero", "microbatch", "schedule", "tp", "pp", "dp", "ep")
    for name in order:
        if getattr(choices, name) == getattr(free, name):
            continue
        looser = msgspec.structs.replace(choices, **{name: getattr(free, name)})
        found = _closest(costs, pools, looser)
        if found is not None and found[0] <= 0:
            return f"drop the pin {name}={getattr(choices, name)}"
    return ""
