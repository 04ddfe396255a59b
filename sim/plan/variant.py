"""Variants: the op lists that lowering passes turn into one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sim.plan.op import Op
from sim.plan.placement import CellOffload, Recompute
from sim.plan.plan import Plan
from sim.plan.program import STEPS, Block, Program

__all__ = ["Pass", "Variant", "program_of"]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One op list.

    Args:
        position: pipeline position. microbatches: of the replicas that run it.
        recompute: what F keeps. offload: of the cells, see sim.plan.placement.Cell.
        gather: True when received tensors are re-assembled over tp.
        ranks: who runs it. ops: one step.
        blocks: the whole program, where it is more than the ops of a step; () for ``ops``.
    """

    position: int
    microbatches: int
    recompute: Recompute
    offload: CellOffload = ""
    gather: bool
    ranks: tuple[int, ...]
    ops: tuple[Op, ...] = ()
    blocks: tuple[Block, ...] = ()


Pass = Callable[[list[Variant], Plan, dict[str, Any]], list[Variant]]


def program_of(variant: Variant, barrier: bool) -> Program:
    """The program of a variant: its blocks, or as many steps as the run asks for."""
    if variant.blocks:
        return Program(ranks=variant.ranks, blocks=variant.blocks)
    ops = variant.ops + ((Op(kind="BARRIER"),) if barrier else ())
    return Program(ranks=variant.ranks, blocks=(Block(form="repeat", items=ops, count=STEPS),))
