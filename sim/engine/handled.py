"""Instances of the ops in ``on`` blocks, during a run and behind it."""

from __future__ import annotations

import msgspec

from sim.plan.op import Op

__all__ = ["Handled", "Instance"]


class Handled(msgspec.Struct, frozen=True, kw_only=True):
    """One op instance of an ``on`` block.

    Args:
        rank: that runs it. sender: of the message. op: the op. index: instance number of the rank.
        ready, start, end: [s].
        version: written (APPLY) or read (reads latest), -1 for neither.
        delay: updates applied between the sender's read and this write, -1 when not a write.
    """

    rank: int
    sender: int
    op: Op
    index: int
    ready: float
    start: float
    end: float
    version: int = -1
    delay: int = -1


class Instance:
    """One op instance of an ``on`` block while the run goes on.

    Args:
        node: of the execution. op, rank, sender: see there.
    """

    __slots__ = ("delay", "node", "op", "rank", "sender", "version")

    def __init__(self, node: int, op: Op, rank: int, sender: int) -> None:
        self.node, self.op, self.rank, self.sender = node, op, rank, sender
        self.version = self.delay = -1
