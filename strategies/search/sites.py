"""Sites as workers: each takes steps of its own between exchanges, on its own kind of chips.

The third family of plans, for jobs that allow inexact ones (local SGD, strategies.data.local_sgd).
All sites run the same stages with the same tensor- and expert-parallel size, experts are shared
inside a site, and each site takes as many microbatches as it is fast. A site whose chips hold a
structure runs it there, recomputing as little as it must; one whose chips do not, recomputes more
or keeps optimizer states on its hosts.

Here: which structures there are, what the sites' passes alone say about them, and shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.plan.draft import CellKnobs, DataKnobs, ExpertKnobs, PlanDraft, TensorKnobs
from sim.plan.placement import Recompute
from sim.problem import Problem
from strategies.base import divisors
from strategies.search.costs import Costs
from strategies.search.drafts import pipeline_knobs
from strategies.search.mixed import common_layers
from strategies.search.options import Choices, modes_of
from strategies.search.pools import Pool, slots
from strategies.search.relax import without_memory, without_states
from strategies.search.screen import exact_times, fits
from strategies.search.slab import RECOMPUTE, Knobs, Slab
from strategies.search.space import MAX_MICROBATCH
from strategies.search.split import share_out
from strategies.search.wires import stage_cells
from strategies.tensor.megatron import tp_sizes

__all__ = [
    "SiteStructure",
    "draft_of_sites",
    "name_of_sites",
    "site_pools",
    "site_structures",
    "why_no_sites",
]

Ints = NDArray[np.int64]


class SiteStructure(msgspec.Struct, frozen=True, kw_only=True):
    """How all sites run the model, before anything is said of memory.

    Args:
        pools: one per site. slabs: one row per site, with layers and one microbatch, nothing
            recomputed unless pinned. pace_s: [s] of a microbatch more, per site.
        shares: microbatches of a replica of each site, the most even ends first.
        bound_s: [s] of a step of the batch, its sites' passes alone under the best of the shares.
    """

    pools: tuple[Pool, ...]
    slabs: tuple[Slab, ...]
    pace_s: tuple[float, ...]
    shares: tuple[tuple[int, ...], ...]
    bound_s: float


def why_no_sites(problem: Problem, pools: Sequence[Pool], choices: Choices) -> str:
    """Why sites cannot step by themselves here, "" when they can."""
    sites = {p.site for p in pools}
    if not problem.job.limits.allow_inexact:
        return "the job allows no inexact plans"
    if len(sites) < 2:
        return "there is one site"
    if len(pools) > len(sites):
        return "a site has several kinds of nodes, which do not share a worker here"
    if choices.zero:
        return f"ZeRO shares states between replicas that step by themselves; zero={choices.zero}"
    if choices.dp is not None or choices.families == "pipeline":
        return "sites are unlike replicas, which pins leave out"
    return ""


def site_pools(problem: Problem, pools: Sequence[Pool]) -> tuple[Pool, ...]:
    """The pools in the order of the machine's chips, which is that of replicas and workers."""
    return tuple(sorted(pools, key=lambda p: p.nodes[0]))


