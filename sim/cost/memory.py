"""Predicted device memory as terms, for many cells at once.

Terms [B] of a cell's fullest rank:

    parameters      weights the products read; tied ones once
    gradients       accumulated gradients
    gradient copy   16-bit gradients beside fp32 ones (fp16 only: loss scaling keeps both)
    optimizer       moments and master weights, divided by ZeRO
    activations     kept for the backward pass, times microbatches in flight
    working         what one backward needs for a moment: the recomputed layer, the gradient of a
                    block's input and output, the 16-bit weight gradient of the largest block
    gathered        parameters on their way from other ranks or the host, and of experts that others
                    lend; else none up to ZeRO-1, which updates in place
    communication   receive buffers, and the gathered sequence under sequence parallelism
    logits          logits in the compute dtype and their fp32 softmax and gradient
    allocator gap   the accelerator's share of all of the above (reserved minus allocated)
    context         driver, libraries and communication channels
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.hardware.machine import Accelerator
from sim.model.amounts import BlockTable
from sim.spec.job import Job, Recompute

__all__ = ["TERMS", "MemoryKnobs", "stage_memory_terms"]

Floats = NDArray[np.float64]

TERMS = (
    "parameters",
    "gradients",
    "gradient copy",
    "optimizer",
    "activations",
    "working",
    "gathered",
    "communication",
    "logits",
    "allocator gap",
    "context",
)


class MemoryKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """What of a cell decides its memory besides its blocks.

    Args:
        microbatch: [sequences]. tp, cp, ep: sizes. recompute: what is not kept.
        sequence_parallel: unsplit activations are divided by tp. buffers: receive buffers per pair.
        shards: ranks among which ZeRO divides optimizer states, 1 without it; those of experts it
            divides among ``shards / ep``. What ZeRO-2 and 3 divide besides, plans by segment know
            (sim.cost.offload).
        late_gradients: reduced gradients that wait for their update beside the one that is summed.
        remote_optimizer: optimizer states are held, and used, by a server.
        outer_bytes: [B] per parameter of states that outlive local steps (local SGD).
        slots: experts that others lend for a step, in every block with experts.
    """

    microbatch: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    buffers: int = 2
    shards: int = 1
    late_gradients: int = 0
    remote_optimizer: bool = False
    outer_bytes: float = 0.0
    slots: int = 0


def stage_memory_terms(
    table: BlockTable,
    job: Job,
    accelerator: Accelerator,
    first: ArrayLike,
    last: ArrayLike,
    live: ArrayLike,
    knobs: MemoryKnobs,
) -> dict[str, Floats]:
    """Return the terms of many cells at once.

    Args:
        table: of the model. job, accelerator: see there.
        first, last: block range of every virtual stage of a cell, shape (..., V).
        live: microbatches in flight per virtual stage, shape (..., V).
        knobs: of the cells.

    Returns:
        Term -> [B], shape (...).
    """
    low, high = np.asarray(first), np.asarray(last)
    in_flight = np.asarray(live, np.float64)
    tp, tokens = knobs.tp, knobs.microbatch * table.sequence_length / knobs.cp
    dense, experts = table.rank_params(low, high, tp, knobs.ep)
    dense, experts = dense.sum(-1) - _held_once(table, low, high) / tp, experts.sum(-1)
    count = dense + experts
    lent = knobs.slots * table.total("params_expert", low, high).sum(-1) / tp
    # Experts are replicated over fewer ranks than the rest, and sharded over those.
    expert_shards = max(1, knobs.shards // knobs.ep)
    owned = dense / knobs.shards + experts / expert_shards
    kept = table.kept_per_token(low, high, knobs.recompute, tp, knobs.sequence_parallel)
    copies = job.dtype == "fp16" and job.gradient_bytes > job.param_bytes
    terms = {
        "parameters": count * job.param_bytes,
        "gradients": (count * (1 + knobs.late_gradients) + lent) * job.gradient_bytes,
        "gradient copy": count * (job.param_bytes if copies else 0),
        "optimizer": owned * (0 if knobs.remote_optimizer else job.optimizer_bytes)
        + count * knobs.outer_bytes,
        "activations": (kept * in_flight).sum(-1) * tokens,
        "working": _working(table, job, low, high, knobs, copies),
        "gathered": lent * job.param_bytes,
        "communication": _buffers(table, low, high, knobs, tokens),
        "logits": table.total("logits_elements", low, high).sum(-1)
        * (job.activation_bytes + 8)
        * tokens
        / tp,
    }
    gap = accelerator.allocator_gap * sum(terms.values())
    terms["allocator gap"] = np.asarray(gap)
    terms["context"] = np.full_like(count, accelerator.context_bytes)
    return terms


def _held_once(table: BlockTable, low: ArrayLike, high: ArrayLike) -> Floats:
    """Parameters that virtual stages of a cell share with another of them."""
    low, high = np.asarray(low), np.asarray(high)
    found = np.zeros(low.shape[:-1])
    for a, b, params in table.tied:
        first, second = (((low <= x) & (x < high)) for x in (a, b))
        apart = first.any(-1) & second.any(-1) & ~(first & second).any(-1)
        found = found + params * apart
    return found


def _working(
    table: BlockTable, job: Job, low: ArrayLike, high: ArrayLike, knobs: MemoryKnobs, copies: bool
) -> Floats:
    """What one block's backward holds for a moment: the largest over the cell's blocks."""
    rest = knobs.tp if knobs.sequence_parallel else 1
    tokens = knobs.microbatch * table.sequence_length / knobs.cp
    again = np.zeros_like(table.input_bytes)
    if knobs.recompute != "none":
        core = table.core_split / knobs.tp + table.core_whole / rest
        whole = core + table.kept_split / knobs.tp + table.kept_whole / rest
        by_block = whole if knobs.recompute == "full" else core
        layers, where = np.unique(table.layer, return_inverse=True)
        sums = np.bincount(where, by_block, minlength=len(layers))
        again = np.where(table.in_layer, sums[where], 0.0)
    per_token = again + 2.0 * table.input_bytes / rest
    nbytes = per_token * tokens
    if job.gradient_bytes > job.param_bytes and not copies:
        own = table.params / knobs.tp + table.params_replicated
        own = own + table.params_experts / (knobs.ep * knobs.tp)
        nbytes = nbytes + own * job.param_bytes
    return _range_max(nbytes, np.asarray(low), np.asarray(high)).max(-1)  # type: ignore[no-any-return]


def _range_max(values: Floats, low: NDArray[np.int64], high: NDArray[np.int64]) -> Floats:
    """Largest value of every range [low, high), by a table over all pairs of ends."""
    n = len(values)
    square = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], values[None, :], 0.0)
    square = np.maximum.accumulate(square, axis=1)
    return np.asarray(square[np.minimum(low, n - 1), np.maximum(high - 1, 0)])


def _buffers(
    table: BlockTable,
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    knobs: MemoryKnobs,
    tokens: float,
) -> Floats:
    n = len(table.input_bytes)
    incoming = np.where(low > 0, table.input_bytes[low], 0.0)
    outgoing = np.where(high < n, table.input_bytes[np.minimum(high, n - 1)], 0.0)
    nbytes = knobs.buffers * (incoming + outgoing).sum(-1) * tokens / knobs.tp
    if knobs.sequence_parallel and knobs.tp > 1:
        nbytes = nbytes + tokens * table.input_bytes.max()
    return np.asarray(nbytes)
