"""The command ``hetlab export``: a plan in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli_output import emit_text, logger
from sim.errors import InputError, UsageError

if TYPE_CHECKING:
    from sim.plan.plan import Plan

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``export``."""
    app.command("export")(_export)


def _export(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    schedule_csv: Annotated[
        str,
        typer.Option(
            "--schedule-csv",
            metavar="FILE",
            help="Write the compute order as torch.distributed.pipelining reads it; - for stdout.",
        ),
    ] = "",
    replica: Annotated[int, typer.Option(min=0, help="Whose order.")] = 0,
) -> None:
    """Write a plan in another tool's format."""
    from sim.interop.files import write_whole
    from sim.interop.schedule_csv import schedule_to_csv
    from sim.plan.io import load_plan
    from sim.plan.validate import validate

    if not schedule_csv:
        raise UsageError("hetlab export: say what to write, e.g. --schedule-csv out.csv")
    plan = load_plan(plan_file)
    validate(plan)
    _require_compute(plan, str(plan_file))
    text = schedule_to_csv(plan, replica)
    if schedule_csv == "-":
        emit_text(text)
    else:
        write_whole(Path(schedule_csv), text)
        logger.info("schedule: %s", schedule_csv)


def _require_compute(plan: Plan, file: str) -> None:
    """Refuse a plan whose cells compute nothing.

    Raises:
        InputError: no rank of a cell has a program with a forward.
    """
    from sim.plan.passes import expand
    from sim.plan.program import walk

    computing = {
        rank
        for program in expand(plan)
        if any(op.kind == "F" for op in walk(program))
        for rank in program.ranks
    }
    idle = [cell for cell in plan.placement.cells if not computing.intersection(cell.ranks)]
    if idle or not plan.placement.cells:
        where = f"cell ({idle[0].stage}, {idle[0].replica})" if idle else "no pipeline cell"
        raise InputError(
            "the plan has no compute programs",
            file=file,
            key="programs",
            found=where,
            expected="a lowering, or programs with F and B, for every cell",
        )
