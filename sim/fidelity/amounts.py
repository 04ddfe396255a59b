"""What a step does along its critical path, apart from how fast anything does it.

The step time is a sum over these amounts, each divided by a rate; a fit changes rates and leaves
amounts alone. The sums are those of sim.cost.compute and sim.cost.cell.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.cell import INNER_GROUPS, CellSpec, CellTimes, cell_times
from sim.cost.compute import (
    ELEMENTWISE_BACKWARD,
    FLASH_BACKWARD,
    SCORE_PASSES,
    compute_dtype,
)
from sim.cost.work import PASSES, Work
from sim.engine.simulate import Run
from sim.hardware.machine import Accelerator
from sim.model.amounts import attention_flops, dtype_bytes, rank_gemms
from sim.model.graph import Block
from sim.problem import Problem
from sim.report.explain_path import critical_path

__all__ = ["Amounts", "Sample", "amounts_of", "whole_step"]

Floats = NDArray[np.float64]
GEMM = 7
"""Columns of a product: m, n, k, how often, [B] per weight element moved, [B] per other element,
peak [FLOP/s]."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated step. Args: microbatches: of each replica. run, problem: of it."""

    microbatches: int
    run: Run
    problem: Problem


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """Along the critical path of one step.

    Args:
        gemms: shape (G, 7), see ``GEMM``. core: [FLOP] of attention cores.
        core_heads, core_keys: [FLOP] over the width of a head, and over the sequence length.

        traffic: [B] of everything else. launches: passes of blocks. routed: passes of MoE blocks.
        tp, ep, cp: [s] of collectives inside passes, at the links' own rates.
        transfers: [s] of transfers between stages. sync: [s] of sums and gathers over replicas.
        optimizer: [B] the update moves. steps: 1. rest: [s] of everything else.
        core_peak: [FLOP/s] of the core. memory: [B/s].
    """

    gemms: Floats
    core: float
    core_heads: float
    core_keys: float
    traffic: float
    launches: float
    routed: float
    tp: float
    ep: float
    cp: float
    transfers: float
    sync: float
    optimizer: float
    steps: float
    rest: float
    core_peak: float
    memory: float


_SUMS = (
    "core", "core_heads", "core_keys", "traffic", "launches", "routed", "tp", "ep", "cp",
    "transfers", "sync", "optimizer", "steps", "rest",
)  # fmt: skip


def whole_step(samples: tuple[Sample, ...], microbatches: int) -> Amounts:
    """Return the amounts of a whole step from those of its short ones."""
    last = amounts_of(samples[-1])
    if len(samples) == 1:
        return last
    first = amounts_of(samples[0])
    between = samples[-1].microbatches - samples[0].microbatches
    times = (microbatches - samples[-1].microbatches) / between
    sums = {k: getattr(last, k) * (1 + times) - getattr(first, k) * times for k in _SUMS}
    gemms = np.concatenate([last.gemms * _scale(1 + times), first.gemms * _scale(-times)])
    return msgspec.structs.replace(last, gemms=_merged(gemms), **sums)


def _scale(factor: float) -> Floats:
    return np.array([1.0, 1.0, 1.0, factor, 1.0, 1.0, 1.0])


def _merged(gemms: Floats) -> Floats:
    """Add up equal products."""
    if not len(gemms):
        return gemms
    keys, index = np.unique(gemms[:, [0, 1, 2, 4, 5, 6]], axis=0, return_inverse=True)
    count = np.bincount(index.reshape(-1), gemms[:, 3], minlength=len(keys))
    found = np.column_stack([keys[:, :3], count, keys[:, 3:]])
    return found[np.abs(count) > 1e-9]


def amounts_of(sample: Sample) -> Amounts:
    """Return the amounts along a simulated step's critical path."""
    run, problem = sample.run, sample.problem
    graph = run.layout.graph
    work = Work(graph, run.layout.wiring, run.layout.plan, problem)
    passes: Counter[tuple[CellSpec, tuple[tuple[int, int], ...], tuple[int, ...]]] = Counter()
    sums = dict.fromkeys(_SUMS, 0.0)
    sums["steps"] = 1.0
    accelerator = None
    for part in critical_path(run, 0.0, run.makespan):
        node, seconds = part.node, part.end - part.start
        if node < 0:
            sums["rest"] += seconds
            continue
        op, rank = graph.ops[node], graph.actors[graph.actor[node]].rank
        if op.kind in PASSES:
            cell = work.cell(rank, op)
            kinds = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,), "R": (3,)}[op.kind]
            if op.recompute == "inner" and op.kind in ("B", "I"):
                kinds = (3, *kinds)
            passes[work.spec(cell, 1, op.stage), tuple(work.ranges(op, rank)), kinds] += 1
            accelerator = work.accelerator(rank)
        elif op.kind == "OPT":
            job = problem.job
            per_param = job.gradient_bytes + 2.0 * job.optimizer_bytes + job.param_bytes
            sums["launches"] += 1
            sums["optimizer"] += per_param * work.owned_params(op, rank)
        elif op.kind.startswith(("SEND", "RECV")):
            sums["transfers"] += seconds
        elif graph.wires[graph.wire[node]].kind == "group" if graph.wire[node] >= 0 else False:
            sums["sync"] += seconds
        else:
            sums["rest"] += seconds
    accelerator = accelerator or next(iter(problem.machine.accelerators.values()))
    dtype = compute_dtype(accelerator, problem.job.dtype)[0]
    gemms: list[tuple[float, ...]] = []
    cells: dict[CellSpec, CellTimes] = {}
    for (spec, ranges, kinds), count in passes.items():
        _add_passes(work, cells, accelerator, spec, ranges, kinds, count, gemms, sums)
    return Amounts(
        gemms=_merged(np.array(gemms, np.float64).reshape(-1, GEMM)),
        core_peak=accelerator.peak_flops_per_s[_wide(accelerator, dtype)],
        memory=accelerator.memory_bytes_per_s,
        **sums,
    )


