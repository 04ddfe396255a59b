"""Boundary tensors of one rank: in pieces over the wires, or handed over inside the rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from real_runtime.groups import Groups
from real_runtime.program import Node, RankProgram
from sim.plan.plan import Plan

__all__ = ["Boundaries"]

Key = tuple[str, int, int]
Handle = tuple[list[dist.Work], Callable[[], None]]


class Boundaries:
    """What crosses between virtual stages.

    Hidden states are (s, b, h) and contiguous, and a piece is an interval of their elements. With
    sequence parallelism a rank holds its own interval only.

    Args:
        plan, program, groups: of the rank. dtype, device: of the tensors.
    """

    def __init__(
        self,
        plan: Plan,
        program: RankProgram,
        groups: Groups,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dtype, self.device, self.tp = dtype, device, groups.tp
        self.group = groups
        math = plan.mathematics
        width = plan.placement.boundaries[0].elements if plan.placement.boundaries else 0
        self.whole = (math.sequence_length, math.microbatch, width)
        self.numel = math.sequence_length * math.microbatch * width
        self.shape = self.whole
        if self.tp.sequence:
            self.shape = (math.sequence_length // self.tp.size, math.microbatch, width)
        self.local_numel = self.numel // (self.tp.size if self.tp.sequence else 1)
        self.first = self.tp.index * self.local_numel if self.tp.sequence else 0
        self.hosted = groups.wiring.stages(program.rank)
        self.leaving: dict[Key, int] = {}
        for node in program.nodes:
            if node.op.kind.startswith("SEND"):
                key = (node.op.kind[-1], node.op.stage, node.op.mb)
                self.leaving[key] = self.leaving.get(key, 0) + 1
        self.inbox: dict[Key, torch.Tensor] = {}
        self.outbox: dict[Key, tuple[torch.Tensor, int]] = {}

    def take(self, way: str, stage: int, mb: int) -> torch.Tensor:
        """Return what stage ``stage`` waits for: its input ("F") or its output's gradient ("B")."""
        return self.inbox.pop((way, stage, mb)).view(self.shape)

    def put(self, way: str, stage: int, mb: int, tensor: torch.Tensor) -> None:
        """Hand over what stage ``stage`` made: its output ("F") or its input's gradient ("B")."""
        tensor = tensor.detach().contiguous().view(-1)
        following = stage + 1 if way == "F" else stage - 1
        if following in self.hosted:
            self.inbox[way, following, mb] = tensor
        pieces = self.leaving.get((way, stage, mb), 0)
        if pieces:
            self.outbox[way, stage, mb] = (tensor, pieces)

    def _interval(self, node: Node) -> slice:
        assert node.piece is not None
        p = node.piece
        start, stop = self.numel * p.start // p.of, self.numel * p.stop // p.of
        return slice(start - self.first, stop - self.first)

    def _tag(self, node: Node) -> int:
        """Number of the message within a step, the same at both ends."""
        assert node.piece is not None
        forward = node.op.kind.endswith("F")
        src = node.op.stage - (node.op.kind[:4] == "RECV") * (1 if forward else -1)
        number = ((node.op.mb * 64 + node.piece.start % 64) * 1024 + src % 1024) * 2 + forward
        return number % 2**31

    def _pair(self, node: Node) -> dist.ProcessGroup | None:
        assert node.piece is not None
        return self.group.pair(node.piece.src, node.piece.dst, node.op.channel)

    def send(self, node: Node) -> Handle:
        """SEND_F or SEND_B: one piece."""
        key = (node.op.kind[-1], node.op.stage, node.op.mb)
        tensor, left = self.outbox[key]
        if left == 1:
            del self.outbox[key]
        else:
            self.outbox[key] = (tensor, left - 1)
        part = tensor[self._interval(node)]
        work = dist.isend(part, node.peer, self._pair(node), self._tag(node))
        assert work is not None

        def finish(kept: torch.Tensor = part) -> None:
            """The tensor is needed until here."""

        return [work], finish

    def receive(self, node: Node) -> Handle:
        """RECV_F or RECV_B: one piece, into its place."""
        key = (node.op.kind[-1], node.op.stage, node.op.mb)
        if key not in self.inbox:
            self.inbox[key] = torch.empty(self.local_numel, dtype=self.dtype, device=self.device)
        part = self.inbox[key][self._interval(node)]
        work = dist.irecv(part, node.peer, self._pair(node), self._tag(node))
        assert work is not None
        return [work], lambda: None

    def gather(self, node: Node) -> Handle:
        """ALL_GATHER behind RECVs: every rank of the cell received an equal part."""
        key = (node.op.label.upper(), node.op.stage, node.op.mb)
        whole = self.inbox[key]
        mine = whole.view(self.tp.size, -1)[self.tp.index].clone()
        work = dist.all_gather_single(
            whole, mine, group=self.group.handle(node.group), async_op=True
        )
        return [work], lambda: None
