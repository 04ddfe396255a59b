"""The command of ``real_runtime``: run. Imports no torch, so that help stays quick."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

import real_runtime.run_options as opt
from sim.cli_output import JsonOption, check_folder, check_output, emit, emit_text, logger
from sim.errors import UsageError

if TYPE_CHECKING:
    from real_runtime.run_cluster import ClusterOptions
    from real_runtime.settings import RunSettings
    from sim.plan.plan import Plan
    from sim.problem import Problem

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``run``."""
    app.command("run")(_run)


def _run(
    plan_file: opt.PlanFile,
    data: opt.Data,
    steps: opt.Steps = 10,
    out: opt.Out = Path("hetlab-run"),
    dtype: opt.Dtype = "",
    learning_rate: opt.LearningRate = 3e-4,
    warmup: opt.Warmup = 0,
    schedule_steps: opt.ScheduleSteps = 0,
    weight_decay: opt.WeightDecay = 0.1,
    clip: opt.Clip = 1.0,
    seed: opt.Seed = 0,
    weights: opt.Weights = "",
    save: opt.Save = False,
    checkpoint_every: opt.CheckpointEvery = 0,
    keep: opt.Keep = 2,
    resume: opt.Resume = False,
    overwrite: opt.Overwrite = False,
    restarts: opt.Restarts = 0,
    deadline: opt.Deadline = 120.0,
    trace: opt.Trace = None,
    tensorboard: opt.TensorBoard = False,
    emulate: opt.Emulate = "",
    pin_cores: opt.PinCores = None,
    launcher: opt.Launcher = "",
    hosts: opt.Hosts = "",
    port: opt.Port = 29500,
    sbatch: opt.Sbatch = None,
    submit: opt.Submit = False,
    no_preflight: opt.NoPreflight = False,
    probed: opt.Probed = "",
    allow_other_cluster: opt.AllowOtherCluster = False,
    dry_run: opt.DryRun = False,
    as_json: JsonOption = False,
) -> None:
    """Train a plan, one process per rank: on this machine, or on several by --launcher."""
    from real_runtime.run_checks import check_numbers, check_paths, check_weights
    from real_runtime.run_cluster import ClusterOptions, check_options
    from real_runtime.settings import Recipe, RunSettings

    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other")
    check_numbers(
        learning_rate=learning_rate, weight_decay=weight_decay, clip=clip, deadline=deadline
    )
    check_paths(PLAN=plan_file, data=data, out=out, weights=weights)
    options = ClusterOptions(
        launcher=launcher, hosts=hosts, port=port, sbatch=tuple(sbatch or ()), submit=submit,
        dry_run=dry_run,
    )  # fmt: skip
    check_options(options, restarts)
    if emulate:
        _check_rehearsal(launcher, probed, restarts)
    plan, problem = _load(plan_file, probed, allow_other_cluster, here=not launcher and not emulate)
    recipe = Recipe(
        learning_rate=learning_rate, warmup=warmup, length=schedule_steps,
        weight_decay=weight_decay, clip=clip,
    )  # fmt: skip
    settings = RunSettings(
        plan=str(plan_file.absolute()), data=str(data.absolute()), out=str(out.absolute()),
        steps=steps, dtype=_dtype(dtype, problem.job.dtype), seed=seed, deadline=deadline,
        threads=_threads(plan), weights=str(Path(weights).absolute()) if weights else "",
        save=save, checkpoint_every=checkpoint_every, keep=keep, preflight=not no_preflight,
        tensorboard=tensorboard, recipe=recipe, cores=_cores(plan, pin_cores),
    )  # fmt: skip
    if emulate:
        settings = _rehearsed(plan, problem, settings, emulate, pin_cores)
    settings = msgspec.structs.replace(settings, data_digest=_check_data(data, problem, seed))
    check_weights(settings.weights)
    check_folder(out, "--out")
    check_output(trace, "--trace", (".json", ".gz"), "trace")
    _start(options, plan, problem, settings, resume, overwrite, restarts, trace, as_json)


