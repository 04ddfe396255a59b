"""``hetlab explain``: why a step takes as long as it does, and why another plan's does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli_output import JsonOption, emit, progress
from sim.errors import InputError, UsageError

if TYPE_CHECKING:
    from sim.report.report import Report

__all__ = ["print_compared_plans", "register"]


def register(app: typer.Typer) -> None:
    """Add ``explain``."""
    app.command("explain")(_explain)


def _explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, - for stdin.")],
    against: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Attribute the difference to this plan.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the plan's generated tables.")] = 0,
    fold: Annotated[bool, typer.Option(help="Run one rank per class of equal ranks.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Explain a step time: critical path, parts, memory; the difference to another plan."""
    from sim.report.explain import explain
    from sim.report.explain_table import print_explanation

    if against is not None and str(plan_file) == str(against) == "-":
        raise UsageError("hetlab explain: only one of the two plans can come from stdin")
    with progress("simulating"):
        other = _report(against, seed, fold) if against is not None else None
        found = explain(_report(plan_file, seed, fold), other)
    emit(found, lambda console: print_explanation(console, found), as_json)


def print_compared_plans(plan_file: Path, other: Path, as_json: bool) -> None:
    """Print what ``hetlab compare PLAN OTHER`` says of two plan files.

    Args:
        plan_file: this plan. other: that it is held against. as_json: the whole explanation.

    Raises:
        InputError: one is no plan, or carries no problem.
    """
    from sim.report.explain import explain
    from sim.report.explain_table import print_difference

    with progress("simulating"):
        found = explain(_report(plan_file, 0, True), _report(other, 0, True))
    emit(found, lambda console: print_difference(console, found), as_json)


def _report(file: Path, seed: int, fold: bool) -> Report:
    from sim.checks import read_plan
    from sim.report.report import report_of
    from sim.report.settled import simulate_settled

    plan, problem = read_plan(file)
    if problem is None:
        raise InputError(
            "the plan carries no problem",
            file=str(file),
            key="problem",
            expected="a plan written by hetlab plan",
        )
    return report_of(simulate_settled(plan, problem, seed=seed, fold=fold), problem)
