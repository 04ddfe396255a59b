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
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict measured runs and show how far off the predictions are."""
    from sim.hardware.catalog import Catalog
    from sim.validate.evaluate import compare
    from sim.validate.predict import Predictor
    from sim.validate.runs import read_runs
    from sim.validate.summary import print_summary, summary_of
    from sim.validate.where import parse_where, selected

    check_output(report, "--report", (".html",))
    found = read_runs(runs)
    columns = tuple(dict.fromkeys(("source", *(found[0].columns if found else ()))))
    conditions = parse_where(where, columns)
    chosen = [r for r in found if selected(r, conditions)]
    predictor = Predictor(Catalog(profiles or ()))
    with progress("predicting", len(chosen)) as tick:
        rows = compare(chosen, predictor, tick)
    summary = summary_of(rows)
    emit(summary, lambda console: print_summary(console, rows, summary), as_json)
    if report is not None:
        from sim.validate.html import write_report

        write_report(report, rows, summary)
        logger.info("report: %s", report)
