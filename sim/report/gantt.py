"""The pipeline Gantt picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.simulate import Run
from sim.plan.placement import Placement
from sim.report.busy import busy_of
from sim.report.metrics import pace_of_run
from sim.report.record import spans_of_run
from sim.report.rows import CLASSES, Row, classes_of, rows_of, time_unit
from sim.report.spans import Spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PICTURES", "draw_gantt", "save_gantt"]

MAIN, THIN = (-0.36, 0.56), (0.25, 0.17)
"""(offset, height) of a row's compute bars and of its communication bars; the axis points down."""
NUMBER_PX = 6.0
"""Width of one digit of a microbatch number, at NUMBER_POINTS."""
NUMBER_POINTS = 6.5


def draw_gantt(
    axes: Axes, spans: Spans, placement: Placement | None = None, *, title: str = ""
) -> Axes:
    """Draw one bar per op: compute on the upper lane of its row, communication on the lower.

    Bars of compute ops carry their microbatch number where it fits. Later chunks of an interleaved
    schedule are paler. A transfer shows on the rows of both its ends.

    Args:
        axes: drawn into. spans: one run. placement: of its plan, for rows and labels.
        title: above the picture.

    Returns:
        The same axes.
    """
    rows = rows_of(spans, placement)
    begin, end = _window(spans)
    unit, scale = time_unit(end - begin)
    axes.set_xlim(0, max(end - begin, 1e-12) * scale)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    positions = placement.num_stages if placement else 0
    number = {row.rank: i for i, row in enumerate(rows)}
    row_of, left, width, stage, key, mb = _bars(spans, number, begin, scale)
    per_px = (end - begin) * scale / max(axes.get_window_extent().width, 1.0)
    shown = [c for c in CLASSES if (key == c).any()]
    for name in shown:
        offset, height = MAIN if CLASSES[name].lane == "main" else THIN
        chunk = stage // positions if positions and offset < 0 else np.zeros_like(stage)
        for row, part in sorted(
            {*zip(row_of[key == name].tolist(), chunk[key == name].tolist(), strict=True)}
        ):
            mine = (key == name) & (row_of == row) & (chunk == part)
            edge = 0.4 if np.median(width[mine]) > 4 * per_px else 0.0
            axes.broken_barh(
                np.stack([left[mine], width[mine]], 1).tolist(), (row + offset, height),
                facecolors=_paler(CLASSES[name].colour, part), edgecolors="white", linewidth=edge,
            )  # fmt: skip
    _numbers(axes, (row_of, left, width, mb, key), per_px)
    chunks = int(stage.max(initial=0)) // positions + 1 if positions else 1
    _furnish(axes, spans, rows, (begin, scale, unit), shown, chunks)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    return axes


def _window(spans: Spans) -> tuple[float, float]:
    if not len(spans):
        return 0.0, 0.0
    return float(spans.columns["start_s"].min()), float(spans.columns["end_s"].max())


def _bars(
    spans: Spans, number: dict[int, int], begin: float, scale: float
) -> tuple[NDArray[Any], ...]:
    """Row, left, width, virtual stage, class of kind and microbatch of every bar."""
    keys = classes_of(spans)
    rank, peer = spans.columns["rank"], spans.columns["peer"]
    index = np.arange(len(spans))
    at = np.concatenate([rank, peer])
    index = np.concatenate([index, index])
    keep = np.isin(at, list(number)) & (keys[index] != "")
    keep[len(rank) :] &= peer != rank
    at, index = at[keep], index[keep]
    start, end = spans.columns["start_s"][index], spans.columns["end_s"][index]
    rows = np.array([number[r] for r in at.tolist()], np.int64)
    stage, mb = spans.columns["stage"][index], spans.columns["microbatch"][index]
    return (
        rows,
        (start - begin) * scale,
        (end - start) * scale,
        np.maximum(stage, 0),
        keys[index],
        mb,
    )


