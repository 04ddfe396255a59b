"""What a run is told beyond its plan: data, steps, optimizer numbers, where to write."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

__all__ = [
    "DTYPES", "WEIGHTS_INDEX", "Recipe", "RunSettings", "changes", "learning_rate",
    "schedule_length", "told_of",
]  # fmt: skip

WEIGHTS_INDEX = "model.safetensors.index.json"
"""Where a folder of weights says which file holds which parameter."""

DTYPES = ("bf16", "fp32", "fp64")
"""Compute dtypes of the runtime; fp64 is for parity."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of the optimizer.

    Args:
        learning_rate: after warm-up. final_share: of it that is left at the end of the cosine.
        warmup: [steps]. length: [steps] of warm-up and cosine, 0 for the run's steps.
        weight_decay: of matrices (adamw only). beta1, beta2, epsilon: of adam and adamw.
        momentum: of sgd. clip: largest global gradient norm, 0 for none.
    """

    learning_rate: float = 3e-4
    final_share: float = 0.1
    warmup: int = 0
    length: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.0
    clip: float = 1.0


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a rank needs to know.

    Args:
        plan, data: files. data_digest: of the data, see ``preflight.digest_of_data``, or "".
        out: folder of the run. steps: to train, counted from 0.
        dtype: of products and activations. seed: of weights and of the order of the data.
        deadline: [s] that a rank waits for others before it fails. threads: per rank, 0 for all.
        cores: that each rank is kept on where it computes on the processor, () for any.
        weights: folder of safetensors to begin with, "" for fresh weights.
        save: write the trained weights. kept_spans: [steps] at the end whose spans are kept.
        checkpoint_every: [steps] between checkpoints, 0 for none. keep: how many stay.
        resume: folder of the checkpoint to go on from, "" to begin.
        preflight: compare the ranks before weights are loaded.
        tensorboard: also write scalars for TensorBoard.
        emulate: name of the cluster that this machine stands for, "" for none.
        own_pairs: a process group for every directed rank pair also where none is needed.
        recipe: see there.
    """

    plan: str
    data: str
    out: str
    steps: int
    dtype: str = "fp32"
    seed: int = 0
    deadline: float = 120.0
    threads: int = 0
    cores: tuple[tuple[int, ...], ...] = ()
    data_digest: str = ""
    weights: str = ""
    save: bool = False
    kept_spans: int = 50
    checkpoint_every: int = 0
    keep: int = 2
    resume: str = ""
    preflight: bool = True
    tensorboard: bool = False
    emulate: str = ""
    own_pairs: bool = False
    recipe: Recipe = Recipe()


def schedule_length(settings: RunSettings) -> int:
    """Return the steps after which the learning rate's cosine ends."""
    return settings.recipe.length or settings.steps


def told_of(settings: RunSettings) -> dict[str, str | float]:
    """Return what may change where a run goes on, and then changes what it learns; by option."""
    recipe = settings.recipe
    data = {"data": settings.data_digest} if settings.data_digest else {}
    return data | {
        "learning-rate": recipe.learning_rate,
        "warmup": float(recipe.warmup),
        "weight-decay": recipe.weight_decay,
        "clip": recipe.clip,
    }


def changes(before: Mapping[str, str | float], settings: RunSettings) -> list[str]:
    """Return what a run that goes on is told otherwise than the one that wrote a checkpoint.

    Args:
        before: what that one was told. settings: of the run that goes on.
    """

    def shown(value: str | float) -> str:
        return value if isinstance(value, str) else f"{value:g}"

    return [
        f"--{name} is {shown(value)} and was {shown(before[name])}"
        for name, value in told_of(settings).items()
        if before.get(name, value) != value
    ]


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to ``final_share`` (Loshchilov & Hutter 2017, equation 5).

    >>> learning_rate(Recipe(learning_rate=1.0, warmup=2), 0, 10)
    0.5
    >>> round(learning_rate(Recipe(learning_rate=1.0, final_share=0.1), 10, 10), 6)
    0.1
    """
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    length = max((recipe.length or steps) - recipe.warmup, 1)
    done = min((step - recipe.warmup) / length, 1.0)
    share = recipe.final_share + (1 - recipe.final_share) * (1 + math.cos(math.pi * done)) / 2
    return recipe.learning_rate * share