def _add_passes(
    work: Work,
    cells: dict[CellSpec, CellTimes],
    accelerator: Accelerator,
    spec: CellSpec,
    ranges: tuple[tuple[int, int], ...],
    kinds: tuple[int, ...],
    count: int,
    gemms: list[tuple[float, ...]],
    sums: dict[str, float],
) -> None:
    times = cells.get(spec)
    if times is None:
        times = cells[spec] = cell_times(work.problem, work.classes, spec)
    for role, own in zip(INNER_GROUPS, times.comm, strict=True):
        sums[role] += count * sum(float(own[k, a:b].sum()) for k in kinds for a, b in ranges)
    member = work.classes.member
    dtype = compute_dtype(accelerator, work.problem.job.dtype)[0]
    wide = _wide(accelerator, dtype)
    blocks = Counter(int(member[i]) for a, b in ranges for i in range(a, b))
    for index, number in blocks.items():
        block = work.classes.blocks[index]
        for kind in kinds:
            own = wide if block.kind in ("embedding", "head") else dtype
            peak = accelerator.peak_flops_per_s[own]
            _add_block(block, spec, kind, float(count * number), own, peak, gemms, sums)


def _wide(accelerator: Accelerator, dtype: str) -> str:
    """What runs the attention core and both ends of the model under fp8."""
    return compute_dtype(accelerator, "bf16")[0] if dtype == "fp8" else dtype


def _add_block(
    block: Block,
    spec: CellSpec,
    kind: int,
    count: float,
    dtype: str,
    peak: float,
    gemms: list[tuple[float, ...]],
    sums: dict[str, float],
) -> None:
    """Add one pass (0 forward, 1 input gradient, 2 weight gradient, 3 again) of a block."""
    shape = spec.shape
    in_layer = block.kind not in ("embedding", "head")
    embedding = block.kind == "embedding"
    size = max(dtype_bytes(dtype), 1)
    stored = 2 if dtype == "fp8" else size
    flash = block.attention is not None and block.attention.flash
    full = shape.recompute == "full"
    if kind == 3:
        if not in_layer or shape.recompute == "none":
            return
        if not full and block.attention is None:
            return
    products = kind == 0 or (kind == 1 and not embedding) or kind == 2 or (kind == 3 and full)
    core = {0: 1.0, 1: FLASH_BACKWARD if flash else 2.0, 2: 0.0, 3: 1.0}[kind]
    moved = {0: 1.0, 1: ELEMENTWISE_BACKWARD, 2: 0.0, 3: 1.0 if full else 0.0}[kind]
    if embedding and kind:
        core, moved = 0.0, (0.0, 0.0, ELEMENTWISE_BACKWARD, 0.0)[kind]
    found = rank_gemms(block, shape.tokens, shape.tp, shape.ep, shape.sequence_parallel)
    if kind == 2 and not found and not embedding:
        return
    if products:
        for m, n, k, number in found:
            weight = 8.0 if kind == 2 else float(size)
            gemms.append((m, n, k, number * count, weight, float(size), peak))
    if block.attention is not None and core:
        flops = attention_flops(block, shape.tokens, shape.sequence_length) / shape.tp
        a = block.attention
        flops *= count * core
        sums["core"] += flops
        sums["core_heads"] += flops * 2.0 / (a.head_dim + a.v_head_dim)
        sums["core_keys"] += flops / shape.sequence_length
        if not flash:
            scores = shape.tokens * shape.sequence_length * block.attention.heads / shape.tp
            again = SCORE_PASSES * (1.0 if core == 1.0 else ELEMENTWISE_BACKWARD)
            sums["traffic"] += count * again * scores * stored
    rest = 1.0 - block.elementwise_split
    share = block.elementwise_split / shape.tp + rest / (shape.tp if shape.sequence_parallel else 1)
    sums["traffic"] += count * moved * shape.tokens * block.elementwise * share * stored
    sums["launches"] += count
    if block.num_experts:
        sums["routed"] += count
