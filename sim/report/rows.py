"""Rows and classes of kinds shared by the pipeline pictures."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.host import HOST_STREAMS
from sim.plan.kinds import KINDS
from sim.plan.placement import Placement
from sim.report.busy import is_communication
from sim.report.spans import Spans

__all__ = ["CLASSES", "KindClass", "Row", "class_of", "classes_of", "rows_of", "time_unit"]


class KindClass(msgspec.Struct, frozen=True):
    """How a class of kinds is drawn.

    Args:
        name: in legends. letter: in text. colour: in pictures. lane: "main" or "thin".
    """

    name: str
    letter: str
    colour: str
    lane: str = "main"


CLASSES = {
    "F": KindClass("forward F", "F", "#4477aa"),
    "R": KindClass("recompute R", "R", "#ccbb44"),
    "B": KindClass("backward B", "B", "#228833"),
    "I": KindClass("input gradient I", "I", "#66ccbb"),
    "W": KindClass("weight gradient W", "W", "#99dd88"),
    "OPT": KindClass("optimizer OPT", "O", "#aa3377"),
    "compute": KindClass("other compute", "c", "#888888"),
    "transfer": KindClass("transfer", "t", "#ee7733", "thin"),
    "collective": KindClass("collective", "g", "#cc3311", "thin"),
    "host": KindClass("host and its link", "h", "#bbbbbb", "thin"),
}
"""Class of kinds -> how it is drawn; colours stay apart for colour-blind readers."""


def class_of(kind: str) -> str:
    """Return the key in CLASSES of an op kind, "" for kinds that are not drawn (BARRIER)."""
    if kind in CLASSES:
        return kind
    if is_communication(kind):
        return KINDS[kind].cost
    if kind == "BARRIER" or kind not in KINDS:
        return ""
    return "host" if KINDS[kind].cost == "host" else "compute"


def classes_of(spans: Spans) -> NDArray[Any]:
    """Class of every row, shape (S,); whatever runs on the host's streams is "host"."""
    keys: NDArray[Any] = np.array([class_of(k) for k in spans.names["kind"]] or [""], "U12")
    keys = keys[spans.columns["kind"]]
    keys[spans.where("stream", lambda s: s in HOST_STREAMS)] = "host"
    return keys


class Row(msgspec.Struct, frozen=True):
    """One row of a picture: the class of ranks with this representative.

    Args:
        rank: representative. label: for people. position: pipeline position, -1 outside cells.
    """

    rank: int
    label: str
    position: int = -1


def rows_of(spans: Spans, placement: Placement | None = None) -> tuple[Row, ...]:
    """One row per pipeline position and class of replicas, in pipeline order.

    Of several classes inside one cell (tensor-parallel ranks that did not fold) only the first has
    a row, because all of them run the same compute ops.

    Args:
        spans: one run. placement: of its plan, for labels; without it every rank has a row.
    """
    local = spans.where("kind", lambda k: k in KINDS and class_of(k) != "")
    ranks, first = np.unique(spans.columns["rank"][local], return_index=True)
    weight = dict(zip(ranks.tolist(), spans.columns["weight"][local][first].tolist(), strict=True))
    cells = {r: c for c in placement.cells for r in c.ranks} if placement else {}
    seen: set[tuple[int, int]] = set()
    rows = []
    for rank in ranks.tolist():
        cell = cells.get(rank)
        if cell is None:
            rows.append(Row(rank, f"rank {rank}" + _times(weight[rank])))
            continue
        if (cell.stage, cell.replica) in seen:
            continue
        seen.add((cell.stage, cell.replica))
        what = f" {cell.accelerator}" if cell.accelerator else ""
        what += f" tp{cell.tp}" if cell.tp > 1 else ""
        label = f"stage {cell.stage}{what}" + _times(weight[rank] // len(cell.ranks))
        rows.append(Row(rank, label, cell.stage))
    rows.sort(key=lambda r: (r.position < 0, r.position, r.rank))
    labels = [r.label for r in rows]
    return tuple(
        msgspec.structs.replace(r, label=f"{r.label} r{r.rank}") if labels.count(r.label) > 1 else r
        for r in rows
    )


def _times(count: int) -> str:
    return f" ×{count}" if count > 1 else ""


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that shows a time with few digits, and units per second.

    >>> time_unit(2.0), time_unit(0.02)
    (('s', 1.0), ('ms', 1000.0))
    """
    if seconds >= 3600:
        return "h", 1 / 3600
    if seconds >= 1:
        return "s", 1.0
    return ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
