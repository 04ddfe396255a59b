"""Structures worth offloading: the search with accelerator memory relaxed, and their bounds.

Offloading trades memory for traffic with the host, so the time of a structure without memory limits
says how good its offloaded plans can be at best. Two relaxed searches give candidates: one without
any limit, and one in which optimizer states take no memory but everything else does; what fits
there fits with the optimizer alone on the host, or nearly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from sim.problem import Problem
from strategies.search.board import Effort, Progress
from strategies.search.costs import Costs
from strategies.search.evaluate import Evaluator
from strategies.search.options import Choices
from strategies.search.pools import Pool
from strategies.search.screen import compute_bound
from strategies.search.slab import Slab, structure_key

__all__ = [
    "Relaxed", "Structure", "offload_bound", "relaxed", "without_memory", "without_states",
]  # fmt: skip

MOST = 24
"""Most structures of each relaxed search."""
FIRST = 12
"""Of them the fastest come first, then the fastest of each further shape (replicas, stages,
microbatches): where the fastest few are alike none may fit."""


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """A structure to repair.

    Args:
        slab: one row with layers, without recomputation unless pinned. estimate_s: [s] relaxed.
        bound_s: [s] see ``offload_bound``. price: what a second costs, 1 where time is minimised.
    """

    slab: Slab
    estimate_s: float
    bound_s: float
    price: float


class Relaxed(msgspec.Struct, kw_only=True):
    """What the relaxed searches found; filled while they run.

    Attributes:
        structures: to repair. space, evaluated, exact: as of an Evaluator, of both searches.
        stopped: the deadline or Ctrl-C ended one of them.
    """

    structures: list[Structure] = []
    space: int = 0
    evaluated: int = 0
    exact: int = 0
    stopped: bool = False


def without_memory(problem: Problem) -> Problem:
    """The problem on accelerators whose memory never runs out."""
    machine = problem.machine
    kinds = {
        name: msgspec.structs.replace(kind, memory_bytes=math.inf)
        for name, kind in machine.accelerators.items()
    }
    endless = msgspec.structs.replace(machine, accelerators=kinds)
    return msgspec.structs.replace(problem, machine=endless)


def without_states(problem: Problem) -> Problem:
    """The problem with an optimizer whose states take no memory."""
    job = msgspec.structs.replace(problem.job, num_states=0, master_weights=False)
    return msgspec.structs.replace(problem, job=job)


def offload_bound(costs: Costs, slab: Slab) -> float:
    """Time [s] between steps that no offloaded plan of a structure beats.

    Passes alone: transfers, gradient sums and updates may hide, the last even in the next step.
    Stage 0 begins and ends a step, so steps that follow one another without a barrier are no closer
    than one step's passes are long. With the weight gradient apart other stages may work on when
    stage 0 has ended; then only the work of the busiest stage is sure.

    Args:
        costs: of the problem. slab: one row, with layers, without recomputation.
    """
    shape = slab.shape
    if not shape.splits:
        return float(compute_bound(costs, slab)[0])
    times = costs.compute_only(slab)
    own = (times.forward + times.backward + times.weight)[0].reshape(shape.chunks, -1).sum(axis=0)
    return float(shape.num_microbatches * own.max())


def relaxed(
    problem: Problem,
    pools: tuple[Pool, ...],
    choices: Choices,
    effort: Effort,
    deadline: float,
    progress: Progress | None,
) -> Relaxed:
    """Run both searches; each structure comes once, the least bound first.

    Args:
        problem, pools, choices: as of the search. effort: of each. deadline: of time.monotonic.
        progress: as for ``search``.
    """
    state = Relaxed()
    endless = without_memory(problem)
    costs = Costs(endless)
    found: dict[bytes, Structure] = {}
    for case in (without_states(problem), endless):
        search = Evaluator(
            Costs(case), _pins(choices), effort, MOST, deadline=deadline, progress=progress
        )
        search.run(pools)
        state.space += search.space
        state.evaluated += search.evaluated
        state.exact += search.exact
        state.stopped |= search.stopped
        for score, slab in _varied(search, choices):
            structure = _structure(costs, search, choices, slab, score)
            found.setdefault(structure_key(structure.slab), structure)
    state.structures = sorted(found.values(), key=lambda s: (s.bound_s * s.price, s.estimate_s))
    return state


def _pins(choices: Choices) -> Choices:
    """Pins of the relaxed searches: 1F1B, which holds the fewest microbatches, unless pinned.

    ZeRO stages that closed forms do not know are set on the drafts.
    """
    free = choices.schedule is None and choices.chunks is None and choices.split_backward is None
    zero = choices.zero if choices.zero in (None, 0, 1) else 1
    kept = msgspec.structs.replace(choices, zero=zero)
    if free:
        kept = msgspec.structs.replace(kept, schedule="1f1b", chunks=1, split_backward=False)
    return kept


def _varied(search: Evaluator, choices: Choices) -> Iterator[tuple[float, Slab]]:
    """The best of a search: the fastest, then the fastest of each shape that is not among them."""
    every = [
        (score, slab)
        for score, slab in search.best(len(search.firsts) + MOST, 1)
        if not choices.zero or slab.dp > 1
    ]
    shapes = {_shape(slab) for _, slab in every[:FIRST]}
    yield from every[:FIRST]
    left = MOST - FIRST
    for score, slab in every[FIRST:]:
        if left and _shape(slab) not in shapes:
            shapes.add(_shape(slab))
            left -= 1
            yield score, slab


def _shape(slab: Slab) -> tuple[int, int, int, int]:
    return slab.dp, slab.num_stages, slab.microbatch, int(slab.tp.max())


def _structure(
    costs: Costs, search: Evaluator, choices: Choices, slab: Slab, score: float
) -> Structure:
    price = float(search.price(slab)[0])
    if choices.recompute is None:
        slab = msgspec.structs.replace(slab, recompute=np.zeros_like(slab.recompute))
    bare = msgspec.structs.replace(slab, recompute=np.zeros_like(slab.recompute))
    bound = offload_bound(costs, bare)
    return Structure(slab=slab, estimate_s=score / price, bound_s=bound, price=price)
