"""Write checkpoints while training goes on: whole or not at all.

At the end of a step every rank copies what it stores into host memory, which takes as much of it
again, and a thread of its own writes the copies while the next steps run. When a rank's file is on
the disk its thread says so in the store of the rendezvous; rank 0's thread hears all of them and
writes the index. So no step waits for a disk, and nobody counts a checkpoint that lacks a file. One
checkpoint is in flight at most: the next waits for it.

A checkpoint is written beside its final name, every file is synced, and the folder is renamed once
the index lies in it: a crash at any moment leaves the older checkpoints as they were.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Set
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from real_runtime.checkpoint import Snapshot, snapshot
from real_runtime.errors import CheckpointError, RunError
from real_runtime.executor import Executor
from real_runtime.resume import (
    INDEX,
    Index,
    Stored,
    StoredFile,
    check_complete,
    complete,
    digest_of,
    run_of,
    seal,
    whole,
)
from real_runtime.run_folder import remove
from real_runtime.settings import RunSettings, schedule_length, told_of

__all__ = ["Begun", "Saved", "Saver", "write_tensors"]


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is being written.

    Args:
        steps: done. copy_s: [s] that the copy took. waited_for: steps of the checkpoint before,
            where it was still being written, else 0. waited_s: [s] for it.
    """

    steps: int
    copy_s: float
    waited_for: int
    waited_s: float


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint. Args: steps done, seconds [s] from its copy to its final name."""

    steps: int
    seconds: float


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says about its file; ``stored`` is None where it stores nothing."""

    file: str
    stored: StoredFile | None
    parameters: dict[str, Stored]