def site_structures(
    problem: Problem, pools: tuple[Pool, ...], choices: Choices, *, even: bool = False
) -> list[SiteStructure]:
    """All structures, the least bound first.

    Args:
        problem: what is planned. pools: of ``site_pools``. choices: pins.
        even: all replicas take equally many microbatches.
    """
    costs = Costs(without_memory(problem))
    hosted = "offload" not in choices.forbid and choices.offload != "no"
    lean = Costs(without_states(problem) if hosted else problem)
    found = []
    for sizes in _sizes(problem, pools, choices):
        slabs = _slabs(costs, pools, choices, *sizes)
        if slabs is None or not all(_may_fit(lean, s, choices) for s in slabs):
            continue
        total = problem.job.global_batch // slabs[0].microbatch
        pace = tuple(pace_of(costs, s)[1] for s in slabs)
        dps = [s.dp for s in slabs]
        shares = share_out([1 / t for t in pace], dps, total)
        if even:
            shares = [(total // sum(dps),) * len(dps)] if total % sum(dps) == 0 else []
        if shares:
            bound = min(max(m * t for m, t in zip(ms, pace, strict=True)) for ms in shares)
            found.append(
                SiteStructure(
                    pools=pools, slabs=slabs, pace_s=pace, shares=tuple(shares), bound_s=bound
                )
            )
    return sorted(found, key=lambda s: s.bound_s)


def _sizes(
    problem: Problem, pools: Sequence[Pool], choices: Choices
) -> Iterator[tuple[int, int, int, int]]:
    """(microbatch, tp, pp, ep) that every site has room for."""
    batch = problem.job.global_batch
    experts = {b.num_experts for b in problem.model.blocks if b.num_experts}
    widths = set.intersection(*(set(tp_sizes(problem, p.chips)[0]) for p in pools))
    micro = [b for b in divisors(batch) if b <= MAX_MICROBATCH or b == choices.microbatch]
    deepest = min(problem.model.num_layers, *(len(slots(p, 1)) for p in pools))
    for mb, tp, pp in itertools.product(micro, sorted(widths), range(1, deepest + 1)):
        if choices.microbatch not in (None, mb) or choices.tp not in (None, tp):
            continue
        dps = [len(slots(p, tp)) // pp for p in pools]
        # Chips of a site that no replica takes would idle; such a structure is never needed.
        if choices.pp not in (None, pp) or any(
            len(slots(p, tp)) % pp or p.num_chips % tp for p in pools
        ):
            continue
        groups = divisors(int(np.gcd.reduce(dps))) if experts else [1]
        for ep in groups:
            if choices.ep in (None, ep) and all(e % ep == 0 for e in experts):
                yield mb, tp, pp, ep


def _slabs(
    costs: Costs, pools: Sequence[Pool], choices: Choices, mb: int, tp: int, pp: int, ep: int
) -> tuple[Slab, ...] | None:
    """One row per site with common layers; None when some layers find no place."""
    problem = costs.problem
    sequence = tp > 1 and problem.job.sequence_length % tp == 0
    if choices.sequence_parallel is not None:
        sequence = sequence and choices.sequence_parallel
    mode = modes_of(problem, choices)[0]
    slabs = [
        Slab(
            pools=(pool,),
            dp=len(slots(pool, tp)) // pp,
            microbatch=mb,
            num_microbatches=pp,
            ep=ep,
            knobs=Knobs(sequence_parallel=sequence),
            tp=np.array([[tp]]),
            pp=np.array([[pp]]),
            recompute=np.array([[mode]]),
            layers=np.zeros((1, 0), np.int64),
        )
        for pool in pools
    ]
    layers = common_layers(costs, slabs)
    return None if layers is None else tuple(s.with_layers(layers) for s in slabs)


def _may_fit(lean: Costs, slab: Slab, choices: Choices) -> bool:
    """Whether a site holds its part with all layers recomputed and, with ``lean``, no states."""
    mode = RECOMPUTE.index(choices.recompute or "full")
    return bool(fits(lean, msgspec.structs.replace(slab, recompute=np.array([[mode]])))[0])


def pace_of(costs: Costs, slab: Slab) -> tuple[float, float]:
    """What a step takes at least, and for each microbatch of a replica [s], by the recurrence."""
    p = slab.num_stages
    few, more = (msgspec.structs.replace(slab, num_microbatches=m) for m in (4 * p, 5 * p))
    (a,), (b,) = exact_times(costs, [few, more])
    pace = max(float(b - a) / p, 1e-12)
    return max(0.0, float(a) - 4 * p * pace), pace


def draft_of_sites(
    problem: Problem,
    structure: SiteStructure,
    shares: Sequence[int],
    modes: Sequence[Recompute],
) -> PlanDraft:
    """Write a structure down: replicas site by site, each site with its recomputation."""
    first = structure.slabs[0]
    tp, stages = int(first.tp[0, 0]), first.num_stages
    cells: list[CellKnobs] = []
    for p in range(stages):
        replica = itertools.count()
        for slab, mode in zip(structure.slabs, modes, strict=True):
            for chips in stage_cells(slab.pools[0], tp, stages, slab.dp, p, False).chips:
                cells.append(
                    CellKnobs(stage=p, replica=next(replica), chips=chips, tp=tp, recompute=mode)
                )
    return PlanDraft(
        name=name_of_sites(structure, shares),
        cells=tuple(cells),
        pipeline=pipeline_knobs(problem, first.layers[0].tolist(), first.knobs, first.microbatch),
        data=DataKnobs(
            microbatches=tuple(
                m for s, m in zip(structure.slabs, shares, strict=True) for _ in range(s.dp)
            )
        ),
        tensor=TensorKnobs(sequence_parallel=first.knobs.sequence_parallel),
        expert=ExpertKnobs(ep=first.ep),
        knobs={"search": msgspec.to_builtins(first.knobs._asdict())},
    )


def name_of_sites(structure: SiteStructure, shares: Sequence[int]) -> str:
    """A structure in words, with these shares."""
    first = structure.slabs[0]
    name = " | ".join(
        f"{s.pools[0].name} dp {s.dp} x {m} microbatches"
        for s, m in zip(structure.slabs, shares, strict=True)
    )
    name += f", tp{int(first.tp[0, 0])}, pp {first.num_stages}"
    return name + (f", ep {first.ep}" if first.ep > 1 else "")
