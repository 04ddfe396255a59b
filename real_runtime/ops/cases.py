"""The operators of the decoder as the runtime computes them, each with inputs that fit its check.

Legend of shapes: s sequence, b batch, h hidden, n heads, d head size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from real_runtime.model.config import read_config
from real_runtime.model.decoder import Decoder, _core
from real_runtime.model.loss import cross_entropy
from real_runtime.model.parallel import TensorParallel
from real_runtime.model.parameters import ParameterSpec
from real_runtime.model.weights import Deferral, Weight, embed, product
from real_runtime.settings import Recipe
from real_runtime.update import StageUpdate

__all__ = ["CONFIG", "OPERATORS", "Operator", "Tensors"]

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "initializer_range": 0.1,
}  # fmt: skip
"""The tiny decoder."""

Tensors = dict[str, torch.Tensor]
S, B, H, N, KV, D, V = 24, 4, 32, 4, 2, 8, 256


class Operator(NamedTuple):
    """One operator.

    Args:
        name: of it. inputs: name -> (standard deviation, shape); integers below it where the name
            is "ids" or "targets".
        run: from the inputs to the output, and gradients that its weights keep for themselves,
            complete after the backward pass.
    """

    name: str
    inputs: Mapping[str, tuple[float, tuple[int, ...]]]
    run: Callable[[Tensors], tuple[torch.Tensor, Tensors]]


def _weight(values: torch.Tensor, name: str = "weight") -> Weight:
    """A weight as the runtime holds it: its gradient in fp32, or in fp64."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    data = values.detach().clone()
    spec = ParameterSpec(name=name, shape=tuple(data.shape))
    return Weight(spec, data, torch.zeros_like(data, dtype=wide))


def _decoder(weights: Mapping[str, Weight]) -> Decoder:
    return Decoder(read_config(CONFIG), (), weights, TensorParallel(), Deferral())


def _matmul(t: Tensors) -> tuple[torch.Tensor, Tensors]:
    weight, bias = _weight(t["weight"]), _weight(t["bias"])
    y = product(t["x"], weight, bias, Deferral())
    return y, {"weight": weight.gradient, "bias": bias.gradient}


def _rmsnorm(t: Tensors) -> tuple[torch.Tensor, Tensors]:
    weight = _weight(t["weight"])
    return _decoder({"norm.weight": weight})._norm(t["x"], "norm"), {"weight": weight.gradient}


def _rope(t: Tensors) -> tuple[torch.Tensor, Tensors]:
    return _decoder({})._rotate(t["x"]), {}


def _attention(t: Tensors) -> tuple[torch.Tensor, Tensors]:
    return _core(t["q"], t["k"], t["v"]), {}


def _swiglu(t: Tensors) -> tuple[torch.Tensor, Tensors]:
    gate, up = _weight(t["gate"]), _weight(t["up"])
    decoder = _decoder({"gate.weight": gate, "up.weight": up})
    return decoder._gated(t["x"], "gate", "up"), {"gate": gate.gradient, "up": up.gradient}


def _embedding(t: Tensors) -> tuple[torch.Tensor, Tensors]:
    weight = _weight(t["weight"])
    anchor = torch.zeros((), requires_grad=True, device=t["ids"].device)
    return embed(t["ids"], weight, 0, anchor, Deferral()), {"weight": weight.gradient}


def _cross_entropy(t: Tensors) -> tuple[torch.Tensor, Tensors]:
    return cross_entropy(t["logits"], t["targets"], V, TensorParallel()), {}


def _adamw(t: Tensors) -> tuple[torch.Tensor, Tensors]:
    weight = _weight(t["weight"])
    update = StageUpdate([(weight, True)], [], "adamw", Recipe())
    for name in ("first", "second"):
        weight.gradient.copy_(t[name])
        update.step(1e-2, 0.5)
    return weight.data.detach(), {}


def _reductions(t: Tensors) -> tuple[torch.Tensor, Tensors]:
    x = t["x"]
    total = x.pow(2).mean().reshape(1)
    return torch.cat([x.sum(0) / 8, x.mean(1), x.amax(1), total]), {}


OPERATORS = (
    Operator(
        "matmul", {"x": (0.5, (S, B, H)), "weight": (0.18, (48, H)), "bias": (0.1, (48,))}, _matmul
    ),
    Operator("rmsnorm", {"x": (0.5, (S, B, H)), "weight": (0.1, (H,))}, _rmsnorm),
    Operator("rope", {"x": (0.25, (S, B, N, D))}, _rope),
    Operator(
        "attention",
        {"q": (1.0, (S, B, N, D)), "k": (1.0, (S, B, KV, D)), "v": (0.25, (S, B, KV, D))},
        _attention,
    ),
    Operator(
        "swiglu",
        {"x": (0.25, (S, B, H)), "gate": (0.18, (48, H)), "up": (0.18, (48, H))},
        _swiglu,
    ),
    Operator("embedding", {"ids": (V, (S, B)), "weight": (0.5, (V, H))}, _embedding),
    Operator("cross_entropy", {"logits": (1.0, (S * B, V)), "targets": (V, (S * B,))},
             _cross_entropy),
    Operator(
        "adamw", {"weight": (0.2, (H, 48)), "first": (0.1, (H, 48)), "second": (0.1, (H, 48))},
        _adamw,
    ),
    Operator("reductions", {"x": (0.25, (64, 48))}, _reductions),
)  # fmt: skip
"""In the order of a step."""
