"""Ways of training on one machine, and what the engine says about each: order, delays, speed."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from sim.engine.faults import Fault
from sim.engine.simulate import Run, simulate
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.validate import validate
from sim.problem import Problem
from sim.report.links import link_use
from strategies.data.cosim_order import Arrival, round_ends
from strategies.data.delayed import DELAYED, DelayedKnobs
from strategies.data.delayed_runs import Delays, common_window, delays_of, order_of
from strategies.data.local_sgd import LOCAL_SGD, LocalKnobs

__all__ = ["WAYS", "Timing", "Way", "part_steps", "plan_of", "timing_of"]


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way of training: ``served`` or ``local``, or synchronous without either.

    Args:
        name: for people. served: knobs of ``delayed_sgd`` with variant "server".
        local: knobs of ``local_sgd`` with one worker per replica.
        outer_rate, outer_momentum: of the outer step; 0.7 and 0.9 are DiLoCo's.
        mix: share of a worker's own values kept when a late exchange comes; without overlap 0.
    """

    name: str
    served: DelayedKnobs | None = None
    local: LocalKnobs | None = None
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    mix: float = 0.5


_STREAMED = LocalKnobs(inner=8, workers=4, overlap=True, bits=8, fragments=4)
WAYS = (
    Way(name="sync"),
    Way(name="async", served=DelayedKnobs(variant="server")),
    Way(name="SSP 2", served=DelayedKnobs(variant="server", rule="ssp", bound=2)),
    Way(name="DiLoCo 8", local=LocalKnobs(inner=8, workers=4)),
    Way(name="DiLoCo 8 streamed", local=_STREAMED),
)
"""Of four workers; DiLoCo has 8 local steps a round. Streamed: overlapped, 8 bits an element, four
fragments in turn."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulation says about a way.

    Args:
        way: which. workers: of the training.
        order: writes of the servers in order, () for rounds.
        ends: [s] when each round, or part of a streamed round, ends; () for servers.
        delays: of the writes of servers; None for rounds, which delay no update.
        updates_per_s: writes, or steps of the shared parameters, of a fragment where they are
            streamed, per simulated second [1/s].
        samples_per_s: sequences behind the gradients [1/s].
        wan_bytes_per_sample: [B] over links between sites, both directions.
    """

    way: Way
    workers: tuple[int, ...]
    order: tuple[Arrival, ...] = ()
    ends: tuple[float, ...] = ()
    delays: Delays | None = None
    updates_per_s: float
    samples_per_s: float
    wan_bytes_per_sample: float


def plan_of(problem: Problem, draft: PlanDraft, way: Way) -> Plan:
    """The plan of a way.

    Args:
        problem: allows inexact plans. draft: synchronous, with equal replicas.

    Raises:
        InputError: the draft does not carry the way, or its replicas are not equal workers.
    """
    counts = draft.data.microbatches
    if len(set(counts)) != 1:
        raise InputError(
            "every worker computes on equally many samples",
            key="data.microbatches",
            found=str(counts),
            expected="equal replicas",
        )
    if way.served:
        draft = DELAYED.apply(problem, draft, way.served)
    elif way.local:
        draft = LOCAL_SGD.apply(problem, draft, way.local)
        if draft.data.workers and set(draft.data.workers) != {1}:
            raise InputError(
                "the co-simulation has one replica per worker",
                key="local_sgd.workers",
                found=str(way.local.workers),
                expected=str(len(counts)),
            )
    plan = lower(problem, draft)
    validate(plan)
    return plan


def timing_of(
    problem: Problem,
    draft: PlanDraft,
    way: Way,
    *,
    seconds: float,
    faults: Sequence[Fault] = (),
) -> Timing:
    """Simulate a way for at least ``seconds`` [s] of its workers' common work.

    Raises:
        InputError: see ``plan_of``; or nothing was updated in that time.
        SimulationError: a lost chip that all others wait for.
    """
    run = _run_for(plan_of(problem, draft, way), problem, seconds, faults)
    workers = tuple(range(len(draft.data.microbatches)))
    crossing, batch = _wan_bytes(run, problem), problem.job.global_batch
    if way.served:
        whole = order_of(run)
        delays = delays_of(run, stop=seconds)
        return Timing(
            way=way,
            workers=workers,
            order=tuple(a for a in whole if a.time <= seconds),
            delays=delays,
            updates_per_s=delays.updates_per_s,
            samples_per_s=delays.samples_per_s,
            wan_bytes_per_sample=crossing / (len(whole) * batch / len(workers)),
        )
    samples = batch * part_steps(way)
    ends = tuple(t for t in _ends(run) if t <= seconds)
    if len(ends) < 2:
        raise InputError(
            "two rounds at least", key="seconds", found=f"{seconds:g} s", expected="a longer time"
        )
    pace = (len(ends) - 1) / (ends[-1] - ends[0])
    return Timing(
        way=way,
        workers=workers,
        ends=ends,
        updates_per_s=pace,
        samples_per_s=pace * samples,
        wan_bytes_per_sample=crossing / (run.layout.steps * samples),
    )


def _wan_bytes(run: Run, problem: Problem) -> float:
    """[B] of a whole run over links between sites."""
    carried = dict(zip(run.prices.link_names, link_use(run)[0].tolist(), strict=True))
    return float(sum(carried[x.name] for x in problem.machine.links if x.kind == "wan"))


def part_steps(way: Way) -> int:
    """Local steps in a step of the plan; 1 where there are none."""
    local = way.local
    return local.inner // local.fragments if local and local.inner else 1


def _run_for(plan: Plan, problem: Problem, seconds: float, faults: Sequence[Fault]) -> Run:
    """As many steps as all workers need to be at work until ``seconds`` [s].

    No more where more steps bring no later end, as behind a lost chip.
    """
    steps, before = 4, 0.0
    while True:
        run = simulate(plan, problem, steps=steps, faults=faults)
        end = common_window(run)[1] if run.handled else _ends(run)[-1]
        if end >= seconds or end <= before:
            return run
        steps, before = ceil(steps * max(1.5, 1.05 * seconds / end)), end


def _ends(run: Run) -> tuple[float, ...]:
    """When each round ends [s]: at its BARRIER, or with the last worker's outer update."""
    if run.layout.plan.barrier:
        return round_ends(run)
    found: dict[int, float] = {}
    graph = run.layout.graph
    for n, op in enumerate(graph.ops):
        if op.kind == "OPT" and op.label == "outer":
            step = int(graph.step[n])
            found[step] = max(found.get(step, 0.0), float(run.outcome.end[n]))
    return tuple(t for _, t in sorted(found.items()))
