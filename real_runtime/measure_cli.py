"""Commands that measure: probe, compare, calibrate. Imports no torch, so that help stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli_output import JsonOption, check_folder, check_output, emit, logger, progress
from sim.errors import InputError, UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``probe``, ``compare`` and ``calibrate``."""
    app.command("probe")(_probe)
    app.command("compare")(_compare)
    app.command("calibrate")(_calibrate)


def _probe(
    out: Annotated[Path, typer.Option(help="Folder of the profiles.")] = Path("profiles"),
    procs: Annotated[int, typer.Option(min=1, help="Ranks that measure at once.")] = 2,
    threads: Annotated[
        int, typer.Option(min=0, help="Of each rank; 0: the cores divided, as hetlab run does.")
    ] = 0,
    name: Annotated[str, typer.Option(help="Of the cluster.")] = "probed",
    repeats: Annotated[int, typer.Option(min=7, help="Of each measurement.")] = 9,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes: a first idea.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine and write it down as a cluster that plans can be made for."""
    import datetime
    import os

    import msgspec

    from real_runtime.cores import usable_cores
    from real_runtime.launch import threads_per_rank
    from real_runtime.probe.fit import fit_chip, fit_wire
    from real_runtime.probe.launch import measure
    from real_runtime.probe.profile import check_name, documents_of, write_profiles
    from real_runtime.probe.records import QUICK, ProbeSettings
    from real_runtime.probe.report import print_probe, probe_document
    from real_runtime.probed import cluster_of, remember
    from sim.hardware.build import build_machine
    from sim.interop.files import write_whole
    from sim.optional import import_optional
    from sim.spec.cluster import ClusterDoc
    from sim.spec.load import Source, validate

    check_name(name)
    check_folder(out, "--out")
    cores = len(usable_cores()) or os.cpu_count() or 1
    if threads > cores:
        raise UsageError(f"--threads {threads}: this process may use {cores} cores")
    import_optional("torch")
    settings = msgspec.structs.replace(
        QUICK if quick else ProbeSettings(),
        ranks=procs, threads=threads or threads_per_rank(procs), repeats=repeats,
    )  # fmt: skip
    with progress("measuring") as tick:

        def show(line: str) -> None:
            logger.debug("%s", line)
            tick(1)

        facts, records = measure(settings, show)
    chip, wire = fit_chip(records), fit_wire(records, procs) if procs > 1 else None
    date = datetime.date.today().isoformat()
    documents = documents_of(name, facts, chip, wire, records, settings, date)
    machine = build_machine(validate(ClusterDoc, Source(documents.cluster, name)))
    document = probe_document(facts, chip, wire, records, machine)
    files = write_profiles(out, documents)
    write_whole(out / "probe.json", msgspec.json.format(msgspec.json.encode(document)).decode())
    document["files"] = [str(f) for f in files]
    emit(document, lambda console: print_probe(console, document), as_json)
    logger.info("cluster: %s", files[-1])
    try:
        remember(cluster_of(files[-1]), files[-1], date)
    except InputError as error:
        logger.warning("hetlab run will not know of this probe: %s", error)


def _compare(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    other: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|PLAN", help="Folder of a run of that plan (hetlab run --out), or a plan."
        ),
    ],
    cluster: Annotated[
        str, typer.Option(help="Simulate on this cluster, e.g. a probed one, not on the plan's.")
    ] = "",
    top: Annotated[int, typer.Option(min=0, help="Ops shown that are off most.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Put a run beside the simulation of its plan, op by op; or two plans beside each other."""
    if other.is_file():
        from sim.explain_command import print_compared_plans

        if cluster:
            raise UsageError("--cluster is for a run; each of two plans has a cluster of its own")
        print_compared_plans(plan_file, other, as_json)
        return
    from real_runtime.compare import compare
    from real_runtime.compare_run import moved, read_run
    from real_runtime.compare_table import print_comparison
    from real_runtime.spreads import WIDE
    from sim.plan.io import load_plan
    from sim.problem import problem_from_documents

    plan = load_plan(plan_file)
    run = read_run(other, plan)
    if cluster:
        simulated, problem = moved(plan, cluster)
    else:
        simulated, problem = plan, problem_from_documents(plan.problem)
    found = compare(simulated, problem, run, plan.hash)
    emit(found, lambda console: print_comparison(console, found, top), as_json)
    if found.only_first:
        logger.warning("the run had one step, and the first one warms up: it says little")
    if found.wide:
        logger.warning(
            "measured with a spread of more than %.0f %%, so not to be trusted as closely: %s",
            WIDE * 100, ", ".join(f"{s.name} ({s.spread:.0%})" for s in found.wide),
        )  # fmt: skip


def _calibrate(
    out: Annotated[Path, typer.Option(help="Cluster file with the corrected profiles.")],
    pairs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PLAN RUN...", help="A plan and the folder of its run; more pairs decide more."
        ),
    ] = None,
    from_runs: Annotated[
        str,
        typer.Option(
            help="Instead: fit step times of this CSV file, or the bundled runs; --out is JSON."
        ),
    ] = "",
    cluster: Annotated[
        str, typer.Option(help="Correct this cluster, e.g. a probed one, not the first plan's.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Correct a cluster's efficiencies, overheads and links from the ops of measured runs."""
    import datetime

    from real_runtime.calibrate import calibrate
    from real_runtime.calibrate_table import print_calibration
    from real_runtime.compare_run import read_run
    from real_runtime.probed import cluster_of, remember_calibrated
    from sim.interop.files import write_whole, yaml_text
    from sim.plan.io import load_plan
    from sim.problem import load_problem

    if from_runs:
        from sim.fidelity.calibrate_file import calibrate_file

        if pairs or cluster:
            raise UsageError("--from-runs fits published runs; it takes no plan and no cluster")
        calibrate_file(from_runs, out, as_json)
        return
    if not pairs or len(pairs) % 2:
        raise UsageError("hetlab calibrate: give each plan and then the folder of its run")
    if out.suffix != ".yaml":
        raise UsageError(f"--out {out}: a cluster's file ends in .yaml")
    check_output(out, "--out")
    plans = [load_plan(file) for file in pairs[::2]]
    runs = [(plan, read_run(at, plan)) for plan, at in zip(plans, pairs[1::2], strict=True)]
    document = plans[0].problem["cluster"]
    if cluster:
        problem = plans[0].problem
        document = load_problem(cluster, problem["model"], problem["job"]).documents["cluster"]
    date = datetime.date.today().isoformat()
    with progress("fitting"):
        found = calibrate(runs, document, date)
    write_whole(out, yaml_text(found.cluster))
    emit(found, lambda console: print_calibration(console, found), as_json)
    for kind, (before, after) in found.worse.items():
        logger.warning(
            "%s is predicted worse than before: median error %.1f %%, was %.1f %%", kind,
            after * 100, before * 100,
        )  # fmt: skip
    try:
        if remember_calibrated(cluster_of(out), document, out, date):
            logger.info("hetlab run takes plans for it on this machine, which it describes")
    except InputError as error:
        logger.warning("hetlab run will not know of this calibration: %s", error)
    logger.info("cluster: %s", out)
