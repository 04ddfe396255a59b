"""The commands of ``strategies``: plan and demo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli_output import (
    JsonOption,
    check_folder,
    check_output,
    emit,
    emit_text,
    logger,
    progress,
    stderr_console,
)
from sim.errors import StoppedError, UsageError
from sim.thresholds import fail_if, numbers_of, read_thresholds

if TYPE_CHECKING:
    from rich.console import Console

    from sim.problem import Problem
    from sim.report.document import PlanDocument
    from sim.report.report import Report
    from strategies.search import SearchResult
    from strategies.search.result import Without

__all__ = ["register"]

DEMO_CLUSTER, DEMO_MODEL = "v100_t4", "gpt2_355m"
INTERRUPTED = 130
"""Exit code after Ctrl-C; the best plan found so far has been printed and written."""
DEMO_FOLDER = Path("hetlab-demo")

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a value: job.global_batch=512, cluster.PATH=..."),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        help="Take a knob out of the search, one per --pin, e.g. tp=8. Numbers: tp pp dp ep "
        "microbatch chunks zero. Names: schedule recompute orders families. Yes or no: "
        "sequence_parallel split_backward scatter all_types. Several: accelerators=A,B. "
        "offload=yes lets plans that use host memory compete, no leaves them out, auto (the "
        "default) looks for them when nothing else fits.",
    ),
]
ForbidOption = Annotated[
    list[str] | None,
    typer.Option(
        "--forbid",
        help="Take a strategy out of the search, one per --forbid: balanced (lent experts), "
        "local_sgd (sites that step by themselves), offload, uneven (unlike shares of "
        "microbatches and layers).",
    ),
]
TopOption = Annotated[int, typer.Option(min=1, help="Plans that are simulated at the end.")]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Seconds after which nothing new is started; without a plan by then, up to 30 more.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add ``plan`` and ``demo``."""
    app.command("plan")(_plan)
    app.command("demo")(_demo)