def _start(
    options: ClusterOptions,
    plan: Plan,
    problem: Problem,
    settings: RunSettings,
    resume: bool,
    overwrite: bool,
    restarts: int,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Start what is checked, or say how, while no other run may write to its folder."""
    from real_runtime.run_cluster import start_cluster
    from real_runtime.run_folder import check_started_over, held

    out = Path(settings.out)
    writes = not options.dry_run and (out.is_dir() or not resume)
    with held(out) if writes else nullcontext():
        if resume:
            settings = _resumed(plan, settings)
        else:
            check_started_over(out, overwrite)
        if settings.emulate:
            _check_steps(settings)
        if start_cluster(options, plan, problem, settings, as_json):
            return
        if options.dry_run:
            _print_command(plan, settings)
            return
        _train(plan, problem, settings, restarts, trace, as_json)


def _load(
    plan_file: Path, probed: str, allow_other_cluster: bool, here: bool
) -> tuple[Plan, Problem]:
    """A plan that this runtime runs, made for the cluster where it will, and its problem."""
    from real_runtime.probed import check_probed
    from real_runtime.run_cluster import check_cluster
    from real_runtime.support import check_supported
    from sim.plan.io import load_plan

    plan = load_plan(plan_file)
    problem = check_supported(plan)
    if probed:
        check_cluster(plan, probed, allow_other_cluster)
    elif here:
        check_probed(plan, plan_file, allow_other_cluster)
    return plan, problem


def _check_rehearsal(launcher: str, probed: str, restarts: int) -> None:
    """Refuse options that an emulation has no use for."""
    for name, given in (("launcher", launcher), ("probed", probed), ("restarts", restarts)):
        if given:
            raise UsageError(f"--emulate runs all ranks here, once; leave out --{name}")


def _check_steps(settings: RunSettings) -> None:
    """Refuse an emulation that ends before its pace is known."""
    from real_runtime.emulate import check_steps

    check_steps(settings)


def _rehearsed(
    plan: Plan, problem: Problem, settings: RunSettings, cluster: str, pinned: bool | None
) -> RunSettings:
    """The same run as an emulation of a cluster; says of what."""
    from real_runtime.cores import usable_cores
    from real_runtime.emulate import check_emulated, emulation, share_of

    name = check_emulated(plan, cluster)
    what, ranks = emulation(plan, problem), plan.placement.num_ranks
    logger.info(
        "emulating %s: each rank has %.2f of a core; passes of ranks 0 to %d take %s times those "
        "of %s", name, share_of(ranks, len(usable_cores()) or 1), ranks - 1,
        " ".join(f"{f:.2f}" for f in what.factors), what.fastest,
    )  # fmt: skip
    return msgspec.structs.replace(
        settings, emulate=name, threads=1, cores=_cores(plan, pinned is not False)
    )


def _dtype(asked: str, planned: str) -> str:
    """The compute dtype: asked for, or the plan's where the runtime has it."""
    from real_runtime.settings import DTYPES

    known = {"tf32": "fp32"}
    dtype = asked or known.get(planned, planned)
    if dtype not in DTYPES:
        raise UsageError(
            f"the runtime does not compute in {dtype}; give --dtype {' or '.join(DTYPES)}"
        )
    return dtype


def _threads(plan: Plan) -> int:
    from real_runtime.launch import threads_per_rank

    return threads_per_rank(plan.placement.num_ranks)


def _cores(plan: Plan, asked: bool | None) -> tuple[tuple[int, ...], ...]:
    from real_runtime.cores import cores_of

    return cores_of(plan.placement.num_ranks, asked)


def _check_data(data: Path, problem: Problem, seed: int) -> str:
    """Refuse data that does not do before anything starts; return its digest."""
    from real_runtime.data import Batches, open_tokens
    from real_runtime.preflight import digest_of_data

    job, vocab = problem.job, max(b.vocab for b in problem.model.blocks)
    Batches(open_tokens(data), vocab, job.sequence_length, job.global_batch, seed)
    return digest_of_data(data)


def _resumed(plan: Plan, settings: RunSettings) -> RunSettings:
    """The same run from the newest good checkpoint of its folder."""
    from real_runtime.resume import check_resumable
    from real_runtime.settings import changes, schedule_length

    begin, index = check_resumable(
        Path(settings.out) / "checkpoints", plan, settings,
        lambda error: logger.warning("checkpoint refused: %s", error),
    )  # fmt: skip
    if index.plan_hash != plan.hash:
        logger.info("%s was written by another plan: %s", begin.name, index.plan_hash)
    length = schedule_length(settings)
    if index.schedule not in (0, length):
        logger.warning(
            "the learning rate's cosine ends after %d steps and ended after %d where %s was "
            "written; --schedule-steps %d keeps it", length, index.schedule, begin.name,
            index.schedule,
        )  # fmt: skip
    changed = changes(index.told, settings)
    if changed:
        logger.warning("not as where %s was written: %s", begin.name, ", ".join(changed))
    return msgspec.structs.replace(settings, resume=str(begin))


def _print_command(plan: Plan, settings: RunSettings) -> None:
    from real_runtime.launch import printed

    emit_text(printed(plan.placement.num_ranks, Path(settings.out), settings.threads))


def _train(
    plan: Plan,
    problem: Problem,
    settings: RunSettings,
    restarts: int,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Train on this machine, and print what came of it."""
    from real_runtime.restarts import train
    from real_runtime.summary import document_of, print_run
    from sim.optional import import_optional
    from sim.report.spans import Spans
    from sim.report.trace import save_trace

    import_optional("torch")
    if settings.tensorboard:
        import_optional("tensorboard")
    ranks = plan.placement.num_ranks
    logger.info("training %s on %d processes", plan.name or Path(settings.plan).name, ranks)
    folder = train(
        settings, ranks, restarts, lambda line: logger.info("%s", line),
        lambda line: logger.warning("%s", line),
    )  # fmt: skip
    document = document_of(folder, plan, problem)
    emit(document, lambda console: print_run(console, document, plan), as_json)
    if trace is not None:
        about = {"plan": plan.name, "plan_hash": plan.hash, "hetlab": plan.version}
        spans = Spans.load(folder / "spans.npz")
        logger.info("trace: %s", save_trace(spans, trace, placement=plan.placement, about=about))
