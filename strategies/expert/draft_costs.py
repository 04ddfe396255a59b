"""The layers of routed experts of a draft: where they are, and what lending costs there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from sim.cost.cell import side_by_side
from sim.cost.compute import BlockTime, Shape, block_time, routed_part
from sim.errors import InputError
from sim.hardware.machine import Accelerator
from sim.model.graph import Block
from sim.plan.draft import CellKnobs, PlanDraft
from sim.plan.layers import cut_layers
from sim.plan.placement import Segment
from sim.plan.schedules import explicit_order, positions
from sim.problem import Problem
from strategies.expert.expert_cost import products
from strategies.expert.layer_cost import LayerCosts
from strategies.expert.link_cost import topology

__all__ = ["ExpertLayer", "costs_of", "expert_layers"]


class ExpertLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of routed experts.

    Args:
        key: of its counts, "l" and the number of the layer. segment: "stage[name]" in the plan.
        block: index of its block. before: index of the block of experts before it in its stage, -1
            for none. position: in the pipeline.
    """

    key: str
    segment: str
    block: int
    before: int
    position: int


def expert_layers(problem: Problem, draft: PlanDraft) -> tuple[ExpertLayer, ...]:
    """Return the layers of experts in the order of the model.

    Args:
        problem: whose model. draft: with cells and cuts.

    Raises:
        InputError: a segment with several such layers, or several in a layer of the model.
    """
    blocks, found = problem.model.blocks, list[ExpertLayer]()
    for s in _segments(problem, draft):
        mine = [i for i in range(*s.blocks) if blocks[i].num_experts]
        if len(mine) > 1:
            raise InputError(
                "a segment with several layers of experts cannot be written out",
                key="offload.segments",
                found=f"{s.stage}[{s.name}] = blocks {s.blocks[0]} to {s.blocks[1] - 1}",
                expected="segments with one layer of experts at most",
            )
        last = found[-1] if found and found[-1].segment.startswith(f"{s.stage}[") else None
        found += [
            ExpertLayer(
                key=f"l{blocks[i].layer}",
                segment=f"{s.stage}[{s.name}]",
                block=i,
                before=last.block if last else -1,
                position=s.cell,
            )
            for i in mine
        ]
    keys = [layer.key for layer in found]
    if len(set(keys)) < len(keys):
        raise InputError(
            "a layer with several blocks of experts has no counts of its own",
            key="model",
            found=next(k for k in keys if keys.count(k) > 1),
            expected="one block of experts per layer",
        )
    return tuple(found)


def _segments(problem: Problem, draft: PlanDraft) -> tuple[Segment, ...]:
    if draft.offload.segments:
        return draft.offload.segments
    cuts = draft.pipeline.cuts or (0, len(problem.model.blocks))
    number, order = 1 + max(c.stage for c in draft.cells), draft.pipeline.order
    at = positions(explicit_order(order)) if order else {}
    stages = [
        Segment(stage=v, cell=at.get(v, v % number), blocks=(a, b))
        for v, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    return cut_layers(problem.model, stages)


def costs_of(
    problem: Problem, draft: PlanDraft, layer: ExpertLayer, plan_s: float = 0.0
) -> LayerCosts:
    """Return what lending costs in a layer, on the first expert-parallel group of its stage.

    Args:
        problem: what. draft: with cells, sizes and cuts. layer: of ``expert_layers``.
        plan_s: [s] that a search takes.
    """
    machine, job, ep = problem.machine, problem.job, draft.expert.ep
    block = problem.model.blocks[layer.block]
    cells = sorted((c for c in draft.cells if c.stage == layer.position), key=lambda c: c.replica)
    groups = [
        tuple(c.chips[t] for c in cells[first : first + ep])
        for first in range(0, len(cells), ep)
        for t in range(len(cells[0].chips))
    ]
    types = [n.accelerator for n in machine.nodes for _ in range(*n.chips)]
    chips = [machine.accelerators[types[c]] for c in groups[0]]
    cell = cells[0]
    split = cell.tp if draft.tensor.sequence_parallel else 1
    expert = block.params_experts / block.num_experts / cell.tp
    forward, backward = _between(problem, draft, cell, chips, layer)
    return LayerCosts(
        token_bytes=block.input_elements * job.activation_bytes / split,
        experts=products(block, chips, job.dtype, cell.tp),
        links=topology(
            machine,
            groups[0],
            share=side_by_side(machine, groups[0], groups),
            ways=("direct", "chain"),
        ),
        param_bytes=expert * job.param_bytes,
        gradient_bytes=expert * job.gradient_bytes,
        fnec_s=forward,
        bnec_s=backward,
        plan_s=plan_s,
        exchange_factor=max(chip.ep_cost for chip in chips),
    )


def _between(
    problem: Problem,
    draft: PlanDraft,
    cell: CellKnobs,
    chips: Sequence[Accelerator],
    layer: ExpertLayer,
) -> tuple[float, float]:
    """Forward and backward of all from the experts before to these [s], collectives apart."""
    if layer.before < 0:
        return 0.0, 0.0
    shape = Shape(
        microbatch=draft.pipeline.microbatch,
        sequence_length=problem.job.sequence_length,
        tp=cell.tp,
        ep=draft.expert.ep,
        cp=cell.cp,
        sequence_parallel=draft.tensor.sequence_parallel,
        recompute=cell.recompute,
    )
    blocks = problem.model.blocks[layer.before + 1 : layer.block + 1]

    def times(part: Block, chip: Accelerator) -> BlockTime:
        return block_time(part, chip, shape, problem.job.dtype)

    forward, backward = [], []
    for chip in {c.name: c for c in chips}.values():
        whole = [times(b, chip) for b in blocks]
        own = times(routed_part(blocks[-1]), chip)
        forward.append(sum(t.forward for t in whole) - own.forward)
        backward.append(sum(t.backward for t in whole) - own.backward)
    return min(forward), min(backward)
