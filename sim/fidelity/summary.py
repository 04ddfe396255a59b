"""The result of a validation as plain data, and as tables for people."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from sim.fidelity.calibrate import interval_of
from sim.fidelity.evaluate import Compared
from sim.fidelity.reasons import worst
from sim.fidelity.scores import ErrorRow, MemoryRow, error_rows, memory_row
from sim.fidelity.store import Calibration

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Basis",
    "IntervalRow",
    "SkippedRun",
    "Summary",
    "print_summary",
    "scored_rows",
    "summary_of",
]


class IntervalRow(msgspec.Struct, frozen=True, kw_only=True):
    """How honest the intervals are.

    Args:
        nominal: share of runs that should lie inside. coverage: share that does.
        median_half_width: of the intervals, as a share of the prediction. Both None where no
            prediction has an interval.
    """

    nominal: float
    coverage: float | None
    median_half_width: float | None


class SkippedRun(msgspec.Struct, frozen=True):
    """Args: run_id, why: a run that was not built, and the missing field or feature."""

    run_id: str
    why: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What ``hetlab validate --json`` prints; only runs that count are in ``errors``."""

    errors: list[ErrorRow]
    memory: MemoryRow
    interval: IntervalRow
    skipped: list[SkippedRun]


def scored_rows(rows: Sequence[Compared]) -> list[Compared]:
    """Return the runs that count: neither flagged nor recalled from memory."""
    return [r for r in rows if r.scored]


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """What predictions rest on.

    Args:
        calibration: the fit, None for the profiles' own numbers. held_out: what each fit did not
            see, "" when predictions are those of the one fit.
    """

    calibration: Calibration | None = None
    held_out: str = ""

    @property
    def text(self) -> str:
        """In one line."""
        if self.held_out:
            return f"each prediction by a fit that saw nothing of the same {self.held_out}"
        if self.calibration is None:
            return "not calibrated: the profiles' own numbers"
        c = self.calibration
        return f"calibrated on {c.runs} runs ({c.source}): for these runs, errors of the fit itself"


def summary_of(rows: Sequence[Compared], calibration: Calibration | None = None) -> Summary:
    """Return the summary of compared runs.

    Args:
        rows: compared runs. calibration: that intervals come from, None for none.
    """
    counted = scored_rows(rows)
    return Summary(
        errors=error_rows(counted),
        memory=memory_row(counted),
        interval=_interval(counted, calibration),
        skipped=[SkippedRun(r.run.run_id, r.why) for r in rows if r.why],
    )


def _interval(rows: Sequence[Compared], calibration: Calibration | None) -> IntervalRow:
    inside, widths = [], []
    for row in rows:
        if row.step is None or row.settings is None or calibration is None:
            continue
        found = interval_of(row.settings, row.step.predicted, calibration)
        if found is not None:
            inside.append(found[0] <= row.step.measured <= found[1])
            widths.append((found[1] - found[0]) / 2 / row.step.predicted)
    return IntervalRow(
        nominal=0.8,
        coverage=sum(inside) / len(inside) if inside else None,
        median_half_width=statistics.median(widths) if widths else None,
    )


def print_summary(
    console: Console, rows: Sequence[Compared], summary: Summary, basis: Basis
) -> None:
    """Print tables: errors per source and in total, complete runs, runs apart, the worst."""
    counted = scored_rows(rows)
    built = [r for r in counted if not r.why]
    timed = [r for r in built if r.step is not None]
    uncalibrated = {
        name for r in built if r.settings and r.predicted and not r.predicted.calibrated
        for name, _ in r.settings.chips
    }  # fmt: skip
    console.print(basis.text, highlight=False)
    if uncalibrated:
        console.print("not calibrated: " + ", ".join(sorted(uncalibrated)), highlight=False)
    console.print(
        f"{len(rows)} runs, {len(built)} of {len(counted)} that count built, {len(timed)} timed",
        highlight=False,
    )
    _errors(console, "step time, runs that count", summary.errors)
    complete = error_rows([r for r in counted if r.complete])
    _errors(console, "complete runs only", [e for e in complete if e.source == "all"])
    for title, apart in (
        ("flagged", [r for r in rows if r.run.flagged]),
        ("recalled from memory", [r for r in rows if r.run.remembered and not r.run.flagged]),
    ):
        _errors(console, title, [e for e in error_rows(apart) if e.source == "all"])
    i = summary.interval
    if i.coverage is not None and i.median_half_width is not None:
        console.print(
            f"80 % interval: holds {i.coverage:.0%}, half as wide as {i.median_half_width:.0%}",
            highlight=False,
        )
    m = summary.memory
    if m.n and m.median_ape is not None and m.p90_ape is not None:
        console.print(
            f"memory: {m.n} peaks, {m.median_ape:.1%} / {m.p90_ape:.1%}; "
            f"{m.false_fits} false fits, {m.false_oom} false out of memory, "
            f"{m.at_risk_share:.1%} at risk, "
            f"{m.unscored_failures} failures without a cause",
            highlight=False,
        )
    _worst(console, counted)
    _skipped(console, summary.skipped)


def _errors(console: Console, title: str, errors: Sequence[ErrorRow]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("source", "subset", "n", "median", "90 %", "bias", "rank"):
        table.add_column(name, justify="left" if name in ("source", "subset") else "right")
    shown = [e for e in errors if e.metric == "time_like"]
    for e in shown:
        if e.source != "all" and e.subset == "all" and _only_one(e, shown):
            continue
        rank = "" if e.spearman is None else f"{e.spearman:.2f}"
        table.add_row(
            e.source, e.subset, str(e.n), f"{e.median_ape:.1%}", f"{e.p90_ape:.1%}",
            f"{e.bias:+.1%}", rank,
        )  # fmt: skip
    if shown:
        console.print(table)


def _only_one(row: ErrorRow, rows: Sequence[ErrorRow]) -> bool:
    """Whether another line of the source says the same."""
    return any(o.source == row.source and o.n == row.n and o.subset != row.subset for o in rows)


def _worst(console: Console, rows: Sequence[Compared]) -> None:
    found = worst(list(rows))
    if found:
        console.print("worst runs:", highlight=False)
    for row, error, reason in found:
        console.print(f"  {row.run.run_id} {error:+.0%}: {reason}", highlight=False)


def _skipped(console: Console, skipped: Sequence[SkippedRun]) -> None:
    if skipped:
        console.print(f"not built: {len(skipped)}", highlight=False)
    for why, count in Counter(s.why for s in skipped).most_common():
        ids = [s.run_id for s in skipped if s.why == why]
        shown = ", ".join(ids[:4]) + (" ..." if count > 4 else "")
        console.print(f"  {count} {why} ({shown})", highlight=False)
