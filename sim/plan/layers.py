"""Virtual stages cut into segments: of one layer each, or as a draft says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from sim.errors import InputError
from sim.model.graph import Model
from sim.plan.draft import PlanDraft
from sim.plan.placement import Placement, Segment
from sim.plan.plan import Call
from sim.problem import Problem
from sim.spec.job import Job

__all__ = [
    "SEGMENTS", "cut_layers", "not_by_segment", "passes_of", "segments_of", "unlike_microbatches",
    "updates_late",
]  # fmt: skip

SEGMENTS = "segments"
"""Name of the lowering pass that runs stages segment by segment."""


def cut_layers(model: Model, stages: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return one segment per layer of every virtual stage; embedding and head stand apart.

    Args:
        model: whose blocks. stages: one segment per virtual stage, in order.
    """
    found = []
    for stage in stages:
        labels = itertools.groupby(range(*stage.blocks), key=lambda i: model.blocks[i].layer)
        for layer, run in labels:
            mine = list(run)
            inside = 0 <= layer < model.num_layers
            found.append(
                Segment(
                    name=f"l{layer}" if inside else "embed" if layer < 0 else "head",
                    stage=stage.stage,
                    cell=stage.cell,
                    blocks=(mine[0], mine[-1] + 1),
                )
            )
    return tuple(found)


def segments_of(
    problem: Problem, draft: PlanDraft, stages: tuple[Segment, ...]
) -> tuple[Segment, ...]:
    """Return the segments of a draft: those it names, layers under ZeRO-2 and 3, or whole stages.

    Args:
        problem, draft: of the lowering. stages: one segment per virtual stage.

    Raises:
        InputError: named segments do not cut the stages, or ZeRO-2 or 3 does not go with the rest.
    """
    if draft.data.zero >= 2:
        why = not_by_segment(problem, draft) or unlike_microbatches(draft)
        if why:
            raise InputError(why, key="data.zero", found=str(draft.data.zero), expected="0 or 1")
        if draft.data.buffers < 0:
            raise InputError(
                "a ring has at least one buffer",
                key="data.buffers",
                found=str(draft.data.buffers),
                expected="at least 1, or 0 for the offload knobs' rings",
            )
    if draft.offload.segments:
        return _finer(draft.offload.segments, stages)
    return cut_layers(problem.model, stages) if draft.data.zero >= 2 else stages


def not_by_segment(problem: Problem, draft: PlanDraft) -> str:
    """Return why stages of a draft cannot run segment by segment, "" when they can."""
    p = draft.pipeline
    if len({c.stage for c in draft.cells}) > 1 and any(b.shares for b in problem.model.blocks):
        return "a tied embedding on two positions is updated in two places"
    if p.blocking_p2p or p.blocking_sends:
        return "blocking transfers write the dependencies of whole stages"
    return ""


def unlike_microbatches(draft: PlanDraft) -> str:
    """Return why replicas cannot meet once per microbatch, "" when they can."""
    if len(set(draft.data.microbatches)) > 1:
        return "ZeRO-2 and 3 meet once per microbatch, so replicas run equally many"
    return ""


def updates_late(job: Job, draft: PlanDraft) -> bool:
    """Return whether ZeRO-2 or 3 by itself makes updates wait for all gradients.

    With fp16 a step whose gradients overflow is skipped, so no update runs ahead of the check.
    """
    by_itself = all(call.name != SEGMENTS for call in draft.passes)
    return draft.data.zero >= 2 and by_itself and job.dtype == "fp16"


def passes_of(
    problem: Problem, draft: PlanDraft, segments: tuple[Segment, ...]
) -> tuple[Call, ...]:
    """Return the draft's passes and, where ZeRO-2 or 3 needs it, the one that runs segments.

    That pass is told which segments have routed experts that other replicas share.

    Args:
        problem, draft: of the lowering. segments: of the placement.
    """
    passes = draft.passes
    if draft.data.zero >= 2 and all(call.name != SEGMENTS for call in passes):
        args = {"clipping": "global"} if updates_late(problem.job, draft) else {}
        passes = (Call(SEGMENTS, 1, args), *passes)
    if draft.expert.ep == 1:
        return passes
    blocks = problem.model.blocks
    routed = [s for s in segments if any(b.params_experts for b in blocks[slice(*s.blocks)])]
    experts = {"experts": [f"{s.stage}[{s.name}]" for s in routed]}
    return tuple(
        msgspec.structs.replace(c, args=c.args | experts) if c.name == SEGMENTS else c
        for c in passes
    )


def _finer(segments: tuple[Segment, ...], stages: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Check that finer segments cut every virtual stage into named runs of blocks."""
    at = [(s.stage, *s.blocks) for s in segments]
    joined = list(itertools.pairwise(at))
    whole = [(s.stage, *s.blocks) for s in Placement(segments=segments).stages]
    fits = whole == [(s.stage, *s.blocks) for s in stages]
    fits = fits and all(b == x for (_, _, b), (_, x, _) in joined) and all(a < b for _, a, b in at)
    names = {(s.stage, s.name) for s in segments if s.name}
    cells = {s.stage: s.cell for s in stages}
    if not fits or len(names) != len(segments) or any(s.cell != cells[s.stage] for s in segments):
        raise InputError(
            "segments must cut every stage into named runs of blocks",
            key="offload.segments",
            found=" ".join(f"{s.stage}[{s.name}]={s.blocks[0]}-{s.blocks[1]}" for s in segments),
            expected=" ".join(f"{s.stage}={s.blocks[0]}-{s.blocks[1]}" for s in stages),
        )
    return segments
