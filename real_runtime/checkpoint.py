"""Checkpoints that any plan of the same training goes on from: whole or not at all.

Every element of every parameter and of its moments is written once, by the rank whose copy counts
towards the gradient norm, into that rank's own safetensors file; the index says which run of which
tensor lies where. A rank that loads puts each whole tensor together, one at a time, and keeps its
part, so tp, pp, dp, ZeRO-1, ep, recomputation and schedule may all be others than before. On the
same plan a run goes on bit for bit. There is no random state to keep: weights and data order follow
from the seed, the data position from the steps done, and no op draws numbers.

A checkpoint is written beside its final name, every file is synced, and the folder is renamed once
the index lies in it: a crash at any moment leaves the older checkpoints as they were. With replicas
of unlike tp under ZeRO-1, a weight that every tp rank keeps is stored from the first of them.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from real_runtime.buckets import cut
from real_runtime.executor import Executor
from real_runtime.model.parameters import ParameterSpec, shard_of
from real_runtime.resume import (
    INDEX,
    Index,
    Piece,
    Stored,
    StoredFile,
    check_complete,
    complete,
    digest_of,
    read_index,
    run_of,
    seal,
)
from real_runtime.settings import RunSettings
from real_runtime.update import Part
from sim.errors import InputError

__all__ = ["load", "save"]

Written = tuple[str, StoredFile | None, dict[str, Stored]]
"""What a rank says about its file: name, digest, parameters with its pieces."""


def save(executor: Executor, settings: RunSettings, folder: Path, done: int, keep: int) -> None:
    """Write a checkpoint after ``done`` steps and drop all but the last ``keep``.

    Every rank calls this at the same point.
    """
    target = folder / f"step-{done:08d}"
    beside = target.with_suffix(".part")
    first = executor.program.rank == 0
    if first:
        for left in (*folder.glob("step-*.part"), *folder.glob("step-*.old")):
            shutil.rmtree(left)
        beside.mkdir(parents=True)
    _gather(executor, None)
    said = _gather(executor, _write(executor, beside, done))
    if first:
        _finish(executor, settings, said, beside, done)
        _put(beside, target)
        _drop(folder, done, keep)
    _gather(executor, None)


def _write(executor: Executor, beside: Path, done: int) -> Written:
    """Write this rank's file."""
    from safetensors.torch import save_file

    name = f"rank-{executor.program.rank:05d}.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    specs: dict[str, ParameterSpec] = {}
    for optimizer, part in _parts(executor):
        if not part.counted:
            continue
        specs[part.name] = part.spec
        shard, shards = _place(executor, part)
        for state, value in _states(optimizer, part, done).items():
            key = f"{state}/{part.name}/{shard}.{shards}.{part.first}"
            tensors[key] = value.detach().contiguous()
            pieces[part.name][state].append(
                Piece(
                    file=name, key=key, shard=shard, shards=shards, first=part.first,
                    count=value.numel(),
                )
            )  # fmt: skip
    stored = {
        n: Stored(
            shape=s.shape, padded=s.padded, split=-1 if s.split is None else s.split,
            pieces={state: tuple(p) for state, p in pieces[n].items()},
        )
        for n, s in specs.items()
    }  # fmt: skip
    if not tensors:
        return name, None, {}
    save_file(tensors, beside / name)
    _sync(beside / name)
    return name, digest_of(beside / name), stored


def _finish(
    executor: Executor, settings: RunSettings, said: list[Written], beside: Path, done: int
) -> None:
    """Write the index of all ranks' files."""
    merged: dict[str, Stored] = {}
    for _, _, parameters in said:
        for name, stored in parameters.items():
            before = merged[name].pieces if name in merged else {}
            both = {s: before.get(s, ()) + p for s, p in stored.pieces.items()}
            merged[name] = Stored(
                shape=stored.shape, padded=stored.padded, split=stored.split, pieces=both
            )
    index = Index(
        steps=done,
        plan_hash=executor.plan.hash,
        run=run_of(executor.plan, settings),
        files={name: file for name, file, _ in said if file is not None},
        parameters=merged,
    )
    check_complete(index, str(beside))
    (beside / INDEX).write_bytes(seal(index))
    _sync(beside / INDEX)
    _sync(beside)


def _put(beside: Path, target: Path) -> None:
    """Give a written checkpoint its name; one of that name is moved away before it is dropped."""
    old = target.with_suffix(".old")
    if target.exists():
        target.rename(old)
    beside.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _drop(folder: Path, done: int, keep: int) -> None:
    """Drop old checkpoints, and newer ones, which this run refused when it went on."""
    found = complete(folder)
    kept = [p for p in found if int(p.name[5:]) <= done][-keep:]
    for other in found:
        if other not in kept:
            shutil.rmtree(other)


