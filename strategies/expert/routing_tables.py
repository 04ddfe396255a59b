"""Rows of routing CSV files, as (step, layer, expert or shard, source, count)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.expert.routing_input import LARGEST

__all__ = ["count_rows", "laer_rows"]

Ints = NDArray[np.int64]
_COUNT = {
    "step": ("step", "iter", "iteration", "record"),
    "layer": ("layer", "layer_id"),
    "expert": ("expert", "expert_id"),
    "source": ("source", "rank", "src"),
    "count": ("count", "tokens", "token_num", "num_tokens"),
}
_LAER = {
    "rank": ("rank",),
    "method": ("method",),
    "model": ("model_name", "model"),
    "layer": ("layer",),
    "step": ("iter", "record", "step"),
    "count": ("token_num", "tokens", "count"),
}
_LONGEST = 40
"""Characters of a cell that is still read as a number, or shown."""


def count_rows(file: Path, names: Sequence[str], lines: Iterable[str]) -> Ints:
    """Read counts of experts; without a source column all come from source 0.

    Args:
        file: for messages. names: of the columns, lower case. lines: the rest.

    Returns:
        Shape (rows, 5).

    Raises:
        InputError: a column that is missing, a value that is no number, a row that is there twice.
    """
    place = _columns(file, names, _COUNT, optional=("source",))
    rows, seen = list[tuple[int, ...]](), set[tuple[int, ...]]()
    for number, cells in enumerate(csv.reader(lines), start=2):
        if not cells:
            continue
        _width(file, number, cells, names)
        at = [
            _whole(file, number, k, cells[place[k]]) if k in place else 0
            for k in ("step", "layer", "expert", "source", "count")
        ]
        if tuple(at[:4]) in seen:
            raise InputError(
                "a count that the file has already given",
                file=str(file),
                line=number,
                found=f"step {at[0]}, layer {at[1]}, expert {at[2]}, source {at[3]}",
                expected="each once",
            )
        seen.add(tuple(at[:4]))
        rows.append(tuple(at))
    return _array(file, rows)


def laer_rows(
    file: Path, names: Sequence[str], lines: Iterable[str], devices: int, method: str, model: str
) -> Ints:
    """Read loads of ranks: rank r is shard ``r % devices`` of group ``r // devices``.

    Args:
        file: for messages. names: of the columns, lower case. lines: the rest.
        devices: of an expert-parallel group. method, model: which of the file's; "" the only one.

    Returns:
        Shape (rows, 5), a shard in the place of the expert and the group as source.

    Raises:
        InputError: see ``count_rows``; or several methods or models and none is named.
    """
    if devices < 1:
        raise InputError("a group has devices", key="devices", found=str(devices), expected=">= 1")
    place = _columns(file, names, _LAER)
    rows, seen = list[tuple[int, ...]](), set[tuple[int, ...]]()
    kinds = set[tuple[str, str]]()
    for number, cells in enumerate(csv.reader(lines), start=2):
        if not cells:
            continue
        _width(file, number, cells, names)
        kind = (cells[place["method"]].strip(), cells[place["model"]].strip())
        if any(want and want != has for want, has in zip((method, model), kind, strict=True)):
            continue
        kinds.add(kind)
        if len(kinds) > 1:
            raise InputError(
                "the file holds several runs",
                file=str(file),
                line=number,
                key="method and model",
                found=", ".join(" of ".join(k) for k in sorted(kinds)),
                expected="name one of each",
            )
        step, layer, rank, tokens = (
            _whole(file, number, k, cells[place[k]]) for k in ("step", "layer", "rank", "count")
        )
        at = (step, layer, rank % devices, rank // devices)
        if at in seen:
            raise InputError(
                "a load that the file has already given",
                file=str(file),
                line=number,
                found=f"step {step}, layer {layer}, rank {rank}",
                expected="each once",
            )
        seen.add(at)
        rows.append((*at, tokens))
    return _array(file, rows)


def _columns(
    file: Path,
    names: Sequence[str],
    known: dict[str, tuple[str, ...]],
    optional: tuple[str, ...] = (),
) -> dict[str, int]:
    found = dict[str, int]()
    for key, choices in known.items():
        there = [names.index(c) for c in choices if c in names]
        if there:
            found[key] = there[0]
        elif key not in optional:
            raise InputError(
                f"a routing file has a column {key}",
                file=str(file),
                line=1,
                key=key,
                found=", ".join(names),
                expected=" or ".join(choices),
            )
    return found


def _width(file: Path, number: int, cells: Sequence[str], names: Sequence[str]) -> None:
    if len(cells) != len(names):
        raise InputError(
            "a row with another number of cells",
            file=str(file),
            line=number,
            found=str(len(cells)),
            expected=str(len(names)),
        )


def _whole(file: Path, number: int, key: str, cell: str) -> int:
    text = cell.strip()
    digits = text.isascii() and text.isdigit() and len(text) <= _LONGEST
    if not digits or int(text) >= LARGEST:
        raise InputError(
            "a routing file holds whole numbers",
            file=str(file),
            line=number,
            key=key,
            found=cell
            if len(cell) <= _LONGEST
            else f"{cell[:_LONGEST]} ... {len(cell)} characters",
            expected=f"a whole number from 0 up, below {LARGEST}",
        )
    return int(text)


def _array(file: Path, rows: list[tuple[int, ...]]) -> Ints:
    if not rows:
        raise InputError("no routing in this file", file=str(file), expected="one row at least")
    return np.array(rows, np.int64)
