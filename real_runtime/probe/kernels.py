"""Times of products, elementwise work, attention cores and whole small blocks on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf

from real_runtime.devices import synchronize
from real_runtime.model.config import read_config
from real_runtime.model.decoder import Decoder
from real_runtime.model.parallel import TensorParallel
from real_runtime.model.parameters import block_specs, initial
from real_runtime.model.weights import Deferral, Weight
from real_runtime.probe.layers import layer_config
from real_runtime.probe.records import ProbeSettings, Record

__all__ = ["TORCH_DTYPES", "Meter", "kernels"]

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COUNTED = 24.0
"""[B] per parameter of an AdamW step with fp32 states."""
TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
"""A model whose work is nothing beside what starting it costs."""


class Meter:
    """Times functions on one device.

    Args:
        device: whose work is waited for. repeats, floor: see ProbeSettings.
        together: called before each measurement, so that all ranks measure at once.
    """

    def __init__(
        self, device: torch.device, repeats: int, floor: float, together: Callable[[], None]
    ) -> None:
        self.device, self.repeats, self.floor, self.together = device, repeats, floor, together

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Time of ``times`` calls in a row [s]."""
        begin = time.perf_counter()
        for _ in range(times):
            work()
        synchronize(self.device)
        return time.perf_counter() - begin

    def record(
        self,
        what: str,
        name: str,
        sizes: dict[str, float],
        work: Callable[[], object],
        times: int = 0,
    ) -> Record:
        """Time one call of a function.

        Args:
            what, name, sizes: of the record. work: to be timed.
            times: calls per repeat; 0 takes as many as last ``floor``. Ranks that exchange
                messages in ``work`` must give the same number.
        """
        self.seconds(work, 1)
        if not times:
            times = max(int(self.floor / max(self.seconds(work, 1), 1e-9)), 1)
        self.together()
        found = [self.seconds(work, times) / times for _ in range(self.repeats)]
        low, middle, high = np.percentile(found, (25, 50, 75)).tolist()
        return Record(
            what=what, name=name, sizes=sizes, median=middle, low=low, high=high,
            repeats=self.repeats,
        )  # fmt: skip


def kernels(meter: Meter, settings: ProbeSettings, dtypes: tuple[str, ...]) -> Iterator[Record]:
    """Yield the record of every kernel, the small ones first."""
    yield _dispatch(meter)
    yield from _blocks(meter)
    yield from _layers(meter, settings, dtypes[0])
    yield from _elementwise(meter, settings)
    yield from _attention(meter, settings, dtypes[0])
    for dtype in dtypes:
        yield from _gemms(meter, settings, dtype)


def _dispatch(meter: Meter) -> Record:
    one = torch.zeros(1, device=meter.device)
    return meter.record("dispatch", "add", {}, lambda: one.add_(1.0))


def _gemms(meter: Meter, settings: ProbeSettings, dtype: str) -> Iterator[Record]:
    """Each product as the runtime runs it: forward, gradient of the input, of the weight."""
    kind, device = TORCH_DTYPES[dtype], meter.device
    for m in settings.tokens:
        for n, k in settings.weights:
            if device.type == "cpu" and 2.0 * m * n * k > settings.heaviest:
                continue
            x, w = (torch.randn(a, k, device=device).to(kind) for a in (m, n))
            dy, total = torch.randn(m, n, device=device).to(kind), torch.zeros(n, k, device=device)

            def forward(x: torch.Tensor = x, w: torch.Tensor = w) -> torch.Tensor:
                return nnf.linear(x, w)

            def inputs(dy: torch.Tensor = dy, w: torch.Tensor = w) -> torch.Tensor:
                return dy @ w

            def weights(
                dy: torch.Tensor = dy, x: torch.Tensor = x, total: torch.Tensor = total
            ) -> torch.Tensor:
                if dy.dtype == total.dtype:
                    return total.addmm_(dy.t(), x)
                return total.add_(dy.t() @ x)

            for way, work in (("forward", forward), ("input", inputs), ("weight", weights)):
                sizes = {"m": m, "n": n, "k": k, "element": float(x.element_size())}
                yield meter.record("gemm", f"{dtype} {way}", sizes, work)


