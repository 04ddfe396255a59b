"""The commands of ``sim``: simulate a plan, check files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli_output import JsonOption, check_output, emit, logger, progress
from sim.errors import InputError, UsageError
from sim.thresholds import fail_if, numbers_of, read_thresholds

if TYPE_CHECKING:
    from rich.console import Console

    from sim.engine.faults import Fault
    from sim.hardware.machine import Machine
    from sim.plan.plan import Plan
    from sim.problem import Problem

__all__ = ["faults_of", "register"]


def faults_of(stragglers: list[str], links: list[str], losses: list[str]) -> tuple[Fault, ...]:
    """Read faults as they are typed.

    Args:
        stragglers: "RANK=FACTOR". links: "NAME=FACTOR" or "NAME=FACTOR@SECONDS"; several of one
            name are its trace. losses: "RANK@SECONDS".

    Raises:
        UsageError: one is malformed.
    """
    from sim.engine.faults import ChipLoss, LinkChange, Straggler

    found: list[Fault] = []
    traces: dict[str, list[tuple[float, float]]] = {}
    for text in stragglers:
        rank, factor = _numbers(text, r"(\d+)=([\d.eE+-]+)", "--straggler RANK=FACTOR, e.g. 3=2.0")
        found.append(Straggler(ranks=(int(rank),), factor=float(factor)))
    for text in links:
        name, factor, at = _numbers(
            text, r"(.+)=([\d.eE+-]+)(?:@([\d.eE+-]+))?", "--link NAME=FACTOR@SECONDS"
        )
        traces.setdefault(name, []).append((float(at or 0.0), float(factor)))
    for text in losses:
        rank, at = _numbers(text, r"(\d+)@([\d.eE+-]+)", "--lose RANK@SECONDS, e.g. 3@1.5")
        found.append(ChipLoss(rank=int(rank), at=float(at)))
    changes = [LinkChange(link=n, trace=tuple(sorted(t))) for n, t in traces.items()]
    return (*found, *changes)


def _numbers(text: str, pattern: str, expected: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, text.strip())
    if match is None:
        raise UsageError(f"{text}: expected {expected}")
    try:
        for group in match.groups()[1:]:
            float(group or 0.0)
    except ValueError:
        raise UsageError(f"{text}: expected {expected}") from None
    return match.groups()


def register(app: typer.Typer) -> None:
    """Add ``simulate`` and ``check``."""
    app.command("simulate")(_simulate)
    app.command("check")(_check)


def _simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, - for stdin.")],
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of steps; by default 1, 8 if they overlap or differ, more behind servers.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the plan's generated tables.")] = 0,
    cluster: Annotated[str, typer.Option(help="Another cluster: a file or bundled name.")] = "",
    fold: Annotated[bool, typer.Option(help="Run one rank per class of equal ranks.")] = True,
    contention: Annotated[bool, typer.Option(help="Transfers share links.")] = True,
    overlap: Annotated[
        bool, typer.Option(help="Compute and communication slow each other.")
    ] = True,
    straggler: Annotated[
        list[str] | None, typer.Option(help="RANK=FACTOR: computes that much slower.")
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="NAME=FACTOR@SECONDS: has that share of its rate.")
    ] = None,
    lose: Annotated[list[str] | None, typer.Option(help="RANK@SECONDS: the chip stops.")] = None,
    gantt: Annotated[Path | None, typer.Option(help="Write the pipeline picture here.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace here (.gz).")] = None,
    fail: Annotated[
        list[str] | None, typer.Option("--fail-if", help="Exit 5 if this holds: step_time>2s.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a plan and print its metrics."""
    from sim.checks import read_plan
    from sim.engine.simulate import simulate
    from sim.report.gantt import PICTURES
    from sim.report.report import report_of
    from sim.report.settled import simulate_settled
    from sim.report.table import print_simulation

    read_thresholds(fail or ())
    check_output(gantt, "--gantt", PICTURES)
    check_output(trace, "--trace", (".json", ".gz"), "trace")
    faults = faults_of(straggler or [], link or [], lose or [])
    plan, carried = read_plan(plan_file)
    problem = _problem_of(plan, carried, str(plan_file), cluster)
    with progress(f"simulating {plan.name or plan_file.name}"):
        how: dict[str, Any] = {
            "fold": fold, "contention": contention, "overlap": overlap, "faults": faults,
            "seed": seed,
        }  # fmt: skip
        if steps is None:
            run = simulate_settled(plan, problem, **how)
        else:
            run = simulate(plan, problem, steps=steps, **how)
        report = report_of(run, problem)
    document = report.simulate_document()
    emit(document, lambda console: print_simulation(console, document), as_json)
    if gantt is not None:
        logger.info("picture: %s", report.save_gantt(gantt))
    if trace is not None:
        logger.info("trace: %s", report.save_trace(trace))
    fail_if(fail or [], numbers_of(report.metrics))


def _problem_of(plan: Plan, carried: Problem | None, file: str, cluster: str) -> Problem:
    """The problem a plan carries, on another cluster when asked."""
    from sim.problem import load_problem

    if carried is None:
        raise InputError(
            "the plan carries no problem",
            file=file,
            key="problem",
            expected="a plan written by hetlab plan",
        )
    if not cluster:
        return carried
    problem = load_problem(cluster, plan.problem["model"], plan.problem["job"])
    chips = plan.placement.chips or range(plan.placement.num_ranks)
    if max(chips, default=-1) >= problem.machine.num_chips:
        raise InputError(
            "the plan needs more chips than this cluster has",
            file=cluster,
            found=f"{problem.machine.num_chips} chips",
            expected=f"{max(chips) + 1}",
        )
    _same_types(plan, problem.machine, cluster)
    return problem


def _same_types(plan: Plan, machine: Machine, file: str) -> None:
    """Refuse a cluster whose chips are not of the types the plan puts its ranks on."""
    kinds = [n.accelerator for n in machine.nodes for _ in range(*n.chips)]
    on = plan.placement.chips
    for cell in plan.placement.cells:
        for rank in cell.ranks if cell.accelerator else ():
            chip = on[rank] if on else rank
            if cell.accelerator not in kinds:
                raise InputError(
                    f"the plan uses {cell.accelerator}, this cluster has none",
                    file=file,
                    found=", ".join(dict.fromkeys(kinds)),
                    expected="a cluster with the plan's chips, or a new plan for this one",
                )
            if kinds[chip] != cell.accelerator:
                raise InputError(
                    f"the plan puts rank {rank} on a {cell.accelerator}, which chip {chip} is not",
                    file=file,
                    found=kinds[chip],
                    expected="the plan's chips in the plan's order, or a new plan for this cluster",
                )


def _check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files to check.")],
    as_json: JsonOption = False,
) -> None:
    """Check cluster, model, job and plan files; every problem with file, line and key."""
    from sim.checks import check_file

    found = [check_file(file) for file in files]

    def show(console: Console) -> None:
        for row in found:
            state = f"[green]ok[/] {row.kind}" if not row.error else "[red]error[/]"
            console.print(f"{row.file}: {state}", highlight=False)

    emit({"files": found}, show, as_json)
    for row in found:
        for problem in row.problems:
            logger.error("%s", problem.text)
    if any(row.error for row in found):
        raise typer.Exit(InputError.exit_code)
