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
from real_runtime.resume import STATE, about
from real_runtime.settings import RunSettings

__all__ = ["load", "save"]


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
        (beside / STATE).write_text(json.dumps(about(executor.plan, settings) | {"steps": done}))
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        complete = sorted(p for p in folder.glob("step-*") if p.suffix != ".part")
        for old in complete[:-keep]:
            shutil.rmtree(old)
    _barrier(executor)


def load(executor: Executor, checkpoint: Path) -> int:
    """Read a checkpoint into a fresh executor and return the steps it had done."""
    for stage in executor.stages.values():
        stage.update.make_state()
    state_dict_loader.load(_state(executor), checkpoint_id=str(checkpoint))
    return int(json.loads((checkpoint / STATE).read_text())["steps"])


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
