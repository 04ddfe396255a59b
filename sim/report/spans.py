"""The span table: what ran when, in one form for simulated and measured runs.

One row per op, class of ranks and step. A folded class has one row that carries its number of
members as weight. A SEND and its RECV are one row, on the stream of their directed rank pair; a
collective has one row for each class that takes part. Legend of shapes: S rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import HetlabError, InputError, UsageError

__all__ = ["COLUMNS", "FLOATS", "INTEGERS", "TEXTS", "Spans", "concatenate", "span_name"]

TEXTS = ("run", "source", "stream", "op", "kind", "segment", "group")
"""Text columns, kept as codes into ``Spans.names``."""
INTEGERS = ("rank", "weight", "peer", "step", "stage", "microbatch", "part", "version")
"""Integer columns; -1 where a row has none."""
FLOATS = ("ready_s", "start_s", "end_s", "nbytes", "flops")
"""Float columns."""
COLUMNS = (
    "run", "source", "rank", "weight", "peer", "stream", "op", "step", "kind", "stage", "segment",
    "microbatch", "part", "group", "ready_s", "start_s", "end_s", "nbytes", "flops", "version",
)  # fmt: skip
"""All columns, in the order of files and frames."""

_MAGIC = b"hetlab-spans 1\n"


class Spans(msgspec.Struct, frozen=True):
    """The span table as columns.

    Columns: run; source ("simulated" or "measured"); rank (representative of its class); weight
    (members that have such a row); peer (representative of a transfer's receiver, else -1); stream;
    op ("program:index"); step; kind; stage (virtual); segment; microbatch; part; group; ready_s,
    start_s, end_s [s]; nbytes [B] and flops [FLOP] of one member; version read or written, else -1.

    Args:
        columns: name -> array, shape (S,); text columns hold codes.
        names: text column -> values that its codes stand for.
    """

    columns: dict[str, NDArray[Any]]
    names: dict[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.columns["start_s"])

    def __repr__(self) -> str:
        end = float(self.columns["end_s"].max()) if len(self) else 0.0
        return f"Spans({len(self)} rows, {len(np.unique(self.columns['rank']))} ranks, {end:.6g} s)"

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column, shape (S,); text columns decoded."""
        column = self.columns[name]
        if name not in self.names:
            return column
        texts: NDArray[Any] = np.array(self.names[name] or ("",))[column]
        return texts

    def where(self, name: str, test: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Mask of the rows whose text passes the test, shape (S,); one call per distinct text."""
        hits = np.array([test(value) for value in self.names[name]], bool)
        return hits[self.columns[name]] if len(hits) else np.zeros(len(self), bool)

    def take(self, rows: NDArray[Any]) -> Spans:
        """Return the rows of a mask or of an index array."""
        return Spans({k: v[rows] for k, v in self.columns.items()}, self.names)

    def to_bytes(self) -> bytes:
        """Serialise; equal tables give equal bytes on any machine of the same byte order."""
        head = {"rows": len(self), "names": {k: self.names[k] for k in TEXTS}}
        parts = [_MAGIC, json.dumps(head, sort_keys=True, separators=(",", ":")).encode(), b"\n"]
        parts += [np.ascontiguousarray(self.columns[k]).tobytes() for k in COLUMNS]
        return b"".join(parts)

    def save(self, path: str | Path) -> Path:
        """Write the table, whole or not at all; the name chooses the form.

        Args:
            path: ".npz" (numpy only) or ".parquet" (needs pyarrow).

        Raises:
            UsageError: another ending, or pyarrow is not installed. InputError: it cannot be
                written.
        """
        path = Path(path)
        if path.suffix == ".parquet":
            from sim.report.frame import write_parquet

            with _beside(path) as file:
                write_parquet(self, file)
        elif path.suffix == ".npz":
            arrays: dict[str, Any] = dict(self.columns)
            arrays |= {f"{k}.names": np.array(self.names[k], np.str_) for k in TEXTS}
            with _beside(path) as file, file.open("wb") as opened:
                np.savez_compressed(opened, **arrays)
        else:
            raise UsageError(f"a span table is saved as .npz or .parquet, not as {path.name!r}")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Spans:
        """Read what ``save`` wrote.

        Raises:
            InputError: the file is damaged, no table, or lacks a column. UsageError: its form
                cannot be read here.
        """
        path = Path(path)
        if path.suffix == ".parquet":
            from sim.report.frame import read_parquet

            with _named(path):
                return read_parquet(path)
        if path.suffix != ".npz":
            raise UsageError(f"a span table is read from .npz or .parquet, not from {path.name!r}")
        with _named(path), path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            wanted = {*COLUMNS, *(f"{k}.names" for k in TEXTS)}
            lacking = sorted(wanted - set(data.files))
            if lacking:
                raise InputError(
                    "not a span table", file=str(path), found="columns " + " ".join(data.files),
                    expected="also " + " ".join(lacking),
                )  # fmt: skip
            names = {k: data[f"{k}.names"] for k in TEXTS}
            columns = {k: data[k] for k in COLUMNS}
            _check(columns, names)
            return cls(columns, {k: tuple(v.tolist()) for k, v in names.items()})


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file to write that then becomes ``path``. Raises InputError: it cannot be written."""
    file = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield file
        file.replace(path)
    except OSError as error:
        raise InputError(
            "cannot write it", str(path), found=error.strerror or str(error)
        ) from error
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in what is said of it."""
    try:
        yield
    except HetlabError:
        raise
    except Exception as error:  # a damaged archive fails in very many ways
        raise InputError(
            "the span table cannot be read", str(path), found=f"{type(error).__name__}: {error}",
            expected="what hetlab run or simulate wrote",
        ) from error  # fmt: skip


def _check(columns: dict[str, NDArray[Any]], names: dict[str, NDArray[Any]]) -> None:
    """Raise ValueError where columns are no table."""
    rows = columns["start_s"].shape[:1]
    for name, column in columns.items():
        kinds = "fiu" if name in FLOATS else "iu"
        if column.shape != rows or column.dtype.kind not in kinds:
            raise ValueError(f"column {name} is {column.dtype} of shape {column.shape}")
    for name, values in names.items():
        codes = columns[name]
        if values.ndim != 1 or values.dtype.kind != "U":
            raise ValueError(f"names of {name} are {values.dtype} of shape {values.shape}")
        if codes.size and not 0 <= codes.min() <= codes.max() < max(len(values), 1):
            raise ValueError(f"a code of {name} has no name")


def concatenate(tables: Sequence[Spans]) -> Spans:
    """Stack tables, e.g. a simulated and a measured run, into one."""
    names: dict[str, tuple[str, ...]] = {}
    columns: dict[str, NDArray[Any]] = {}
    for name in COLUMNS:
        if name in TEXTS:
            number: dict[str, int] = {}
            codes = []
            for t in tables:
                own = [number.setdefault(v, len(number)) for v in t.names[name]]
                codes.append(np.array(own, np.int32)[t.columns[name]])
            names[name] = tuple(number)
            columns[name] = np.concatenate(codes)
        else:
            columns[name] = np.concatenate([t.columns[name] for t in tables])
    return Spans(columns, names)


def span_name(kind: str, stage: int, microbatch: int, part: int, segment: str) -> str:
    """Op of a row in the text form of programs, e.g. ``2F0.1[mlp7]``.

    >>> span_name("F", 2, 0, 1, "mlp7"), span_name("OPT", -1, -1, -1, "")
    ('2F0.1[mlp7]', 'OPT')
    """
    text = f"{stage if stage >= 0 else ''}{kind}{microbatch if microbatch >= 0 else ''}"
    if part >= 0:
        text += f".{part}"
    return f"{text}[{segment}]" if segment else text
