"""Whether a cell's predicted memory fits its accelerator: the ledger, its verdict and margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from sim.cost.memory import TERMS, MemoryKnobs, stage_memory_terms
from sim.cost.offload import segment_terms
from sim.cost.servers import servers_of
from sim.errors import PlanError
from sim.hardware.machine import Accelerator
from sim.model.amounts import block_table
from sim.plan.placement import Cell
from sim.plan.plan import Plan
from sim.plan.schedules import SCHEDULES, Slot, explicit_order
from sim.problem import Problem
from sim.spec.job import Job

__all__ = [
    "BAND",
    "Ledger",
    "knobs_of",
    "ledger",
    "live_microbatches",
    "memory_limit",
    "peak_memory",
    "server_memory",
]

BAND = 0.10
"""Share by which a prediction may be low: the 90th percentile of ledgers of this kind over measured
runs is 7 to 9 %. Between ``capacity / (1 + BAND)`` and the capacity a plan is at risk."""
_LIVE_PERIODS = 4
"""The number in flight repeats once the pipeline is full; this many rounds are enough to see it."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank.

    Args:
        terms: name -> [B], in the order of ``TERMS``. capacity_bytes: [B] of the accelerator.
        limit_bytes: [B] up to which it fits (see ``memory_limit``).
        verdict: "fits", "at risk" (above the limit, not above the capacity) or "does not fit".
    """

    terms: dict[str, float]
    capacity_bytes: float
    limit_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Sum of the terms [B]."""
        return sum(self.terms.values())

    @property
    def margin_bytes(self) -> float:
        """What is left of the capacity [B]; negative by how much it is short."""
        return self.capacity_bytes - self.peak_bytes

    @property
    def verdict(self) -> str:
        """One of "fits", "at risk", "does not fit"."""
        if self.peak_bytes > self.capacity_bytes:
            return "does not fit"
        return "fits" if self.peak_bytes <= self.limit_bytes else "at risk"

    def table(self) -> str:
        """The terms as text, one a line, with the verdict and the margin last."""
        lines = [f"{name:<15}{nbytes / 1e9:>9.2f} GB" for name, nbytes in self.terms.items()]
        lines.append(f"{'peak':<15}{self.peak_bytes / 1e9:>9.2f} GB")
        capacity = f"{self.capacity_bytes / 1e9:.2f} GB"
        lines.append(f"{self.verdict}: {self.margin_bytes / 1e9:+.2f} GB of {capacity} left")
        return "\n".join(lines)


def memory_limit(accelerator: Accelerator, job: Job) -> float:
    """Return the predicted peak up to which a plan fits [B].

    The smaller of the job's share of the capacity and ``capacity / (1 + BAND)``.
    """
    share = min(job.limits.max_memory_fraction, 1 / (1 + BAND))
    return share * accelerator.memory_bytes


@lru_cache(maxsize=1024)
def live_microbatches(
    schedule: str,
    num_stages: int,
    microbatches: int,
    chunks: int = 1,
    order: tuple[str, ...] = (),
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return how many microbatches each virtual stage of a position holds at once.

    Counted on the schedule itself: a forward adds one, the last backward op of a microbatch
    takes it away (a split backward holds everything until W).

    Args:
        schedule: name in sim.plan.schedules. num_stages: pipeline positions.
        microbatches: of the replica. chunks: virtual stages per position.
        order: rows of a schedule written out, which then replaces the named one.

    Returns:
        Per position the maximal vectors over its virtual stages: none is below another.

    Raises:
        PlanError: the schedule is unknown.
    """
    if order:
        return tuple(_live_vectors(slots) for slots in explicit_order(order))
    if schedule not in SCHEDULES:
        raise PlanError("unknown schedule", key="schedule", found=schedule)
    enough = num_stages * _LIVE_PERIODS * max(chunks, 1)
    m = microbatches if schedule == "gpipe" or microbatches <= enough else enough
    extra = (chunks,) if schedule == "interleaved" else ()
    return tuple(_live_vectors(slots) for slots in SCHEDULES[schedule](num_stages, m, *extra))


def _live_vectors(slots: Sequence[Slot]) -> tuple[tuple[int, ...], ...]:
    """Maximal vectors of microbatches held, over the stages that a position's slots name."""
    index = {stage: i for i, stage in enumerate(sorted({s for _, s, _ in slots}))}
    now = [0] * len(index)
    seen: set[tuple[int, ...]] = set()
    for kind, stage, _ in slots:
        now[index[stage]] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        seen.add(tuple(now))
    return tuple(sorted(v for v in seen if not any(v != w and _below(v, w) for w in seen)))


def _below(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))


