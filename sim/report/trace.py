"""Chrome trace of a run, for Perfetto and chrome://tracing; shaped like a Kineto trace.

A process is a class of ranks, a thread one of its streams; times are microseconds from the start
of the run, sorted. A transfer is drawn at both ends, joined by an arrow.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.engine.simulate import Run
from sim.errors import InputError
from sim.plan.placement import Placement
from sim.report.record import spans_of_run
from sim.report.spans import Spans, span_name

__all__ = ["Counter", "save_trace", "trace_lines", "trace_of_run"]

Floats = NDArray[np.float64]


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity over time, drawn as an area.

    Args:
        name: with its unit, e.g. "memory [B]". rank: process it belongs to; -1 for the links.
        times_s: [s], shape (K,). values: from each time on, shape (K,).
    """

    name: str
    times_s: Floats
    values: Floats
    rank: int = -1


def save_trace(
    spans: Spans,
    path: str | Path,
    *,
    placement: Placement | None = None,
    counters: Sequence[Counter] = (),
    about: Mapping[str, str] | None = None,
) -> Path:
    """Write a trace; compressed when the name ends with ".gz".

    Args:
        spans: one run. path: where to. placement: of its plan, for process names.
        counters: memory and link load. about: plan hash, version ..., kept in the file's head.

    Returns:
        The path.

    Raises:
        InputError: a counter's times and values differ in number.
    """
    path = Path(path)
    text = "".join(trace_lines(spans, placement=placement, counters=counters, about=about))
    data = text.encode()
    if path.name.endswith(".gz"):
        # A fixed time stamp keeps equal runs equal, byte for byte.
        data = gzip.compress(data, compresslevel=5, mtime=0)
    path.write_bytes(data)
    return path


def trace_of_run(
    run: Run, path: str | Path, *, spans: Spans | None = None, counters: Sequence[Counter] = ()
) -> Path:
    """Write the trace of a simulation.

    Args:
        run: from sim.engine.simulate. path: where to. spans: of the run, when they exist already.
        counters: memory and link load.

    Returns:
        The path.
    """
    plan = run.layout.plan
    about = {"plan": plan.name, "plan_hash": plan.hash, "hetlab": plan.version}
    table = spans_of_run(run) if spans is None else spans
    return save_trace(table, path, placement=plan.placement, counters=counters, about=about)


