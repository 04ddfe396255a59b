"""What would make a plan fit: changes that the memory model accepts, the quickest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec

from sim.cost.ledger import knobs_of, peak_memory
from sim.cost.offload import host_ledgers, nvme_ledgers
from sim.errors import HetlabError
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.explain_edits import (
    offloaded,
    recomputing,
    smaller_microbatch,
    sound,
    zero_one,
)
from sim.report.metrics import pace_of_run
from sim.report.record import spans_of_run
from sim.report.settled import simulate_settled

__all__ = ["Change", "changes_that_fit", "short_cells"]

Edit = Callable[[Plan], Plan | None]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change after which every cell fits.

    Args:
        text: for people. step_time_s: [s] of the changed plan. peak_share: of its fullest cell.
        at_risk: a cell is above the limit, though below the capacity.
    """

    text: str
    step_time_s: float
    peak_share: float
    at_risk: bool


def short_cells(plan: Plan, problem: Problem) -> tuple[tuple[int, int], ...]:
    """Return (stage, replica) of the cells that do not fit."""
    found = peak_memory(plan, problem)
    return tuple(at for at, ledger in found.items() if ledger.verdict == "does not fit")


def changes_that_fit(plan: Plan, problem: Problem) -> tuple[Change, ...]:
    """Return changes that make a plan fit, by step time.

    Tried are recomputation (selective, full) in the cells that are short, each smaller microbatch,
    ZeRO-1, and optimizer states on the hosts; pairs of them only where none is enough by itself.

    Args:
        plan, problem: see there; a plan that fits needs none.
    """
    short = short_cells(plan, problem)
    if not short:
        return ()
    edits = dict(_edits(plan, problem, short))
    for number in (1, 2):
        found = []
        for names in itertools.combinations(edits, number):
            changed: Plan | None = plan
            for name in names:
                changed = edits[name](changed) if changed is not None else None
            change = _tried(changed, problem, " and ".join(names)) if changed else None
            if change is not None:
                found.append(change)
        if found:
            return tuple(sorted(found, key=lambda c: (c.step_time_s, c.text)))
    return ()


def _edits(
    plan: Plan, problem: Problem, short: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, Edit]]:
    stages = sorted({stage for stage, _ in short})
    where = "stage " + ", ".join(map(str, stages))
    if len(stages) == plan.placement.num_stages:
        where = "all stages"
    for mode in ("selective", "full"):
        yield f"recompute {mode} in {where}", _again(mode, short)
    size = plan.mathematics.microbatch
    for smaller in (n for n in range(size - 1, 0, -1) if size % n == 0):
        yield f"microbatch {smaller} instead of {size}", _microbatch(problem, smaller)
    yield "ZeRO-1", zero_one
    yield "optimizer states on the host", lambda p: offloaded(p, problem)


def _again(mode: str, short: tuple[tuple[int, int], ...]) -> Edit:
    return lambda p: recomputing(p, mode, short)  # type: ignore[arg-type]


def _microbatch(problem: Problem, size: int) -> Edit:
    return lambda p: smaller_microbatch(p, problem, size)


def _tried(plan: Plan, problem: Problem, text: str) -> Change | None:
    """The change if it fits and runs; memory first, since it costs less to know."""
    try:
        cells = peak_memory(plan, problem).values()
        hosts = [host_ledgers(plan, problem, knobs_of), nvme_ledgers(plan, problem, knobs_of)]
        verdicts = [x.verdict for x in cells] + [x.verdict for row in hosts for x in row.values()]
        if "does not fit" in verdicts or not sound(plan, problem):
            return None
        run = simulate_settled(plan, problem)
        seconds = pace_of_run(run, spans_of_run(run)).step_time_s
    except HetlabError:
        return None
    return Change(
        text=text,
        step_time_s=seconds,
        peak_share=max(x.peak_bytes / x.capacity_bytes for x in cells),
        at_risk=any(x.verdict == "at risk" for x in cells),
    )
