"""``hetlab validate``: predicted against measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli_output import JsonOption, check_output, emit, logger, progress

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``validate``."""
    app.command("validate")(_validate)


def _validate(
    runs: Annotated[
        Path | None, typer.Option(help="CSV file of measured runs; default: the bundled ones.")
    ] = None,
    where: Annotated[str, typer.Option(help="Only runs like 'source = bloom and tp >= 4'.")] = "",
    profiles: Annotated[
        list[Path] | None, typer.Option(help="Folder of further hardware profiles.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="File of hetlab calibrate --from-runs; default: bundled.")
    ] = None,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="The profiles' own numbers, no fit to runs.")
    ] = False,
    held_out: Annotated[
        str,
        typer.Option(
            help="Refit without each run, plan, model or source (anchored: but two runs of it)."
        ),
    ] = "",
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict measured runs and show how far off the predictions are."""
    from sim.errors import UsageError
    from sim.fidelity.calibrate import HELD_OUT, calibrated_predictor, judged_rows
    from sim.fidelity.evaluate import compare
    from sim.fidelity.predict import jobs_at_once
    from sim.fidelity.runs import read_runs
    from sim.fidelity.store import read_calibration
    from sim.fidelity.summary import Basis, print_summary, summary_of
    from sim.fidelity.where import parse_where, selected
    from sim.hardware.catalog import Catalog

    check_output(report, "--report", (".html",))
    if held_out and held_out not in HELD_OUT:
        raise UsageError(f"--held-out {held_out}: one of {', '.join(HELD_OUT)}")
    if uncalibrated and calibration is not None:
        raise UsageError("--uncalibrated and --calibration say different things")
    found = read_runs(runs)
    columns = tuple(dict.fromkeys(("source", *(found[0].columns if found else ()))))
    conditions = parse_where(where, columns)
    chosen = [r for r in found if selected(r, conditions)]
    catalog = Catalog(profiles or ())
    fit = None if uncalibrated else read_calibration(calibration)
    predictor = calibrated_predictor(catalog, fit)
    with progress("predicting") as tick:
        rows = compare(chosen, predictor, jobs_at_once(), tick)
    if held_out:
        rows = judged_rows(rows, held_out)
    summary = summary_of(rows, fit)
    about = Basis(calibration=fit, held_out=held_out)
    emit(summary, lambda console: print_summary(console, rows, summary, about), as_json)
    if report is not None:
        from sim.fidelity.html import write_report

        write_report(report, rows, summary, about)
        logger.info("report: %s", report)
