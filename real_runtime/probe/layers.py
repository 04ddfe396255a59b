"""Times of whole layers, and what they say of the numbers that single kernels gave.

A kernel that is repeated finds its operands in the caches and has the core to itself; in a layer
neither holds. So layers of several sizes, none of which belongs to a model of anybody's, correct
four numbers of the accelerator together: products, attention, elementwise work, overhead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from real_runtime.probe.records import Record, select
from sim.cost.compute import Shape, block_time
from sim.hardware.machine import Accelerator
from sim.model.graph import Block
from sim.model.load import load_model

__all__ = ["LAYERS", "Corrections", "corrected", "layer_config", "layers_of"]

LAYERS = 3
"""Of the measured stack; so many weights take turns in the caches."""
DOUBT = 0.5
"""Standard deviation of ln(correction) that is thought likely before anything is measured."""
NOISE = 0.05
"""And of ln(measured / predicted) of a layer."""

Floats = NDArray[np.float64]


class Corrections(msgspec.Struct, frozen=True):
    """Factors on an accelerator's numbers.

    Args:
        gemm, attention, memory: on the efficiencies. overhead: on the time per pass.
        residual: quartile distance of ln(measured / predicted) after correction. count: of records.
    """

    gemm: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    overhead: float = 1.0
    residual: float = 0.0
    count: int = 0


def layer_config(hidden: int, ffn: int, heads: int, length: int) -> dict[str, Any]:
    """Return a decoder's config.json of ``LAYERS`` layers."""
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": LAYERS,
        "vocab_size": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": length,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip


def layers_of(sizes: dict[str, float]) -> tuple[Block, ...]:
    """Return the blocks that a layer's record timed."""
    numbers = (int(sizes[x]) for x in ("hidden", "ffn", "heads", "length"))
    return tuple(b for b in load_model(layer_config(*numbers)).blocks if 0 <= b.layer < LAYERS)


def corrected(chip: Accelerator, records: Sequence[Record]) -> Corrections:
    """Return the factors that make the cost model's times of whole layers those measured.

    Least squares of ln(measured / predicted) over the records, each factor held near 1.

    Args:
        chip: from single kernels. records: of the probe; without layers nothing is corrected.
    """
    from scipy.optimize import least_squares

    found = select(records, "layer")
    if not found:
        return Corrections()
    terms = list(_terms(found))
    took = np.log([r.median for r in found])

    def off(x: Floats) -> Floats:
        changed = _changed(chip, *np.exp(x).tolist())
        said = np.log([_seconds(changed, *term) for term in terms])
        return np.asarray((said - took) / NOISE, dtype=np.float64)

    def cost(x: Floats) -> Floats:
        return np.concatenate([off(x), x / DOUBT])

    best = least_squares(cost, np.zeros(4))
    low, high = np.percentile(off(best.x) * NOISE, (25, 75)).tolist()
    gemm, attention, memory, overhead = np.exp(best.x).tolist()
    return Corrections(gemm, attention, memory, overhead, high - low, len(found))


def _changed(
    chip: Accelerator, gemm: float, attention: float, memory: float, overhead: float
) -> Accelerator:
    return msgspec.structs.replace(
        chip,
        gemm_efficiency=chip.gemm_efficiency * gemm,
        attention_efficiency=chip.attention_efficiency * attention,
        memory_efficiency=chip.memory_efficiency * memory,
        kernel_overhead_s=chip.kernel_overhead_s * overhead,
    )


def _terms(records: Sequence[Record]) -> Iterator[tuple[str, str, tuple[Block, ...], Shape]]:
    """(Pass, dtype, blocks, shape) of each record."""
    for r in records:
        dtype, which = r.name.split()
        shape = Shape(microbatch=r.sizes["batch"], sequence_length=int(r.sizes["length"]))
        yield which, dtype, layers_of(r.sizes), shape


def _seconds(
    chip: Accelerator, which: str, dtype: str, blocks: tuple[Block, ...], shape: Shape
) -> float:
    total = 0.0
    for b in blocks:
        t = block_time(b, chip, shape, dtype)
        total += t.forward + (t.backward if which == "both" else 0.0)
    return total
