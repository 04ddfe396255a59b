"""A run's folder: who may write there, and what an earlier run left. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from real_runtime.run_log import EVENTS, SCALARS
from sim.cli_output import logger
from sim.errors import InputError

__all__ = [
    "CHECKPOINTS", "begun", "check_own", "check_started_over", "held", "put_aside", "put_back",
    "remove",
]  # fmt: skip

CHECKPOINTS = "checkpoints"
"""Where a run's checkpoints lie in its folder."""
LOCK = "run.lock"
"""File that a running command holds; the kernel lets go of it when the command ends."""
EARLIER, GONE = "earlier", "earlier.gone"
"""Where the results of the run before lie until the next one has begun, and while they go."""
RESULTS = ("spans.npz", "run.json")
"""What each run writes anew."""
HISTORY = (CHECKPOINTS, EVENTS, SCALARS)
"""What a run that goes on keeps."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a run's folder to this process.

    Args:
        folder: of the run; made where there is none.

    Raises:
        InputError: another run writes there, named by its process; the folder is no run's.
    """
    check_own(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise InputError(
                "another run writes there", str(folder), found=lock.read().strip(),
                expected="its end, or another --out",
            ) from None  # fmt: skip
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be kept from other runs: %s", folder, error)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        put_back(folder)
        yield


def check_own(folder: Path) -> None:
    """Refuse a folder that holds something else than a run.

    Raises:
        InputError: it does.
    """
    inside = {p.name for p in folder.iterdir()} - {LOCK} if folder.is_dir() else set()
    if inside and not inside & {"run.json", EARLIER}:
        raise InputError("--out is not empty and no run's folder", str(folder))


def check_started_over(folder: Path, overwrite: bool) -> None:
    """Refuse to start over where checkpoints lie, good or broken.

    Args:
        folder: of the run. overwrite: they may be dropped.

    Raises:
        InputError: there are some, says the ways out; or a file has their folder's name.
    """
    place = folder / CHECKPOINTS
    if place.exists() and not place.is_dir():
        raise InputError("a file has the name of a run's checkpoints", str(place))
    halves = (".part", ".old")
    found = [p.name for p in place.glob("*") if p.suffix not in halves]
    if found and not overwrite:
        raise InputError(
            "--out holds checkpoints of an earlier run", str(folder), found=max(found),
            expected="--resume to go on from them, --overwrite to drop them, or another --out",
        )  # fmt: skip


def put_aside(folder: Path, goes_on: bool) -> None:
    """Make room for a run; what lay there can be put back until that has begun.

    Args:
        folder: of the run. goes_on: from a checkpoint, with the same log.
    """
    put_back(folder)
    aside = folder / EARLIER
    for name in RESULTS if goes_on else RESULTS + HISTORY:
        if (folder / name).exists():
            aside.mkdir(exist_ok=True)
            (folder / name).rename(aside / name)


def put_back(folder: Path) -> None:
    """Undo ``put_aside`` where the run never began."""
    aside = folder / EARLIER
    if aside.is_dir():
        for path in aside.iterdir():
            remove(folder / path.name)
            path.rename(folder / path.name)
        aside.rmdir()


def begun(folder: Path) -> None:
    """Drop what was put aside: the run trains."""
    remove(folder / GONE)
    if (folder / EARLIER).is_dir():
        # Renamed first: what is half removed must not be put back.
        (folder / EARLIER).rename(folder / GONE)
        remove(folder / GONE)


def remove(path: Path) -> None:
    """Remove a file or a folder, whichever lies there; nothing is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
