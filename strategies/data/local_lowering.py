"""Lowering pass of ``local_sgd``: steps of a worker's own, then one exchange between workers.

A step of the plan is a round: ``repeat(H)`` of the ordinary step, whose gradients are summed inside
the worker only, then the way each replica went, summed over all of them, and the outer update. In
streaming form a step is the part of a round between two exchanges, each of another fragment.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sim.errors import PlanError
from sim.plan.arguments import Arguments, takes
from sim.plan.op import Dep, Op
from sim.plan.plan import Plan
from sim.plan.program import STEPS, Block
from sim.plan.variant import Variant

__all__ = ["LocalArguments", "local_steps"]


class LocalArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pass, see there; the last one is for the memory model [B]."""

    inner: Annotated[int, msgspec.Meta(ge=1)]
    overlap: bool
    outer_bytes: Annotated[float, msgspec.Meta(ge=0)] = 0.0


@takes(LocalArguments)
def local_steps(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """Repeat the steps of a worker and exchange behind them.

    Args:
        variants: lowered by the built-in passes. plan: says whether BARRIER ends a round.
        args: ``inner`` steps between two exchanges; ``overlap`` True to use an exchange one round
            late, so that it runs behind the next inner steps.

    Raises:
        PlanError: the plan's amounts lack those of an exchange.
    """
    stages = {op.stage for v in variants for op in v.ops if op.kind == "OPT"}
    wanted = [f"{what}{s}" for s in sorted(stages) for what in ("way", "exchange", "outer")]
    missing = [key for key in wanted if key not in plan.amounts]
    if plan.amounts and missing:
        raise PlanError(
            "workers need the amounts of their exchanges",
            key=f"amounts.{missing[0]}",
            found="nothing",
            expected="its bytes",
        )
    barrier = plan.barrier and plan.placement.num_ranks > 1
    return [_rounds(v, args["inner"], args["overlap"], barrier) for v in variants]


def _rounds(variant: Variant, inner: int, overlap: bool, barrier: bool) -> Variant:
    steps = tuple(
        msgspec.structs.replace(op, group="local")
        if op.kind == "REDUCE_GRAD" and not op.group
        else op
        for op in variant.ops
    )
    stages = list(dict.fromkeys(op.stage for op in steps if op.kind == "OPT"))
    leave = [op for stage in stages for op in _leave(stage)]
    arrive = [_outer(stage, int(overlap)) for stage in stages]
    behind = [*arrive, *leave] if overlap else [*leave, *arrive]
    end = (Op(kind="BARRIER"),) if barrier else ()
    turns = Block(form="repeat", items=steps, count=inner)
    whole = Block(form="repeat", items=(turns, *behind, *end), count=STEPS)
    return msgspec.structs.replace(variant, ops=steps, blocks=(whole,))


def _leave(stage: int) -> tuple[Op, Op]:
    """The way a replica went, and its sum over all replicas."""
    way = Op(
        kind="ENCODE",
        stage=stage,
        label="outer",
        amount=f"way{stage}",
        deps=(Dep(f"{stage}OPT"),),
    )
    total = Op(
        kind="ALL_REDUCE",
        stage=stage,
        label="outer",
        group="dp",
        amount=f"exchange{stage}",
        deps=(Dep(way.name),),
    )
    return way, total


def _outer(stage: int, carried: int) -> Op:
    return Op(
        kind="OPT",
        stage=stage,
        label="outer",
        amount=f"outer{stage}",
        carried=carried,
        deps=(Dep(f"{stage}ALL_REDUCE[outer]"),),
    )
