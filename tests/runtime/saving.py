"""Checkpoints written at once, for tests of what is in them; and disks that wait for a test."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec

from real_runtime import checkpoint_save
from real_runtime.checkpoint_save import Saver
from real_runtime.executor import Executor
from real_runtime.settings import RunSettings


def save(
    executor: Executor, settings: RunSettings, folder: Path, done: int, keep: int, store: Any = None
) -> None:
    """Write a checkpoint to its end; every rank calls this at the same point."""
    saver = Saver(executor, msgspec.structs.replace(settings, keep=keep), folder, store)
    saver.begin(done)
    saver.finish()


class SlowDisk:
    """Holds every tensor file back until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()
        real = checkpoint_save.write_tensors

        def write(tensors: Any, file: Path) -> Any:
            self.reached.set()
            assert self.go.wait(60)
            return real(tensors, file)

        self.write = write
