"""Pipeline schedules as strategies: how many stages, in which order they work, what is legal.

The orders themselves are pure functions in sim.plan.schedules. Chips are given to stages in
contiguous runs of cells, so that a stage's replicas are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.schedules import SCHEDULES
from sim.problem import Problem
from strategies.base import Space, divisors, draft_or_default, fill, kept_by_pin, space_of
from strategies.registry import register

__all__ = [
    "GPipe",
    "Interleaved",
    "InterleavedKnobs",
    "OneFOneB",
    "OneFOneBKnobs",
    "StageKnobs",
    "ZeroBubbleH1",
    "check_schedule",
    "form_stages",
    "max_stages",
]


class StageKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``gpipe`` and ``zb-h1``: number of pipeline stages."""

    stages: int = 1


class OneFOneBKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``1f1b``.

    Args:
        stages: of the pipeline.
        split_backward: B as I then W, with the send of the input gradient under W.
    """

    stages: int = 1
    split_backward: bool = False


class InterleavedKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``interleaved``.

    Args:
        stages: pipeline positions, at least 2. chunks: virtual stages per position, at least 2.
        split_backward: as for ``1f1b``.
    """

    stages: int = 2
    chunks: int = 2
    split_backward: bool = False


def max_stages(problem: Problem) -> int:
    """Most virtual stages a model can be cut into: its layers, or its blocks where it has none."""
    return problem.model.num_layers or len(problem.model.blocks)


