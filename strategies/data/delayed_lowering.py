"""Lowering pass of ``delayed_sgd``: workers that pull and push, servers that answer, late updates.

Server variant: a replica is a worker. Each rank of it pulls the parts of its stages' parameters
that its tensor-parallel index owns, runs its passes and pushes the gradients of the same parts. A
part has a server of its own, which writes a version for each gradient that arrives. All-reduce
variant: an update stands ``tau`` steps behind the reduction it applies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from sim.errors import PlanError
from sim.plan.arguments import Arguments, takes
from sim.plan.deps import resolve
from sim.plan.flat import flatten
from sim.plan.op import Dep, Op
from sim.plan.placement import Placement
from sim.plan.plan import Plan
from sim.plan.program import STEPS, Block, Program
from sim.plan.variant import Variant

__all__ = ["DelayedArguments", "delayed", "server_of"]

DROPPED = ("REDUCE_GRAD", "OPT")
"""What a worker's program has no use for: its server updates."""


class DelayedArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pass, see there; the last two are for the memory model."""

    variant: Literal["allreduce", "server"]
    tau: Annotated[int, msgspec.Meta(ge=1)] = 1
    shards: Annotated[int, msgspec.Meta(ge=1)] = 1
    reads: Literal["latest", "current"] = "latest"
    stream: Literal["", "compute"] = ""
    slack: Annotated[int, msgspec.Meta(ge=-1)] = -1
    late_gradients: Annotated[int, msgspec.Meta(ge=0)] = 0
    remote_optimizer: bool = False


@takes(DelayedArguments)
def delayed(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """Turn synchronous programs into delayed ones.

    Args:
        variants: lowered by the built-in passes. plan: its placement says who serves.
        args: ``variant`` "allreduce" with ``tau``, or "server" with ``shards`` parts of each
            stage's parameters and ``reads``, what an answer waits for (see sim.plan.op);
            ``stream`` "compute" where updates run on the servers' chips; ``slack`` updates that a
            worker may lead the slowest by, -1 for any number.

    Raises:
        PlanError: the servers are not as many as the parts, or the plan's amounts lack theirs.
    """
    given = msgspec.convert(args, DelayedArguments)
    if given.variant == "allreduce":
        return [_late(v, given.tau) for v in variants]
    placement, shards = plan.placement, given.shards
    stages = [s.stage for s in placement.stages]
    if len(placement.extra_ranks) != shards * len(stages):
        raise PlanError(
            "every part of a stage's parameters has one server",
            key="placement.extra_ranks",
            found=str(len(placement.extra_ranks)),
            expected=f"{shards} parts x {len(stages)} stages",
        )
    _check_amounts(plan, stages)
    found = [w for v in variants for w in _workers(v, placement, shards)]
    for stage in stages:
        ranks = tuple(server_of(placement, shards, stage, k) for k in range(shards))
        found.append(_server(stage, ranks, given))
    return found


def _check_amounts(plan: Plan, stages: Sequence[int]) -> None:
    """A plan that states amounts states those of all messages and updates."""
    wanted = [f"{what}{stage}" for stage in stages for what in ("gradient", "parameters", "update")]
    missing = [key for key in ("request", *wanted) if key not in plan.amounts]
    if plan.amounts and missing:
        raise PlanError(
            "servers need the amounts of their messages and updates",
            key=f"amounts.{missing[0]}",
            found="nothing",
            expected="its bytes",
        )


def server_of(placement: Placement, shards: int, stage: int, part: int) -> int:
    """Rank that serves a part of a virtual stage's parameters."""
    index = [s.stage for s in placement.stages].index(stage)
    return placement.extra_ranks[index * shards + part]


def _late(variant: Variant, tau: int) -> Variant:
    ops = (
        msgspec.structs.replace(op, carried=tau) if op.kind == "OPT" else op for op in variant.ops
    )
    return msgspec.structs.replace(variant, ops=tuple(ops))


def _server(stage: int, ranks: tuple[int, ...], given: DelayedArguments) -> Variant:
    push = Op(kind="APPLY", writes="next", amount=f"update{stage}", stream=given.stream)
    pull = Op(
        kind="SEND_F",
        reads=given.reads,
        amount=f"parameters{stage}",
        slack=given.slack,
    )
    return Variant(
        position=-1,
        microbatches=0,
        recompute="none",
        gather=False,
        ranks=ranks,
        blocks=(
            Block(form="on", message="PUSH", items=(push,)),
            Block(form="on", message="PULL", items=(pull,)),
        ),
    )


def _workers(variant: Variant, placement: Placement, shards: int) -> list[Variant]:
    """One variant per tensor-parallel index: each talks to servers of its own."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for cell in placement.cells:
        for index, rank in enumerate(cell.ranks):
            if rank in variant.ranks:
                alike[cell.tp, index].append(rank)
    hosted = frozenset(s.stage for s in placement.stages if s.cell == variant.position)
    ops = tuple(op for op in variant.ops if op.kind not in DROPPED)
    found = []
    for (tp, index), ranks in alike.items():
        parts = range(index * shards // tp, (index + 1) * shards // tp)
        mine = {
            stage: [(k, server_of(placement, shards, stage, k)) for k in parts]
            for stage in sorted(hosted)
        }
        written = _worker(ops, hosted, mine, tp > 1)
        found.append(msgspec.structs.replace(variant, ranks=tuple(ranks), ops=written))
    return found


def _worker(
    ops: tuple[Op, ...],
    hosted: frozenset[int],
    servers: Mapping[int, list[tuple[int, int]]],
    together: bool,
) -> tuple[Op, ...]:
    """Pulls, the passes, and after a stage's last gradient its pushes.

    The first forward of ranks that work ``together`` waits for the pulls of all of them, as its
    tensor-parallel collectives do.
    """
    program = Program(ranks=(), blocks=(Block(form="repeat", items=ops, count=STEPS),))
    implied = resolve(flatten(program), hosted)
    first = {op.stage: i for i, op in reversed(list(enumerate(ops))) if op.kind == "F"}
    last = {op.stage: i for i, op in enumerate(ops) if op.kind in ("B", "W")}
    found: list[Op] = []
    ready: dict[int, tuple[Dep, ...]] = {}
    for stage, parts in servers.items():
        pulls = [_message("PULL", stage, k, rank, "request") for k, rank in parts]
        found += pulls
        ready[stage] = tuple(Dep(op.name) for op in pulls)
        if together:
            same = Op(
                kind="ALL_GATHER",
                stage=stage,
                label="pulled",
                group="tp",
                amount="request",
                deps=ready[stage],
            )
            found.append(same)
            ready[stage] = (Dep(same.name),)
    for i, op in enumerate(ops):
        if first.get(op.stage) == i:
            before = op.deps
            if before is None:
                before = tuple(Dep(ops[j].name, distance) for j, distance in implied[i])
            op = msgspec.structs.replace(op, deps=(*before, *ready[op.stage]))
        found.append(op)
        if last.get(op.stage) == i:
            for k, rank in servers[op.stage]:
                found.append(_message("PUSH", op.stage, k, rank, f"gradient{op.stage}", op.name))
    return tuple(found)


def _message(kind: str, stage: int, part: int, server: int, amount: str, after: str = "") -> Op:
    """A pull behind the push of the step before, or a push behind an op."""
    before = Dep(after) if after else Dep(f"{stage}PUSH[p{part}]", 1)
    return Op(kind=kind, stage=stage, label=f"p{part}", peer=server, amount=amount, deps=(before,))
