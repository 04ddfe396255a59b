"""Lowering pass of ``local_sgd``: steps of a worker's own, then one exchange between workers.

A step of the plan is a round: ``repeat(H)`` of the ordinary step, whose gradients are summed inside
the worker only, then the way each replica went, summed over all of them, and the outer update. In
streaming form a step is the part of a round between two exchanges, each of another fragment.

What a cell updates on its host goes its way there: the host works it out, a copy brings it to the
chip, whose NIC exchanges it, and the sum goes back to the host's outer update.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sim.errors import PlanError
from sim.plan.arguments import Arguments, takes
from sim.plan.deps import EXPERTS, of_experts
from sim.plan.op import Dep, Op
from sim.plan.plan import Plan
from sim.plan.program import STEPS, Block
from sim.plan.variant import Variant
from strategies.lowering.cut import ended, spelled_out

__all__ = ["OUTER", "LocalArguments", "local_steps"]

OUTER = "outer"
"""Label of the exchange between workers and of the outer update."""
WAY = "way"
"""Label of what a worker's host does before an exchange."""
INSIDE = {"": "local", "edp": "local_edp"}
"""Group role of a gradient sum -> that of the same sum inside a worker."""


class LocalArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pass, see there; the last one is for the memory model [B]."""

    inner: Annotated[int, msgspec.Meta(ge=1)]
    overlap: bool
    outer_bytes: Annotated[float, msgspec.Meta(ge=0)] = 0.0


@takes(LocalArguments)
def local_steps(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """Repeat the steps of a worker and exchange behind them.

    Args:
        variants: lowered by the built-in passes, and by ``segments``. plan: says whether BARRIER
            ends a round.
        args: ``inner`` steps between two exchanges; ``overlap`` True to use an exchange one round
            late, so that it runs behind the next inner steps.

    Raises:
        PlanError: the plan's amounts lack those of an exchange; parameters on the host of which the
            chip updates some.
    """
    rounds = [_Round(v, plan, args["inner"], args["overlap"]) for v in variants]
    used = {op.amount for r in rounds for op in (*r.leave, *r.arrive) if op.amount}
    missing = sorted(used - set(plan.amounts))
    if plan.amounts and missing:
        raise PlanError(
            "workers need the amounts of their exchanges",
            key=f"amounts.{missing[0]}",
            found="nothing",
            expected="its bytes",
        )
    return [r.variant for r in rounds]


class _Round:
    """A variant that takes steps of its own.

    Attributes:
        leave: the way a replica went, and its sum. arrive: the outer update. variant: all of it.
    """

    def __init__(self, before: Variant, plan: Plan, inner: int, overlap: bool) -> None:
        self.before, self.late = before, int(overlap)
        self.leave: list[Op] = []
        self.arrive: list[Op] = []
        steps = tuple(
            msgspec.structs.replace(op, group=INSIDE[op.group])
            if op.kind == "REDUCE_GRAD" and op.group in INSIDE
            else op
            for op in before.ops
        )
        for stage in dict.fromkeys(op.stage for op in steps if op.kind == "OPT"):
            self._exchange(stage, [op for op in steps if op.stage == stage])
        behind = [*self.arrive, *self.leave] if overlap else [*self.leave, *self.arrive]
        if any(op.label for op in steps if op.kind == "OPT"):
            steps = self._gated(plan, steps)
        barrier = plan.barrier and plan.placement.num_ranks > 1
        end = (Op(kind="BARRIER"),) if barrier else ()
        turns = Block(form="repeat", items=steps, count=inner)
        whole = Block(form="repeat", items=(turns, *behind, *end), count=STEPS)
        self.variant = msgspec.structs.replace(before, ops=steps, blocks=(whole,))

    def _exchange(self, stage: int, steps: list[Op]) -> None:
        updates = [op for op in steps if op.kind == "OPT"]
        away = [op for op in updates if op.stream == "host"]
        if any(op.kind == "D2H" and op.amount == "parameters" for op in steps):
            raise PlanError(
                "parameters on the host are updated there where workers step by themselves",
                key="placement.segments", found="an optimizer on the chip",
                expected="the optimizer on the host as well",
            )  # fmt: skip
        part = ".chip" if away else ""
        made: list[Op] = []
        if len(away) < len(updates):
            kept = [op.name for op in updates if op.stream != "host"]
            made.append(self._op("ENCODE", stage, OUTER, f"way{stage}{part}", kept))
        if away:
            last = [dep.name for dep in ended(steps) if dep.name not in {u.name for u in updates}]
            last += [op.name for op in away]
            worked = self._op("HOST", stage, WAY, f"way{stage}.host", last)
            up = self._op("H2D", stage, WAY, f"exchange{stage}.host", [worked.name])
            self.leave.append(worked)
            made.append(up)
        self.leave += made
        sums = self._sums(stage, steps, [op.name for op in made])
        self.leave += sums
        self._outer(stage, steps, [op.name for op in sums], part)

    def _sums(self, stage: int, steps: list[Op], made: list[str]) -> list[Op]:
        """One all-reduce over all replicas, and one of experts over those that hold the same."""
        total = self._op("ALL_REDUCE", stage, OUTER, f"exchange{stage}", made)
        found = [msgspec.structs.replace(total, group="dp")]
        if any(op.kind == "REDUCE_GRAD" and of_experts(op.label) for op in steps):
            label, amount = f"{OUTER}/{EXPERTS}", f"experts{stage}"
            found.append(msgspec.structs.replace(total, label=label, group="edp", amount=amount))
        return found

    def _outer(self, stage: int, steps: list[Op], sums: list[str], part: str) -> None:
        """The outer update, on the chip and on the host."""
        found: list[Op] = []
        if not part or any(op.kind == "OPT" and op.stream != "host" for op in steps):
            found.append(self._op("OPT", stage, OUTER, f"outer{stage}{part}", sums))
        if part:
            down = self._op("D2H", stage, OUTER, f"exchange{stage}.host", sums)
            update = self._op("HOST", stage, OUTER, f"outer{stage}.host", [down.name])
            found += [down, update]
            if any(op.kind == "H2D" for op in steps):
                found.append(self._op("H2D", stage, OUTER, f"back{stage}", [update.name]))
        self.arrive += [msgspec.structs.replace(op, carried=self.late) for op in found]

    def _op(self, kind: str, stage: int, label: str, amount: str, deps: list[str]) -> Op:
        named = tuple(Dep(name) for name in deps)
        return Op(kind=kind, stage=stage, label=label, amount=amount, deps=named)

    def _gated(self, plan: Plan, steps: tuple[Op, ...]) -> tuple[Op, ...]:
        """Let what waits for the step before wait, in a round's first, for the end of the round.

        The inner repeat begins anew with every round, so nothing in it reaches back beyond.
        """
        after = [Dep(op.name, 1) for op in self.leave if op.kind in ("ENCODE", "HOST")]
        after += [Dep(op.name, 1 + self.late) for op in self.arrive]
        hosted = frozenset(
            s.stage for s in plan.placement.segments if s.cell == self.before.position
        )
        spelled = spelled_out(msgspec.structs.replace(self.before, ops=steps), hosted)
        return tuple(
            msgspec.structs.replace(op, deps=(*(whole.deps or ()), *after))
            if any(d.distance for d in whole.deps or ())
            else op
            for op, whole in zip(steps, spelled, strict=True)
        )