def _paler(colour: str, step: int) -> tuple[float, float, float]:
    """The colour mixed with white, once per chunk."""
    from matplotlib.colors import to_rgb

    keep = max(0.35, 1 - 0.3 * step)
    r, g, b = (keep * c + 1 - keep for c in to_rgb(colour))
    return r, g, b


def _numbers(axes: Axes, bars: tuple[NDArray[Any], ...], per_px: float) -> None:
    """Microbatch numbers of the kinds whose usual bar is wide enough for the largest number."""
    row_of, left, width, mb, key = bars
    digits = len(str(mb.max())) if len(mb) else 1
    for name, kind in CLASSES.items():
        mine = (key == name) & (mb >= 0)
        if kind.lane != "main" or not mine.any():
            continue
        if np.median(width[mine]) < (NUMBER_PX * digits + 2) * per_px:
            continue
        ink = "black" if name in ("I", "W", "R") else "white"
        middle = row_of + MAIN[0] + MAIN[1] / 2
        for x, y, number in zip((left + width / 2)[mine], middle[mine], mb[mine], strict=True):
            axes.text(
                x, y, str(number), ha="center", va="center_baseline", fontsize=NUMBER_POINTS,
                color=ink, clip_on=True,
            )  # fmt: skip


def _furnish(
    axes: Axes,
    spans: Spans,
    rows: Sequence[Row],
    scaling: tuple[float, float, str],
    shown: list[str],
    chunks: int,
) -> None:
    """Labels, step ends, legend."""
    from matplotlib.patches import Patch

    begin, scale, unit = scaling
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"time [{unit}]", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for i in range(1, len(rows)):
        axes.axhline(i - 0.5, color="#dddddd", linewidth=0.4, zorder=0)
    steps = spans.columns["step"]
    # Ranks that serve messages (step -1) share no steps with the others.
    shared = len(steps) and int(steps.min()) >= 0
    for s in range(int(steps.max()) if shared else 0):
        last = (spans.columns["end_s"][steps == s].max() - begin) * scale
        axes.axvline(last, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)))
    handles = [Patch(color=CLASSES[c].colour, label=CLASSES[c].name) for c in shown]
    if chunks > 1:
        handles.append(Patch(color=_paler("#666666", 1), label="paler: later chunk"))
    axes.legend(
        handles=handles,
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=max(1, len(handles)), frameon=False,
        fontsize=7.5, handlelength=1.0, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".eps", ".ps", ".tif", ".tiff")
"""Endings of the formats a picture can have."""


def save_gantt(run: Run, path: str | Path, *, spans: Spans | None = None) -> Path:
    """Draw a simulation and write the picture; the name's ending chooses the format.

    Args:
        run: from sim.engine.simulate. path: e.g. "gantt.png" or "gantt.svg".
        spans: of the run, when they exist already.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spans = spans_of_run(run) if spans is None else spans
    plan = run.layout.plan
    rows = len(rows_of(spans, plan.placement))
    figure = Figure(figsize=(15, 1.3 + 0.34 * max(rows, 3)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # The layout decides how many pixels a bar gets, and so which numbers fit.
    axes.set_yticks(range(rows), [row.label for row in rows_of(spans, plan.placement)], fontsize=8)
    figure.draw_without_rendering()
    draw_gantt(axes, spans, plan.placement, title=_title(run, spans))
    figure.savefig(path)
    return Path(path)


def _title(run: Run, spans: Spans) -> str:
    plan = run.layout.plan
    pace, busy = pace_of_run(run, spans), busy_of(spans)
    unit, scale = time_unit(pace.step_time_s)
    text = f"{plan.name or plan.hash}: step {pace.step_time_s * scale:.4g} {unit}"
    if busy.makespan_s and len(busy.rank):
        bubble = 1 - np.average(busy.compute_s, weights=busy.weight) / busy.makespan_s
        text += f", bubble {100 * bubble:.1f} %"
    return text
