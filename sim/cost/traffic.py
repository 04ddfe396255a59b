"""What each communication op of a plan moves: kind of collective and bytes."""

from __future__ import annotations

from sim.cost.work import Work
from sim.errors import InputError
from sim.model.amounts import dtype_bytes, rank_params
from sim.plan.deps import of_experts
from sim.plan.graph import Wire
from sim.plan.op import Op

__all__ = ["collective_of", "transfer_bytes"]

_COLLECTIVE = {
    "ALL_REDUCE": "all_reduce",
    "ALL_GATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_TO_ALL": "all_to_all",
    "MOVE_EXPERT": "all_to_all",
    "REDUCE_EXPERT": "all_to_all",
    "UNSHARD": "all_gather",
    "UNSHARD_B": "all_gather",
    "REDUCE_GRAD": "all_reduce",
}


def transfer_bytes(work: Work, op: Op, wire: Wire) -> float:
    """Return the bytes of one piece of a transfer [B].

    Raises:
        InputError: an explicit pair without a boundary and without an amount.
    """
    assert wire.end is not None
    share = wire.share[0] / wire.share[1]
    index = wire.end.what[1]
    if isinstance(index, int) and not op.amount:
        elements = work.placement.boundaries[index].elements
        return work.tokens(op) * elements * work.problem.job.activation_bytes * share
    return _stated_bytes(work, op) * share


def collective_of(work: Work, op: Op, wire: Wire, rank: int) -> tuple[str, float]:
    """Return (kind of sim.cost.collective, bytes [B]) of a collective op.

    Raises:
        InputError: the op has no meaning on a machine and no amount.
    """
    if op.kind == "BARRIER":
        return "all_reduce", 0.0
    if op.amount:
        return _COLLECTIVE.get(op.kind, "all_reduce"), _stated_bytes(work, op)
    if op.kind in ("REDUCE_GRAD", "UNSHARD", "UNSHARD_B"):
        return _gradient(work, op, wire, rank)
    if op.kind == "ALL_REDUCE" and op.label == "embed":
        shared = {b.shares: b.params for b in work.segment(op, rank) if b.shares}
        elements = sum(shared.values()) * wire.share[0] / wire.share[1]
        return "all_reduce", elements * dtype_bytes(work.math.reduction_dtype)
    token_bytes = work.tokens(op) * work.problem.job.activation_bytes
    token_bytes /= work.cell(rank, op).cp
    if op.kind == "ALL_GATHER" and op.label in ("f", "b"):
        stage = work.wiring.stage_of(op, rank)
        elements = sum(
            b.elements
            for b in work.placement.boundaries
            if (b.dst if op.label == "f" else b.src) == stage
        )
        return "all_gather", token_bytes * elements
    if op.kind in ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER") and "tp" in wire.roles:
        last = work.ranges(op, rank)[-1][1] - 1
        output = work.classes.output[int(work.classes.member[last])]
        return _COLLECTIVE[op.kind], token_bytes * output
    if op.kind == "ALL_TO_ALL":
        moe = [b for b in work.segment(op, rank) if b.num_experts]
        if moe:
            held = token_bytes * moe[0].top_k * moe[0].input_elements
            split = work.cell(rank, op).tp if work.math.sequence_parallel else 1
            return "all_to_all", held / split
    return _COLLECTIVE.get(op.kind, "all_reduce"), _stated_bytes(work, op)


def _gradient(work: Work, op: Op, wire: Wire, rank: int) -> tuple[str, float]:
    """Gradients of a stage's or segment's shard, or its parameters.

    Per microbatch a segment gathers, and reduces gradients of, all that it uses; per step a
    parameter that two segments share moves once.
    """
    per_microbatch = work.math.zero == 3 or (work.math.zero == 2 and op.kind == "REDUCE_GRAD")
    blocks = work.segment(op, rank) if per_microbatch else work.own_blocks(op, rank)
    ep = work.placement.ep
    if of_experts(op.label):
        _, elements = rank_params(blocks, work.cell(rank, op).tp, ep)
    else:
        dense, experts = rank_params(blocks, wire.share[1] // wire.share[0], 1)
        elements = dense + (experts if ep == 1 else 0.0)
    if op.kind != "REDUCE_GRAD":
        return "all_gather", elements * work.problem.job.param_bytes
    kind = "reduce_scatter" if work.math.zero else "all_reduce"
    return kind, elements * dtype_bytes(work.math.reduction_dtype)


def _stated_bytes(work: Work, op: Op) -> float:
    amount = work.amount(op)
    if amount is None:
        if op.ref is not None:
            return 1.0  # the table holds the bytes themselves
        raise InputError(
            f"no amount for {op.name}",
            key="plan.amounts",
            found=op.amount or "no amount",
            expected="bytes in the plan's amounts, a late amount, or stated times",
        )
    return amount.nbytes