def load(executor: Executor, checkpoint: Path) -> int:
    """Read a checkpoint into a fresh executor and return the steps it had done.

    Raises:
        InputError: it is broken, or of another model.
    """
    index = read_index(checkpoint)
    parts: dict[str, list[tuple[torch.optim.Optimizer, Part]]] = defaultdict(list)
    for stage in executor.stages.values():
        stage.update.make_state()
    for optimizer, part in _parts(executor):
        parts[part.name].append((optimizer, part))
    files = _Files(checkpoint)
    for stage in executor.stages.values():
        for weight in stage.weights:
            spec = weight.spec
            stored = _stored(index, spec, checkpoint)
            for state in stored.pieces:
                full = files.whole(stored, state, spec)
                if state == "value":
                    tp = executor.groups.tp
                    weight.data.data.copy_(shard_of(full, spec, tp.index, tp.size))
                for optimizer, part in parts[spec.name]:
                    _fill(executor, optimizer, part, state, full)
    for optimizer, part in _parts(executor):
        if "step" in optimizer.state[part.master]:
            optimizer.state[part.master]["step"].fill_(index.steps)
    return index.steps


def _stored(index: Index, spec: ParameterSpec, checkpoint: Path) -> Stored:
    stored = index.parameters.get(spec.name)
    if stored is None or stored.shape != spec.shape:
        raise InputError(
            "the checkpoint is of another model", str(checkpoint / INDEX), key=spec.name,
            found="none" if stored is None else str(stored.shape), expected=str(spec.shape),
        )  # fmt: skip
    return stored


def _fill(
    executor: Executor, optimizer: torch.optim.Optimizer, part: Part, state: str, full: torch.Tensor
) -> None:
    """Take a part's run of a whole tensor."""
    shard, shards = _place(executor, part)
    flat = cut(full, part.spec.split, shard, shards).reshape(-1)
    mine = flat[part.first : part.first + part.master.numel()].view(part.master.shape)
    if state == "value":
        part.master.copy_(mine)
        if part.target is not None:
            part.target.copy_(part.master)
    else:
        optimizer.state[part.master][state].copy_(mine)


class _Files:
    """A checkpoint's tensor files, each opened once."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.opened: dict[str, Any] = {}

    def _tensor(self, piece: Piece) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        where = self.checkpoint / piece.file
        try:
            if piece.file not in self.opened:
                self.opened[piece.file] = safe_open(where, "pt")
            found: torch.Tensor = self.opened[piece.file].get_tensor(piece.key)
        except (SafetensorError, OSError) as error:
            raise InputError(
                "a file of the checkpoint is broken", str(where), found=str(error)
            ) from error
        return found.reshape(-1)

    def whole(self, stored: Stored, state: str, spec: ParameterSpec) -> torch.Tensor:
        """Return a parameter's tensor, padded as this plan pads it."""
        pieces = stored.pieces[state]
        runs = [(piece, self._tensor(piece)) for piece in pieces]
        full = torch.zeros(stored.padded, dtype=runs[0][1].dtype)
        shards: dict[tuple[int, int], torch.Tensor] = {}
        for piece, run in runs:
            at = piece.shard, piece.shards
            if at not in shards:
                shards[at] = full.new_empty(full.numel() // piece.shards)
            shards[at][piece.first : piece.first + piece.count] = run
        for (shard, count), flat in shards.items():
            view = cut(full, spec.split, shard, count)
            view.copy_(flat.view(view.shape))
        if stored.padded == spec.padded:
            return full
        mine = full.new_zeros(spec.padded)
        mine[: spec.shape[0]] = full[: spec.shape[0]]
        return mine


def _parts(executor: Executor) -> Iterator[tuple[torch.optim.Optimizer, Part]]:
    for stage in executor.stages.values():
        for part in stage.update.parts:
            yield stage.update.optimizer, part


def _place(executor: Executor, part: Part) -> tuple[int, int]:
    """(shard, shards) of a part among the equal cuts of its whole tensor."""
    if part.spec.split is None:
        return 0, 1
    tp = executor.groups.tp
    return tp.index * part.shards + part.shard, tp.size * part.shards


def _states(optimizer: torch.optim.Optimizer, part: Part, done: int) -> dict[str, torch.Tensor]:
    """A part's values and moments by name; its step count is the run's."""
    found = {"value": part.master}
    for name, value in optimizer.state[part.master].items():
        if name == "step":
            assert int(value) == done, (part.name, int(value), done)
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


def _sync(path: Path) -> None:
    """Make sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _gather(executor: Executor, mine: Any) -> list[Any]:
    """Every rank's value on every rank of the run; also a barrier."""
    world = executor.groups.of("world")
    if not world:
        return [mine]
    group = executor.groups.handle(world[0])
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said
