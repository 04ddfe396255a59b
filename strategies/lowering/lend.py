"""Lowering pass ``lend``: layers of routed experts written out as a layer program.

Boxed, a pass of such a layer holds its exchanges. Written out it is, forward,

    F[l] ; ALL_TO_ALL[l/dispatch] ; F[l/experts] ; ALL_TO_ALL[l/combine]

and backward B[l/experts] between the exchanges of gradients, then B[l]. Exchanges and experts may
have late amounts, so that the fullest device and the busiest link set the time. Experts are lent
through MOVE_EXPERT and come back as gradients through REDUCE_EXPERT, once a step: in the forward
of its first microbatch and the backward of its last. Which go where is a matrix of a table;
nothing lent is nothing sent.

Scheduled (Pro-Prophet, arXiv:2411.10003, section 5), what the next layer is lent passes behind this
one, in two parts: one while the experts compute, one while what lies between the two layers does.
Gradients go the other way round. The first layer of a stage has no layer before it: it waits.
The search for the next step runs on the host behind the dispatch.

Blocking (FasterMoE), a layer waits for what it is lent, and the next for its gradients.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from sim.errors import PlanError
from sim.plan.arguments import takes
from sim.plan.placement import Placement, derive_groups
from sim.plan.plan import Plan
from sim.plan.variant import Variant
from strategies.expert import controllers
from strategies.lowering.lend_layers import Layers
from strategies.lowering.lend_program import LendArguments, Writer

__all__ = ["controllers", "lend"]


@takes(LendArguments)
def lend(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """Write layers of routed experts out.

    Args:
        variants, plan: of the lowering. args: see ``LendArguments``.

    Raises:
        PlanError: a plan that this pass does not carry, or segments that it does not have.
    """
    given = msgspec.convert(args, LendArguments)
    named = {f"{s.stage}[{s.name}]": s for s in plan.placement.segments}
    unknown = [key for key in given.experts if key not in named]
    if unknown:
        raise PlanError(
            "the plan has no such segment",
            key="lowering.lend.experts",
            found=unknown[0],
            expected=" ".join(named),
        )
    if plan.placement.ep == 1:
        return variants
    _check(variants, plan, given)
    _check_room(plan, given)
    return [_written(v, plan, given) for v in variants]


def _written(variant: Variant, plan: Plan, given: LendArguments) -> Variant:
    layers = Layers(variant, plan, given.experts)
    return Writer(variant, layers, given).written() if layers.moe else variant


def _check(variants: list[Variant], plan: Plan, given: LendArguments) -> None:
    placement, zero = plan.placement, plan.mathematics.zero
    shared = any(g.role == "edp" for g in derive_groups(placement))
    mine = [s for s in placement.segments if f"{s.stage}[{s.name}]" in given.experts]
    reasons = {
        "programs of several blocks": any(v.blocks for v in variants),
        "passes in parts": any(op.part >= 0 for v in variants for op in v.ops),
        "replicas that share experts and run unlike programs": _unlike(variants, placement),
        "lent experts whose parameters are on the host": bool(given.slots)
        and any("parameters" in s.offload for s in mine),
        "lent experts whose gradients ZeRO-2 or 3 shares out": bool(given.slots)
        and zero >= 2
        and shared,
        "a search whose result its own step needs behind a schedule": given.fresh and given.overlap,
    }
    for what, broken in reasons.items():
        if broken:
            raise PlanError(f"the pass does not carry {what}", key="lowering.lend")


def _check_room(plan: Plan, given: LendArguments) -> None:
    """The controller fills no more slots than the pass lists transfers, and memory room, for."""
    table = plan.tables.get(given.table)
    stated = table.parameters if table is not None and table.controller == "lend-experts" else {}
    budget = stated.get("budget")
    if stated.get("balancer") != "none" and isinstance(budget, int) and budget > given.slots:
        raise PlanError(
            "the controller lends more experts than the pass has slots for",
            key=f"tables.{given.table}.parameters.budget",
            found=str(budget),
            expected=f"at most {given.slots}, the slots of the pass lend",
        )


def _unlike(variants: list[Variant], placement: Placement) -> bool:
    """Whether members of an exchange are in variants of their own: they list unlike ops."""
    of_rank = {r: i for i, v in enumerate(variants) for r in v.ranks}
    found: dict[int, set[int]] = defaultdict(set)
    for number, group in enumerate(derive_groups(placement)):
        if group.role == "ep":
            found[number] |= {of_rank.get(r, -1) for r in group.ranks}
    return any(len(numbers) > 1 for numbers in found.values())
