"""Lower a draft to a Plan: number the ranks, cut the model, derive boundaries, name the passes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from sim.errors import InputError, PlanError
from sim.model.amounts import dtype_bytes, forward_flops
from sim.model.graph import Model
from sim.plan.draft import PlanDraft
from sim.plan.knobs import check_knobs
from sim.plan.layers import SEGMENTS, cut_layers, passes_of, segments_of, updates_late
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment, derive_groups
from sim.plan.plan import Amount, Mathematics, Plan
from sim.plan.schedules import explicit_order, positions
from sim.problem import Problem

__all__ = ["amounts_of", "boundaries_of", "lower"]


def lower(problem: Problem, draft: PlanDraft) -> Plan:
    """Turn a draft into a complete plan.

    Args:
        problem: cluster, model and job. draft: the knobs.

    Raises:
        InputError: knobs of a wrong type or range, chips used twice or not in the machine, cells
            that do not match their sizes, a batch or cuts that do not add up, groups that cannot
            be formed, ZeRO-2 or 3 where stages do not run by segment.
    """
    check_knobs(draft)
    placement = _placement(problem, draft)
    job, p = problem.job, draft.pipeline
    total = sum(draft.data.microbatches) * p.microbatch
    if total != job.global_batch:
        raise InputError(
            "the replicas' microbatches do not add up to the global batch",
            key="job.global_batch",
            found=f"{'+'.join(map(str, draft.data.microbatches))} x {p.microbatch} = {total}",
            expected=str(job.global_batch),
        )
    derive_groups(placement)
    if not draft.exact and not job.limits.allow_inexact:
        raise InputError(
            f"the plan changes the mathematics ({draft.reason}) and the job does not allow it",
            key="job.limits.allow_inexact",
            found="false",
            expected="true to allow it",
        )
    experts = tuple(
        s.stage
        for s in placement.stages
        if any(b.params_experts for b in problem.model.blocks[s.blocks[0] : s.blocks[1]])
    )
    return Plan(
        name=draft.name,
        exact=draft.exact,
        reason=draft.reason,
        mathematics=Mathematics(
            global_batch=job.global_batch,
            sequence_length=job.sequence_length,
            microbatch=p.microbatch,
            dtype=job.dtype,
            reduction_dtype=job.reduction_dtype,
            optimizer=job.optimizer,
            zero=draft.data.zero,
            sequence_parallel=draft.tensor.sequence_parallel,
        ),
        placement=placement,
        lowering=standard_calls(
            p.schedule,
            p.chunks,
            p.split_backward,
            p.blocking_sends,
            experts if draft.expert.ep > 1 else (),
            _tied(problem.model, placement),
            p.order,
            p.blocking_p2p,
        )
        + passes_of(problem, draft, placement.segments),
        barrier=draft.barrier,
        buffers=p.buffers,
        tables=draft.tables,
        amounts=amounts_of(problem, placement, p.microbatch) | draft.amounts,
        problem=problem.documents,
        problem_hash=problem.hash,
        version=_version(),
        assumptions=problem.assumptions + draft.assumptions,
    )


@cache
def _version() -> str:
    try:
        return version("hetlab")
    except PackageNotFoundError:
        return "unknown"


def _placement(problem: Problem, draft: PlanDraft) -> Placement:
    cells, chips = _cells(problem, draft)
    num_stages = 1 + max(c.stage for c in cells)
    num_replicas = len(draft.data.microbatches)
    if len(cells) != num_stages * num_replicas or len({(c.stage, c.replica) for c in cells}) != len(
        cells
    ):
        raise InputError(
            "every (stage, replica) needs exactly one cell",
            key="cells",
            found=f"{len(cells)} cells",
            expected=f"{num_stages} stages x {num_replicas} replicas",
        )
    cuts = draft.pipeline.cuts or (0, len(problem.model.blocks))
    virtual = num_stages * draft.pipeline.chunks
    if len(cuts) != virtual + 1 or cuts[0] != 0 or cuts[-1] != len(problem.model.blocks):
        raise InputError(
            "the cuts must place every block of the model once",
            key="pipeline.cuts",
            found=" ".join(map(str, cuts)),
            expected=f"{virtual + 1} cuts from 0 to {len(problem.model.blocks)}",
        )
    if any(a >= b for a, b in itertools.pairwise(cuts)):
        raise InputError(
            "every stage needs at least one block",
            key="pipeline.cuts",
            found=" ".join(map(str, cuts)),
            expected="strictly rising cuts",
        )
    position = _positions(draft, num_stages, virtual)
    stages = tuple(
        Segment(stage=v, cell=position[v], blocks=(a, b))
        for v, (a, b) in enumerate(itertools.pairwise(cuts))
    )
    segments, rings = segments_of(problem, draft, stages), draft.offload
    by_layer = draft.expert.inlined and segments == stages
    segments = cut_layers(problem.model, stages) if by_layer else segments
    # Without the pass that updates by segment, stages are updated whole.
    whole = by_layer and all(call.name != SEGMENTS for call in draft.passes)
    extra = tuple(range(len(chips), len(chips) + len(draft.servers)))
    chips += draft.servers
    return Placement(
        cells=cells,
        segments=segments,
        boundaries=boundaries_of(problem.model, segments),
        chips=() if chips == tuple(range(len(chips))) else chips,
        microbatches=draft.data.microbatches,
        ep=draft.expert.ep,
        whole_boundaries=draft.pipeline.whole_boundaries,
        parameter_buffers=draft.data.buffers or rings.parameter_buffers,
        gradient_buffers=draft.data.buffers or rings.gradient_buffers,
        late_updates=rings.late_updates or updates_late(problem.job, draft) or whole,
        extra_ranks=extra,
        workers=draft.data.workers,
    )


def _positions(draft: PlanDraft, num_stages: int, virtual: int) -> dict[int, int]:
    """Pipeline position of each virtual stage: round robin, or as a written order says."""
    if not draft.pipeline.order:
        return {v: v % num_stages for v in range(virtual)}
    found = positions(explicit_order(draft.pipeline.order))
    if len(found) != virtual:
        raise InputError(
            "the written schedule has another number of virtual stages",
            key="pipeline.order",
            found=str(len(found)),
            expected=f"{virtual} = {num_stages} stages x {draft.pipeline.chunks} chunks",
        )
    return found


def _cells(problem: Problem, draft: PlanDraft) -> tuple[tuple[Cell, ...], tuple[int, ...]]:
    machine = problem.machine
    accelerator = [n.accelerator for n in machine.nodes for _ in range(*n.chips)]
    cells: list[Cell] = []
    chips: list[int] = []
    for knobs in sorted(draft.cells, key=lambda c: (c.stage, c.replica)):
        where = f"stage {knobs.stage}, replica {knobs.replica}"
        if len(knobs.chips) != knobs.tp * knobs.cp:
            raise InputError(
                f"the product of sizes must match the chips of the cell at {where}",
                key="cells",
                found=f"tp {knobs.tp} x cp {knobs.cp} on {len(knobs.chips)} chips",
                expected=f"{knobs.tp * knobs.cp} chips",
            )
        unknown = [c for c in knobs.chips if not 0 <= c < machine.num_chips]
        if unknown:
            raise InputError(
                f"the cell at {where} names a chip the machine lacks",
                key="cells",
                found=str(unknown[0]),
                expected=f"0 to {machine.num_chips - 1}",
            )
        types = {accelerator[c] for c in knobs.chips}
        if len(types) > 1:
            raise InputError(
                f"the cell at {where} mixes accelerators",
                key="cells",
                found=", ".join(sorted(types)),
                expected="one type per cell",
            )
        first = len(chips)
        chips += knobs.chips
        cells.append(
            Cell(
                stage=knobs.stage,
                replica=knobs.replica,
                ranks=tuple(range(first, len(chips))),
                accelerator=types.pop(),
                tp=knobs.tp,
                cp=knobs.cp,
                recompute=knobs.recompute,
                offload=knobs.offload,
            )
        )
    if len(set(chips)) != len(chips):
        twice = next(c for c in chips if chips.count(c) > 1)
        raise InputError(
            "a chip is used twice", key="cells", found=str(twice), expected="each chip once"
        )
    if not cells:
        raise PlanError("the draft has no cells", key="cells")
    return tuple(cells), tuple(chips)


def boundaries_of(model: Model, segments: tuple[Segment, ...]) -> tuple[Boundary, ...]:
    """What crosses between virtual stages: the model's edges, added up per pair of stages.

    Raises:
        PlanError: an edge goes back to an earlier stage.
    """
    stage_of = {}
    for s in segments:
        for block in model.blocks[s.blocks[0] : s.blocks[1]]:
            stage_of[block.name] = s.stage
    elements: dict[tuple[int, int], int] = defaultdict(int)
    gradient: dict[tuple[int, int], bool] = defaultdict(bool)
    for edge in model.edges:
        pair = (stage_of[edge.src], stage_of[edge.dst])
        if pair[0] == pair[1]:
            continue
        if pair[0] > pair[1]:
            raise PlanError(
                f"edge {edge.src} -> {edge.dst} goes back from stage {pair[0]} to {pair[1]}"
            )
        elements[pair] += edge.elements
        gradient[pair] |= edge.gradient
    return tuple(
        Boundary(
            name="" if dst == src + 1 else f"{src}-{dst}",
            src=src,
            dst=dst,
            elements=elements[src, dst],
            gradient=gradient[src, dst],
        )
        for src, dst in sorted(elements)
    )


def _tied(model: Model, placement: Placement) -> tuple[int, ...]:
    """Virtual stages that share a parameter with a stage at another position."""
    sharing: dict[str, set[int]] = defaultdict(set)
    for s in placement.stages:
        for block in model.blocks[s.blocks[0] : s.blocks[1]]:
            if block.shares:
                sharing[block.shares].add(s.stage)
    found: set[int] = set()
    for stages in sharing.values():
        if len({placement.stages[v].cell for v in stages}) > 1:
            found |= stages
    return tuple(sorted(found))


def amounts_of(problem: Problem, placement: Placement, microbatch: int) -> dict[str, Amount]:
    """Amounts per microbatch, before splitting: forward, boundary transfer, gradient and update.

    Args:
        problem: whose model. placement: segments and boundaries. microbatch: [sequences].
    """
    job = problem.job
    tokens = float(microbatch * job.sequence_length)
    found = {}
    for s in placement.stages:
        blocks = problem.model.blocks[s.blocks[0] : s.blocks[1]]
        flops = sum(forward_flops(b, tokens, job.sequence_length) for b in blocks)
        params = float(sum(b.params + b.params_replicated + b.params_experts for b in blocks))
        found[f"{s.stage}F"] = Amount(flops=flops, tokens=tokens)
        found[f"{s.stage}B"] = Amount(flops=2 * flops, tokens=tokens)
        found[f"{s.stage}OPT"] = Amount(nbytes=params * dtype_bytes(job.reduction_dtype))
    for b in placement.boundaries:
        found[f"{b.src}SEND_F" + (f"[{b.name}]" if b.name else "")] = Amount(
            nbytes=tokens * b.elements * job.activation_bytes, tokens=tokens
        )
    return found
