"""The blocks of a decoder, one function each, on a rank's part of their weights.

Legend of shapes: s sequence (this rank's part, when divided), S whole sequence, b batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as nnf
from torch.utils.checkpoint import checkpoint

from real_runtime.model.config import DecoderConfig
from real_runtime.model.experts import ExpertParallel, experts
from real_runtime.model.loss import cross_entropy
from real_runtime.model.parallel import TensorParallel
from real_runtime.model.parameters import EMBEDDING, HEAD
from real_runtime.model.weights import Deferral, Weight, embed, product

__all__ = ["Decoder"]


class Decoder:
    """A run of blocks of the planner's model.

    Args:
        config: the decoder. blocks: (kind, layer) of each. weights: name -> this rank's part.
        tp: of the cell. deferral: where weight gradients go.
        drop_core: the attention core is recomputed in the backward pass (selective recomputation).
        ep: of the replicas that share experts.
    """

    def __init__(
        self,
        config: DecoderConfig,
        blocks: tuple[tuple[str, int], ...],
        weights: Mapping[str, Weight],
        tp: TensorParallel,
        deferral: Deferral,
        drop_core: bool = False,
        ep: ExpertParallel | None = None,
    ) -> None:
        self.config, self.blocks, self.weights = config, blocks, weights
        self.tp, self.deferral, self.drop_core = tp, deferral, drop_core
        self.ep = ep or ExpertParallel()
        self._rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor | None, anchor: torch.Tensor
    ) -> torch.Tensor:
        """Run the blocks.

        Args:
            x: token ids (S, b) when the first block is the embedding, else hidden states (s, b, h).
            targets: (S, b) when the last block is the head. anchor: see ``embed``.

        Returns:
            Hidden states (s, b, h), or the summed loss.
        """
        for kind, layer in self.blocks:
            if kind == "embedding":
                weight = self.weights[EMBEDDING]
                first = self.tp.index * weight.data.shape[0]
                x = self.tp.leave(embed(x, weight, first, anchor, self.deferral))
            elif kind == "attention":
                x = x + self._attention(x, f"model.layers.{layer}.")
            elif kind == "mlp":
                x = x + self._mlp(x, f"model.layers.{layer}.")
            elif kind == "moe":
                x = x + self._moe(x, f"model.layers.{layer}.")
            else:
                assert targets is not None
                x = self._head(x, targets)
        return x

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"].data
        if x.dtype == torch.float64:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps)
            return x * scale * weight
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.eps)
        return (wide * scale).to(x.dtype) * weight

    def _product(self, x: torch.Tensor, name: str, bias: bool = True) -> torch.Tensor:
        addend = self.weights.get(f"{name}.bias") if bias else None
        return product(x, self.weights[f"{name}.weight"], addend, self.deferral)

    def _row_product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Row-split product: the bias is added once, after the sum over ranks."""
        x = self.tp.leave(self._product(x, name, bias=False))
        bias = self.weights.get(f"{name}.bias")
        return x if bias is None else x + bias.data

    def _attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        shape = self.config.shape
        x = self.tp.enter(self._norm(x, at + "input_layernorm"))
        s, b, _ = x.shape
        at += "self_attn."
        q, k, v = (
            self._product(x, at + name).view(s, b, -1, shape.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if shape.qk_norm:
            q, k = self._norm(q, at + "q_norm"), self._norm(k, at + "k_norm")
        q, k = self._rotate(q), self._rotate(k)
        drop = self.drop_core
        y = checkpoint(_core, q, k, v, use_reentrant=False) if drop else _core(q, k, v)
        return self._row_product(y.reshape(s, b, -1), at + "o_proj")

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions, halves apart as in Hugging Face's models (Su et al. 2021)."""
        s, half = x.shape[0], x.shape[-1] // 2
        if self._rotation is None or len(self._rotation[0]) < s:
            at = torch.arange(s, dtype=torch.float64)
            pace = self.config.theta ** -(torch.arange(half, dtype=torch.float64) / half)
            angle = torch.outer(at, pace)
            self._rotation = tuple(
                part.to(x.device, x.dtype)[:, None, None, :] for part in (angle.cos(), angle.sin())
            )  # type: ignore[assignment]
        assert self._rotation is not None
        cos, sin = self._rotation[0][:s], self._rotation[1][:s]
        a, c = x[..., :half], x[..., half:]
        return torch.cat([a * cos - c * sin, c * cos + a * sin], -1)

    def _gated(self, x: torch.Tensor, gate: str, up: str) -> torch.Tensor:
        return nnf.silu(self._product(x, gate)) * self._product(x, up)

    def _mlp(self, x: torch.Tensor, at: str) -> torch.Tensor:
        x = self.tp.enter(self._norm(x, at + "post_attention_layernorm"))
        inner = self._gated(x, at + "mlp.gate_proj", at + "mlp.up_proj")
        return self._row_product(inner, at + "mlp.down_proj")

    def _moe(self, x: torch.Tensor, at: str) -> torch.Tensor:
        mixtral = self.config.shape.family == "mixtral"
        inside = at + ("block_sparse_moe." if mixtral else "mlp.")
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")

        def one(number: int, rows: torch.Tensor) -> torch.Tensor:
            gate, up, down = (f"{inside}experts.{number}.{n}" for n in names)
            return self._product(self._gated(rows, gate, up), down)

        x = self._norm(x, at + "post_attention_layernorm")
        logits = self._product(x, inside + "gate")
        return experts(x, logits, one, self.config, self.tp, self.ep)

    def _head(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        shape = self.config.shape
        x = self.tp.enter(self._norm(x, "model.norm"))
        weight = self.weights[EMBEDDING if shape.tied else HEAD]
        logits = product(x, weight, None, self.deferral).flatten(0, 1)
        return cross_entropy(logits, targets.reshape(-1), shape.vocab, self.tp)


def _core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention, (S, b, heads, d) -> (S, b, heads, d)."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    y = nnf.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.permute(2, 0, 1, 3)
