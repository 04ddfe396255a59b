"""Weights as safetensors in Hugging Face's naming: read whole parameters, write a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from real_runtime.executor import Executor
from real_runtime.model.parameters import EMBEDDING, HEAD
from real_runtime.model.weights import Weight
from real_runtime.settings import WEIGHTS_INDEX
from sim.errors import InputError

__all__ = ["INDEX", "StoredWeights", "save_weights"]

INDEX = WEIGHTS_INDEX


class StoredWeights(Mapping[str, torch.Tensor]):
    """Parameters of a folder or file, each read when it is asked for.

    Args:
        path: a ``.safetensors`` file, or a folder with one or with an index.

    Raises:
        InputError: there is none, or its index is broken.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files: dict[str, Path] = {}
        index = self.path / INDEX
        if index.is_file():
            table = json.loads(index.read_text())
            self.files = {n: self.path / f for n, f in table["weight_map"].items()}
            return
        one = self.path / "model.safetensors" if self.path.is_dir() else self.path
        if not one.is_file():
            raise InputError("no weights there", str(path), expected=f"safetensors, or {INDEX}")
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(one, "pt") as opened:
                self.files = dict.fromkeys(opened.keys(), one)
        except SafetensorError as error:
            raise InputError("not a safetensors file", str(one), found=str(error)) from error

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        if name == HEAD and HEAD not in self.files:
            name = EMBEDDING
        if name not in self.files:
            raise InputError("the weights lack a parameter", str(self.path), found=name)
        with safe_open(self.files[name], "pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def save_weights(executor: Executor, folder: str | Path) -> None:
    """Write the model: one file per virtual stage, and rank 0 the index. Every rank calls this.

    The first replica's ranks gather their tensor-parallel parts, and those that share experts with
    it theirs; padded rows are left out, and a parameter that two stages share is written once.

    Args:
        executor: of this rank. folder: target.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tp, cell = executor.groups.tp, executor.cell
    written: dict[str, str] = {}
    if cell.replica < executor.groups.ep.size:
        for number, stage in executor.stages.items():
            copies = stage.embed is not None and number > 0
            mine = [w for w in stage.weights if not (copies and w is stage.embed)]
            if cell.replica:
                mine = [w for w in mine if w.spec.expert >= 0]
            whole = {w.spec.name: _whole(executor, w) for w in mine}
            if tp.index == 0 and whole:
                name = f"model-stage-{number:04d}-{cell.replica:04d}.safetensors"
                beside = folder / f"{name}.part"
                save_file(whole, beside, metadata={"format": "pt"})
                beside.replace(folder / name)
                written |= dict.fromkeys(whole, name)
    world = executor.groups.of("world")
    said = [written]
    if world:
        group = executor.groups.handle(world[0])
        said = [{} for _ in executor.groups.members(world[0])]
        dist.all_gather_object(said, written, group=group)
    if executor.program.rank == 0:
        table = {name: file for part in said for name, file in part.items()}
        beside = folder / f"{INDEX}.part"
        beside.write_text(json.dumps({"metadata": {}, "weight_map": table}, indent=2) + "\n")
        beside.replace(folder / INDEX)


def _whole(executor: Executor, weight: Weight) -> torch.Tensor:
    spec, tp = weight.spec, executor.groups.tp
    data = weight.data.data
    if spec.split is not None and tp.size > 1:
        parts = [torch.empty_like(data) for _ in range(tp.size)]
        dist.all_gather(parts, data, group=tp.group)
        data = torch.cat(parts, spec.split)
    return data[: spec.shape[0]].cpu().contiguous()
