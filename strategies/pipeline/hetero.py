"""HeteroPP: one pipeline over unlike accelerators, a run of stages on each type.

Every stage uses one accelerator type; types differ in tensor parallelism, layers and recomputation
and share the number of replicas (H2, arXiv:2505.17548). What the paper calls topology-aware
resharding is the plan's own rule for boundaries between unequal cells: max(t_s, t_r) pieces, then
an all-gather inside the receiver. Pieces leave and arrive through the NIC their chip is affine to,
because cells are runs of neighbouring chips inside a node. The send of the input gradient runs
under the weight gradient (``split_backward``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from sim.errors import InputError
from sim.plan.draft import CellKnobs, PlanDraft
from sim.plan.placement import Recompute
from sim.plan.uniform import check_layers
from sim.problem import Problem
from strategies.base import Space, fill, space_of
from strategies.pipeline.partition import unit_starts
from strategies.registry import register

if TYPE_CHECKING:
    from strategies.search.pools import Pool
    from strategies.search.slab import Slab

__all__ = ["HETERO_PP", "HeteroGroup", "HeteroKnobs", "HeteroPP"]

OFFERED = 24
"""Most values of the space: the fastest by closed form."""


class HeteroGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A run of stages on one accelerator type.

    Args:
        pool: accelerator, written "NAME@site" where a type stands on several sites.
        tp: chips per cell. layers: of each of its stages. recompute: what is not kept.
    """

    pool: str
    tp: int = 1
    layers: tuple[int, ...] = (1,)
    recompute: Recompute = "none"


class HeteroKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``hetero-pp``.

    Args:
        groups: in order of stages; a type may come twice (a sub-group of its nodes each).
        replicas: data-parallel size, shared by all groups.
        split_backward: B as I then W, so that sends of gradients run under W.
    """

    groups: tuple[HeteroGroup, ...] = ()
    replicas: int = 1
    split_backward: bool = True


class HeteroPP:
    """Unlike cells per block of stages."""

    name = "hetero-pp"
    axis = "pipeline"
    paper = "H2, arXiv:2505.17548, HeteroPP"
    owns = frozenset(
        {
            "cells.stage",
            "cells.replica",
            "cells.chips",
            "cells.tp",
            "cells.recompute",
            "pipeline.schedule",
            "pipeline.chunks",
            "pipeline.cuts",
            "pipeline.split_backward",
        }
    )
    knobs = HeteroKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[HeteroKnobs]:
        """Plans of H2's first stage (one group per type, all types) that fit, fastest first.

        Layers are split by the fastest bottleneck for microbatches of the job's size (or one
        sequence); at most ``OFFERED`` values, by the closed form.
        """
        found = _first_stage(problem, draft or PlanDraft())
        return space_of(found, "no pipeline over all accelerator types fits into their memory")

    def apply(self, problem: Problem, draft: PlanDraft, knobs: HeteroKnobs) -> PlanDraft:
        """Place the groups on their chips and cut the model.

        Raises:
            InputError: an unknown type, a tp that is not legal on it, too few chips, or layers that
                do not add up; names the nearest legal values.
        """
        if not knobs.groups or knobs.replicas < 1:
            raise InputError(
                "a heterogeneous pipeline needs groups and replicas",
                key="hetero.groups",
                found=f"{len(knobs.groups)} groups, {knobs.replicas} replicas",
                expected="at least one of each",
            )
        layers = [n for g in knobs.groups for n in g.layers]
        starts = unit_starts(problem.model)
        check_layers(len(starts) - 1, layers, len(layers))
        cells = _cells(problem, knobs)
        cuts, done = [0], 0
        for count in layers:
            done += count
            cuts.append(starts[done])
        pipeline = msgspec.structs.replace(
            draft.pipeline,
            schedule="1f1b",
            chunks=1,
            cuts=tuple(cuts),
            split_backward=knobs.split_backward and len(layers) > 1,
        )
        return fill(draft, self.name, knobs, cells=cells, pipeline=pipeline)


def _cells(problem: Problem, knobs: HeteroKnobs) -> tuple[CellKnobs, ...]:
    from strategies.search.pools import pools_of, slots
    from strategies.search.wires import stage_cells

    free = {p.name: p for p in pools_of(problem.machine)}
    cells, stage = [], 0
    for group in knobs.groups:
        pool = _pool_of(free, group)
        _check_tp(problem, pool, group)
        need = knobs.replicas * len(group.layers)
        have = len(slots(pool, group.tp))
        if need > have:
            raise InputError(
                f"{pool.name} has too few chips for this group",
                key="hetero.groups",
                found=f"{knobs.replicas} replicas x {len(group.layers)} stages x tp {group.tp}",
                expected=f"at most {have // knobs.replicas} stages at these sizes",
            )
        for index in range(len(group.layers)):
            places = stage_cells(
                pool, group.tp, len(group.layers), knobs.replicas, index, False
            ).chips
            cells += [
                CellKnobs(stage=stage, replica=r, chips=c, tp=group.tp, recompute=group.recompute)
                for r, c in enumerate(places)
            ]
            stage += 1
        per_node = max(1, (pool.nodes[0][1] - pool.nodes[0][0]) // group.tp)
        left = pool.nodes[math.ceil(need / per_node) :]
        free[pool.name] = msgspec.structs.replace(pool, nodes=left)
    return tuple(cells)


def _pool_of(free: dict[str, Pool], group: HeteroGroup) -> Pool:
    pool = free.get(group.pool)
    if pool is None or not pool.nodes:
        raise InputError(
            "no nodes of this accelerator are left" if pool else "unknown accelerator",
            key="hetero.groups",
            found=group.pool,
            expected=" or ".join(n for n, p in free.items() if p.nodes) or "fewer groups",
        )
    return pool


def _check_tp(problem: Problem, pool: Pool, group: HeteroGroup) -> None:
    from strategies.tensor.megatron import tp_sizes

    sizes, reason = tp_sizes(problem, pool.chips)
    if group.tp not in sizes:
        raise InputError(
            f"{reason} on {pool.name}",
            key="hetero.tp",
            found=str(group.tp),
            expected=" or ".join(map(str, sizes)) or "another model",
        )


def _first_stage(problem: Problem, draft: PlanDraft) -> list[HeteroKnobs]:
    # The search is built on this package, so it is looked up when it is needed.
    from collections import Counter

    from strategies.search.costs import Costs
    from strategies.search.options import choices_of
    from strategies.search.pools import pools_of
    from strategies.search.screen import by_stages, place_layers, rough_times
    from strategies.search.shortlist import Shortlist
    from strategies.search.slab import Knobs
    from strategies.search.space import blocks_of
    from strategies.search.structures import enumerate_block

    pins = {
        "all_types": True, "schedule": "1f1b", "ep": 1, "chunks": 1, "orders": "memory",
        "microbatch": problem.job.pins.microbatch or 1,
    }  # fmt: skip
    if problem.job.pins.schedule not in (None, "1f1b"):
        return []
    costs, choices = Costs(problem), choices_of(problem, pins)
    best = Shortlist(OFFERED)
    for block in blocks_of(costs, pools_of(problem.machine), choices, rich=False):
        found = enumerate_block(
            block, costs.passes.num_layers, math.inf, Counter(), choices.pp, max_rows=4096
        )
        for slab in by_stages(found) if found is not None else ():
            zero = problem.job.pins.zero or 0
            split = slab.num_stages > 1
            knobs = Knobs("1f1b", 1, split, zero, draft.tensor.sequence_parallel)
            placed = place_layers(costs, slab.with_knobs(knobs), Counter())
            if len(placed):
                best.add(placed, rough_times(costs, placed))
    return list(dict.fromkeys(_knobs_of(slab) for _, slab in best.best(OFFERED)))


def _knobs_of(slab: Slab) -> HeteroKnobs:
    from strategies.search.slab import RECOMPUTE

    groups, first = [], 0
    for g, pool in enumerate(slab.pools):
        stages = int(slab.pp[0, g])
        groups.append(
            HeteroGroup(
                pool=pool.name,
                tp=int(slab.tp[0, g]),
                layers=tuple(slab.layers[0, first : first + stages].tolist()),
                recompute=RECOMPUTE[int(slab.recompute[0, g])],
            )
        )
        first += stages
    return HeteroKnobs(
        groups=tuple(groups), replicas=slab.dp, split_backward=slab.knobs.split_backward
    )


HETERO_PP = register(HeteroPP())
