"""What a run's rates are relative to: tokens, FLOPs, peaks and prices of what was really placed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from sim.cost.compute import compute_dtype
from sim.errors import InputError
from sim.hardware.machine import Accelerator, Machine
from sim.model.amounts import attention_flops, forward_flops
from sim.model.graph import Block, Model
from sim.plan.passes import expand
from sim.plan.plan import Plan
from sim.plan.servers import serving_chips

__all__ = ["Basis", "basis_of", "peak_of"]


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """The denominators and fixed amounts of a plan's metrics.

    Args:
        tokens_per_step: tokens of all replicas. num_chips: chips that hold a rank; a server that is
            a process of its node holds none.
        model_flops_per_step: [FLOP] forward and backward of the placed blocks, no recomputation, or
            None when the plan does not say which blocks it places.
        hardware_flops_per_step: [FLOP] the same plus recomputation.
        peak_flops_per_s: [FLOP/s] sum of the chips' dense peaks for ``dtype``, or None without a
            machine.
        dtype: compute dtype of the peak.
        price_per_s: [USD/s] all chips together, or None when a chip has no price.
        egress_per_step: [USD] price of the bytes sent over priced links.
        unused: accelerator type -> chips of the cluster that hold no rank.
        uncalibrated: types in use of which no efficiency was measured, where the times of the plan
            rest on such efficiencies.
    """

    tokens_per_step: float
    num_chips: int
    model_flops_per_step: float | None
    hardware_flops_per_step: float | None
    peak_flops_per_s: float | None
    dtype: str
    price_per_s: float | None = None
    egress_per_step: float = 0.0
    unused: dict[str, int] = {}
    uncalibrated: tuple[str, ...] = ()


def peak_of(accelerator: Accelerator, dtype: str) -> float:
    """Dense peak [FLOP/s] of one chip, in the dtype it computes in when the job asks for ``dtype``.

    Raises:
        InputError: the chip can compute neither in it nor in one that may stand in.
    """
    return accelerator.peak_flops_per_s[compute_dtype(accelerator, dtype)[0]]


def _flops_per_token(block: Block, sequence_length: int) -> float:
    """Forward FLOPs; a block known by its times alone counts 2 FLOP per active parameter."""
    if block.kind == "measured" and not block.gemms:
        experts = block.params_experts * block.top_k / block.num_experts if block.num_experts else 0
        return 2.0 * (block.params + block.params_replicated + experts)
    return forward_flops(block, 1.0, sequence_length)


def basis_of(
    plan: Plan,
    machine: Machine | None = None,
    model: Model | None = None,
    *,
    egress_per_step: float = 0.0,
    tokens_per_step: float | None = None,
) -> Basis:
    """Work out the basis from the blocks and chips of the plan, never from the model's name.

    Model FLOPs are those of sim.model.amounts; the backward counts twice the forward. Recomputation
    adds one forward ("full") or one attention core ("selective") of the layers in the cells that
    recompute; embedding and head are never recomputed.

    Args:
        plan: with placement and mathematics. machine, model: what it was made for, where known.
        egress_per_step: [USD] of priced links, per step.
        tokens_per_step: where the plan's microbatches do not say it (one update of a plan whose
            ranks serve messages, a round of local steps); all of them pass through every block.

    Raises:
        InputError: a chip cannot compute in the plan's dtype, or the plan names blocks that the
            model does not have.
    """
    placement, maths = plan.placement, plan.mathematics
    tokens = [n * maths.microbatch * maths.sequence_length for n in placement.microbatches]
    total = float(sum(tokens)) if tokens_per_step is None else tokens_per_step
    flops = None if model is None else _flops_of(plan, model, tokens, total)
    chips = [] if machine is None else _chips(plan, machine)
    priced = [c.price_per_s for c in chips]
    return Basis(
        tokens_per_step=total,
        num_chips=placement.num_ranks if machine is None else len(chips),
        model_flops_per_step=flops[0] if flops else None,
        hardware_flops_per_step=flops[1] if flops else None,
        peak_flops_per_s=sum(peak_of(c, maths.dtype) for c in chips) if chips else None,
        dtype=maths.dtype,
        price_per_s=sum(priced) if chips and all(priced) else None,
        egress_per_step=egress_per_step,
        unused=_unused(machine, chips) if machine is not None else {},
        uncalibrated=_uncalibrated(plan, model, chips),
    )


def _unused(machine: Machine, chips: Sequence[Accelerator]) -> dict[str, int]:
    left: Counter[str] = Counter()
    for node in machine.nodes:
        left[node.accelerator] += node.chips[1] - node.chips[0]
    left.subtract(c.name for c in chips)
    return {name: n for name, n in left.items() if n > 0}


def _uncalibrated(plan: Plan, model: Model | None, chips: Sequence[Accelerator]) -> tuple[str, ...]:
    """Types without a calibration that run a block nobody measured on them."""
    timed = {(t.block, t.accelerator) for t in model.times} if model is not None else set()
    found = []
    for name in dict.fromkeys(c.name for c in chips if not c.calibrated):
        stages = {c.stage for c in plan.placement.cells if c.accelerator == name}
        spans = [s.blocks for s in plan.placement.segments if s.cell in stages]
        blocks = [b for first, last in spans for b in (model.blocks[first:last] if model else ())]
        if not blocks or any((b.name, name) not in timed for b in blocks):
            found.append(name)
    return tuple(found)


def _flops_of(
    plan: Plan, model: Model, tokens: Sequence[float], total: float
) -> tuple[float, float] | None:
    """(model, hardware) FLOPs of a step, None when the plan places no blocks.

    Args:
        plan, model: see there. tokens: of each replica. total: of all of them.
    """
    placement, maths = plan.placement, plan.mathematics
    if all(s.blocks == (0, 0) for s in placement.segments):
        return None
    forward, full, core = (defaultdict[int, float](float) for _ in range(3))
    for segment in placement.segments:
        first, last = segment.blocks
        if last > len(model.blocks):
            raise InputError(
                f"stage {segment.stage} names blocks that {model.name} does not have",
                found=f"blocks {first} to {last - 1}", expected=f"at most {len(model.blocks) - 1}",
            )  # fmt: skip
        for block in model.blocks[first:last]:
            flops = _flops_per_token(block, maths.sequence_length)
            forward[segment.cell] += flops
            if 0 <= block.layer < max(model.num_layers, 1) and segment.recompute != "none":
                full[segment.cell] += flops
                core[segment.cell] += attention_flops(block, 1.0, maths.sequence_length)
    model_flops = 3.0 * sum(forward.values()) * total
    again = 0.0
    for cell in placement.cells:
        if cell.recompute != "none":
            share = full if cell.recompute == "full" else core
            part = tokens[cell.replica] / sum(tokens) if tokens else 1 / placement.num_replicas
            of_replica = part * total
            again += share[cell.stage] * of_replica
    return model_flops, model_flops + again


def _chips(plan: Plan, machine: Machine) -> list[Accelerator]:
    """The accelerator under each rank that computes; chips that hold none are not counted."""
    types: list[Accelerator] = []
    for node in machine.nodes:
        types += [machine.accelerators[node.accelerator]] * (node.chips[1] - node.chips[0])
    on = plan.placement.chips
    ranks = [r for cell in plan.placement.cells for r in cell.ranks]
    chips = [on[r] if on else r for r in ranks]
    if plan.placement.extra_ranks:
        chips += serving_chips(plan.placement, expand(plan)).values()
    return [types[c] for c in chips]