def _plan(
    cluster: Annotated[str, typer.Argument(help="Cluster file, or a bundled name.")],
    model: Annotated[str, typer.Argument(help="Model file, or a bundled name.")],
    job: Annotated[str, typer.Argument(help="Job file, or a bundled name.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here ('-' for stdout).")
    ] = None,
    overrides: SetOption = None,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    top: TopOption = 8,
    budget: BudgetOption = None,
    contention: Annotated[bool, typer.Option(help="Transfers share links.")] = True,
    sub_groups: Annotated[
        bool, typer.Option(help="Then let parts of a type choose sizes of their own.")
    ] = False,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-one-out", help="Search again without each strategy: what it gave."),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that simulate.")] = 1,
    store: Annotated[
        Path | None, typer.Option(help="Run table: known simulations are not repeated.")
    ] = None,
    fail: Annotated[
        list[str] | None, typer.Option("--fail-if", help="Exit 5 if this holds: step_time>2s.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best plan for a cluster, a model and a job."""
    from sim.problem import load_problem
    from strategies.search import leave_one_out, search, sub_grouped
    from strategies.search.hetero_auto import SECONDS

    read_thresholds(fail or ())
    check_output(output, "--output")
    check_output(store, "--store")
    problem = load_problem(cluster, model, job, overrides or ())
    with _shown() as show:
        result = search(
            problem,
            pins=_pins(pin, forbid),
            top=top,
            budget=budget,
            progress=show,
            store=store,
            contention=contention,
            n_jobs=jobs,
        )
        if sub_groups:
            result = sub_grouped(
                result,
                pins=_pins(pin, forbid),
                top=top,
                progress=show,
                store=store,
                contention=contention,
                n_jobs=jobs,
                seconds=SECONDS if budget is None else budget - result.wall_s,
            )
    without: tuple[Without, ...] = ()
    if leave_out:
        with _shown() as show:
            without = leave_one_out(
                problem, result, pins=_pins(pin, forbid), top=top, budget=budget, progress=show,
                store=store, contention=contention, n_jobs=jobs,
            )  # fmt: skip
    report, document = _report(result, without)
    to_stdout = str(output) == "-"
    if to_stdout:
        _write_plan(result, None)
    else:
        emit(document, lambda console: _print(console, document, result), as_json)
    if output is not None and not to_stdout:
        _write_plan(result, output)
    if result.stopped and (budget is None or result.wall_s < budget):
        raise typer.Exit(INTERRUPTED)
    fail_if(fail or [], numbers_of(report.metrics))


def _demo(
    cluster: Annotated[str, typer.Option(help="Another cluster: a file or bundled name.")] = "",
    model: Annotated[str, typer.Option(help="Another model.")] = "",
    job: Annotated[str, typer.Option(help="Another job.")] = "",
    folder: Annotated[Path, typer.Option(help="Where picture, trace and plan go.")] = DEMO_FOLDER,
    as_json: JsonOption = False,
) -> None:
    """Plan and simulate the bundled job: 12 V100 + 4 T4, GPT-2 355M."""
    from sim.plan.io import save_plan
    from strategies.search import search

    check_folder(folder, "--folder")
    problem = _demo_problem(cluster, model, job)
    with _shown() as show:
        result = search(problem, progress=show)
    report, document = _report(result)
    emit(document, lambda console: _print_demo(console, document, result, report), as_json)
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(result.plan, folder / "plan.json")
    written = {
        "plan": folder / "plan.json",
        "picture": report.save_gantt(folder / "gantt.png"),
        "trace": report.save_trace(folder / "trace.json.gz"),
    }
    for what, path in written.items():
        logger.info("%s: %s", what, path)


def _demo_problem(cluster: str, model: str, job: str) -> Problem:
    """The bundled job, on any cluster; a bundled cluster brings its own job and model."""
    import hardware_profiles
    from sim.problem import load_problem
    from sim.spec.load import read_source

    cluster = cluster or DEMO_CLUSTER
    jobs = hardware_profiles.folder("jobs")
    bundled = (jobs / f"{cluster}.yaml").is_file()
    job = job or (cluster if bundled else DEMO_CLUSTER)
    if not model and bundled and job == cluster:
        model = str(read_source(Path(str(jobs / f"{job}.yaml"))).data["name"])
    return load_problem(cluster, model or DEMO_MODEL, job)


def _pins(texts: list[str] | None, forbid: list[str] | None = None) -> dict[str, Any]:
    pins: dict[str, Any] = {"forbid": tuple(forbid)} if forbid else {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UsageError(f"--pin {text}: expected KNOB=VALUE, e.g. tp=8")
        pins[name.strip()] = value.strip()
    return pins


@contextmanager
def _shown() -> Iterator[Callable[[str, int, int], None]]:
    """Show a search's progress on stderr; silent when stderr is no terminal.

    Raises:
        StoppedError: Ctrl-C where the search does not keep what it has found.
    """
    try:
        if stderr_console().is_terminal:
            with _shown_lines() as show:
                yield show
        else:
            yield lambda what, done, total: None
    except KeyboardInterrupt:
        raise StoppedError("stopped before a plan was found") from None


@contextmanager
def _shown_lines() -> Iterator[Callable[[str, int, int], None]]:
    with progress("searching") as _:
        console = stderr_console()
        last = [""]

        def show(what: str, done: int, total: int) -> None:
            if what != last[0]:
                last[0] = what
                console.print(f"  {what}: {total:,}" if total else f"  {what}", style="dim")
            elif what == "offload":
                console.print(f"  offload {done} of {total}", style="dim")

        yield show


def _report(result: SearchResult, without: tuple[Without, ...] = ()) -> tuple[Report, PlanDocument]:
    from sim.report.document import SearchFacts
    from sim.report.report import report_of
    from strategies.search.result import OffloadDocument

    report = report_of(result.run, result.problem)
    facts = SearchFacts(
        space=result.space,
        evaluated=result.evaluated,
        pruned=sum(result.pruned.values()),
        wall_s=result.wall_s,
    )
    document = report.plan_document(facts)
    if result.offload is None and not (result.notes or result.experts or without):
        return report, document
    fields = {f: getattr(document, f) for f in document.__struct_fields__}
    return report, OffloadDocument(
        **fields, offload=result.offload, notes=result.notes, sites=result.sites,
        experts=result.experts, without=without,
    )  # fmt: skip


def _print(console: Console, document: PlanDocument, result: SearchResult) -> None:
    from sim.report.table import Tight, print_plan

    print_plan(console, document)
    for site in result.sites:
        console.print(Tight(f"{site.site}: {site.text}"), highlight=False)
    if result.experts is not None:
        console.print(Tight(f"experts: {result.experts.text}"), highlight=False)
    if result.offload is not None:
        console.print(Tight(f"offload: {result.offload.why}"), highlight=False)
        for stage in result.offload.stages:
            console.print(Tight(f"on the host, stage {stage.index}: {stage.text}"), highlight=False)
    console.print(Tight(f"bound by {result.binding}"), highlight=False)
    if result.next_best:
        console.print(Tight(f"next best: {result.next_best}"), highlight=False)
    for other in getattr(document, "without", ()):
        console.print(Tight(other.text), highlight=False)
    for note in result.notes:
        console.print(Tight(f"note: {note}"), highlight=False)
    if result.sub_groups:
        console.print(f"sub-groups: {result.sub_groups}", highlight=False)
    if result.stopped:
        console.print("the search was stopped early: this is the best found so far")


def _print_demo(
    console: Console, document: PlanDocument, result: SearchResult, report: Report
) -> None:
    _print(console, document, result)
    console.print()
    console.print(report.text(max(60, min(console.width, 120))), highlight=False, markup=False)


def _write_plan(result: SearchResult, path: Path | None) -> None:
    from sim.plan.io import plan_to_json, save_plan

    if path is None:
        emit_text(plan_to_json(result.plan).decode())
    else:
        save_plan(result.plan, path)
        logger.info("plan: %s", path)
