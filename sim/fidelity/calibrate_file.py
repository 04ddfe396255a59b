"""``hetlab calibrate --from-runs``: measured runs in, a calibration out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sim.cli_output import check_output, emit, logger, progress
from sim.errors import InputError, UsageError
from sim.fidelity.calibrate import HELD_OUT, calibrate, fitted_rows, held_out_rows
from sim.fidelity.evaluate import Compared, compare
from sim.fidelity.fit import LEVELS
from sim.fidelity.predict import Predictor, jobs_at_once
from sim.fidelity.runs import read_runs
from sim.fidelity.scores import statistics, subsets_of
from sim.fidelity.store import Calibration
from sim.hardware.catalog import bundled_catalog
from sim.interop.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Judgement", "calibrate_file"]

BUNDLED = "bundled"
_DIGITS = 5


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of runs that a fit did not see.

    Args:
        held_out: what was. subset: of runs. n: how many. median_ape, p90_ape: absolute errors.
    """

    held_out: str
    subset: str
    n: int
    median_ape: float
    p90_ape: float


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    runs: int
    numbers: dict[str, float]
    judged: list[Judgement]


def calibrate_file(runs: str, out: Path, as_json: bool) -> None:
    """Fit runs, write the calibration and print how it does on what it did not see.

    Args:
        runs: a CSV file, or "bundled". out: JSON file to write. as_json: print JSON.

    Raises:
        InputError: unreadable runs, or none that a fit may use. UsageError: another ending.
    """
    if out.suffix != ".json":
        raise UsageError(f"--out {out}: a calibration's file ends in .json")
    check_output(out, "--out")
    found = read_runs(None if runs == BUNDLED else runs)
    with progress("simulating") as tick:
        rows = compare(found, Predictor(bundled_catalog()), jobs_at_once(), tick)
    if not fitted_rows(rows):
        raise InputError("no run that counts gives a step time", file=runs)
    source = "the bundled measured runs" if runs == BUNDLED else Path(runs).name
    apart = {what: held_out_rows(rows, what) for what in HELD_OUT}
    calibration = _rounded(calibrate(rows, apart, source))
    judged = [j for what in HELD_OUT for j in _judge(apart[what], what)]
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1).decode()
    write_whole(out, text + "\n")
    document = _Document(
        file=str(out), runs=calibration.runs, numbers=calibration.fitted.numbers, judged=judged
    )
    emit(document, lambda console: _print(console, document), as_json)
    logger.info("calibration: %s", out)


def _judge(judged: list[Compared], what: str) -> list[Judgement]:
    found = []
    for subset in ("all", "dense", "moe"):
        pairs = [r.step for r in judged if subset in subsets_of(r) and r.step is not None]
        if pairs:
            median, p90, _ = statistics(pairs)
            found.append(
                Judgement(
                    held_out=what, subset=subset, n=len(pairs), median_ape=median, p90_ape=p90
                )
            )
    return found


def _rounded(c: Calibration) -> Calibration:
    """Numbers to as many digits as mean anything, so that equal fits are equal files."""
    fitted = msgspec.structs.replace(
        c.fitted,
        numbers={k: _digits(v) for k, v in c.fitted.numbers.items()},
        offsets={k: round(v, _DIGITS) for k, v in sorted(c.fitted.offsets.items())},
    )
    spreads = {
        k: msgspec.structs.replace(s, low=round(s.low, _DIGITS), high=round(s.high, _DIGITS))
        for k, s in c.spreads.items()
    }
    return msgspec.structs.replace(c, fitted=fitted, spreads=spreads)


def _digits(value: float) -> float:
    return round(value, _DIGITS - 1 - math.floor(math.log10(abs(value)))) if value else 0.0


def _print(console: Console, document: _Document) -> None:
    from rich.table import Table

    console.print(
        f"{document.runs} runs, {len(document.numbers)} shared numbers, offsets at "
        f"{len(LEVELS)} levels: {document.file}",
        highlight=False,
    )
    table = Table(title="step time, of runs that the fit did not see", title_justify="left")
    for name in ("held out", "subset", "n", "median", "90 %"):
        table.add_column(name, justify="left" if name in ("held out", "subset") else "right")
    for j in document.judged:
        table.add_row(
            f"by {j.held_out}", j.subset, str(j.n), f"{j.median_ape:.1%}", f"{j.p90_ape:.1%}"
        )
    console.print(table)
