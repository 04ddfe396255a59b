"""What ranks did with their time: computed, communicated, waited for communication."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.plan.kinds import KINDS
from sim.report.spans import Spans

__all__ = ["Busy", "busy_of", "clipped", "is_communication", "sum_by"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Busy(msgspec.Struct, frozen=True, kw_only=True):
    """What each class of ranks did with its compute stream over the whole run; arrays, shape (R,).

    Args:
        rank: representative. weight: members. compute_s: [s] the compute stream was busy.
        exposed_s: group of communication -> [s] the compute stream was idle while such an op of the
            rank ran; an instant with several groups counts in equal parts for each.
        communication_s: [s] any communication op of the rank ran.
        makespan_s: [s] from the first start to the last end of the table.
    """

    rank: Ints
    weight: Ints
    compute_s: Floats
    exposed_s: dict[str, Floats]
    communication_s: Floats
    makespan_s: float


def is_communication(kind: str) -> bool:
    """True for transfers and collectives; BARRIER moves no bytes and is neither."""
    known = KINDS.get(kind)
    return known is not None and known.cost in ("transfer", "collective") and kind != "BARRIER"


def busy_of(spans: Spans) -> Busy:
    """Sweep each rank's compute and communication intervals once.

    A transfer counts for its sender and its receiver, a collective for every member; BARRIER is not
    communication. Only classes of ranks with a compute stream are listed.
    """
    compute = spans.where("stream", lambda s: s == "compute")
    comm = spans.where("kind", is_communication) & ~compute
    both = comm & (spans.columns["peer"] >= 0)
    group, names = _groups(spans)
    rank, start, end = (spans.columns[k] for k in ("rank", "start_s", "end_s"))
    who = np.concatenate([rank[compute], rank[comm], spans.columns["peer"][both]])
    begin = np.concatenate([start[compute], start[comm], start[both]])
    stop = np.concatenate([end[compute], end[comm], end[both]])
    what = np.concatenate([np.full(int(compute.sum()), -1), group[comm], group[both]])
    time, ranks = np.concatenate([begin, stop]), np.concatenate([who, who])
    sign, what = np.repeat([1, -1], len(who)), np.concatenate([what, what])
    order = np.lexsort((time, ranks))
    time, ranks, sign, what = time[order], ranks[order], sign[order], what[order]
    listed = np.unique(rank[compute])
    row = np.searchsorted(listed, ranks[:-1])
    inside = (ranks[:-1] == ranks[1:]) & (row < len(listed))
    inside[inside] = listed[row[inside]] == ranks[:-1][inside]
    gap = np.diff(time) * inside
    row = np.where(inside, row, 0)

    def total(share: NDArray[Any]) -> Floats:
        return sum_by(row, gap * share[:-1], len(listed))

    def running(number: int) -> NDArray[np.bool_]:
        return np.cumsum(np.where(what == number, sign, 0)) > 0

    in_compute = running(-1)
    in_group = np.zeros((len(names), len(time)), bool)
    for g in range(len(names)):
        in_group[g] = running(g)
    several = np.maximum(in_group.sum(0), 1)
    weight = np.zeros(len(listed), np.int64)
    weight[np.searchsorted(listed, rank[compute])] = spans.columns["weight"][compute]
    return Busy(
        rank=listed, weight=weight, compute_s=total(in_compute),
        exposed_s={
            name: total((in_group[g] & ~in_compute) / several) for g, name in enumerate(names)
        },
        communication_s=total(in_group.sum(0) > 0),
        makespan_s=float(end.max() - start.min()) if len(spans) else 0.0,
    )  # fmt: skip


def clipped(spans: Spans, start: float, stop: float) -> tuple[Spans, Ints, Floats]:
    """What of a table lies in a window.

    Args:
        spans: one run. start, stop: [s] of the window.

    Returns:
        The rows cut at its edges, their indices in ``spans`` and the share left of each (0..1).
    """
    begin, end = spans.columns["start_s"], spans.columns["end_s"]
    kept = np.flatnonzero((end > start) & (begin < stop))
    found = spans.take(kept)
    cut = (np.maximum(begin[kept], start), np.minimum(end[kept], stop))
    whole = end[kept] - begin[kept]
    left = cut[1] - cut[0]
    share = np.divide(left, whole, out=np.ones(len(kept)), where=whole > 0)
    return Spans(found.columns | {"start_s": cut[0], "end_s": cut[1]}, spans.names), kept, share


def sum_by(row: Ints, values: Floats, rows: int) -> Floats:
    """Sum of the values of each row, shape (rows,)."""
    found = np.zeros(rows)
    np.add.at(found, row, values)
    return found


def _groups(spans: Spans) -> tuple[Ints, list[str]]:
    """Number of each row's group of communication, and their names."""
    role = np.array([text.partition(" ")[0] for text in spans.names["group"]] or [""])
    text = role[spans.columns["group"]].astype("U12")
    # Transfers have no group: those between stages, and those that a listed message asks for.
    message = spans.where("kind", lambda k: k in ("PULL", "PUSH")) | (spans.columns["step"] < 0)
    text[(text == "") & message] = "ps"
    text[text == ""] = "pp"
    names, number = np.unique(text, return_inverse=True)
    used = spans.where("kind", is_communication)
    kept = [g for g in range(len(names)) if (number.reshape(-1)[used] == g).any()]
    to = np.zeros(len(names), np.int64)
    to[kept] = np.arange(len(kept))
    return to[number.reshape(-1)], [str(names[g]) for g in kept]
