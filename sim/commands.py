"""The commands of ``sim``: simulate a plan, check files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli_output import JsonOption, emit, logger, progress
from sim.errors import HetlabError, InputError, ThresholdError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from sim.engine.faults import Fault
    from sim.plan.plan import Plan
    from sim.problem import Problem
    from sim.report.metrics import Metrics
    from sim.spec.load import Source

__all__ = ["fail_if", "faults_of", "numbers_of", "register"]

_CONDITION = re.compile(r"\s*(?P<key>\w+)\s*(?P<op><=|>=|<|>)\s*(?P<value>\S.*?)\s*\Z")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}


def fail_if(conditions: list[str], metrics: dict[str, float]) -> None:
    """Refuse a result that meets one of the conditions.

    Args:
        conditions: "METRIC OP VALUE", e.g. "step_time>2s"; times may carry a unit.
        metrics: name -> value in SI units.

    Raises:
        UsageError: a condition is malformed or names no metric. ThresholdError: one holds.
    """
    from sim.units import parse_quantity

    for text in conditions:
        match = _CONDITION.match(text)
        if match is None:
            raise UsageError(f"--fail-if {text}: expected METRIC<VALUE, e.g. step_time>2s")
        names = [n for n in (match["key"], match["key"] + "_s") if n in metrics]
        if not names:
            known = " ".join(sorted(metrics))
            raise UsageError(f"--fail-if {text}: no metric {match['key']}; one of {known}")
        raw = match["value"]
        is_number = re.fullmatch(r"[-+.\deE]+", raw) is not None
        limit = float(raw) if is_number else parse_quantity(raw, "seconds")
        if _COMPARE[match["op"]](metrics[names[0]], limit):
            raise ThresholdError(f"{names[0]} is {metrics[names[0]]:.6g}: --fail-if {text} holds")


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


def numbers_of(metrics: Metrics) -> dict[str, float]:
    """The metrics that are numbers, by name."""
    import msgspec

    values = msgspec.to_builtins(metrics)
    return {k: v for k, v in values.items() if isinstance(v, int | float)}


def register(app: typer.Typer) -> None:
    """Add ``simulate`` and ``check``."""
    app.command("simulate")(_simulate)
    app.command("check")(_check)


def _simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 1,
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
    from sim.engine.simulate import simulate
    from sim.plan.io import load_plan
    from sim.plan.validate import validate
    from sim.report.report import report_of
    from sim.report.table import print_simulation

    plan = load_plan(plan_file)
    validate(plan)
    problem = _problem_of(plan, str(plan_file), cluster)
    with progress(f"simulating {plan.name or plan_file.name}"):
        run = simulate(
            plan,
            problem,
            steps=steps,
            fold=fold,
            contention=contention,
            overlap=overlap,
            faults=faults_of(straggler or [], link or [], lose or []),
            seed=seed,
        )
        report = report_of(run, problem)
    document = report.simulate_document()
    emit(document, lambda console: print_simulation(console, document), as_json)
    if gantt is not None:
        logger.info("picture: %s", report.save_gantt(gantt))
    if trace is not None:
        logger.info("trace: %s", report.save_trace(trace))
    fail_if(fail or [], numbers_of(report.metrics))


def _problem_of(plan: Plan, file: str, cluster: str) -> Problem:
    """The problem a plan carries, on another cluster when asked."""
    from sim.problem import load_problem, problem_from_documents

    if not plan.problem:
        raise InputError(
            "the plan carries no problem",
            file=file,
            key="problem",
            expected="a plan written by hetlab plan",
        )
    if not cluster:
        return problem_from_documents(plan.problem)
    problem = load_problem(cluster, plan.problem["model"], plan.problem["job"])
    chips = plan.placement.chips or range(plan.placement.num_ranks)
    if max(chips, default=-1) >= problem.machine.num_chips:
        raise InputError(
            "the plan needs more chips than this cluster has",
            file=cluster,
            found=f"{problem.machine.num_chips} chips",
            expected=f"{max(chips) + 1}",
        )
    return problem


def _check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files to check.")],
    as_json: JsonOption = False,
) -> None:
    """Check cluster, model, job and plan files; every problem with file, line and key."""
    found: list[dict[str, str]] = []
    worst: HetlabError | None = None
    for file in files:
        try:
            found.append({"file": str(file), "kind": _check_file(file), "error": ""})
        except HetlabError as error:
            found.append({"file": str(file), "kind": "", "error": str(error)})
            worst = worst or error

    def show(console: Console) -> None:
        for row in found:
            state = f"[green]ok[/] {row['kind']}" if not row["error"] else "[red]error[/]"
            console.print(f"{row['file']}: {state}", highlight=False)

    emit({"files": found}, show, as_json)
    for row in found:
        if row["error"]:
            logger.error("%s", row["error"])
    if worst is not None:
        raise typer.Exit(worst.exit_code)


def _check_file(file: Path) -> str:
    """Check one file by what it is; returns the kind."""
    from sim.hardware.build import build_machine
    from sim.model.load import load_model_source
    from sim.plan.io import load_plan
    from sim.plan.validate import validate as validate_plan
    from sim.problem import problem_from_documents
    from sim.spec.cluster import ClusterDoc
    from sim.spec.job import JobDoc
    from sim.spec.load import read_source, validate

    source = read_source(file)
    kind = _kind_of(source)
    if kind == "plan":
        plan = load_plan(file)
        validate_plan(plan)
        if plan.problem:
            problem_from_documents(plan.problem)
    elif kind == "cluster":
        build_machine(validate(ClusterDoc, source))
    elif kind == "job":
        validate(JobDoc, source)
    else:
        load_model_source(source)
    return kind


def _kind_of(source: Source) -> str:
    """What a document is, by the keys only that kind has."""
    signs = {
        "plan": ("placement",),
        "cluster": ("sites",),
        "job": ("global_batch",),
        "model": ("model_type", "text_config", "blocks", "architectures"),
    }
    for kind, keys in signs.items():
        if any(k in source.data for k in keys):
            return kind
    raise InputError(
        "neither a plan, a cluster, a job nor a model",
        file=source.file,
        line=1,
        found="keys " + ", ".join(list(map(str, source.data))[:6]),
        expected="one of " + ", ".join(k for keys in signs.values() for k in keys),
    )