def form_stages(problem: Problem, draft: PlanDraft, stages: int, chunks: int = 1) -> PlanDraft:
    """Number the cells of a draft as a grid of ``stages`` rows.

    Raises:
        InputError: the cells do not divide into the stages, or there are fewer layers than stages.
    """
    cells = draft.cells
    limit = max_stages(problem)
    legal = [d for d in divisors(len(cells)) if d * chunks <= limit]
    if stages not in legal:
        near = sorted(sorted(legal, key=lambda d: (abs(d - stages), d))[:2])
        raise InputError(
            f"{len(cells)} cells and {limit} layers do not make this pipeline",
            key="pipeline.stages",
            found=f"{stages} stages" + (f" x {chunks} chunks" if chunks > 1 else ""),
            expected=" or ".join(map(str, near)) or f"at most {limit} virtual stages",
        )
    wide = len(cells) // stages
    grid = tuple(
        msgspec.structs.replace(c, stage=i // wide, replica=i % wide) for i, c in enumerate(cells)
    )
    return msgspec.structs.replace(draft, cells=grid)


def check_schedule(draft: PlanDraft) -> None:
    """Prove that the schedule works with every replica's microbatches, once both are known.

    Raises:
        InputError: it does not; names the nearest legal number of microbatches.
    """
    p = draft.pipeline
    if p.schedule not in SCHEDULES or not draft.cells:
        return
    stages = 1 + max(c.stage for c in draft.cells)
    replicas = 1 + max(c.replica for c in draft.cells)
    if len(draft.data.microbatches) != replicas:
        return
    extra = (p.chunks,) if p.schedule == "interleaved" else ()
    for m in sorted(set(draft.data.microbatches)):
        SCHEDULES[p.schedule](stages, m, *extra)


def _pipelines(problem: Problem, draft: PlanDraft, chunks: int) -> Iterator[int]:
    """Numbers of stages that some microbatch size can feed."""
    job, cells = problem.job, len(draft.cells)
    stages = [d for d in divisors(cells) if d * chunks <= max_stages(problem)]
    stages = kept_by_pin(stages, job.pins.pp)
    for p in stages:
        dp = cells // p
        if job.global_batch % dp or (job.pins.dp is not None and dp != job.pins.dp):
            continue
        sizes = kept_by_pin(divisors(job.global_batch // dp), job.pins.microbatch)
        if any(chunks == 1 or job.global_batch // (dp * mb) % p == 0 for mb in sizes):
            yield p


def _reason(problem: Problem, draft: PlanDraft, name: str) -> str:
    pins = problem.job.pins
    pinned = [f"{k}={v}" for k in ("pp", "dp", "microbatch") if (v := getattr(pins, k)) is not None]
    return (
        f"no number of stages of {name} divides {len(draft.cells)} cells, at most "
        f"{max_stages(problem)} layers and the global batch {problem.job.global_batch}"
        + (f" under the pins {' '.join(pinned)}" if pinned else "")
    )


def _pinned_elsewhere(problem: Problem, name: str) -> str:
    pin = problem.job.pins.schedule
    return f"the job pins the schedule {pin}" if pin not in (None, name) else ""


OWNS = frozenset(
    {
        "cells.stage",
        "cells.replica",
        "pipeline.schedule",
        "pipeline.chunks",
        "pipeline.split_backward",
        "pipeline.order",
    }
)


def _scheduled(
    problem: Problem,
    draft: PlanDraft,
    name: str,
    knobs: StageKnobs | OneFOneBKnobs | InterleavedKnobs,
) -> PlanDraft:
    chunks = getattr(knobs, "chunks", 1)
    formed = form_stages(problem, draft_or_default(problem, draft), knobs.stages, chunks)
    pipeline = msgspec.structs.replace(
        draft.pipeline,
        schedule=name,
        chunks=chunks,
        split_backward=getattr(knobs, "split_backward", False),
        order=(),
    )
    done = fill(formed, name, knobs, pipeline=pipeline)
    if sum(done.data.microbatches) * pipeline.microbatch == problem.job.global_batch:
        check_schedule(done)
    return done


class GPipe:
    """All forwards, then all backwards."""

    name = "gpipe"
    axis = "pipeline"
    paper = "Huang et al. 2019, arXiv:1811.06965"
    owns = OWNS
    knobs = StageKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[StageKnobs]:
        """Divisors of the cells that leave every stage a layer and every replica a microbatch."""
        given = draft_or_default(problem, draft)
        why = _pinned_elsewhere(problem, self.name) or _reason(problem, given, self.name)
        found = () if _pinned_elsewhere(problem, self.name) else _pipelines(problem, given, 1)
        return space_of((StageKnobs(stages=p) for p in found), why)

    def apply(self, problem: Problem, draft: PlanDraft, knobs: StageKnobs) -> PlanDraft:
        """Form the stages and name the schedule.

        Raises:
            InputError: the cells or layers do not divide.
        """
        return _scheduled(problem, draft, self.name, knobs)


class ZeroBubbleH1(GPipe):
    """Backward split in two, weight gradients fill the drain, memory as 1F1B."""

    name = "zb-h1"
    paper = "Qi et al. 2023, arXiv:2401.10241, section 2.1"


class OneFOneB:
    """One forward, one backward; legal with fewer microbatches than stages, only inefficient."""

    name = "1f1b"
    axis = "pipeline"
    paper = "Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1"
    owns = OWNS
    knobs = OneFOneBKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[OneFOneBKnobs]:
        """As for GPipe, each with a whole and, where there is a boundary, a split backward."""
        given = draft_or_default(problem, draft)
        why = _pinned_elsewhere(problem, self.name) or _reason(problem, given, self.name)
        found = () if _pinned_elsewhere(problem, self.name) else _pipelines(problem, given, 1)
        values = tuple(
            OneFOneBKnobs(stages=p, split_backward=split)
            for p in found
            for split in ((False, True) if p > 1 else (False,))
        )
        return space_of(values, why)

    def apply(self, problem: Problem, draft: PlanDraft, knobs: OneFOneBKnobs) -> PlanDraft:
        """Form the stages and name the schedule.

        Raises:
            InputError: the cells or layers do not divide.
        """
        return _scheduled(problem, draft, self.name, knobs)


class Interleaved:
    """Several chunks per position; microbatches must be a multiple of the positions."""

    name = "interleaved"
    axis = "pipeline"
    paper = "Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2"
    owns = OWNS
    knobs = InterleavedKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[InterleavedKnobs]:
        """Stages and chunks that leave every virtual stage a layer and m a multiple of stages."""
        given = draft_or_default(problem, draft)
        why = _pinned_elsewhere(problem, self.name)
        values = [
            InterleavedKnobs(stages=p, chunks=v)
            for v in range(2, max_stages(problem) // 2 + 1 if not why else 0)
            for p in _pipelines(problem, given, v)
            if p > 1
        ]
        return space_of(values, why or _reason(problem, given, self.name))

    def apply(self, problem: Problem, draft: PlanDraft, knobs: InterleavedKnobs) -> PlanDraft:
        """Form the stages and name the schedule.

        Raises:
            InputError: the cells or layers do not divide, fewer than two chunks, or microbatches
                that are no multiple of the stages.
        """
        if knobs.chunks < 2:
            raise InputError(
                "interleaving needs several chunks per stage",
                key="pipeline.chunks",
                found=str(knobs.chunks),
                expected="at least 2, or the schedule 1f1b",
            )
        return _scheduled(problem, draft, self.name, knobs)


GPIPE = register(GPipe())
ONE_F_ONE_B = register(OneFOneB())
INTERLEAVED = register(Interleaved())
ZERO_BUBBLE_H1 = register(ZeroBubbleH1())
