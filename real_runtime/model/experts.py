"""Routed experts: each token goes through its top-k experts (Shazeer et al. 2017, section 2.1).

With expert parallelism a rank keeps some of the experts, and copies of tokens travel to them and
back by all-to-all (Lepikhin et al. 2020, section 3.2). No token is dropped and nothing is padded:
each pair of ranks exchanges as many rows as the router says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from real_runtime.model.config import DecoderConfig
from real_runtime.model.parallel import TensorParallel

__all__ = ["ExpertParallel", "experts"]

One = Callable[[int, torch.Tensor], torch.Tensor]


class ExpertParallel:
    """The expert-parallel side of one rank.

    Args:
        size: replicas that share the experts. index: of this one. group: None when size is 1.
    """

    def __init__(
        self, size: int = 1, index: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        self.size, self.index, self.group = size, index, group

    def holds(self, expert: int, num_experts: int) -> bool:
        """Whether this rank keeps an expert; -1 stands for what is no expert."""
        return expert < 0 or expert // (num_experts // self.size) == self.index


def experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    one: One,
    config: DecoderConfig,
    tp: TensorParallel,
    ep: ExpertParallel,
) -> torch.Tensor:
    """Send every token through its experts and add up what they return, weighted.

    Args:
        x: (S, b, h), normalised. logits: of the router, (S, b, experts).
        one: (expert, rows) -> rows; a part of the result where experts are split over tp.
        config: the decoder. tp: of the cell. ep: of the replicas that share experts.
    """
    assert config.shape.moe is not None
    k, count = config.shape.moe.top_k, config.shape.moe.num_experts
    wide = logits if logits.dtype == torch.float64 else logits.float()
    share, chosen = wide.softmax(-1).flatten(0, 1).topk(k, -1)
    if config.normalise_top_k:
        share = share / share.sum(-1, keepdim=True)
    # The ranks' results are parts of a sum, so the router's gradients are parts, too.
    share = tp.copy(share.to(x.dtype))
    rows = tp.enter(x)
    flat = rows.flatten(0, 1)
    order = chosen.flatten().argsort(stable=True)
    token = order // k
    load = torch.bincount(chosen.flatten(), minlength=count)
    copies = flat[token]
    parts = _away(copies, load, one, ep) if ep.size > 1 else _run(copies, [load.tolist()], 0, one)
    out = torch.zeros_like(flat)
    out = out.index_add(0, token, parts * share.flatten()[order].unsqueeze(-1))
    return tp.leave(out.view_as(rows))


def _run(rows: torch.Tensor, loads: list[list[int]], first: int, one: One) -> torch.Tensor:
    """Run experts on rows that lie sender by sender, each sender's by expert; keep their order.

    Args:
        rows: (n, h). loads: per sender, rows of each expert. first: number of the first expert.
        one: see ``experts``.
    """
    chunks = rows.split([n for load in loads for n in load])
    width = len(loads[0])
    done: list[torch.Tensor] = [rows] * len(chunks)
    for e in range(width):
        mine = range(e, len(chunks), width)
        out = one(first + e, torch.cat([chunks[i] for i in mine]))
        for i, part in zip(mine, out.split([len(chunks[i]) for i in mine]), strict=True):
            done[i] = part
    return torch.cat(done)


def _away(copies: torch.Tensor, load: torch.Tensor, one: One, ep: ExpertParallel) -> torch.Tensor:
    """Send copies to the ranks of their experts, run those, and take the results back."""
    width = len(load) // ep.size
    loads = torch.empty_like(load)
    dist.all_to_all_single(loads, load, group=ep.group)
    arriving = loads.view(ep.size, width).tolist()
    sent = load.view(ep.size, width).sum(1).tolist()
    got = [sum(row) for row in arriving]
    rows = _AllToAll.apply(copies, sent, got, ep.group)
    done = _run(rows, arriving, ep.index * width, one)
    back: torch.Tensor = _AllToAll.apply(done, got, sent, ep.group)
    return back


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.parts = sent, got, group
        return _exchange(x, sent, got, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sent, got, group = ctx.parts
        return _exchange(gradient, got, sent, group), None, None, None


def _exchange(
    x: torch.Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = x.new_empty((sum(got), x.shape[1]))
    dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
    return out
