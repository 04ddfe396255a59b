"""What a checkpoint holds, whether it is whole, and which one a run goes on from.

Imports no torch. The index is JSON and tensors are safetensors, so reading a checkpoint never runs
code from it. (torch.distributed.checkpoint, as of 2.13, keeps the index of its own format as a
pickle; in that and in its safetensors format a stored piece is a box of a tensor, and a ZeRO share
is none.)
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from real_runtime.settings import RunSettings
from sim.errors import InputError
from sim.plan.plan import Plan

__all__ = [
    "INDEX", "Index", "Piece", "Stored", "StoredFile", "check_complete", "check_resumable",
    "complete", "digest_of", "newest_good", "read_index", "seal", "whole",
]  # fmt: skip

INDEX = "index.json"
"""What a checkpoint says about itself."""


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of elements of one tensor.

    Args:
        file, key: where it lies. shard, shards: the tensor is cut into ``shards`` equal parts along
            its split dimension, and the run lies in this one.
        first: of its elements there, in row-major order. count: [elements].
    """

    file: str
    key: str
    shard: int
    shards: int
    first: int
    count: int


class Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One parameter.

    Args:
        shape: without padding. padded: shape that the pieces cover. split: dimension that shards
            cut, -1 for none. pieces: of "value" and of each moment of the optimizer.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    split: int
    pieces: dict[str, tuple[Piece, ...]]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file: size [B] and SHA-256."""

    nbytes: int
    sha256: str


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint.

    Args:
        steps: done. Data position and learning rate follow from it and the seed.
        plan_hash: of the plan that wrote it, for people.
        run: what must be equal for another plan to go on with the same training.
        files: by name. parameters: by name.
        schedule: [steps] after which the learning rate's cosine ended, 0 where nobody wrote it.
        told: what else the run was told, see ``settings.told_of``; empty where nobody wrote it.
    """

    steps: int
    plan_hash: str
    run: dict[str, str | int]
    files: dict[str, StoredFile]
    parameters: dict[str, Stored]
    schedule: int = 0
    told: dict[str, str | float] = {}


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sha256: str
    index: msgspec.Raw


def seal(index: Index) -> bytes:
    """Return the index as the text of its file, with its own digest."""
    raw = msgspec.json.encode(index)
    return msgspec.json.encode(
        _Sealed(sha256=hashlib.sha256(raw).hexdigest(), index=msgspec.Raw(raw))
    )


