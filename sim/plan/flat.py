"""A program as flat lists."""

from __future__ import annotations

from typing import Any

from sim.errors import PlanError
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.plan.program import Block, Program

__all__ = ["Flat", "Layout", "Path", "flatten"]

Path = tuple[int, ...]
Layout = list[Any]
"""Positions of ops, and (id, Layout) for repeats."""


class Flat:
    """A program as flat lists; repeats are named by an id.

    Attributes:
        ops: static ops in list order, those of ``on`` blocks left out.
        paths: ids of the repeats around each op, outermost first.
        counts: repeat id -> count (STEPS for the run's steps).
        layout: the blocks as positions of ops and (id, layout) of repeats, for unrolling.
        handlers: ``on`` blocks, message kind -> ops.
        same: first position of the op's name, for names that stand in several blocks.
        streams: stream of each op.
        talk: number of each op in ``talkers``, -1 for ops on rank-local streams.
        talkers: one op for each distinct transfer or collective; those of one number have the same
            peers and groups on every rank.
    """

    __slots__ = (
        "counts",
        "handlers",
        "layout",
        "ops",
        "paths",
        "same",
        "streams",
        "talk",
        "talkers",
    )

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.paths: list[Path] = []
        self.counts: list[int] = []
        self.layout: Layout = []
        self.handlers: dict[str, tuple[Op, ...]] = {}
        self.same: list[int] = []
        self.streams: list[str] = []
        self.talk: list[int] = []
        self.talkers: list[Op] = []


def flatten(program: Program) -> Flat:
    """Lay a program out.

    Raises:
        PlanError: an ``on`` block is nested or given twice for one message.
    """
    flat = Flat()

    def visit(block: Block, path: Path, layout: Layout) -> None:
        if block.form == "on":
            if path or block.message in flat.handlers:
                raise PlanError(
                    "an on block stands alone, once per message", found=f"on({block.message})"
                )
            flat.handlers[block.message] = tuple(i for i in block.items if isinstance(i, Op))
            return
        inner = layout
        if block.form == "repeat":
            flat.counts.append(block.count)
            path = (*path, len(flat.counts) - 1)
            inner = []
            layout.append((path[-1], inner))
        for item in block.items:
            if isinstance(item, Op):
                inner.append(len(flat.ops))
                flat.ops.append(item)
                flat.paths.append(path)
            else:
                visit(item, path, inner)

    for block in program.blocks:
        visit(block, (), flat.layout)
    first: dict[tuple[object, ...], int] = {}
    flat.same = [
        first.setdefault((op.stage, op.kind, op.mb, op.part, op.label), i)
        for i, op in enumerate(flat.ops)
    ]
    numbers: dict[tuple[object, ...], int] = {}
    for op in flat.ops:
        stream = op.stream or KINDS[op.kind].stream
        flat.streams.append(stream)
        if stream in ("pair", "group"):
            key = (op.kind, op.stage, op.label, op.group, op.peer, op.channel)
            number = numbers.setdefault(key, len(numbers))
            if number == len(flat.talkers):
                flat.talkers.append(op)
            flat.talk.append(number)
        else:
            flat.talk.append(-1)
    return flat