def _elementwise(meter: Meter, settings: ProbeSettings) -> Iterator[Record]:
    """A plain copy, a norm with its residual sum (counted as 5 passes), and an optimizer."""
    width = 256
    for count in settings.elements:
        x = torch.randn(count // width, width, device=meter.device)
        out, weight = torch.empty_like(x), torch.ones(width, device=meter.device)
        nbytes = float(x.nbytes)

        def copy(x: torch.Tensor = x, out: torch.Tensor = out) -> torch.Tensor:
            return out.copy_(x)

        def norm(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return x + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

        yield meter.record("copy", "fp32", {"nbytes": 2 * nbytes}, copy)
        yield meter.record("elementwise", "norm", {"nbytes": 5 * nbytes}, norm)
    for count in settings.elements[1:-1] or settings.elements:
        parameter = torch.nn.Parameter(torch.randn(count, device=meter.device))
        parameter.grad = torch.randn(count, device=meter.device)
        # Counted per element: gradient and parameter once, two states read and written, the
        # parameter written, as sim.cost.compute.optimizer_time does for fp32.
        optimizer = torch.optim.AdamW([parameter], lr=1e-4)
        yield meter.record("elementwise", "adamw", {"nbytes": COUNTED * count}, optimizer.step)


def _attention(meter: Meter, settings: ProbeSettings, dtype: str) -> Iterator[Record]:
    for batch, heads, length, width in settings.cores:
        q, k, v = (
            torch.randn(batch, heads, length, width, device=meter.device).to(TORCH_DTYPES[dtype])
            for _ in range(3)
        )

        def core(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)

        # Model FLOPs: half of the scores, for the scores' product and the values'.
        flops = 2.0 * batch * length * (length / 2) * heads * (2 * width)
        yield meter.record("attention", dtype, {"flops": flops}, core)


def _blocks(meter: Meter) -> Iterator[Record]:
    """Forward and backward of a model so small that what is left is the cost per pass."""
    forward, both, blocks = _stack(meter.device, TINY, (4, 1), torch.float32)
    # A block has a forward pass, and an input and a weight gradient.
    yield meter.record("block", "forward", {"passes": blocks}, forward)
    yield meter.record("block", "both", {"passes": 3 * blocks}, both)


def _layers(meter: Meter, settings: ProbeSettings, dtype: str) -> Iterator[Record]:
    """Forward, and forward with backward, of stacks of layers; never the same weights twice."""
    for hidden, ffn, heads, batch, length in settings.layers:
        forward, both, _ = _stack(
            meter.device, layer_config(hidden, ffn, heads, length), (length, batch),
            TORCH_DTYPES[dtype],
        )  # fmt: skip
        names = ("hidden", "ffn", "heads", "batch", "length")
        sizes = dict(zip(names, map(float, (hidden, ffn, heads, batch, length)), strict=True))
        yield meter.record("layer", f"{dtype} forward", sizes, forward)
        yield meter.record("layer", f"{dtype} both", sizes, both)


def _stack(
    device: torch.device, document: dict[str, Any], rows: tuple[int, int], dtype: torch.dtype
) -> tuple[Callable[[], torch.Tensor], Callable[[], None], int]:
    """Forward, forward with backward, and blocks of a decoder's layers."""
    config = read_config(document)
    kinds = tuple(
        (kind, layer) for layer in range(config.shape.num_layers) for kind in ("attention", "mlp")
    )
    weights = {
        spec.name: Weight(
            spec,
            initial(spec, 0.02, 0).to(device, dtype),
            torch.zeros(spec.padded, device=device),
        )
        for kind, layer in kinds
        for spec in block_specs(config, kind, layer, 16, False)
    }
    decoder = Decoder(config, kinds, weights, TensorParallel(), Deferral())
    anchor = torch.zeros((), requires_grad=True, device=device)
    x = torch.randn(*rows, config.shape.hidden, device=device, dtype=dtype, requires_grad=True)

    def forward() -> torch.Tensor:
        return decoder.forward(x, None, anchor)

    def both() -> None:
        y = forward()
        torch.autograd.backward(y, torch.ones_like(y))

    return forward, both, len(kinds)
