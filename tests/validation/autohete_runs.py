"""Every system on the models of AutoHete's paper: AutoHete planned, the baselines as policies.

A system's throughput on a model is that of its fastest plan that fits; a ratio stands where both
fit. "no priority" is AutoHete planned anew with host streams in list order and a barrier between
steps; "same plan" keeps AutoHete's three integers; "list order" has no barrier.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.planner import Planned, plan_offload
from strategies.offload.policies import Outcome, outcome_of, run_policy
from tests.validation.autohete_cases import BASELINES, MODELS, SCHEDULER, Given, case

__all__ = [
    "AUTOHETE",
    "SHEET_EFFICIENCY",
    "UPDATES",
    "VARIANTS",
    "Row",
    "one_row",
    "planned",
    "rows",
    "summary",
]

AUTOHETE = "autohete"
UPDATES = (0.25, 0.375, 0.5, 0.75, 1.0)
"""[ns] that the host takes to update a parameter."""
SHEET_EFFICIENCY = 0.45
"""140 TFLOP/s of 312, what our specification's own calibration assumes a step reaches."""
MOST = 60
"""Choices that one search simulates at most, if not told; what it may have missed is printed."""
_ORDERED = {"priority": False, "whole_steps": True}
VARIANTS: dict[str, dict[str, bool]] = {
    SCHEDULER: _ORDERED,
    "same plan": _ORDERED,
    "list order": {"priority": False},
}
"""AutoHete with less: name -> knobs."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What every system makes of one model.

    Args:
        model: name in ``MODELS``. given: of ``case``. found: system -> its best plan.
        gaps: searched system -> share by which some choice might be faster; 0 when none is.
    """

    model: str
    given: Given
    found: dict[str, Outcome]
    gaps: dict[str, float]

    def ratio(self, rival: str) -> float:
        """Throughput of AutoHete over a rival's; 0 where one of them does not fit."""
        ours, other = self.found[AUTOHETE], self.found[rival]
        return 0.0 if ours.short or other.short else other.step_s / ours.step_s


def planned(model: str, knobs: AutoHeteKnobs, given: Given, most: int = MOST) -> Planned:
    """Plan a model; embedding and head leave the chip only where nothing fits otherwise."""
    problem, start = case(*MODELS[model], **given)
    best = plan_offload(problem, start, knobs, most=most)
    if not best.best.short:
        return best
    return plan_offload(problem, start, msgspec.structs.replace(knobs, outer=True), most=most)


def one_row(
    model: str, given: Given, variants: Iterable[str] = tuple(VARIANTS), most: int = MOST
) -> Row:
    """Run every system on one model.

    Args:
        model: name in ``MODELS``. given: of ``case``. variants: of ``VARIANTS``.
        most: choices that a search simulates.
    """
    problem, start = case(*MODELS[model], **given)
    found = {name: run_policy(problem, start, name) for name in BASELINES}
    first = planned(model, AutoHeteKnobs(), given, most)
    ours, gaps = first.best, {AUTOHETE: first.gap}
    found[AUTOHETE] = ours
    for name, changes in VARIANTS.items():
        if name not in variants:
            continue
        if name == "same plan":
            knobs = msgspec.structs.replace(ours.knobs, **changes)
            found[name] = ours if ours.short else outcome_of(problem, start, knobs)
            continue
        other = planned(model, msgspec.structs.replace(AutoHeteKnobs(), **changes), given, most)
        found[name], gaps[name] = other.best, other.gap
    return Row(model=model, given=given, found=found, gaps=gaps)


def rows(tasks: Sequence[tuple[str, Given]], most: int = MOST) -> Iterator[Row]:
    """Run (model, arguments of ``case``) on all cores, in order; progress goes to stderr."""
    from joblib import Parallel, delayed

    began = time.monotonic()
    work = (delayed(one_row)(model, given, most=most) for model, given in tasks)
    for i, row in enumerate(Parallel(n_jobs=-1, return_as="generator")(work)):
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{i + 1}/{len(tasks)} {row.model}, {took}", file=sys.stderr, flush=True)
        yield row


def summary(found: Iterable[Row], rival: str) -> tuple[float, float]:
    """Return (average, largest) ratio over the models that both fit; 0 where there is none."""
    ratios = [r.ratio(rival) for r in found if r.ratio(rival)]
    return (statistics.fmean(ratios), max(ratios)) if ratios else (0.0, 0.0)