def digest_of(file: Path) -> StoredFile:
    """Read a file's size and digest."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return StoredFile(nbytes=file.stat().st_size, sha256=digest)


def read_index(checkpoint: Path) -> Index:
    """Read a checkpoint's index without looking at its tensors.

    Raises:
        InputError: it is missing, broken or altered.
    """
    file = checkpoint / INDEX
    try:
        sealed = msgspec.json.decode(file.read_bytes(), type=_Sealed)
        raw = bytes(sealed.index)
        index = msgspec.json.decode(raw, type=Index)
    except OSError as error:
        raise InputError("the checkpoint has no index", str(file), found=str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError("the checkpoint's index is broken", str(file), found=str(error)) from error
    found = hashlib.sha256(raw).hexdigest()
    if found != sealed.sha256:
        raise InputError(
            "the checkpoint's index was altered", str(file), key="sha256", found=found,
            expected=sealed.sha256,
        )  # fmt: skip
    check_complete(index, str(file))
    return index


def check_complete(index: Index, where: str) -> None:
    """Check that the pieces of every tensor cover it once and lie in files of the checkpoint.

    Raises:
        InputError: they do not.
    """
    for name, stored in index.parameters.items():
        for state, pieces in stored.pieces.items():
            full, seen = math.prod(stored.padded), 0
            of = {p.shards for p in pieces}
            size = full // shards if len(of) == 1 and (shards := min(of)) > 0 else 0
            good = bool(pieces) and size > 0
            for p in sorted(pieces, key=lambda p: (p.shard, p.first)):
                # Shards lie one behind the other here.
                behind = p.shard * size + p.first == seen and p.first + p.count <= size
                good = good and behind and p.file in index.files
                seen += p.count
            if seen != full or not good:
                raise InputError(
                    "a tensor of the checkpoint is not whole", where, key=f"{name} {state}",
                    found=f"{seen} elements", expected=f"each of {full} once",
                )  # fmt: skip


def check_files(checkpoint: Path, index: Index) -> None:
    """Check size and digest of every file.

    Raises:
        InputError: one is missing, cut off or altered; names it.
    """
    check_sizes(checkpoint, index)
    for name, expected in index.files.items():
        file = checkpoint / name
        found = digest_of(file).sha256
        if found != expected.sha256:
            raise InputError(
                "a file of the checkpoint was altered", str(file), key="sha256", found=found,
                expected=expected.sha256,
            )  # fmt: skip


def check_sizes(checkpoint: Path, index: Index) -> None:
    """Check that every file is there, with its size; reads none.

    Raises:
        InputError: one is missing or cut off; names it.
    """
    for name, expected in index.files.items():
        file = checkpoint / name
        if Path(name).name != name:
            raise InputError("a file outside the checkpoint", str(checkpoint / INDEX), found=name)
        if not file.is_file():
            raise InputError("a file of the checkpoint is missing", str(file))
        size = file.stat().st_size
        if size != expected.nbytes:
            raise InputError(
                "a file of the checkpoint is cut off", str(file), found=f"{size} B",
                expected=f"{expected.nbytes} B",
            )  # fmt: skip


def whole(checkpoint: Path) -> bool:
    """Return whether index and sizes of a checkpoint are right, which takes no reading of it."""
    try:
        check_sizes(checkpoint, read_index(checkpoint))
    except InputError:
        return False
    return True


def complete(folder: Path) -> list[Path]:
    """Return a folder's checkpoints by steps; what a crash left half written is none."""
    return sorted(
        (p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()),
        key=lambda p: int(p.name[5:]),
    )


def newest_good(
    folder: Path, refused: Callable[[InputError], None], below: int | None = None
) -> tuple[Path, Index] | None:
    """Return the checkpoint with the most steps whose files are as they were written.

    Args:
        folder: of checkpoints. refused: hears why a newer one is not used.
        below: [steps] only checkpoints that had done fewer.
    """
    for found in reversed(complete(folder)):
        if below is not None and int(found.name[5:]) >= below:
            continue
        try:
            index = read_index(found)
            check_files(found, index)
            if index.steps != int(found.name[5:]):
                raise InputError(
                    "the checkpoint's name is wrong", str(found), found=found.name,
                    expected=f"{index.steps} steps",
                )  # fmt: skip
        except InputError as error:
            refused(error)
            continue
        return found, index
    return None


def run_of(plan: Plan, settings: RunSettings) -> dict[str, str | int]:
    """What must be equal for a run to go on with the same training."""
    math = plan.mathematics
    return {
        "seed": settings.seed,
        "dtype": settings.dtype,
        "optimizer": math.optimizer,
        "global_batch": math.global_batch,
        "sequence_length": math.sequence_length,
    }


def check_resumable(
    folder: Path, plan: Plan, settings: RunSettings, refused: Callable[[InputError], None]
) -> tuple[Path, Index]:
    """Return the newest good checkpoint of a folder and its index.

    Args:
        folder: of checkpoints. plan, settings: that go on. refused: see ``newest_good``.

    Raises:
        InputError: there is none, or it belongs to another seed, dtype, optimizer or batch, or it
            has already done all steps.
    """
    good = newest_good(folder, refused)
    if good is None:
        raise InputError("no checkpoint to resume from", str(folder), expected="a whole one")
    found, index = good
    for key, expected in run_of(plan, settings).items():
        if index.run.get(key) != expected:
            raise InputError(
                "the checkpoint belongs to another run", str(found / INDEX), key=key,
                found=str(index.run.get(key)), expected=str(expected),
            )  # fmt: skip
    if index.steps >= settings.steps:
        raise InputError(
            "nothing is left to train", str(found), found=f"{index.steps} steps done",
            expected=f"--steps more than {index.steps}",
        )  # fmt: skip
    return good
