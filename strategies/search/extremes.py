"""What a structure may be offloaded with, and the extremes: all layers or none on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from sim.cost.ledger import peak_memory
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs
from strategies.registry import get
from strategies.search.drafts import draft_of
from strategies.search.options import Choices
from strategies.search.slab import Slab

__all__ = ["bases_of", "draft_named", "drafts_of", "extremes", "too_large"]


def drafts_of(problem: Problem, slab: Slab, choices: Choices) -> Iterator[PlanDraft]:
    """Write a structure down with every ZeRO stage that may stand; 2 is never better than 3 here.

    Args:
        problem: what it is for. slab: one row, with layers. choices: pins.
    """
    draft = draft_of(problem, slab)
    zero = get("zero")
    offered = {k.stage for k in zero.space(problem, draft)}
    wanted = (1, 3, 0) if choices.zero is None else (choices.zero,)
    for stage in wanted:
        if stage in offered:
            yield compose(problem, [(zero, {"stage": stage})], start=draft)


def bases_of(values: Sequence[AutoHeteKnobs]) -> Iterator[AutoHeteKnobs]:
    """Knobs besides the integers: every legal wait of updates, the model's ends here and there.

    Serving what the next forward needs first is best nearly always; where a slow link is busy with
    the first layers' copies, an update that holds back all later ones may wait longer than in
    order of readiness, so that is tried as well.

    Args:
        values: of the strategy's space.
    """
    ways = dict.fromkeys(v.clipping for v in values)
    for priority, way, outer in itertools.product((True, False), ways, (False, True)):
        yield AutoHeteKnobs(clipping=way, outer=outer, priority=priority)


def draft_named(draft: PlanDraft, knobs: AutoHeteKnobs) -> PlanDraft:
    """Return the draft under a name that says it offloads, with what its updates rest on."""
    assumed = draft.assumptions
    if knobs.clipping == "speculate":
        assumed = (*assumed, f"{knobs.failure_rate:g} of speculated updates are undone")
    return msgspec.structs.replace(draft, name=f"{draft.name}, offload", assumptions=assumed)


def extremes(
    problem: Problem, draft: PlanDraft, base: AutoHeteKnobs, choices: Choices
) -> list[tuple[AutoHeteKnobs, Plan]]:
    """Lower all or nothing of each integer that the strategy takes, most on the chip first.

    Args:
        problem, draft: see there. base: knobs besides the integers. choices: pins.

    Raises:
        InputError: the strategy takes none of them.
    """
    n = problem.model.num_layers
    modes = {"none": (0,), "full": (n,)}.get(choices.recompute or "", (0, n))
    found: list[tuple[AutoHeteKnobs, Plan]] = []
    refused: InputError | None = None
    for p, c, o in itertools.product((0, n), modes, (0, n)):
        knobs = msgspec.structs.replace(base, checkpointed=c, parameters=p, optimizer=o)
        try:
            full = compose(problem, [("offload", knobs)], start=draft_named(draft, knobs))
            found.append((knobs, lower(problem, full)))
        except InputError as error:
            refused = error
    if not found and refused is not None:
        raise refused
    return found


def too_large(plans: Sequence[Plan], problem: Problem) -> bool:
    """Whether some cell has too little memory for the least of every term over the extremes.

    Every term is least where all or nothing of each integer is on the host, so no choice fits then.

    Args:
        plans: of ``extremes``. problem: see there.
    """
    ledgers = [peak_memory(plan, problem) for plan in plans]
    for at, first in ledgers[0].items():
        least = sum(min(x[at].terms[name] for x in ledgers) for name in first.terms)
        if least > first.limit_bytes * (1 + 1e-9):
            return True
    return False
