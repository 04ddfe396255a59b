"""A run's timeline as text, for terminals and READMEs."""

from __future__ import annotations

import numpy as np

from sim.plan.placement import Placement
from sim.report.rows import CLASSES, classes_of, rows_of, time_unit
from sim.report.spans import Spans

__all__ = ["text_gantt"]


def text_gantt(
    spans: Spans, placement: Placement | None = None, *, width: int = 80, legend: bool = True
) -> str:
    """One line per row of the picture, one character per slice of time.

    A slice shows the class that fills most of it: a compute op if one covers at least half of the
    slice, else communication if that covers at least half, else "." for idle.

    Args:
        spans: one run. placement: of its plan, for labels.
        width: [characters] of the whole line, label included. legend: add a line that explains.

    Returns:
        Text without a final newline.
    """
    rows = rows_of(spans, placement)
    if not rows:
        return "(no spans)"
    head = max(len(r.label) for r in rows)
    slices = max(10, width - head - 3)
    begin = float(spans.columns["start_s"].min())
    total = float(spans.columns["end_s"].max()) - begin
    key_of = classes_of(spans)
    lines, used = [], set()
    for row in rows:
        cover = {}
        mine = (spans.columns["rank"] == row.rank) | (spans.columns["peer"] == row.rank)
        for key in CLASSES:
            hit = mine & (key_of == key)
            if hit.any():
                start = spans.columns["start_s"][hit] - begin
                end = spans.columns["end_s"][hit] - begin
                cover[key] = _coverage(start, end, total, slices)
        text = _letters(cover, slices)
        used |= set(text)
        lines.append(f"{row.label:<{head}} |{text}|")
    unit, scale = time_unit(total)
    lines.append(f"{'':<{head}} 0{f'{total * scale:.4g} {unit}':>{slices + 1}}")
    if legend:
        named = [
            f"{c.letter} {c.name.removesuffix(' ' + k)}"
            for k, c in CLASSES.items()
            if c.letter in used
        ]
        lines.append(f"{'':<{head}}  " + ", ".join([*named, ". idle"]))
    return "\n".join(lines)


def _coverage(
    start: np.ndarray[tuple[int], np.dtype[np.float64]],
    end: np.ndarray[tuple[int], np.dtype[np.float64]],
    total: float,
    slices: int,
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Share of each slice that the intervals cover, shape (slices,)."""
    edges = np.linspace(0.0, total, slices + 1)
    # Integral of "number of running ops" up to each edge, by the clipped length of each interval.
    upto = np.clip(edges[:, None] - start, 0.0, end - start).sum(1)
    share: np.ndarray[tuple[int], np.dtype[np.float64]] = np.diff(upto) / max(
        total / slices, 1e-300
    )
    return share


def _letters(cover: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]], slices: int) -> str:
    letters = np.full(slices, ".")
    for lane in ("thin", "main"):
        keys = [k for k in cover if CLASSES[k].lane == lane]
        if not keys:
            continue
        shares = np.stack([cover[k] for k in keys])
        most = np.array([CLASSES[k].letter for k in keys])[shares.argmax(0)]
        letters = np.where(shares.sum(0) >= 0.5 - 1e-9, most, letters)
    return "".join(letters.tolist())