def trace_lines(
    spans: Spans,
    *,
    placement: Placement | None = None,
    counters: Sequence[Counter] = (),
    about: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Pieces of the JSON text, see ``save_trace``."""
    ends = _ends(spans)
    world = placement.num_ranks if placement else int(ends.at.max(initial=-1)) + 1
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "hetlab", "rank": 0, "world_size": world},
        "otherData": dict(about or {}),
    }
    yield json.dumps(head)[:-1] + ', "traceEvents": [\n'
    yield ",\n".join(_names(spans, ends.threads, placement, bool(len(counters))))
    parts = [_slices(spans, ends), _arrows(spans, ends), _counts(counters, spans)]
    stamps = np.concatenate([stamp for stamp, _ in parts])
    lines = [line for _, some in parts for line in some]
    yield "".join(map(lines.__getitem__, np.argsort(stamps, kind="stable").tolist()))
    yield "\n]}\n"


class _Ends(NamedTuple):
    """Where every slice is drawn; arrays over slices, those of receiving ends last."""

    at: NDArray[np.int64]
    row: NDArray[np.int64]
    received: NDArray[np.bool_]
    thread: NDArray[np.int64]
    threads: list[tuple[int, int, str]]


def _ends(spans: Spans) -> _Ends:
    """Process, row, receiving or not and thread of every slice; and all (process, thread, stream).

    Streams of the chip come first, then pairs and groups by name.
    """
    peer, names = spans.columns["peer"], spans.names["stream"]
    twice = np.flatnonzero(peer >= 0)
    at = np.concatenate([spans.columns["rank"], peer[twice]])
    index = np.concatenate([np.arange(len(spans)), twice])
    received = np.arange(len(at)) >= len(spans)
    local = {"compute": 0, "h2d": 1, "d2h": 2, "host": 3, "nvme_read": 4, "nvme_write": 5}
    order = sorted(range(len(names)), key=lambda c: (local.get(names[c], 6), names[c]))
    place = np.zeros(max(len(names), 1), np.int64)
    place[order] = np.arange(len(order))
    # A class may send to itself; its receiving end then needs a thread of its own.
    own = received & (spans.columns["rank"][index] == at)
    thread = 2 * place[spans.columns["stream"][index]] + own
    threads = [
        (process, number, names[order[number // 2]] + (" (in)" if number % 2 else ""))
        for process, number in sorted(set(zip(at.tolist(), thread.tolist(), strict=True)))
    ]
    return _Ends(at, index, received, thread, threads)


def _names(
    spans: Spans, threads: list[tuple[int, int, str]], placement: Placement | None, counted: bool
) -> list[str]:
    """Metadata events: names and order of processes and threads."""
    cells = {r: c for c in placement.cells for r in c.ranks} if placement else {}
    sent = spans.columns["peer"] < 0
    weight = dict(
        zip(
            spans.columns["rank"][sent].tolist(),
            spans.columns["weight"][sent].tolist(),
            strict=True,
        )
    )
    events = []
    for rank in sorted({p for p, _, _ in threads}):
        cell = cells.get(rank)
        name = f"rank {rank}"
        if weight.get(rank, 1) > 1:
            name += f" and {weight[rank] - 1} like it"
        if cell is not None:
            name += f": stage {cell.stage} {cell.accelerator}".rstrip()
        events.append(_metadata("process_name", rank, 0, {"name": name}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
    for rank, number, stream in threads:
        events.append(_metadata("thread_name", rank, number, {"name": stream}))
        events.append(_metadata("thread_sort_index", rank, number, {"sort_index": number}))
    if counted:
        events.append(_metadata("process_name", -1, 0, {"name": "links"}))
    return events


def _metadata(name: str, pid: int, tid: int, args: Mapping[str, object]) -> str:
    return json.dumps({"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args})


def _nanoseconds(spans: Spans) -> tuple[Floats, Floats]:
    """Start and end of every row from the start of the run, whole nanoseconds [µs].

    Rounding both ends, not the duration, keeps back-to-back ops from overlapping.
    """
    start, end = spans.columns["start_s"], spans.columns["end_s"]
    zero = start.min(initial=np.inf)
    return np.rint((start - zero) * 1e9) / 1e3, np.rint((end - zero) * 1e9) / 1e3


def _slices(spans: Spans, ends: _Ends) -> tuple[Floats, list[str]]:
    """One event per slice. Only times differ between slices; all other text is made once."""
    at, index, received, thread, _ = ends
    start, end = _nanoseconds(spans)
    c = spans.columns
    heads, head = _heads(spans, index, received)
    pairs, where = _combine(at, thread)
    places = [f'"pid":{at[k]},"tid":{thread[k]},"ts":' for k in pairs.tolist()]
    kinds, what = _combine(
        c["step"][index], c["group"][index], c["nbytes"][index], c["flops"][index]
    )
    tails = []
    for k in index[kinds].tolist():
        group = json.dumps(spans.names["group"][c["group"][k]])
        tails.append(
            f',"args":{{"step":{c["step"][k]},"group":{group},'
            f'"nbytes":{float(c["nbytes"][k])!r},"flops":{float(c["flops"][k])!r}}}}}'
        )
    rows = zip(
        map(heads.__getitem__, head.tolist()),
        map(places.__getitem__, where.tolist()),
        start[index].tolist(),
        (end - start)[index].tolist(),
        map(tails.__getitem__, what.tolist()),
        strict=True,
    )
    return start[index], ['%s%s%.3f,"dur":%.3f%s' % row for row in rows]  # noqa: UP031


def _combine(*keys: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First row of each distinct combination of keys, and the combination of each row."""
    code = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        distinct, inverse = np.unique(key, return_inverse=True)
        # Numbered densely again after each key, so that the product never overflows.
        _, code = np.unique(code * len(distinct) + inverse.reshape(-1), return_inverse=True)
    _, first, code = np.unique(code, return_index=True, return_inverse=True)
    return first, code.reshape(-1)


def _heads(
    spans: Spans, index: NDArray[np.int64], received: NDArray[np.bool_]
) -> tuple[list[str], NDArray[np.int64]]:
    """Distinct beginnings of slices, up to their category, and the number of each slice's."""
    c = spans.columns
    keys = [c[k][index] for k in ("kind", "stage", "microbatch", "part", "segment")]
    first, code = _combine(*keys, received)
    # Kinds are plain words; only segments may hold characters that JSON escapes.
    segments = [json.dumps(name)[1:-1] for name in spans.names["segment"]]
    parts = [key[first].tolist() for key in keys]
    heads = []
    for is_end, kind, stage, mb, part, segment in zip(
        received[first].tolist(), *parts, strict=True
    ):
        name = spans.names["kind"][kind]
        shown = name.replace("SEND", "RECV") if is_end else name
        text = span_name(shown, stage, mb, part, segments[segment])
        heads.append(f',\n{{"ph":"X","name":"{text}","cat":"{name}",')
    return heads, code


def _arrows(spans: Spans, ends: _Ends) -> tuple[Floats, list[str]]:
    """From the start of each transfer's sending slice to the end of its receiving slice."""
    at, index, received, thread, _ = ends
    start, end = _nanoseconds(spans)
    to = np.flatnonzero(received)
    row = index[to]
    first = start[row]
    # An arrow binds to the slice that encloses its time; an end is outside its own slice.
    last = np.maximum(first, end[row] - 0.001)
    numbers = range(len(to))
    lines = [
        ',\n{"ph":"s","id":%d,"name":"transfer","cat":"arrow","pid":%d,"tid":%d,"ts":%.3f}' % values  # noqa: UP031
        for values in zip(
            numbers, at[row].tolist(), thread[row].tolist(), first.tolist(), strict=True
        )
    ]
    lines += [
        ',\n{"ph":"f","bp":"e","id":%d,"name":"transfer","cat":"arrow","pid":%d,"tid":%d,"ts":%.3f}'  # noqa: UP031
        % values
        for values in zip(numbers, at[to].tolist(), thread[to].tolist(), last.tolist(), strict=True)
    ]
    return np.concatenate([first, last]), lines


def _counts(counters: Sequence[Counter], spans: Spans) -> tuple[Floats, list[str]]:
    zero = float(spans.columns["start_s"].min(initial=np.inf))
    stamps, lines = [], []
    for counter in counters:
        if len(counter.times_s) != len(counter.values):
            raise InputError(
                f"counter {counter.name} has times and values of different number",
                found=f"{len(counter.times_s)} times, {len(counter.values)} values",
            )
        name = json.dumps(counter.name)
        for time, value in zip(counter.times_s.tolist(), counter.values.tolist(), strict=True):
            stamp = round((time - zero) * 1e9) / 1e3
            stamps.append(stamp)
            lines.append(
                f',\n{{"ph":"C","name":{name},"pid":{counter.rank},"tid":0,"ts":{stamp:.3f},'
                f'"args":{{"value":{value!r}}}}}'
            )
    return np.array(stamps, np.float64), lines
