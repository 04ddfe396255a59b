"""Tensor parallelism: every product of a block divided over tp chips of one node."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import msgspec

from sim.errors import InputError
from sim.model.graph import Model
from sim.plan.draft import CellKnobs, PlanDraft
from sim.problem import Problem
from strategies.base import Space, fill, kept_by_pin, space_of
from strategies.registry import register

__all__ = ["MEGATRON", "Megatron", "MegatronKnobs", "tp_sizes"]


class MegatronKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``megatron``.

    Args:
        tp: chips per cell. chips: which chips take part, in order; () for the whole machine.
    """

    tp: int = 1
    chips: tuple[int, ...] = ()


def _refusal(model: Model, tp: int) -> str:
    """Why a model's products cannot be divided by ``tp``, "" when they can."""
    for block in model.blocks:
        a = block.attention
        if a is not None and a.heads % tp:
            return f"tp {tp} does not divide the {a.heads} heads of {block.name}"
        if a is not None and a.kv_heads % tp and tp % a.kv_heads:
            return f"tp {tp} and the {a.kv_heads} key/value heads of {block.name} do not divide"
        for gemm in block.gemms:
            split = {"column": gemm.n, "row": gemm.k}.get(gemm.split, tp)
            if split % tp and not block.vocab:
                return f"tp {tp} does not divide the {split} features of {block.name}"
    return ""


def tp_sizes(problem: Problem, chips: Sequence[int] = ()) -> tuple[list[int], str]:
    """Legal tp sizes, ascending, and why larger ones are not.

    A size is a power of two that divides the chips of every node that takes part, so that no cell
    leaves its node; divides heads and features; and was measured, where the model is a table.

    Args:
        problem: what. chips: that take part; () for all.
    """
    model = problem.model
    taking = set(chips) or set(range(problem.machine.num_chips))
    counts, accelerators = [], set()
    for node in problem.machine.nodes:
        inside = len(taking.intersection(range(*node.chips)))
        if inside:
            counts.append(inside)
            accelerators.add(node.accelerator)
    limit = gcd(*counts)
    measured = {b.name for b in model.blocks if b.kind == "measured"}
    sizes, reason = [], f"tp must divide the chips of every node ({limit} at most)"
    tp = 1
    while limit % tp == 0:
        why = _refusal(model, tp)
        if not why and measured:
            known = {(t.accelerator, t.tp) for t in model.times if t.block in measured}
            lacking = sorted(a for a in accelerators if (a, tp) not in known)
            why = f"no times at tp {tp} were measured on {', '.join(lacking)}" if lacking else ""
        if why:
            reason = why
        else:
            sizes.append(tp)
        tp *= 2
    return sizes, reason


class Megatron:
    """Split heads and features by column, then by row (Shoeybi et al. 2019, section 3)."""

    name = "megatron"
    axis = "tensor"
    paper = "Shoeybi et al. 2019, arXiv:1909.08053"
    owns = frozenset({"cells.tp", "cells.chips"})
    knobs = MegatronKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[MegatronKnobs]:
        """Powers of two inside a node that divide heads and features, on all chips."""
        sizes, reason = tp_sizes(problem)
        left = kept_by_pin(sizes, problem.job.pins.tp)
        if sizes and not left:
            reason = f"the job pins tp to {problem.job.pins.tp}; legal are {sizes}; {reason}"
        return space_of((MegatronKnobs(tp=tp) for tp in left), reason)

    def apply(self, problem: Problem, draft: PlanDraft, knobs: MegatronKnobs) -> PlanDraft:
        """Form cells of tp consecutive chips; later axes number stages and replicas.

        Raises:
            InputError: tp leaves a node, or the model's products do not divide.
        """
        chips = knobs.chips or tuple(range(problem.machine.num_chips))
        unknown = [c for c in chips if not 0 <= c < problem.machine.num_chips]
        if unknown or len(set(chips)) != len(chips):
            raise InputError(
                "chips must be distinct chips of the machine",
                key="tensor.chips",
                found=str(unknown[0]) if unknown else f"{len(chips) - len(set(chips))} twice",
                expected=f"each of 0 to {problem.machine.num_chips - 1} at most once",
            )
        sizes, reason = tp_sizes(problem, chips)
        if knobs.tp not in sizes:
            raise InputError(
                reason if knobs.tp > 1 else "tp must be positive",
                key="tensor.tp",
                found=str(knobs.tp),
                expected=" or ".join(map(str, sizes)) or "another machine or model",
            )
        cells = tuple(
            CellKnobs(stage=0, replica=i, chips=chips[first : first + knobs.tp], tp=knobs.tp)
            for i, first in enumerate(range(0, len(chips), knobs.tp))
        )
        return fill(draft, self.name, knobs, cells=cells)


MEGATRON = register(Megatron())
