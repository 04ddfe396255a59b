"""The oracle: the same decoder in plain torch: one process, whole batch and weights, autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as nnf

Weights = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions by complex multiplication; x is (b, heads, s, d)."""
    s, d = x.shape[-2:]
    pace = theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.outer(torch.arange(s), pace))
    both = torch.complex(x[..., : d // 2].double(), x[..., d // 2 :].double()) * turn
    return torch.cat([both.real, both.imag], -1).to(x.dtype)


def attention(c: dict[str, Any], w: Weights, at: str, x: torch.Tensor) -> torch.Tensor:
    b, s, _ = x.shape
    d = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])

    def heads(name: str, count: int) -> torch.Tensor:
        y = x @ w[f"{at}{name}_proj.weight"].t() + w.get(f"{at}{name}_proj.bias", 0.0)
        y = y.view(b, s, count, d).transpose(1, 2)
        scale = w.get(f"{at}{name}_norm.weight")
        return y if scale is None else norm(y, scale, c["rms_norm_eps"])

    q = rotate(heads("q", c["num_attention_heads"]), c["rope_theta"])
    k = rotate(heads("k", c["num_key_value_heads"]), c["rope_theta"])
    v = heads("v", c["num_key_value_heads"])
    more = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(more, 1), v.repeat_interleave(more, 1)
    score = q @ k.transpose(-1, -2) / d**0.5
    score = score.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
    y = (score.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1)
    return y @ w[f"{at}o_proj.weight"].t() + w.get(f"{at}o_proj.bias", 0.0)


def gated(w: Weights, x: torch.Tensor, gate: str, up: str, down: str) -> torch.Tensor:
    inner = nnf.silu(x @ w[gate].t()) * (x @ w[up].t())
    return inner @ w[down].t()


def mlp(c: dict[str, Any], w: Weights, at: str, x: torch.Tensor) -> torch.Tensor:
    if "num_local_experts" not in c:
        return gated(w, x, *(f"{at}mlp.{n}_proj.weight" for n in ("gate", "up", "down")))
    at += "block_sparse_moe."
    top, chosen = (x @ w[at + "gate.weight"].t()).topk(c["num_experts_per_tok"], -1)
    share = top.softmax(-1)
    out = torch.zeros_like(x)
    for e in range(c["num_local_experts"]):
        y = gated(w, x, *(f"{at}experts.{e}.{n}.weight" for n in ("w1", "w3", "w2")))
        out = out + y * (share * (chosen == e)).sum(-1, keepdim=True)
    return out


def loss_of(
    c: dict[str, Any], w: Weights, ids: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Mean cross entropy per token; ids and targets are (b, s)."""
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        x = x + attention(
            c, w, at + "self_attn.", norm(x, w[at + "input_layernorm.weight"], c["rms_norm_eps"])
        )
        y = norm(x, w[at + "post_attention_layernorm.weight"], c["rms_norm_eps"])
        x = x + mlp(c, w, at, y)
    x = norm(x, w["model.norm.weight"], c["rms_norm_eps"])
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return nnf.cross_entropy((x @ head.t()).flatten(0, 1), targets.flatten())


def train(config, weights, batches, recipe, rates, kind="adamw"):
    """Train; returns per step the loss and the gradients before clipping."""
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    groups = [
        {"params": [p for p in w.values() if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in w.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = (
        torch.optim.SGD([*w.values()], lr=1.0, momentum=recipe.momentum)
        if kind == "sgd"
        else torch.optim.AdamW(
            groups, lr=1.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon
        )
    )
    found = []
    for (ids, targets), rate in zip(batches, rates, strict=True):
        loss = loss_of(config, w, ids, targets)
        optimizer.zero_grad()
        loss.backward()
        found.append((loss.item(), {n: p.grad.clone() for n, p in w.items()}))
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(list(w.values()), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return found
