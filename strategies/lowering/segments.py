"""Lowering pass ``segments``: stages run segment by segment, under ZeRO and with a host.

Per segment, as the placement says:

* optimizer on the host: backward, REDUCE_GRAD, D2H of the gradient, OPT on the host, H2D of the
  updated parameters, for which the next step's forward waits and for nothing else;
* parameters on the host: a fetch before each use, into a ring of buffers whose slot the use before
  must have left; where the optimizer stays on the chip, an updated copy goes back through the same
  ring.

With several microbatches the gradient adds up on the chip and leaves after the last.

* ZeRO-2 and 3: REDUCE_GRAD behind each microbatch's backward; only the shard adds up;
* ZeRO-3: UNSHARD before each forward and UNSHARD_B before each backward, into a ring of buffers;
  the optimizer updates the shard, and the next use gathers it. Parameters on the host are fetched
  shard by shard first. A segment gathered for one pass leaves its buffer with it, so no RESHARD is
  written.

Routed experts spread over replicas are summed and gathered apart, in the groups of those that hold
the same ones; the segment's update and its host traffic stay one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sim.errors import PlanError
from sim.plan.arguments import takes
from sim.plan.op import Ref
from sim.plan.passes import SAVES
from sim.plan.plan import Plan
from sim.plan.variant import Variant
from strategies.lowering.arguments import SegmentArguments
from strategies.lowering.arrivals import add_fetches, add_gathers, wait_for_updates
from strategies.lowering.cut import Cut, Settings
from strategies.lowering.updates import CLIPPING, SPECULATION, add_norm, add_updates

__all__ = ["segments"]


@takes(SegmentArguments)
def segments(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """Cut stages into their segments and add what the host does for them.

    Args:
        variants, plan: of the lowering.
        args: ``priority``: host streams serve the first segments first (else list order).
            ``clipping``: one of ``CLIPPING``. ``whole_steps``: nothing of a step begins before the
            step before has ended on its rank. ``masters`` False: there are no master weights on a
            chip that updates parameters of the host, which are then fetched for the update.
            ``experts``: segments, as "stage[name]", whose routed experts other replicas share;
            ``lower`` writes them.

    Raises:
        PlanError: unknown clipping; a plan that this pass does not carry (a tied parameter on two
            positions, blocking transfers, ZeRO-1 or 2 with parameters on the host, replicas of
            unlike microbatches under ZeRO-2 and 3).
    """
    clipping = args.get("clipping", "none")
    if clipping not in CLIPPING:
        raise PlanError(
            "unknown clipping", key="lowering.segments", found=clipping, expected=" ".join(CLIPPING)
        )
    _check(variants, plan)
    settings = Settings(
        priority=bool(args.get("priority", True)),
        clipping=clipping,
        whole=bool(args.get("whole_steps", False)),
        masters=bool(args.get("masters", True)),
        experts=frozenset(args.get("experts", ())),
    )
    return [_cut(Cut(v, plan, settings)) for v in variants]


def _check(variants: list[Variant], plan: Plan) -> None:
    away = any("parameters" in s.offload for s in plan.placement.segments)
    reasons = {
        "a parameter that two positions share": any(
            op.kind == "ALL_REDUCE" and op.label == "embed" for v in variants for op in v.ops
        ),
        "whole parameters on the host under ZeRO": away and plan.mathematics.zero in (1, 2),
        "unlike numbers of microbatches under ZeRO-2 and 3": plan.mathematics.zero >= 2
        and len(set(plan.placement.microbatches)) > 1,
        # A cell's times of recomputation are of its own mode.
        "segments that recompute otherwise than their cells": any(
            s.recompute not in ("", "none", v.recompute)
            for v in variants
            for s in plan.placement.segments_at(v.position, v.offload, v.recompute)
        ),
        "blocking transfers": any(
            op.kind in ("F", "B", "I", "W") and op.deps is not None
            for v in variants
            for op in v.ops
        ),
    }
    for what, broken in reasons.items():
        if broken:
            raise PlanError(f"the pass does not carry {what}", key="lowering.segments")


def _cut(cut: Cut) -> Variant:
    _passes(cut)
    add_updates(cut)
    add_norm(cut)
    wait_for_updates(cut)
    add_gathers(cut)
    add_fetches(cut)
    return cut.finish()


def _passes(cut: Cut) -> None:
    """F of a stage as its segments' F, B, I and W likewise, backwards."""
    for op in cut.variant.ops:
        if op.kind not in ("F", "B", "I", "W"):
            cut.ops.append(op)
            continue
        mine = cut.segments[op.stage]
        for s in mine if op.kind == "F" else reversed(mine):
            fields: dict[str, Any] = {"label": s.name}
            if s.recompute and op.kind == "F":
                fields["saves"] = SAVES[s.recompute]
            if s.recompute and op.kind in ("B", "I"):
                fields["recompute"] = "inner" if s.recompute != "none" else ""
            if op.kind == "F" and cut.settings.clipping == "speculate":
                fields["ref"] = Ref(SPECULATION, "forward")
            cut.ops.append(msgspec.structs.replace(op, **fields))
