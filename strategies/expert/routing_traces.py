"""Routing that tools write token by token, and counts that are an array already."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.expert.routing import Routing
from strategies.expert.routing_input import LARGEST, MOST, experts_of, limited, places, zeros

__all__ = ["counts_of_npz", "ids_routing", "tracer_routing"]

Ints = NDArray[np.int64]
_Whole = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
_HEADER = 2**16
"""[B] of an npy file that are read before anything in it is believed."""


class _Record(msgspec.Struct):
    """What of a line of Megatron's tracer says where tokens went."""

    step: _Whole
    layer: _Whole
    top_indices: list[list[_Whole]]
    rank: _Whole = 0
    mtp_idx: int | None = None


def tracer_routing(path: Path, experts: int | None) -> Routing:
    """Read Megatron-Core's router trace.

    Args:
        path: a .jsonl file, or a folder with one per rank, which then is the source.
        experts: E, or None for one more than the largest named.

    Raises:
        InputError: no such record, with its line.
    """
    files = sorted(path.glob("*.jsonl"), key=_rank_of) if path.is_dir() else [path]
    if not files:
        raise InputError("no .jsonl file in this folder", file=str(path))
    read = msgspec.json.Decoder(_Record).decode
    keys, parts = list[tuple[int, int, int]](), list[Ints]()
    for place, file in enumerate(files):
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                record = _parsed(file, number, line, read)
                if record.mtp_idx is not None:
                    continue  # layers of a prediction head repeat the decoder's numbers
                source = place if path.is_dir() else record.rank
                keys.append((record.step, record.layer, source))
                parts.append(_of_record(file, number, record, experts))
    if not keys:
        raise InputError("no record of a router", file=str(path))
    size = experts or 1 + max(int(p.max(initial=0)) for p in parts)
    step, layer, origin = (places(column) for column in zip(*keys, strict=True))
    counts = zeros(path, (step.max() + 1, layer.max() + 1, size, origin.max() + 1))
    for t, at, s, ids in zip(step, layer, origin, parts, strict=True):
        counts[t, at, :, s] += np.bincount(ids, minlength=size)
    return Routing(counts, f"router trace {path.name}, a source is a rank")


def _of_record(file: Path, number: int, record: _Record, experts: int | None) -> Ints:
    ids = np.array([e for row in record.top_indices for e in row], np.int64)
    if experts and ids.max(initial=0) >= experts:
        raise InputError(
            "an expert that the model does not have",
            file=str(file),
            line=number,
            key="top_indices",
            found=str(ids.max()),
            expected=f"0 to {experts - 1}",
        )
    return ids


def _parsed(file: Path, number: int, line: bytes, read: Callable[[bytes], _Record]) -> _Record:
    try:
        return read(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(
            f"no record of a router trace: {error}",
            file=str(file),
            line=number,
            expected="step, layer and top_indices",
        ) from error


def _rank_of(file: Path) -> tuple[int, str]:
    number = re.search(r"(\d+)$", file.stem)
    return (int(number.group(1)) if number else -1, file.name)


def counts_of_npz(file: Path) -> Ints:
    """Return the array ``counts`` of an npz file, after a look at its shape.

    Raises:
        InputError: no such file or array, or counts that are too large to be added exactly.
    """
    with _foreign(file, "no npz file with routing", "counts"), zipfile.ZipFile(file) as archive:
        with archive.open("counts.npy") as member:
            shape, dtype = _header(file, member)
        limited(file, shape)
        if len(shape) != 4 or dtype.kind not in "iu":
            raise InputError(
                "routing is an array of whole numbers",
                file=str(file),
                key="counts",
                found=f"{dtype} {shape}",
                expected="integers (steps, layers, experts, sources)",
            )
        with archive.open("counts.npy") as member:
            counts = np.asarray(np.lib.format.read_array(member, allow_pickle=False))
    if int(counts.max(initial=0)) >= LARGEST:
        raise InputError(
            "no router sends this many tokens",
            file=str(file),
            key="counts",
            found=str(counts.max()),
            expected=f"below {LARGEST}",
        )
    return counts.astype(np.int64)


def ids_routing(file: Path, experts: int | None, steps: int, sources: int) -> Routing:
    """Read ids of experts, shape (tokens, layers, k), as vLLM returns them.

    Args:
        file: npy. experts: E, or None. steps, sources: T and S; the tokens are cut into T equal
            parts in their order, and each of them into S.

    Raises:
        InputError: no such array, or tokens that cannot be cut so.
    """
    with _foreign(file, "no npy file"), file.open("rb") as member:
        shape, dtype = _header(file, member)
        limited(file, shape)
        if len(shape) != 3 or dtype.kind not in "iu" or not all(shape):
            raise InputError(
                "ids of routed experts are whole numbers",
                file=str(file),
                found=f"{dtype} {shape}",
                expected="integers (tokens, layers, k)",
            )
        member.seek(0)
        ids = np.asarray(np.lib.format.read_array(member, allow_pickle=False))
    size, layers, parts = experts_of(file, ids, experts), ids.shape[1], steps * sources
    if steps < 1 or sources < 1 or len(ids) % parts:
        raise InputError(
            "these tokens cannot be cut into equal parts",
            file=str(file),
            key="steps",
            found=f"{len(ids)} tokens, {steps} steps, {sources} sources",
            expected="a divisor of the tokens",
        )
    limited(file, (parts, layers, size))
    place = np.arange(len(ids))[:, None] // (len(ids) // parts) * layers + np.arange(layers)
    flat = place[:, :, None] * size + ids.astype(np.int64)
    found = np.bincount(flat.ravel(), minlength=parts * layers * size)
    counts = found.reshape(steps, sources, layers, size).transpose(0, 2, 3, 1)
    return Routing(np.ascontiguousarray(counts, np.int64), f"ids of {file.name}")


@contextmanager
def _foreign(file: Path, what: str, key: str = "") -> Iterator[None]:
    """Whatever the parsers of zip and npy files stumble over is an error of this file."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        why = str(error) or type(error).__name__
        raise InputError(f"{what}: {why}", file=str(file), key=key) from error


def _header(file: Path, member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    head = io.BytesIO(member.read(_HEADER))
    version = np.lib.format.read_magic(head)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise InputError(
            "an npy format that is not read",
            file=str(file),
            found=".".join(map(str, version)),
            expected="1.0 or 2.0",
        )
    shape, _, dtype = readers[version](head)
    return shape, dtype
