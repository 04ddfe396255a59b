"""Fit the rates to compared runs, judge the fit on runs it did not see, write it down."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.fidelity.cases import case_of, levels_of, weights_of
from sim.fidelity.evaluate import Compared, Pair
from sim.fidelity.fit import PRIORS, Case, Fitted, fit
from sim.fidelity.judge import held_out
from sim.fidelity.predict import Predictor
from sim.fidelity.settings import Settings
from sim.fidelity.store import Calibration, FittedRates, Spread
from sim.hardware.catalog import Catalog

__all__ = [
    "HELD_OUT",
    "calibrate",
    "calibrated_predictor",
    "fitted_rows",
    "held_out_rows",
    "interval_of",
    "judged_rows",
    "spread_name",
]

Floats = NDArray[np.float64]
HELD_OUT = ("run", "plan", "model", "source", "anchored")
"""What a judgement may hold out together; "anchored" is a source of which two runs are known, which
set one factor on the time of the others and are not judged."""
ANCHORS = 2
_FOLDS = {"run": 5, "plan": 5, "model": 5, "source": 0}
_FEWEST = 8
"""Fewest runs whose spread is worth a number of its own."""


def fitted_rows(rows: Sequence[Compared]) -> list[Compared]:
    """Return the runs a fit may use: they count, ran on one type of chip, and give a step time."""
    return [
        r for r in rows
        if r.scored and r.step is not None and r.predicted and r.predicted.amounts is not None
    ]  # fmt: skip


def _cases(rows: Sequence[Compared]) -> list[Case]:
    found = []
    for row, weight in zip(rows, weights_of([r.key for r in rows]), strict=True):
        assert row.settings and row.predicted and row.predicted.amounts and row.step
        found.append(case_of(row.settings, row.predicted.amounts, row.step.measured, weight))
    return found


def _names(rows: Sequence[Compared], what: str) -> list[str]:
    found = []
    for row in rows:
        assert row.settings is not None
        model = f"{row.run.source}/{row.settings.model}"
        named = {"run": row.run.run_id, "plan": row.key, "model": model, "source": row.run.source}
        found.append(named[what])
    return found


def held_out_rows(rows: Sequence[Compared], what: str) -> list[Compared]:
    """Return fitted runs with step times of fits that saw nothing of their group.

    Args:
        rows: compared runs. what: one of ``HELD_OUT``.
    """
    if what == "anchored":
        return _anchored(held_out_rows(rows, "source"))
    used = fitted_rows(rows)
    times: Sequence[float] = ()
    if used:
        times = held_out(_cases(used), _names(used, what), _FOLDS[what]).tolist()
    return [_timed(row, seconds) for row, seconds in zip(used, times, strict=True)]


def _timed(row: Compared, seconds: float) -> Compared:
    """A run with another predicted step time."""
    assert row.step is not None
    ratio = seconds / row.step.predicted
    metrics = {
        k: Pair(p.measured, p.predicted * (ratio if k == "step_time" else 1.0 / ratio))
        for k, p in row.metrics.items()
    }
    step = Pair(row.step.measured, seconds)
    return msgspec.structs.replace(row, step=step, metrics=metrics)


def _anchored(rows: Sequence[Compared]) -> list[Compared]:
    """Runs of sources held out, rescaled by two of each; which two no measurement decides."""
    groups: dict[str, list[Compared]] = defaultdict(list)
    for row in rows:
        groups[row.run.source].append(row)
    found = []
    for members in groups.values():
        order = sorted(members, key=lambda r: zlib.crc32(r.run.run_id.encode()))
        known, rest = order[:ANCHORS], order[ANCHORS:]
        ratios = [r.step.measured / r.step.predicted for r in known if r.step]
        factor = math.exp(sum(map(math.log, ratios)) / len(ratios))
        found += [_timed(r, r.step.predicted * factor) for r in rest if r.step]
    return found


def judged_rows(rows: Sequence[Compared], what: str) -> tuple[Compared, ...]:
    """Return all runs, those that a fit may use with held-out step times.

    Args:
        rows: compared runs. what: one of ``HELD_OUT``.
    """
    better = {r.run.run_id: r for r in held_out_rows(rows, what)}
    return tuple(better.get(r.run.run_id, r) for r in rows)


def calibrated_predictor(catalog: Catalog, calibration: Calibration | None) -> Predictor:
    """Return a predictor under a fit, or one with the profiles' own numbers."""
    if calibration is None:
        return Predictor(catalog)
    return Predictor(catalog, FittedRates(catalog, calibration.fitted))


def spread_name(s: Settings, fitted: Fitted) -> str:
    """Return which spread a run's interval comes from.

    A chip and precision that the fit saw under the run's framework is "known", else "cold".
    """
    if len(s.chips) > 1:
        return "mixed chips"
    known = f"place:{levels_of(s)['place']}" in fitted.offsets
    return f"{'moe' if s.moe else 'dense'} {'known' if known else 'cold'}"


def calibrate(
    rows: Sequence[Compared], judged: Mapping[str, Sequence[Compared]], source: str
) -> Calibration:
    """Fit compared runs.

    Args:
        rows: compared runs. judged: the same, held out by "plan" and by "source".
        source: where they come from, in words.
    """
    used = fitted_rows(rows)
    fitted = fit(_cases(used))
    spreads: dict[str, Spread] = {}
    for what, state in (("plan", "known"), ("source", "cold")):
        for kind in ("dense", "moe"):
            logs = [
                math.log(r.step.measured / r.step.predicted) for r in judged[what]
                if r.step and r.settings and r.settings.moe == (kind == "moe")
            ]  # fmt: skip
            if len(logs) >= _FEWEST:
                low, high = np.percentile(logs, [10, 90])
                spreads[f"{kind} {state}"] = Spread(low=float(low), high=float(high), n=len(logs))
    if "dense cold" in spreads:
        spreads["mixed chips"] = spreads["dense cold"]
    return Calibration(
        source=source,
        runs=len(used),
        meanings={p.name: p.meaning for p in PRIORS},
        fitted=fitted,
        spreads=spreads,
        chips=tuple(sorted({name for r in used if r.settings for name, _ in r.settings.chips})),
    )


def interval_of(s: Settings, step: float, c: Calibration) -> tuple[float, float] | None:
    """Return the 80 % interval of a predicted step time [s], None where no spread is known.

    Args:
        s: settings of the run. step: predicted [s]. c: calibration the prediction rests on.
    """
    spread = c.spreads.get(spread_name(s, c.fitted))
    if spread is None:
        return None
    return step * math.exp(spread.low), step * math.exp(spread.high)
