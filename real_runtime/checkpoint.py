"""The state of a training as checkpoints hold it: what a rank gives to one, and takes from one.

Every element of every parameter and of its moments is stored once, by the rank whose copy counts
towards the gradient norm, in that rank's own safetensors file; the index says which run of which
tensor lies where. A rank that loads puts each whole tensor together, one at a time, and keeps its
part, so tp, pp, dp, ZeRO-1, ep, recomputation and schedule may all be others than before. On the
same plan a run goes on bit for bit. There is no random state to keep: weights and data order follow
from the seed, the data position from the steps done, and no op draws numbers.

With replicas of unlike tp under ZeRO-1, a weight that every tp rank keeps is stored from the first
of them. How checkpoints get to disk is ``real_runtime.checkpoint_save``'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from real_runtime.buckets import cut
from real_runtime.devices import synchronize
from real_runtime.executor import Executor
from real_runtime.model.parameters import ParameterSpec, shard_of
from real_runtime.resume import INDEX, Index, Piece, Stored, read_index
from real_runtime.update import Part
from sim.errors import InputError

__all__ = ["Snapshot", "load", "snapshot"]


class Snapshot:
    """What one rank stores after a step: copies in host memory.

    Attributes:
        file: name of the rank's file. steps: done. tensors: key in the file -> copy.
        parameters: by name, with the pieces in this file.
    """

    def __init__(
        self, file: str, steps: int, tensors: dict[str, torch.Tensor], parameters: dict[str, Stored]
    ) -> None:
        self.file, self.steps, self.tensors, self.parameters = file, steps, tensors, parameters


def snapshot(executor: Executor, done: int, buffers: dict[str, torch.Tensor]) -> Snapshot:
    """Copy what this rank stores after ``done`` steps.

    Args:
        executor: of the rank, between two steps. done: steps.
        buffers: key -> copy of an earlier snapshot that is no longer needed; filled anew.
    """
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
            tensors[key] = _copied(value, buffers, key)
            pieces[part.name][state].append(
                Piece(
                    file=name, key=key, shard=shard, shards=shards, first=part.first,
                    count=value.numel(),
                )
            )  # fmt: skip
    synchronize(executor.device)
    stored = {
        n: Stored(
            shape=s.shape, padded=s.padded, split=-1 if s.split is None else s.split,
            pieces={state: tuple(p) for state, p in pieces[n].items()},
        )
        for n, s in specs.items()
    }  # fmt: skip
    return Snapshot(name, done, tensors, stored)


def _copied(value: torch.Tensor, buffers: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """A copy in host memory; on an accelerator it is complete after ``synchronize``."""
    if key not in buffers:
        buffers[key] = torch.empty(
            value.shape, dtype=value.dtype, pin_memory=value.device.type != "cpu"
        )
    return buffers[key].copy_(value.detach(), non_blocking=True)


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