class Saver:
    """Writes one rank's part of checkpoints; rank 0's also completes them.

    Every rank makes one and calls its methods at the same points.

    Args:
        executor, settings: of the rank. folder: of checkpoints. store: where the ranks meet, None
            for one rank alone.
    """

    def __init__(
        self, executor: Executor, settings: RunSettings, folder: Path, store: Store | None
    ) -> None:
        self.executor, self.settings, self.folder = executor, settings, folder
        self.rank, self.ranks = executor.program.rank, executor.plan.placement.num_ranks
        # A connection of its own: one that waits would hold up what else the process asks.
        self._store: Store | None = None
        if store is not None:
            self._store = PrefixStore("checkpoints", store.clone())  # type: ignore[attr-defined]
            # A slow disk is no error as long as training does not wait for it.
            self._store.set_timeout(timedelta(days=365))
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._steps = 0
        self._doing = ""
        self._error: Exception | None = None
        self._saved: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        if self.rank == 0:
            for left in (*folder.glob("step-*.part"), *folder.glob("step-*.old")):
                remove(left)
            folder.mkdir(parents=True, exist_ok=True)
        # Newer ones than this run went on from are those that it refused.
        begin = Path(settings.resume).name
        self._refused = {p for p in complete(folder) if begin and _steps(p.name) > _steps(begin)}
        # What an earlier run left half written is gone before a rank writes there again.
        _together(executor)

    def begin(self, done: int) -> Begun:
        """Copy the state after ``done`` steps and have it written while training goes on.

        Raises:
            CheckpointError: the one before could not be written, or not before the deadline.
        """
        start = time.monotonic()
        waited_for = self._steps if self._thread is not None and self._thread.is_alive() else 0
        self._wait()
        waited = time.monotonic() - start
        copied = snapshot(self.executor, done, self._buffers)
        ready = time.monotonic()
        self._steps = done
        self._thread = threading.Thread(
            target=self._work, args=(copied, ready), name=f"checkpoint {done}", daemon=True
        )
        self._thread.start()
        return Begun(
            steps=done, copy_s=ready - start - waited, waited_for=waited_for, waited_s=waited
        )

    def check(self) -> list[Saved]:
        """Return the checkpoints completed since the last call (of rank 0).

        Raises:
            CheckpointError: one could not be written.
            RunError: the ranks could not talk about it, which comes from a death elsewhere.
        """
        if isinstance(self._error, dist.DistError):
            raise RunError(
                f"rank {self.rank} lost the others while the checkpoint after step {self._steps} "
                f"was written: {self._error}"
            ) from self._error
        if self._error is not None:
            raise CheckpointError(
                f"the checkpoint after step {self._steps} could not be written: {self._error}"
            ) from self._error
        found = []
        while not self._saved.empty():
            found.append(self._saved.get())
        return found

    def finish(self) -> list[Saved]:
        """Wait until what is in flight is complete, on all ranks; return as ``check`` does.

        Raises:
            CheckpointError: see ``begin``.
        """
        self._wait()
        _together(self.executor)
        return self.check()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join(self.settings.deadline)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the checkpoint after step {self._steps} is not complete and training has "
                    f"waited {self.settings.deadline:g} s for it: {self._doing}"
                )
            self._thread = None
        if self._error is not None:
            self.check()

    def _work(self, copied: Snapshot, begun: float) -> None:
        try:
            self._write(copied, begun)
        except Exception as error:  # noqa: BLE001 - training must learn of every failure
            self._error = error

    def _write(self, copied: Snapshot, begun: float) -> None:
        target = self.folder / f"step-{copied.steps:08d}"
        beside = target.with_suffix(".part")
        beside.mkdir(exist_ok=True)
        self._doing = f"writing {beside / copied.file}"
        stored = write_tensors(copied.tensors, beside / copied.file) if copied.tensors else None
        mine = _Written(file=copied.file, stored=stored, parameters=copied.parameters)
        if self.rank:
            assert self._store is not None
            self._store.set(f"{copied.steps}/{self.rank}", msgspec.json.encode(mine).decode())
            return
        self._complete([mine, *self._others(copied.steps)], beside, copied.steps)
        _put(beside, target)
        self._refused.discard(target)
        _drop(self.folder, copied.steps, self.settings.keep, self._refused)
        self._saved.put(Saved(steps=copied.steps, seconds=time.monotonic() - begun))

    def _others(self, done: int) -> list[_Written]:
        """What the other ranks say; waits for each."""
        found = []
        for rank in range(1, self.ranks):
            assert self._store is not None
            key = f"{done}/{rank}"
            self._doing = f"rank {rank} has not written its file"
            found.append(msgspec.json.decode(self._store.get(key), type=_Written))
            self._store.delete_key(key)
        self._doing = "writing the index"
        return found

    def _complete(self, said: list[_Written], beside: Path, done: int) -> None:
        """Write the index of all ranks' files."""
        merged: dict[str, Stored] = {}
        for written in said:
            for name, stored in written.parameters.items():
                before = merged[name].pieces if name in merged else {}
                both = {s: before.get(s, ()) + p for s, p in stored.pieces.items()}
                merged[name] = msgspec.structs.replace(stored, pieces=both)
        plan = self.executor.plan
        index = Index(
            steps=done,
            plan_hash=plan.hash,
            run=run_of(plan, self.settings),
            files={w.file: w.stored for w in said if w.stored is not None},
            parameters=merged,
            schedule=schedule_length(self.settings),
            told=told_of(self.settings),
        )
        check_complete(index, str(beside))
        (beside / INDEX).write_bytes(seal(index))
        _sync(beside / INDEX)
        _sync(beside)


def write_tensors(tensors: dict[str, torch.Tensor], file: Path) -> StoredFile:
    """Write a rank's file so that it is on the disk.

    Raises:
        OSError: it cannot be written; names the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file)
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    _sync(file)
    return digest_of(file)


def _put(beside: Path, target: Path) -> None:
    """Give a written checkpoint its name; one of that name is moved away before it is dropped."""
    old = target.with_suffix(".old")
    if target.exists():
        target.rename(old)
    beside.rename(target)
    _sync(target.parent)
    remove(old)


def _drop(folder: Path, done: int, keep: int, refused: Set[Path]) -> None:
    """Drop old checkpoints, and those that this run refused; broken ones do not count."""
    mine = {_steps(p.name): p for p in complete(folder) if p not in refused}
    good = [n for n, p in mine.items() if n == done or (n < done and whole(p))]
    old = (p for n, p in mine.items() if n > done or n < good[-keep:][0])
    for path in (*old, *(p for p in refused if p.exists())):
        remove(path)


def _steps(name: str) -> int:
    """Steps that a checkpoint of this name had done."""
    return int(name[5:])


def _sync(path: Path) -> None:
    """Make sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _together(executor: Executor) -> None:
    """Wait for all ranks of the run."""
    world = executor.groups.of("world")
    if world:
        group = executor.groups.handle(world[0])
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, None, group=group)
