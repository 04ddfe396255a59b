"""Data parallelism: the replicas that the grid has, and their microbatches."""

from __future__ import annotations

import msgspec

from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.uniform import check_batch
from sim.problem import Problem
from strategies.base import Space, divisors, draft_or_default, fill, kept_by_pin, space_of
from strategies.pipeline.schedules import check_schedule
from strategies.registry import register

__all__ = ["DDP", "Ddp", "DdpKnobs", "measured_microbatches"]


class DdpKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``ddp``.

    Args:
        microbatch: [sequences].
        microbatches: of each replica, () for the same number everywhere. Uneven numbers suit
            replicas on unlike accelerators; gradients are weighted by tokens.
    """

    microbatch: int = 1
    microbatches: tuple[int, ...] = ()


def measured_microbatches(problem: Problem, draft: PlanDraft) -> frozenset[int] | None:
    """Microbatch sizes that were measured on every cell's accelerator and tp; None for any."""
    model = problem.model
    if not any(b.kind == "measured" for b in model.blocks):
        return None
    known: dict[tuple[str, int], set[int]] = {}
    for t in model.times:
        known.setdefault((t.accelerator, t.tp), set()).add(t.microbatch)
    names = [n.accelerator for n in problem.machine.nodes for _ in range(*n.chips)]
    used = {(names[c.chips[0]], c.tp) for c in draft.cells}
    sizes = [known.get(key, set()) for key in used]
    return frozenset(set.intersection(*sizes)) if sizes else None


class Ddp:
    """Equal or uneven replicas whose gradients are summed (Li et al. 2020)."""

    name = "ddp"
    axis = "data"
    paper = "Li et al. 2020, arXiv:2006.15704"
    owns = frozenset({"data.microbatches", "pipeline.microbatch"})
    knobs = DdpKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[DdpKnobs]:
        """Microbatch sizes that divide the batch of a replica and suit the schedule."""
        given = draft_or_default(problem, draft)
        job, dp = problem.job, _replicas(given)
        if job.global_batch % dp:
            near = [k * dp for k in (job.global_batch // dp, job.global_batch // dp + 1) if k]
            return Space(
                (),
                f"{dp} replicas do not divide the global batch {job.global_batch}; "
                f"{' or '.join(map(str, near))} would",
            )
        if job.pins.dp not in (None, dp):
            return Space((), f"the job pins dp to {job.pins.dp}, the grid has {dp} replicas")
        measured = measured_microbatches(problem, given)
        found, why = [], "no microbatch size fits the job's pin or the measured times"
        for size in kept_by_pin(divisors(job.global_batch // dp), job.pins.microbatch):
            if measured is not None and size not in measured:
                continue
            knobs = DdpKnobs(microbatch=size)
            try:
                self.apply(problem, given, knobs)
            except InputError as error:
                why = str(error)
            else:
                found.append(knobs)
        return space_of(found, why)

    def apply(self, problem: Problem, draft: PlanDraft, knobs: DdpKnobs) -> PlanDraft:
        """Give every replica its microbatches.

        Raises:
            InputError: the batch does not divide (names dp and the nearest legal values), the
                stated numbers do not add up, or the schedule cannot run them.
        """
        given = draft_or_default(problem, draft)
        dp, batch = _replicas(given), problem.job.global_batch
        if knobs.microbatch < 1 or any(m < 1 for m in knobs.microbatches):
            raise InputError(
                "every replica needs a microbatch of at least one sequence",
                key="data.microbatch",
                found=f"{knobs.microbatch} x {knobs.microbatches or 'equal'}",
                expected="positive numbers",
            )
        if knobs.microbatches:
            counts = knobs.microbatches
            total = sum(counts) * knobs.microbatch
            if len(counts) != dp or total != batch:
                raise InputError(
                    "the replicas' microbatches must add up to the global batch",
                    key="data.microbatches",
                    found=f"{'+'.join(map(str, counts))} x {knobs.microbatch} = {total}",
                    expected=f"{dp} numbers, {batch} sequences",
                )
        else:
            width = sum(len(c.chips) for c in given.cells) // dp
            counts = (check_batch(batch, knobs.microbatch, dp, width),) * dp
        done = fill(
            given,
            self.name,
            knobs,
            data=msgspec.structs.replace(given.data, microbatches=counts),
            pipeline=msgspec.structs.replace(given.pipeline, microbatch=knobs.microbatch),
        )
        check_schedule(done)
        return done


def _replicas(draft: PlanDraft) -> int:
    return 1 + max(c.replica for c in draft.cells)


DDP = register(Ddp())
