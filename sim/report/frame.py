"""The span table as a pandas DataFrame, and as a parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sim.errors import InputError
from sim.optional import import_optional
from sim.report.spans import COLUMNS, FLOATS, TEXTS, Spans

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["from_frame", "read_parquet", "to_frame", "write_parquet"]


def to_frame(spans: Spans) -> pd.DataFrame:
    """Return the table as a DataFrame; text columns are categoricals, seconds stay seconds."""
    import pandas as pd

    data = {}
    for name in COLUMNS:
        column = spans.columns[name]
        if name in TEXTS:
            data[name] = pd.Categorical.from_codes(column, categories=list(spans.names[name]))
        else:
            data[name] = column
    return pd.DataFrame(data)


def from_frame(frame: pd.DataFrame, file: str = "") -> Spans:
    """Read a table back from a DataFrame with the columns of ``to_frame``.

    Args:
        frame: text columns may be plain strings. file: named in errors.

    Raises:
        InputError: a column is missing.
    """
    import pandas as pd

    lacking = [name for name in COLUMNS if name not in frame.columns]
    if lacking:
        raise InputError(
            "not a span table", file=file, found="columns " + " ".join(map(str, frame.columns)),
            expected="also " + " ".join(lacking),
        )  # fmt: skip
    columns, names = {}, {}
    for name in COLUMNS:
        if name in TEXTS:
            coded = pd.Categorical(frame[name])
            columns[name] = coded.codes.astype(np.int32)
            names[name] = tuple(str(value) for value in coded.categories)
        else:
            columns[name] = frame[name].to_numpy(np.float64 if name in FLOATS else np.int64)
    return Spans(columns, names)


def write_parquet(spans: Spans, path: Path) -> None:
    """Write a parquet file.

    Raises:
        UsageError: pyarrow is not installed.
    """
    import_optional("pyarrow")
    to_frame(spans).to_parquet(path, index=False)


def read_parquet(path: Path) -> Spans:
    """Read a parquet file.

    Raises:
        InputError: a column is missing. UsageError: pyarrow is not installed.
    """
    import_optional("pyarrow")
    import pandas as pd

    return from_frame(pd.read_parquet(path), str(path))
