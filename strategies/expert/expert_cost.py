"""Time of the experts' products on each device, by how many tokens each expert sees there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.cost.compute import ELEMENTWISE_BACKWARD, compute_dtype, gemm_efficiency, routed_part
from sim.errors import InputError
from sim.hardware.machine import Accelerator
from sim.model.amounts import dtype_bytes
from sim.model.graph import Block

__all__ = ["ExpertTimes", "PerToken", "Products", "expert_s", "products"]

Floats = NDArray[np.float64]

_SUM_BYTES = 8.0
"""[B] per weight that a weight gradient moves: it is added to an fp32 sum."""


class PerToken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pro-Prophet's constant throughput (arXiv:2411.10003, eq. 2 and 3).

    Args:
        forward, backward: [s] per token, the same on every device.
    """

    forward: float
    backward: float


class Products(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """The simulator's roofline: each product is a line in the tokens, so few tokens are dear.

    A product lasts ``max(c0 + c1 tokens, m0 + m1 tokens)``: compute, or operands over the memory.

    Args:
        forward, backward: (c0, c1, m0, m1) [s] of each product on each device, shape (P, 4, D).
        start_forward, start_backward: [s] once per pass on a device that has tokens, shape (D,).
    """

    forward: Floats
    backward: Floats
    start_forward: Floats
    start_backward: Floats


ExpertTimes = PerToken | Products


def expert_s(times: ExpertTimes, work: ArrayLike) -> tuple[Floats, Floats]:
    """Return the forward and backward time of each device's experts [s], shapes (..., D).

    Args:
        times: of an expert. work: tokens of each expert on each device, shape (..., E, D).
    """
    tokens = np.asarray(work, np.float64)
    if isinstance(times, PerToken):
        load = tokens.sum(axis=-2)
        return load * times.forward, load * times.backward
    busy, any_busy = tokens > 0, (tokens > 0).any(axis=-2)
    found = []
    for lines, start in (
        (times.forward, times.start_forward),
        (times.backward, times.start_backward),
    ):
        total = np.zeros_like(tokens)
        for c0, c1, m0, m1 in lines:
            total += np.maximum(c0 + c1 * tokens, m0 + m1 * tokens)
        found.append(np.where(busy, total, 0.0).sum(axis=-2) + np.where(any_busy, start, 0.0))
    return found[0], found[1]


def products(
    block: Block, accelerators: Sequence[Accelerator], dtype: str, tp: int = 1
) -> Products:
    """Return what one expert of a block costs on each device.

    The same arithmetic as ``sim.cost.compute.block_time`` of a block's ``routed_part``.

    Args:
        block: with routed experts. accelerators: of each device, (D,). dtype: of the products.
        tp: size of the tensor-parallel group that shares each expert.

    Raises:
        InputError: a block without routed products, or an accelerator without the dtype.
    """
    part = routed_part(block)
    if not part.gemms:
        raise InputError(
            f"{block.name} has no routed experts",
            key="block",
            found=block.kind,
            expected="a block whose products go through a router",
        )
    lines = np.array([_lines(part, chip, dtype, tp) for chip in accelerators])
    forward, inputs, weights = np.moveaxis(lines, 0, -1)
    start = np.array([a.kernel_overhead_s for a in accelerators])
    return Products(
        forward=forward,
        backward=np.concatenate([inputs, weights[:-1]]),
        start_forward=start,
        start_backward=2.0 * start,
    )


def _lines(part: Block, chip: Accelerator, dtype: str, tp: int) -> Floats:
    """Lines of the forward pass and the two gradients on one chip, shape (3, P + 1, 4).

    The last line of a pass is what lies between the products: elements that cross the memory.
    """
    own = compute_dtype(chip, dtype)[0]
    size = max(dtype_bytes(own), 1)
    peak = chip.peak_flops_per_s[own]
    memory = chip.memory_bytes_per_s * chip.memory_efficiency
    forward, weights = [], []
    for g in part.gemms:
        n = g.n / tp if g.split == "column" else float(g.n)
        k = g.k / tp if g.split == "row" else float(g.k)
        slope = g.count * 2.0 * n * k / (peak * gemm_efficiency(chip, math.inf, n, k))
        moved = g.count * size * (k + n) / memory
        compute = slope * chip.gemm_half, slope
        forward.append((*compute, g.count * k * n * size / memory, moved))
        weights.append((*compute, g.count * k * n * _SUM_BYTES / memory, moved))
    stored = 2 if own == "fp8" else size
    between = part.elementwise / part.top_k / tp * stored / memory
    return np.array(
        [
            [*forward, (0.0, 0.0, 0.0, between)],
            [*forward, (0.0, 0.0, 0.0, ELEMENTWISE_BACKWARD * between)],
            [*weights, (0.0, 0.0, 0.0, 0.0)],
        ]
    )
