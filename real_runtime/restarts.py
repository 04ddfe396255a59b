"""Train to the end although ranks die: start all of them again from the newest good checkpoint.

Imports no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from real_runtime.errors import RunError
from real_runtime.launch import launch, prepare
from real_runtime.resume import newest_good
from real_runtime.run_folder import CHECKPOINTS, put_back
from real_runtime.run_log import EVENTS
from real_runtime.settings import RunSettings
from sim.errors import InputError

__all__ = ["train"]


def train(
    settings: RunSettings,
    ranks: int,
    restarts: int,
    show: Callable[[str], None],
    warn: Callable[[str], None],
) -> Path:
    """Run a plan's ranks, and after a death all of them again; return the run's folder.

    What a rank raises itself (wrong data, no memory) would come again, so it ends the run.

    Args:
        settings: of the run. ranks: of the plan. restarts: how often at most.
        show: takes rank 0's progress lines. warn: hears of deaths and refused checkpoints.

    Raises:
        RunError: a rank died or fell silent once more than that. HetlabError: see ``launch``.
    """
    folder = prepare(settings)
    try:
        return _launches(settings, folder, ranks, restarts, show, warn)
    finally:
        put_back(folder)  # where no rank began to train


def _launches(
    settings: RunSettings,
    folder: Path,
    ranks: int,
    restarts: int,
    show: Callable[[str], None],
    warn: Callable[[str], None],
) -> Path:
    """Launch until the run is at its end or out of restarts."""
    for left in range(restarts, -1, -1):
        try:
            launch(ranks, folder, settings.threads, show)
            return folder
        except RunError as error:
            if not left:
                raise
            settings = _from_newest(settings, folder, warn, error)
            begin = Path(settings.resume).name or "the beginning"
            warn(f"{error}; all ranks start again from {begin}")
            prepare(settings, again=True)
            _log(folder / EVENTS, reason=str(error), checkpoint=Path(settings.resume).name)
    raise AssertionError("the last attempt returns or raises")


def _from_newest(
    settings: RunSettings, folder: Path, warn: Callable[[str], None], error: RunError
) -> RunSettings:
    """The same run from its newest good checkpoint that leaves a step to train.

    Raises:
        RunError: the death itself, where the only good checkpoint had done all steps: what was
            trained lies there, and beginning anew would drop it.
    """

    def refused(reason: InputError) -> None:
        warn(f"checkpoint refused: {reason}")

    checkpoints = folder / CHECKPOINTS
    good = newest_good(checkpoints, refused, below=settings.steps)
    if good is None and newest_good(checkpoints, refused) is not None:
        raise error
    return msgspec.structs.replace(settings, resume=str(good[0]) if good else "")


def _log(events: Path, **fields: str) -> None:
    """Append a restart to a log that ends in a whole line, as ``prepare`` leaves it."""
    with events.open("a") as log:
        log.write(json.dumps({"event": "restart", "unix_s": time.time(), **fields}) + "\n")
