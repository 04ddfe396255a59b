"""The command of ``real_runtime``: run. Imports no torch, so that help stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from sim.cli_output import JsonOption, check_folder, check_output, emit, emit_text, logger
from sim.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``run``."""
    app.command("run")(_run)


def _run(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    data: Annotated[
        Path, typer.Option(help="Text (its bytes are the tokens), or token ids: .npy, .bin.")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 10,
    out: Annotated[Path, typer.Option(help="Folder for log, spans and weights.")] = Path(
        "hetlab-run"
    ),
    dtype: Annotated[
        str, typer.Option(help="bf16, fp32 or fp64; the plan's own when left out.")
    ] = "",
    learning_rate: Annotated[float, typer.Option(min=0.0, help="After warm-up.")] = 3e-4,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.")] = 0,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Of matrices (adamw).")] = 0.1,
    clip: Annotated[float, typer.Option(min=0.0, help="Largest gradient norm, 0: none.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data order.")] = 0,
    weights: Annotated[str, typer.Option(help="Begin with these safetensors.")] = "",
    save: Annotated[bool, typer.Option("--save", help="Write the trained weights.")] = False,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints, 0: none.")
    ] = 0,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that stay.")] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest good checkpoint in --out.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="Times to start again from it after a rank died.")
    ] = 0,
    deadline: Annotated[
        float, typer.Option(min=1.0, help="Seconds a rank waits for others.")
    ] = 120.0,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of the last steps here (.gz).")
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            help="torchrun or sbatch: print how each node of the plan's cluster starts, and write "
            "what it reads, a script for sbatch included. Left out: all ranks start here."
        ),
    ] = "",
    hosts: Annotated[
        str, typer.Option(help="Hosts of the cluster's nodes in its order, with commas.")
    ] = "",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of the rendezvous of several nodes.")
    ] = 29500,
    sbatch: Annotated[
        list[str] | None, typer.Option(help='More for sbatch, e.g. "--partition=gpu".')
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand the script to sbatch.")] = False,
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Do not compare the ranks before training.")
    ] = False,
    probed: Annotated[
        str, typer.Option(help="Cluster file of hetlab probe that the plan must be made for.")
    ] = "",
    allow_other_cluster: Annotated[
        bool, typer.Option("--allow-other-cluster", help="Run although it was not.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, then print the command only.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a plan, one process per rank: on this machine, or on several by --launcher."""
    from real_runtime.data import Batches, open_tokens
    from real_runtime.launch import printed, threads_per_rank
    from real_runtime.restarts import train
    from real_runtime.resume import check_resumable
    from real_runtime.run_cluster import ClusterOptions, check_cluster, check_options, start_cluster
    from real_runtime.settings import Recipe, RunSettings
    from real_runtime.summary import document_of, print_run
    from real_runtime.support import check_supported
    from sim.optional import import_optional
    from sim.plan.io import load_plan
    from sim.report.spans import Spans
    from sim.report.trace import save_trace

    options = ClusterOptions(
        launcher=launcher, hosts=hosts, port=port, sbatch=tuple(sbatch or ()), submit=submit,
        dry_run=dry_run,
    )  # fmt: skip
    check_options(options, restarts)
    plan = load_plan(plan_file)
    problem = check_supported(plan)
    if probed:
        check_cluster(plan, probed, allow_other_cluster)
    settings = RunSettings(
        plan=str(plan_file.absolute()),
        data=str(data.absolute()),
        out=str(out.absolute()),
        steps=steps,
        dtype=_dtype(dtype, problem.job.dtype),
        seed=seed,
        deadline=deadline,
        threads=threads_per_rank(plan.placement.num_ranks),
        weights=str(Path(weights).absolute()) if weights else "",
        save=save,
        checkpoint_every=checkpoint_every,
        keep=keep,
        preflight=not no_preflight,
        recipe=Recipe(
            learning_rate=learning_rate, warmup=warmup, weight_decay=weight_decay, clip=clip
        ),
    )
    job, vocab = problem.job, max(b.vocab for b in problem.model.blocks)
    Batches(open_tokens(data), vocab, job.sequence_length, job.global_batch, seed)
    check_folder(out, "--out")
    check_output(trace, "--trace")
    ranks, folder = plan.placement.num_ranks, Path(settings.out)
    if resume:
        begin, index = check_resumable(
            folder / "checkpoints", plan, settings,
            lambda error: logger.warning("checkpoint refused: %s", error),
        )  # fmt: skip
        settings = msgspec.structs.replace(settings, resume=str(begin))
        if index.plan_hash != plan.hash:
            logger.info("%s was written by another plan: %s", begin.name, index.plan_hash)
    if start_cluster(options, plan, problem, settings, as_json):
        return
    if dry_run:
        emit_text(printed(ranks, folder, settings.threads))
        return
    import_optional("torch")
    logger.info("training %s on %d processes", plan.name or plan_file.name, ranks)
    train(
        settings, ranks, restarts, lambda line: logger.info("%s", line),
        lambda line: logger.warning("%s", line),
    )  # fmt: skip
    document = document_of(folder, plan, problem)
    emit(document, lambda console: print_run(console, document, plan), as_json)
    if trace is not None:
        about = {"plan": plan.name, "plan_hash": plan.hash, "hetlab": plan.version}
        spans = Spans.load(folder / "spans.npz")
        logger.info("trace: %s", save_trace(spans, trace, placement=plan.placement, about=about))


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
