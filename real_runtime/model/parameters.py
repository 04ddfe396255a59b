"""Parameters by name: full shape, how tensor parallelism splits them, and how they begin.

Names are those of Hugging Face checkpoints. A weight's first values depend on its name and the seed
alone, so every sharding starts from the same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import torch

from real_runtime.model.config import DecoderConfig

__all__ = ["EMBEDDING", "HEAD", "ParameterSpec", "block_specs", "initial", "shard_of"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class ParameterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter.

    Args:
        name: in Hugging Face checkpoints. shape: of the whole parameter, padding left out.
        split: dimension that tensor parallelism divides, None when every rank keeps all of it.
        rows: rows after padding, 0 for no padding.
        ones: starts as ones (norms) or, with ``zeros``, as zeros (biases); else normal.
        partial: each tensor-parallel rank sees a part of its gradient, so the parts are added up.
        expert: number of the routed expert it belongs to, -1 for none.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    rows: int = 0
    ones: bool = False
    zeros: bool = False
    partial: bool = False
    expert: int = -1

    @property
    def padded(self) -> tuple[int, ...]:
        """Shape with padding."""
        return (self.rows or self.shape[0], *self.shape[1:])

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) > 1

    def local(self, tp: int) -> tuple[int, ...]:
        """Shape on one of ``tp`` ranks."""
        shape = list(self.padded)
        if self.split is not None:
            shape[self.split] //= tp
        return tuple(shape)


def block_specs(
    config: DecoderConfig, kind: str, layer: int, rows: int, sequence_parallel: bool
) -> tuple[ParameterSpec, ...]:
    """Parameters of one of the planner's blocks.

    Args:
        config: the decoder. kind: of the block ("embedding", "attention", "mlp", "moe", "head").
        layer: label. rows: padded vocabulary.
        sequence_parallel: norms see a part of the sequence, so their gradients are partial.
    """
    s, at = config.shape, f"model.layers.{layer}."
    sp = sequence_parallel

    def norm(name: str, size: int = s.hidden, partial: bool = sp) -> ParameterSpec:
        return ParameterSpec(name=f"{name}.weight", shape=(size,), ones=True, partial=partial)

    def product(
        name: str, n: int, k: int, split: int, bias: bool = False
    ) -> tuple[ParameterSpec, ...]:
        weight = ParameterSpec(name=f"{name}.weight", shape=(n, k), split=split)
        shared = split == 1
        addend = ParameterSpec(
            name=f"{name}.bias", shape=(n,), split=None if shared else 0, zeros=True,
            partial=shared and sp,
        )  # fmt: skip
        return (weight, addend) if bias else (weight,)

    if kind == "embedding":
        table = (s.vocab, s.hidden)
        return (ParameterSpec(name=EMBEDDING, shape=table, split=0, rows=rows),)
    if kind == "head":
        name = EMBEDDING if s.tied else HEAD
        weight = ParameterSpec(name=name, shape=(s.vocab, s.hidden), split=0, rows=rows)
        return (norm("model.norm"), weight)
    if kind == "attention":
        queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attn = at + "self_attn."
        head_norms = (
            (norm(attn + "q_norm", s.head_dim, True), norm(attn + "k_norm", s.head_dim, True))
            if s.qk_norm
            else ()
        )
        return (
            norm(at + "input_layernorm"),
            *product(attn + "q_proj", queries, s.hidden, 0, s.qkv_bias),
            *product(attn + "k_proj", keys, s.hidden, 0, s.qkv_bias),
            *product(attn + "v_proj", keys, s.hidden, 0, s.qkv_bias),
            *head_norms,
            *product(attn + "o_proj", s.hidden, queries, 1, s.out_bias),
        )
    before = norm(at + "post_attention_layernorm")
    if kind == "mlp":
        return (before, *_gated(at + "mlp.", s.hidden, s.ffn, product, s.mlp_bias))
    assert kind == "moe" and s.moe is not None
    inside = at + ("block_sparse_moe." if s.family == "mixtral" else "mlp.")
    router = ParameterSpec(
        name=inside + "gate.weight", shape=(s.moe.num_experts, s.hidden), partial=sp
    )
    experts = [
        msgspec.structs.replace(spec, expert=e)
        for e in range(s.moe.num_experts)
        for spec in _expert(config, f"{inside}experts.{e}.", product)
    ]
    return (before, router, *experts)


Product = Callable[[str, int, int, int, bool], tuple["ParameterSpec", ...]]


def _gated(
    at: str, hidden: int, ffn: int, product: Product, bias: bool = False
) -> tuple[ParameterSpec, ...]:
    return (
        *product(at + "gate_proj", ffn, hidden, 0, bias),
        *product(at + "up_proj", ffn, hidden, 0, bias),
        *product(at + "down_proj", hidden, ffn, 1, bias),
    )


def _expert(config: DecoderConfig, at: str, product: Product) -> tuple[ParameterSpec, ...]:
    assert config.shape.moe is not None
    hidden, ffn = config.shape.hidden, config.shape.moe.ffn
    if config.shape.family != "mixtral":
        return _gated(at, hidden, ffn, product)
    return (
        *product(at + "w1", ffn, hidden, 0, False),
        *product(at + "w3", ffn, hidden, 0, False),
        *product(at + "w2", hidden, ffn, 1, False),
    )


def initial(spec: ParameterSpec, std: float, seed: int) -> torch.Tensor:
    """Return the whole parameter's first values, padded, in fp32.

    Args:
        spec: the parameter. std: of weights. seed: of the run.
    """
    if spec.ones:
        return torch.ones(spec.padded)
    values = torch.zeros(spec.padded)
    if not spec.zeros:
        digest = hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=8).digest()
        source = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values[: spec.shape[0]].normal_(0.0, std, generator=source)
    return values


def shard_of(full: torch.Tensor, spec: ParameterSpec, index: int, tp: int) -> torch.Tensor:
    """Return a tensor-parallel rank's part of a whole parameter (a view)."""
    if spec.split is None or tp == 1:
        return full
    size = full.shape[spec.split] // tp
    return full.narrow(spec.split, index * size, size)
