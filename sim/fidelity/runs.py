"""Measured runs: one CSV line per measured value -> one record per run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec

import hardware_profiles
from sim.errors import InputError

__all__ = ["BUNDLED", "MeasuredRun", "MeasuredValue", "read_runs"]

BUNDLED = "measured_runs.csv"
"""Name of the runs that come with hetlab, among the hardware profiles."""
_VALUE = ("measured_metric", "value", "unit")
REQUIRED = (
    "run_id", "model", "n_params", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq",
    "chips", "tp", "pp", "ep", "cp", "dp", "vpp", "mbs", "gbs", "precision", "recompute", "zero",
    *_VALUE, "source",
)  # fmt: skip
"""Columns a file must have; ``kind``, ``evidence``, ``notes``, ``flag`` and ``flop_convention`` may
be missing and are then empty."""
_OPTIONAL = ("kind", "evidence", "notes", "flag", "flop_convention")


class MeasuredValue(msgspec.Struct, frozen=True):
    """One measured value. Args: metric: name. value: number. unit: as the file says."""

    metric: str
    value: float
    unit: str


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Args:
        run_id: unique; its part before the number names the source.
        columns: column -> text, "" where the file says nothing; settings, not values.
        values: what was measured.
    """

    run_id: str
    columns: dict[str, str]
    values: tuple[MeasuredValue, ...]

    @property
    def source(self) -> str:
        """Family of the run, e.g. "bloom" of bloom-034."""
        return self.run_id.split("-", 1)[0]

    @property
    def flagged(self) -> bool:
        """Whether the file keeps the run out of the score."""
        return bool(self.columns["flag"])

    @property
    def remembered(self) -> bool:
        """Whether its values were recalled and not read."""
        return self.columns["evidence"].startswith("memory")

    @property
    def heterogeneous(self) -> bool:
        """Whether it ran on chips of several types."""
        return self.columns["kind"] == "heterogeneous" or " + " in self.columns["chips"]

    def text(self, column: str) -> str:
        """Return a column, stripped; "" when it is empty."""
        return self.columns.get(column, "").strip()

    def integer(self, column: str) -> int | None:
        """Return a column as a whole number; None when it is empty or no number."""
        try:
            return int(float(self.text(column)))
        except ValueError:
            return None


def read_runs(file: str | Path | None = None) -> tuple[MeasuredRun, ...]:
    """Read measured runs.

    Args:
        file: a CSV file with the columns ``REQUIRED``; None reads the bundled one.

    Returns:
        One record per run_id, in file order.

    Raises:
        InputError: unreadable, a column is missing, a value is no number, or the lines of one run
            disagree about its settings.
    """
    path = Path(str(hardware_profiles.folder() / BUNDLED)) if file is None else Path(file)
    try:
        with path.open(encoding="utf-8", newline="") as opened:
            reader = csv.DictReader(opened)
            lines = list(reader)
            header = reader.fieldnames or ()
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", file=str(path)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"not a CSV file: {error}", file=str(path)) from None
    _check_header(header, str(path))
    settings: dict[str, dict[str, str]] = {}
    values: dict[str, list[MeasuredValue]] = {}
    for number, line in enumerate(lines, start=2):
        run_id = line["run_id"]
        own = {k: (line.get(k) or "") for k in (*REQUIRED, *_OPTIONAL) if k not in _VALUE}
        known = settings.setdefault(run_id, own)
        if {k: v for k, v in known.items() if k not in ("notes", "flop_convention")} != {
            k: v for k, v in own.items() if k not in ("notes", "flop_convention")
        }:
            changed = next(k for k in own if own[k] != known[k])
            raise InputError(
                f"the lines of {run_id} disagree",
                file=str(path), line=number, key=changed, found=own[changed],
                expected=known[changed],
            )  # fmt: skip
        values.setdefault(run_id, []).append(_value(line, str(path), number))
    return tuple(
        MeasuredRun(run_id=k, columns=own, values=tuple(values[k])) for k, own in settings.items()
    )


def _check_header(header: Sequence[str], file: str) -> None:
    missing = [c for c in REQUIRED if c not in header]
    if missing:
        raise InputError(
            "a column is missing", file=file, line=1, key=missing[0], expected=", ".join(REQUIRED)
        )


def _value(line: dict[str, str], file: str, number: int) -> MeasuredValue:
    try:
        value = float(line["value"])
    except (TypeError, ValueError):
        raise InputError(
            "not a number", file=file, line=number, key="value", found=str(line["value"])
        ) from None
    return MeasuredValue(line["measured_metric"], value, line["unit"])
