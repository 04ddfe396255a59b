"""Options of ``hetlab run``, one name each, so that its signature can be seen whole.

Imports no torch, so that help stays quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]

# What is trained.
Data = Annotated[
    Path, typer.Option(help="Text (its bytes are the tokens), or token ids: .npy, .bin.")
]
Steps = Annotated[int, typer.Option(min=1, max=2**53, help="Steps to train.")]
Dtype = Annotated[str, typer.Option(help="bf16, fp32 or fp64; the plan's own when left out.")]
LearningRate = Annotated[float, typer.Option(min=0.0, help="After warm-up.")]
Warmup = Annotated[int, typer.Option(min=0, max=2**53, help="Steps of linear warm-up.")]
ScheduleSteps = Annotated[
    int,
    typer.Option(
        min=0, max=2**53, help="Steps after which the learning rate's cosine ends, 0: --steps."
    ),
]
WeightDecay = Annotated[float, typer.Option(min=0.0, help="Of matrices (adamw).")]
Clip = Annotated[float, typer.Option(min=0.0, help="Largest gradient norm, 0: none.")]
Seed = Annotated[int, typer.Option(min=0, help="Of weights and data order.")]
Weights = Annotated[str, typer.Option(help="Begin with these safetensors.")]

# What is written.
Out = Annotated[Path, typer.Option(help="Folder for log, spans and weights.")]
Save = Annotated[bool, typer.Option("--save", help="Write the trained weights.")]
Trace = Annotated[
    Path | None, typer.Option(help="Write a Chrome trace of the last steps here (.gz).")
]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write scalars to tensorboard/ in --out, too.")
]
CheckpointEvery = Annotated[int, typer.Option(min=0, help="Steps between checkpoints, 0: none.")]
Keep = Annotated[int, typer.Option(min=1, help="Checkpoints that stay.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest good checkpoint in --out.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start over although --out holds checkpoints.")
]
Restarts = Annotated[
    int, typer.Option(min=0, help="Times to start again from it after a rank died.")
]
Deadline = Annotated[
    float, typer.Option(min=1.0, max=365 * 86400.0, help="Seconds a rank waits for others.")
]

# Where it runs.
Emulate = Annotated[
    str,
    typer.Option(
        metavar="CLUSTER",
        help="Rehearse on this machine: ranks as slow beside one another, and links as slow "
        "beside them, as in this cluster, which the plan is for.",
    ),
]
PinCores = Annotated[
    bool | None,
    typer.Option(
        "--pin-cores/--no-pin-cores",
        help="Keep each rank on cores of its own where it computes on the processor. Left out: "
        "where there are as many cores as ranks.",
    ),
]
Launcher = Annotated[
    str,
    typer.Option(
        help="torchrun or sbatch: print how each node of the plan's cluster starts, and write "
        "what it reads, a script for sbatch included. Left out: all ranks start here."
    ),
]
Hosts = Annotated[str, typer.Option(help="Hosts of the cluster's nodes in its order, with commas.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Of the rendezvous of several nodes.")]
Sbatch = Annotated[list[str] | None, typer.Option(help='More for sbatch, e.g. "--partition=gpu".')]
Submit = Annotated[bool, typer.Option("--submit", help="Hand the script to sbatch.")]
NoPreflight = Annotated[
    bool, typer.Option("--no-preflight", help="Do not compare the ranks before training.")
]
Probed = Annotated[
    str,
    typer.Option(
        help="Cluster file of hetlab probe that the plan must be made for. Left out: what hetlab "
        "probe last saw of this machine, where all ranks start here."
    ),
]
AllowOtherCluster = Annotated[
    bool, typer.Option("--allow-other-cluster", help="Run although it was made for another.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check, then print the command only.")]
