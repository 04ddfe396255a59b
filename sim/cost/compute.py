"""Time of a block's passes on one accelerator: measured where there is an entry, else roofline.

Roofline: every product runs at ``e0 / ((1 + d/m)(1 + d/n)(1 + d/k))`` of the dense peak, no faster
than its operands cross the memory; the attention core has an efficiency of its own; everything
else is memory traffic; and each pass of a block has a fixed overhead. ``d`` and ``e0`` belong to
the accelerator, never to a run.
"""

from __future__ import annotations

import msgspec

from sim.cost.measured import MeasuredTimes
from sim.errors import InputError
from sim.hardware.machine import Accelerator
from sim.model.amounts import attention_flops, dtype_bytes, rank_gemms
from sim.model.graph import Block
from sim.spec.job import Job, Recompute

__all__ = [
    "BlockTime",
    "Shape",
    "block_time",
    "compute_dtype",
    "gemm_efficiency",
    "optimizer_time",
    "routed_part",
]

ELEMENTWISE_BACKWARD = 1.5
"""Backward over forward traffic of elementwise work: a norm reads x and writes y forward, reads dy
and x and writes dx backward; activations likewise."""
FLASH_BACKWARD = 2.5
"""Backward over forward work of fused attention, which computes the scores again (Dao 2023,
arXiv:2307.08691, section 4.1); 2 where the scores are kept."""
SCORE_PASSES = 6
"""Times each score crosses the memory forward when it is not fused: product out, softmax in and
out, dropout in and out, product in."""
TILE = 64
"""Features that matrix units take at once, on all makes the measured runs know."""
_FALLBACK = {
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp16"),
    "tf32": ("fp32",),
}
"""What a chip runs in place of a dtype it lacks, first choice first."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One cell's share of a microbatch.

    Args:
        microbatch: [sequences]. sequence_length: [tokens].
        tp, ep, cp: sizes. sequence_parallel: unsplit work is divided by tp along the sequence.
        recompute: what the forward pass does not keep.
    """

    microbatch: float
    sequence_length: int
    tp: int = 1
    ep: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"

    @property
    def tokens(self) -> float:
        """Tokens of the microbatch on one context-parallel rank."""
        return self.microbatch * self.sequence_length / self.cp


