"""Find the three integers: bound every choice in closed form, simulate until no bound is better.

All layers are equal, so what each of the four resources does in a step follows from the integers:
the chip computes, both copy directions carry, the host updates. No step is shorter than the busiest
of them is busy. Choices are taken in order of this bound; those that fit are simulated; the search
stops when the next bound is no better than the best step found, and has then found what simulating
all of them would find. The unit times come from a few priced plans, not from formulas of their own.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.ledger import memory_limit, peak_memory
from sim.cost.pricing import price
from sim.engine.simulate import lay_out
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.policies import Outcome, outcome_of

__all__ = ["Planned", "memory_bounds", "plan_offload", "time_bounds"]

Floats = NDArray[np.float64]

STREAMS = ("compute", "host", "d2h", "h2d")


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What the search found.

    Args:
        best: the fastest choice that fits, or one that does not when none does.
        weighed, simulated: choices whose memory was worked out, and that were simulated.
        proven: no choice left could be faster.
    """

    best: Outcome
    weighed: int
    simulated: int
    proven: bool


def plan_offload(
    problem: Problem, start: PlanDraft, base: AutoHeteKnobs | None = None, *, most: int = 500
) -> Planned:
    """Return the fastest (checkpointed, parameters, optimizer) that fits.

    Args:
        problem: see there. start: a complete draft of one stage without offloading.
        base: knobs other than the three integers. most: simulations after which to stop unproven.

    Raises:
        InputError: the draft has several stages, or cannot be offloaded.
    """
    base = base or AutoHeteKnobs()
    bound = time_bounds(problem, start, base)
    least = memory_bounds(problem, start, base)
    limit = min(
        memory_limit(problem.machine.accelerators[c.accelerator], problem.job)
        for c in lower(problem, start).placement.cells
    )
    size = bound.shape[0]
    order = np.argsort(bound, axis=None, kind="stable")
    order = order[least.reshape(-1)[order] <= limit * (1 + 1e-9)]
    best = Outcome(knobs=base, short="accelerator memory")
    weighed = simulated = 0
    for index in order.tolist():
        if not best.short and bound.reshape(-1)[index] >= best.step_s:
            break
        if simulated >= most:
            return Planned(best=best, weighed=weighed, simulated=simulated, proven=False)
        c, p, o = (int(x) for x in np.unravel_index(index, (size, size, size)))
        knobs = msgspec.structs.replace(base, checkpointed=c, parameters=p, optimizer=o)
        found = outcome_of(problem, start, knobs)
        weighed += 1
        simulated += not found.short
        better = not found.short and (bool(best.short) or found.step_s < best.step_s)
        if better or (best.short and found.short == "host memory"):
            best = found
    return Planned(best=best, weighed=weighed, simulated=simulated, proven=True)


def time_bounds(problem: Problem, start: PlanDraft, base: AutoHeteKnobs) -> Floats:
    """Return how long the busiest resource of rank 0 works in a step [s], shape (N + 1,) * 3.

    Axes: layers checkpointed, with parameters, with optimizer on the host.

    Raises:
        InputError: the draft has several stages.
    """
    n = problem.model.num_layers
    none = _busy(problem, start, base, 0, 0, 0)
    again = (_busy(problem, start, base, n, 0, 0)["compute"] - none["compute"]) / n
    away = _busy(problem, start, base, 0, 0, n)
    fetched = _busy(problem, start, base, 0, n, n)
    update = (none["compute"] - away["compute"]) / n
    m = lower(problem, start).placement.microbatches[0]
    # Consecutive uses of a layer share a fetch: at the turn of a microbatch and between two.
    shared = m + (m - 1)
    fetch = fetched["h2d"] / (2 * n * m - shared)
    c, p, o = np.meshgrid(*[np.arange(n + 1.0)] * 3, indexing="ij", sparse=True)
    fetches = np.where(p > 0, 2 * p * m - shared, 0.0)
    updated_here = np.minimum(p, n - o)
    busy = (
        none["compute"] + c * again - o * update,
        o * away["host"] / n,
        o * away["d2h"] / n + updated_here * fetch,
        fetches * fetch + np.minimum(o, n - p) * away["h2d"] / n,
    )
    # Sums of many equal times are a little off.
    return np.asarray(np.maximum.reduce(np.broadcast_arrays(*busy)) * (1 - 1e-9))


def memory_bounds(problem: Problem, start: PlanDraft, base: AutoHeteKnobs) -> Floats:
    """Return bytes [B] that each choice needs at least on a chip; shape as of ``time_bounds``."""
    n = problem.model.num_layers
    terms = []
    for c, p, o in ((0, 0, 0), (n, 0, 0), (0, n, 0), (0, 0, n)):
        ledgers = peak_memory(_plan(problem, start, base, c, p, o), problem).values()
        terms.append(max((x.terms for x in ledgers), key=lambda t: sum(t.values())))
    none, kept, away, states = terms
    gap = 1 + none["allocator gap"] / max(
        sum(v for k, v in none.items() if k not in ("allocator gap", "context")), 1.0
    )
    saved = (
        (none["activations"] - kept["activations"]) / n,
        (none["parameters"] - away["parameters"]) / n,
        (none["optimizer"] - states["optimizer"]) / n,
    )
    c, p, o = np.meshgrid(*[np.arange(n + 1.0)] * 3, indexing="ij", sparse=True)
    streamed = np.where(o > 0, none["gradients"] + none["gradient copy"], 0.0)
    least = sum(none.values()) - gap * (c * saved[0] + p * saved[1] + o * saved[2] + streamed)
    return np.asarray(least)


def _plan(problem: Problem, start: PlanDraft, base: AutoHeteKnobs, c: int, p: int, o: int) -> Plan:
    knobs = msgspec.structs.replace(base, checkpointed=c, parameters=p, optimizer=o)
    return lower(problem, compose(problem, [("offload", knobs)], start=start))


def _busy(
    problem: Problem, start: PlanDraft, base: AutoHeteKnobs, c: int, p: int, o: int
) -> dict[str, float]:
    """Seconds that each stream of rank 0 works in a step, nobody in its way."""
    if len({cell.stage for cell in start.cells}) > 1:
        raise InputError(
            "three integers are planned for one stage",
            key="cells",
            found="several stages",
            expected="one stage; set the integers for several",
        )
    plan = _plan(problem, start, base, c, p, o)
    layout = lay_out(plan)
    graph = layout.graph
    prices = price(graph, layout.wiring, plan, problem, contention=False, late=layout.late)
    busy = dict.fromkeys(STREAMS, 0.0)
    for node, seconds in enumerate(prices.seconds.tolist()):
        name = graph.stream_names[graph.stream[node]][1]
        if name in busy and 0 in graph.actors[graph.actor[node]].ranks:
            busy[name] += seconds
    return busy
