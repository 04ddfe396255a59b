"""Lowering pass ``nvme``: states that live one tier below host memory.

It follows the pass ``segments``. For each segment that the placement puts on NVMe (ZeRO-Infinity,
arXiv:2104.07857, as recalled: states are read before and written behind the CPU's update, both
beside the updates of other segments):

* NVME_READ of its optimizer states before OPT, NVME_WRITE of them behind it, through a ring of
  host buffers: a read waits for the write that left its slot, and for the write of the same states
  in the step before;
* where its parameters live on the host as well, their copy lies on NVMe: every fetch waits for a
  read of its own, into a second ring whose slots fetches leave, and NVME_WRITE writes them too.

Landed gradients, and the parameters that an update sends back to a chip which keeps them, stay in
host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sim.errors import PlanError
from sim.plan.arguments import takes
from sim.plan.kinds import Kind, register
from sim.plan.op import Dep, Op
from sim.plan.placement import Segment
from sim.plan.plan import Call, Plan
from sim.plan.variant import Variant
from strategies.lowering.arguments import NvmeArguments
from strategies.lowering.cut import ended
from strategies.lowering.kinds import FETCH_B, FETCH_F

__all__ = ["NVME_READ", "NVME_READ_B", "NVME_READ_F", "NVME_WRITE", "drives", "nvme"]

NVME_READ = register(Kind(name="NVME_READ", stream="nvme_read", cost="host"))
"""Optimizer states of a segment come in for an update."""
NVME_READ_F = register(Kind(name="NVME_READ_F", stream="nvme_read", cost="host"))
"""Parameters of a segment come in for the fetch of a forward pass."""
NVME_READ_B = register(Kind(name="NVME_READ_B", stream="nvme_read", cost="host"))
"""Parameters of a segment come in for the fetch of a backward pass."""
NVME_WRITE = register(Kind(name="NVME_WRITE", stream="nvme_write", cost="host"))
"""What an update changed goes back."""

_READS = {FETCH_F.name: NVME_READ_F.name, FETCH_B.name: NVME_READ_B.name}
_ALL_READS = (NVME_READ.name, *_READS.values())


def drives(segments: Sequence[Segment], whole_steps: bool) -> list[Call]:
    """Return the call of the pass, none where no segment lives on NVMe.

    Args:
        segments: of a draft. whole_steps: as of the pass ``segments``.
    """
    used = any("nvme" in s.offload for s in segments)
    return [Call("nvme", 1, {"whole_steps": whole_steps})] if used else []


@takes(NvmeArguments)
def nvme(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """Add reads and writes of what lives on NVMe.

    Args:
        variants, plan: of the lowering, behind the pass ``segments``.
        args: ``whole_steps``: as of that pass.

    Raises:
        PlanError: a segment on NVMe is not updated by the host, or not yet cut out.
    """
    for s in plan.placement.segments:
        if "nvme" in s.offload and "optimizer" not in s.offload:
            raise PlanError(
                f"segment {s.name} is on NVMe and its optimizer is not on the host",
                key="placement.segments", found=" ".join(s.offload), expected="optimizer nvme",
            )  # fmt: skip
    whole = bool(args.get("whole_steps", False))
    return [_on_drive(v, plan, whole) for v in variants]


def _on_drive(v: Variant, plan: Plan, whole: bool) -> Variant:
    own = plan.placement.segments_at(v.position, v.offload, v.recompute)
    low = {(s.stage, s.name): s for s in own if "nvme" in s.offload}
    updates = [op for op in v.ops if op.kind == "OPT" and (op.stage, op.label) in low]
    fetches = [op for op in v.ops if op.kind in _READS and (op.stage, op.label) in low]
    if {(op.stage, op.label) for op in updates if op.stream == "host" and op.deps} != set(low):
        raise PlanError(
            "NVMe needs updates on the host", key="lowering.nvme", expected="behind segments"
        )
    slots = plan.placement.nvme_buffers
    # States come and go in the order of their gradients. Where chips wait for parameters, those
    # are read first, and written in the order in which the next forward needs them.
    ranked = any(op.priority is not None for op in fetches)
    last = float(len(plan.placement.segments)) if ranked else None
    before: dict[str, Op] = {}
    behind: dict[str, Op] = {}
    for k, op in enumerate(updates):
        left, steps = _left(updates, k, slots)
        deps = (Dep(_write_of(op), 1), Dep(_write_of(left), steps))
        before[op.name] = _like(op, NVME_READ.name, deps, amount="states", priority=last)
        with_copy = "parameters" in low[op.stage, op.label].offload
        what = "states+parameters" if with_copy else "states"
        key = op.priority if ranked else None
        behind[op.name] = _like(op, NVME_WRITE.name, (Dep(op.name),), amount=what, priority=key)
    for k, op in enumerate(fetches):
        left, steps = _left(fetches, k, slots)
        deps = (Dep(_write_of(op), 1), Dep(left.name, steps))
        before[op.name] = _like(
            op, _READS[op.kind], deps, amount="parameters", priority=op.priority
        )
    ops: list[Op] = []
    for op in v.ops:
        read = before.get(op.name)
        if read is None:
            ops.append(op)
        else:
            ops += [read, msgspec.structs.replace(op, deps=(*(op.deps or ()), Dep(read.name)))]
        if op.name in behind:
            ops.append(behind[op.name])
    return msgspec.structs.replace(v, ops=tuple(_by_steps(ops) if whole else ops))


def _by_steps(ops: list[Op]) -> list[Op]:
    """Let first reads wait for the end of the step before, and whatever does for its writes."""
    last = ended(ops)
    writes = [Dep(op.name, 1) for op in ops if op.kind == NVME_WRITE.name]
    found = []
    for op in ops:
        deps = list(op.deps or ())
        if op.kind in _ALL_READS and all(d.distance for d in deps):
            deps += [*last, *writes]
        elif set(last) <= set(deps):
            deps += writes
        if len(deps) > len(op.deps or ()):
            op = msgspec.structs.replace(op, deps=tuple(dict.fromkeys(deps)))
        found.append(op)
    return found


def _left(users: list[Op], k: int, slots: int) -> tuple[Op, int]:
    """Who left the slot that the k-th user of a ring takes, and how many steps before."""
    steps, before = divmod(k - slots, len(users))
    return users[before], -steps


def _like(op: Op, kind: str, deps: tuple[Dep, ...], **fields: Any) -> Op:
    """An op of this kind for the segment and microbatch of another."""
    deps = tuple(dict.fromkeys(deps))
    return Op(kind=kind, stage=op.stage, label=op.label, mb=op.mb, deps=deps, **fields)


def _write_of(op: Op) -> str:
    """Name of the write of an op's segment."""
    return Op(kind=NVME_WRITE.name, stage=op.stage, label=op.label).name