def knobs_of(plan: Plan, cell: Cell) -> MemoryKnobs:
    """Return what of a plan's cell decides its memory besides its blocks."""
    math = plan.mathematics
    return MemoryKnobs(
        microbatch=math.microbatch,
        tp=cell.tp,
        cp=cell.cp,
        ep=plan.placement.ep,
        recompute=cell.recompute,
        sequence_parallel=math.sequence_parallel,
        buffers=plan.buffers,
        shards=plan.placement.num_replicas * cell.cp if math.zero else 1,
        late_gradients=max((c.args.get("late_gradients", 0) for c in plan.lowering), default=0),
        outer_bytes=max((c.args.get("outer_bytes", 0.0) for c in plan.lowering), default=0.0),
        remote_optimizer=any(c.args.get("remote_optimizer", False) for c in plan.lowering),
        slots=max((c.args.get("slots", 0) for c in plan.lowering), default=0),
    )


def ledger(
    plan: Plan,
    problem: Problem,
    cell: Cell,
    live: Sequence[Sequence[int]] | None = None,
) -> Ledger:
    """Return the ledger of a cell.

    Args:
        plan, problem: see there. cell: of the plan's placement.
        live: maximal vectors of microbatches in flight per virtual stage of the cell; None takes
            those of the plan's schedule.

    Raises:
        PlanError: the plan names no schedule and ``live`` is not given.
    """
    mine = [s for s in plan.placement.segments if s.cell == cell.stage]
    if live is None:
        live = _live_of(plan, cell)
    if any(s.name for s in mine):
        accelerator = problem.machine.accelerators[cell.accelerator]
        return Ledger(
            terms=segment_terms(plan, problem, cell, live, knobs_of(plan, cell)),
            capacity_bytes=accelerator.memory_bytes,
            limit_bytes=memory_limit(accelerator, problem.job),
        )
    machine, job = problem.machine, problem.job
    accelerator = machine.accelerators[cell.accelerator]
    table = block_table(problem.model, job.sequence_length, job.activation_bytes)
    knobs = knobs_of(plan, cell)
    first = np.array([[s.blocks[0] for s in mine]] * len(live))
    last = np.array([[s.blocks[1] for s in mine]] * len(live))
    terms = stage_memory_terms(table, job, accelerator, first, last, np.array(live), knobs)
    worst = int(np.argmax(sum(terms.values())))
    return Ledger(
        terms={name: float(terms[name][worst]) for name in TERMS},
        capacity_bytes=accelerator.memory_bytes,
        limit_bytes=memory_limit(accelerator, job),
    )


def _live_of(plan: Plan, cell: Cell) -> tuple[tuple[int, ...], ...]:
    call = next((c for c in plan.lowering if c.name == "schedule"), None)
    if call is None:
        raise PlanError("memory in closed form needs a plan with a schedule", key="lowering")
    placement = plan.placement
    m = placement.microbatches[cell.replica] if placement.microbatches else 1
    name = call.args.get("name", "1f1b")
    chunks = len(placement.stages) // placement.num_stages
    order = tuple(call.args.get("order", ()))
    return live_microbatches(name, placement.num_stages, m, chunks, order)[cell.stage]


def peak_memory(plan: Plan, problem: Problem) -> Mapping[tuple[int, int], Ledger]:
    """Return (stage, replica) -> ledger of every cell of a plan."""
    known: dict[tuple[object, ...], Ledger] = {}
    found = {}
    for cell in plan.placement.cells:
        m = plan.placement.microbatches
        key = (
            cell.stage,
            cell.accelerator,
            cell.tp,
            cell.cp,
            cell.recompute,
            cell.offload,
            m[cell.replica] if m else 1,
        )
        if key not in known:
            known[key] = ledger(plan, problem, cell)
        found[cell.stage, cell.replica] = known[key]
    return found


def server_memory(plan: Plan, problem: Problem) -> Mapping[int, Ledger]:
    """Return rank -> ledger of every server that has a chip of its own."""
    machine, found = problem.machine, {}
    types = [n.accelerator for n in machine.nodes for _ in range(*n.chips)]
    for server in servers_of(plan, problem):
        if server.on_chip:
            accelerator = machine.accelerators[types[server.chip]]
            terms = dict.fromkeys(TERMS, 0.0) | server.terms
            terms["allocator gap"] = accelerator.allocator_gap * sum(server.terms.values())
            terms["context"] = accelerator.context_bytes
            found[server.rank] = Ledger(
                terms=terms,
                capacity_bytes=accelerator.memory_bytes,
                limit_bytes=memory_limit(accelerator, problem.job),
            )
    return found
