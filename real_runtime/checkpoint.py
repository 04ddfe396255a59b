"""Checkpoints with torch.distributed.checkpoint: whole or not at all, and resumed bit for bit.

A checkpoint belongs to its plan: each rank stores its own parts under names that replicas with the
same part share, so torch writes those once. It is written beside its final name and renamed when
every rank is done, so a folder ``step-N`` is always complete.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from real_runtime.executor import Executor
from real_runtime.settings import RunSettings
from sim.errors import InputError

__all__ = ["load", "newest", "save"]

STATE = "hetlab.json"


def newest(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps, None when there is none."""
    found = [p for p in folder.glob("step-*") if p.suffix != ".part"]
    return max(found, key=lambda p: int(p.name[5:]), default=None)


def save(executor: Executor, settings: RunSettings, folder: Path, done: int, keep: int) -> None:
    """Write a checkpoint after ``done`` steps and drop all but the last ``keep``.

    Every rank calls this at the same point.
    """
    target = folder / f"step-{done:08d}"
    beside = target.with_suffix(".part")
    first = executor.program.rank == 0
    if first:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    _barrier(executor)
    state_dict_saver.save(_state(executor), checkpoint_id=str(beside))
    _barrier(executor)
    if first:
        (beside / STATE).write_text(json.dumps(_about(executor, settings) | {"steps": done}))
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        complete = sorted(p for p in folder.glob("step-*") if p.suffix != ".part")
        for old in complete[:-keep]:
            shutil.rmtree(old)
    _barrier(executor)


def load(executor: Executor, settings: RunSettings, checkpoint: Path) -> int:
    """Read a checkpoint into a fresh executor and return the steps it had done.

    Raises:
        InputError: it belongs to another plan, seed, dtype or optimizer.
    """
    about = json.loads((checkpoint / STATE).read_text())
    for key, expected in _about(executor, settings).items():
        if about[key] != expected:
            raise InputError(
                "the checkpoint belongs to another run", str(checkpoint / STATE), key=key,
                found=str(about[key]), expected=str(expected),
            )  # fmt: skip
    for stage in executor.stages.values():
        stage.update.make_state()
    state_dict_loader.load(_state(executor), checkpoint_id=str(checkpoint))
    return int(about["steps"])


def _about(executor: Executor, settings: RunSettings) -> dict[str, object]:
    return {
        "plan_hash": executor.plan.hash,
        "seed": settings.seed,
        "dtype": settings.dtype,
        "optimizer": executor.plan.mathematics.optimizer,
    }


def _state(executor: Executor) -> dict[str, torch.Tensor]:
    """Everything that a step changes on this rank, by name; the tensors themselves, not copies."""
    tp, found = executor.groups.tp, {}
    shared, own = f"tp{tp.index}of{tp.size}", f"rank{executor.program.rank}"
    for number, stage in executor.stages.items():
        for weight in stage.weights:
            found[f"{number}/{weight.spec.name}/{shared}"] = weight.data.data
        for bucket in stage.update.buckets:
            assert bucket.values is not None
            found[f"{number}/values/{bucket.number}/{own}"] = bucket.values
        for i, part in enumerate(stage.update.parts):
            at = f"{number}/{part.name}/{i}/{own if stage.update.buckets else shared}"
            if part.target is not None:
                found[f"{at}/master"] = part.master
            for name, value in stage.update.optimizer.state[part.master].items():
                found[f"{at}/{name}"] = value
    return found


def _barrier(executor: Executor) -> None:
    world = executor.groups.of("world")
    if world:
        dist.barrier(group=executor.groups.handle(world[0]))