class BlockTime(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one block's passes on one rank [s]; collectives are apart unless ``measured``.

    Args:
        forward, input_grad, weight_grad: [s]. recompute: [s], 0 when nothing is recomputed.
        measured: a measurement, whose forward and backward already hold the tensor-parallel
            collectives: they must not be added again.
        flops: [FLOP] of one rank as (forward, input gradient, weight gradient, recompute).
    """

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float = 0.0
    measured: bool = False
    flops: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    @property
    def backward(self) -> float:
        """Both halves, without recomputation [s]."""
        return self.input_grad + self.weight_grad


def compute_dtype(accelerator: Accelerator, dtype: str) -> tuple[str, str]:
    """Return the dtype an accelerator runs a job's dtype in, and the assumption made (or "").

    Raises:
        InputError: the accelerator has no peak for the dtype nor for one that may stand in.
    """
    if dtype in accelerator.peak_flops_per_s:
        return dtype, ""
    for other in _FALLBACK.get(dtype, ()):
        if other in accelerator.peak_flops_per_s:
            return other, f"{accelerator.name} has no {dtype}: it computes in {other}"
    raise InputError(
        f"{accelerator.name} cannot compute in {dtype}",
        key="job.dtype",
        found=dtype,
        expected=" or ".join(sorted(accelerator.peak_flops_per_s)),
    )


def gemm_efficiency(accelerator: Accelerator, m: float, n: float, k: float) -> float:
    """Return the share of the dense peak that a product (m, k) x (k, n) reaches (0..1).

    Features that no tile divides cost more: the accelerator's ``misaligned`` says how much.
    """
    d = accelerator.gemm_half
    best = accelerator.gemm_efficiency * (accelerator.misaligned if n % TILE or k % TILE else 1.0)
    return best / ((1 + d / m) * (1 + d / n) * (1 + d / k))


def block_time(
    block: Block,
    accelerator: Accelerator,
    shape: Shape,
    dtype: str,
    measured: MeasuredTimes | None = None,
) -> BlockTime:
    """Return the times of one microbatch's passes through a block on one rank.

    Recomputation: "selective" repeats the attention core, "full" the forward pass of blocks that
    belong to a layer (embedding and head are never recomputed). With measured times both cost the
    measured recomputation, or a forward where none was measured.

    Args:
        block: what. accelerator: where. shape: the rank's share. dtype: of the products.
        measured: measured times, which replace everything else where there is an entry.

    Raises:
        InputError: a measured table lacks this split, or the accelerator the dtype.
    """
    entry = None
    if measured is not None:
        entry = measured.find(block, accelerator.name, shape.tp, shape.microbatch, shape.cp)
    work = _RankWork(block, accelerator, shape, compute_dtype(accelerator, dtype)[0])
    flops = work.flops()
    if entry is None:
        return BlockTime(
            forward=work.forward(),
            input_grad=work.input_grad(),
            weight_grad=work.weight_grad(),
            recompute=work.recompute(),
            flops=flops,
        )
    whole = entry.weight_grad == 0.0
    again = entry.forward if entry.recompute < 0 else entry.recompute
    return BlockTime(
        forward=entry.forward,
        input_grad=entry.input_grad / 2 if whole else entry.input_grad,
        weight_grad=entry.input_grad / 2 if whole else entry.weight_grad,
        recompute=again if work.recomputes else 0.0,
        measured=True,
        flops=flops,
    )


def routed_part(block: Block) -> Block:
    """Return what of a block routed tokens make: their products and what lies between these.

    The router, the tokens' way to the experts' order and back, and shared experts are not part.
    """
    gemms = tuple(g for g in block.gemms if g.routed)
    width = sum(g.count * (g.k if g.split == "row" else g.n) for g in gemms)
    return msgspec.structs.replace(
        block, gemms=gemms, elementwise=float(block.top_k * width), elementwise_split=1.0
    )


class _RankWork:
    """A block's work on one rank, turned into seconds pass by pass."""

    def __init__(self, block: Block, accelerator: Accelerator, shape: Shape, dtype: str) -> None:
        self.block, self.accelerator, self.shape = block, accelerator, shape
        # fp8 training keeps the attention core and the products of both ends in 16 bits.
        wide = compute_dtype(accelerator, "bf16")[0] if dtype == "fp8" else dtype
        dtype = wide if block.kind in ("embedding", "head") else dtype
        self.peak = accelerator.peak_flops_per_s[dtype]
        self.core_peak = accelerator.peak_flops_per_s[wide]
        self.memory_rate = accelerator.memory_bytes_per_s * accelerator.memory_efficiency
        self.size = max(dtype_bytes(dtype), 1)
        self.stored = 2 if dtype == "fp8" else self.size
        self.gemms = rank_gemms(block, shape.tokens, shape.tp, shape.ep, shape.sequence_parallel)
        core = attention_flops(block, shape.tokens, shape.sequence_length)
        self.core_flops = core / shape.tp
        in_layer = block.kind not in ("embedding", "head")
        self.recomputes = in_layer and (
            shape.recompute == "full"
            or (shape.recompute == "selective" and block.attention is not None)
        )
        parts = len({g.routed for g in block.gemms}) if block.num_experts else 1
        self.overhead = accelerator.kernel_overhead_s * parts
        # The way to the experts and back belongs to what is not the experts' own.
        self.overhead += accelerator.routing_overhead_s if parts > 1 else 0.0

    def flops(self) -> tuple[float, float, float, float]:
        products = sum(2.0 * m * n * k * count for m, n, k, count in self.gemms)
        forward, again = products + self.core_flops, 0.0
        if self.recomputes:
            again = forward if self.shape.recompute == "full" else self.core_flops
        return forward, products + 2.0 * self.core_flops, products, again

    def _products(self, accumulates: bool) -> float:
        """The products of one pass; a weight gradient is added to an fp32 sum instead of read."""
        total = 0.0
        for m, n, k, count in self.gemms:
            weight_bytes = 8.0 if accumulates else self.size
            moved = (m * k + m * n) * self.size + k * n * weight_bytes
            rate = self.peak * gemm_efficiency(self.accelerator, m, n, k)
            total += count * max(2.0 * m * n * k / rate, moved / self.memory_rate)
        return total

    def _core(self, factor: float) -> float:
        """The attention core; ``factor`` 1 forward, more backward."""
        a = self.block.attention
        if a is None:
            return 0.0
        chip = self.accelerator
        slow = 1.0 + 2.0 * chip.head_half / (a.head_dim + a.v_head_dim)
        slow += chip.keys_half / self.shape.sequence_length
        seconds = factor * self.core_flops * slow / (self.core_peak * chip.attention_efficiency)
        if not a.flash:
            scores = self.shape.tokens * self.shape.sequence_length * a.heads / self.shape.tp
            passes = SCORE_PASSES * (1.0 if factor == 1.0 else ELEMENTWISE_BACKWARD)
            seconds += passes * scores * self.stored / self.memory_rate
        return seconds

    def _elementwise(self) -> float:
        b, tp = self.block, self.shape.tp
        rest = 1.0 - b.elementwise_split
        share = b.elementwise_split / tp + rest / (tp if self.shape.sequence_parallel else 1)
        return self.shape.tokens * b.elementwise * share * self.stored / self.memory_rate

    def forward(self) -> float:
        return self._products(False) + self._core(1.0) + self._elementwise() + self.overhead

    def input_grad(self) -> float:
        flash = self.block.attention is not None and self.block.attention.flash
        core = self._core(FLASH_BACKWARD if flash else 2.0)
        if self.block.kind == "embedding":  # nothing lies before it; its weight gradient scatters
            return self.overhead
        traffic = ELEMENTWISE_BACKWARD * self._elementwise()
        return self._products(False) + core + traffic + self.overhead

    def weight_grad(self) -> float:
        if self.block.kind == "embedding":
            return self._products(True) + ELEMENTWISE_BACKWARD * self._elementwise() + self.overhead
        return (self._products(True) + self.overhead) if self.gemms else 0.0

    def recompute(self) -> float:
        if not self.recomputes:
            return 0.0
        return self.forward() if self.shape.recompute == "full" else self._core(1.0) + self.overhead


def optimizer_time(
    accelerator: Accelerator,
    job: Job,
    params: float,
    *,
    shards: float = 1.0,
    update: float = 0.0,
) -> float:
    """Return the time of one optimizer step on one rank [s]: its bytes over the memory bandwidth.

    Each parameter's gradient is read once, its states and master weight are read and written, and
    the parameter is written.

    Args:
        accelerator, job: where and what. params: parameters on the rank.
        shards: ranks among which ZeRO-1 divides the update. update: [s] measured, replaces it.
    """
    if update > 0.0:
        return update
    per_param = job.gradient_bytes + 2.0 * job.optimizer_bytes + job.param_bytes
    share = accelerator.optimizer_efficiency or accelerator.memory_efficiency
    rate = accelerator.memory_bytes_per_s * share
    return params / shards * per_param / rate + accelerator.kernel_overhead_s
