"""What the runtime needs of a ``config.json`` beyond the sizes that planning reads."""

from __future__ import annotations

from typing import Any

import msgspec

from real_runtime.errors import UnsupportedPlanError
from sim.model.hf import read_shape
from sim.model.shape import Shape
from sim.spec.load import Source

__all__ = ["FAMILIES", "DecoderConfig", "read_config"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Families the runtime builds: RMSNorm, rotary positions, grouped queries, gated SiLU."""


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder.

    Args:
        shape: sizes. eps: of the norms. theta: base of the rotary frequencies.
        std: of the initial weights. normalise_top_k: the weights of a token's experts add up to 1.
    """

    shape: Shape
    eps: float
    theta: float
    std: float
    normalise_top_k: bool = True


def read_config(document: dict[str, Any], name: str = "") -> DecoderConfig:
    """Read the model document that a plan carries.

    Raises:
        UnsupportedPlanError: a family or a feature the runtime does not build.
        InputError: the document is no config.
    """
    shape, _ = read_shape(Source(document, "problem.model"), name)
    data = document.get("text_config", document)
    if shape.family not in FAMILIES:
        raise _refused("model family", "model_type", shape.family, " ".join(FAMILIES))
    if shape.moe is not None and shape.moe.shared_ffn:
        raise _refused("shared experts", "n_shared_experts", str(shape.moe.shared_ffn), "none")
    if data.get("use_sliding_window", True) and data.get("sliding_window"):
        raise _refused("sliding windows", "sliding_window", str(data["sliding_window"]), "none")
    rope = data.get("rope_parameters") or {}
    scaling = data.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise _refused("scaled rotary positions", "rope_scaling", str(kind), "default")
    if data.get("hidden_act", "silu") != "silu":
        raise _refused("activation", "hidden_act", str(data["hidden_act"]), "silu")
    return DecoderConfig(
        shape=shape,
        eps=float(data.get("rms_norm_eps", 1e-6)),
        theta=float(data.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        std=float(data.get("initializer_range", 0.02)),
        normalise_top_k=shape.family == "mixtral" or bool(data.get("norm_topk_prob", False)),
    )


def _refused(what: str, key: str, found: str, expected: str) -> UnsupportedPlanError:
    return UnsupportedPlanError(
        f"the runtime does not build this {what}",
        key=f"problem.model.{key}",
        found=found,
        expected=expected,
    )
