"""What ``hetlab run`` is told, checked before anything starts. Imports no torch."""

from __future__ import annotations

import math
import os
from pathlib import Path

from real_runtime.settings import WEIGHTS_INDEX
from sim.errors import InputError, UsageError

__all__ = ["check_numbers", "check_paths", "check_weights"]


def check_numbers(**options: float) -> None:
    """Refuse numbers that are none.

    Raises:
        UsageError: infinite, or not a number; names the option.
    """
    for name, value in options.items():
        if not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} {value}: expected a finite number")


def check_paths(**paths: Path | str) -> None:
    """Refuse paths that the ranks, which read them as JSON, could not be told.

    Raises:
        InputError: one is not UTF-8; names the option.
    """
    for name, path in paths.items():
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise InputError(
                "the path is not UTF-8", key=f"--{name}", found=repr(os.fsencode(path))
            ) from error


def check_weights(weights: str) -> None:
    """Refuse weights to begin with that are not there; "" is fine.

    Raises:
        InputError: neither safetensors nor a folder with an index of them.
    """
    path = Path(weights)
    files = (path / WEIGHTS_INDEX, path / "model.safetensors") if path.is_dir() else (path,)
    if weights and not any(f.is_file() for f in files):
        raise InputError(
            "no weights there",
            weights,
            key="--weights",
            expected=f"safetensors, or {WEIGHTS_INDEX}",
        )
