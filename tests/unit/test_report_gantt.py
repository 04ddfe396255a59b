"""Pipeline pictures: rows, bars, numbers, and the text form."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sim.cost.stated import stated_prices
from sim.engine.simulate import Run, lay_out, run_layout
from sim.plan.kinds import KINDS
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Plan, ProgramText
from sim.report.gantt import draw_gantt, save_gantt
from sim.report.record import spans_of_run
from sim.report.rows import CLASSES, class_of, classes_of, rows_of
from sim.report.text_gantt import text_gantt


def run_of(
    p: int, m: int, *, replicas: int = 1, tp: int = 1, fold: bool = True, schedule: str = "1f1b",
    chunks: int = 1, send: float = 0.0, **seconds: float,
) -> Run:  # fmt: skip
    cells = []
    for s in range(p):
        for r in range(replicas):
            first = (r * p + s) * tp
            ranks = tuple(range(first, first + tp))
            cells.append(Cell(stage=s, replica=r, ranks=ranks, tp=tp, accelerator="X1"))
    v = p * chunks
    plan = Plan(
        name="picture",
        placement=Placement(
            cells=tuple(cells),
            segments=tuple(Segment(stage=s, cell=s % p) for s in range(v)),
            boundaries=tuple(Boundary(src=s, dst=s + 1) for s in range(v - 1)),
            microbatches=(m,) * replicas,
        ),
        lowering=standard_calls(schedule, chunks, False, False, (), ()),
    )
    prices = {
        "F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "SEND_F": send, "SEND_B": send,
        "ALL_GATHER": 0.0, "REDUCE_GRAD": 3.0, "OPT": 0.0, **seconds,
    }  # fmt: skip
    return run_layout(lay_out(plan, fold=fold), lambda lay: stated_prices(lay.graph, prices))


def text_of(run: Run, width: int) -> str:
    return text_gantt(spans_of_run(run), run.layout.plan.placement, width=width)


def test_golden_text_of_1f1b() -> None:
    # p 2, m 2: 9 s, two characters a second.
    assert text_of(run_of(2, 2), 13 + 18).splitlines() == [
        "stage 0 X1 |FFFF....BBBB..BBBB|",
        "stage 1 X1 |..FFBBBBFFBBBB....|",
        "           0                9 s",
        "            F forward, B backward, . idle",
    ]


def test_golden_text_of_zero_bubble() -> None:
    # zb-h1, p 2, m 2, every op 1 s: total 8 s, two characters a second.
    text = text_of(run_of(2, 2, schedule="zb-h1"), 13 + 14)
    assert text.splitlines()[:2] == [
        "stage 0 X1 |FFFF..IIWWIIWW|",
        "stage 1 X1 |..FFIIFFIIWWWW|",
    ]


def test_every_kind_has_a_class() -> None:
    assert {k for k in KINDS if not class_of(k)} == {"BARRIER"}
    assert {class_of(k) for k in KINDS} - {""} == set(CLASSES)
    assert len({c.letter for c in CLASSES.values()}) == len(CLASSES)


def test_rows_follow_the_pipeline_and_fold_replicas() -> None:
    run = run_of(3, 4, replicas=2)
    rows = rows_of(spans_of_run(run), run.layout.plan.placement)
    assert [(r.position, r.label) for r in rows] == [
        (s, f"stage {s} X1 ×2") for s in range(3)
    ]  # fmt: skip
    assert [r.label for r in rows_of(spans_of_run(run))] == [f"rank {s} ×2" for s in range(3)]


def test_unfolded_ranks_of_one_cell_share_a_row() -> None:
    run = run_of(2, 2, replicas=2, tp=2, fold=False)
    rows = rows_of(spans_of_run(run), run.layout.plan.placement)
    assert [r.rank for r in rows] == [0, 4, 2, 6]
    assert [r.label for r in rows] == [
        "stage 0 X1 tp2 r0", "stage 0 X1 tp2 r4", "stage 1 X1 tp2 r2", "stage 1 X1 tp2 r6",
    ]  # fmt: skip


def test_optimizer_on_the_host_is_not_drawn_as_compute() -> None:
    plan = Plan(
        placement=Placement(cells=(Cell(stage=0, replica=0, ranks=(0,)),)), barrier=False,
        programs=(ProgramText((0,), "F0 B0 OPT{stream=host} F1 <- none B1"),),
    )  # fmt: skip
    run = run_layout(lay_out(plan), lambda lay: stated_prices(lay.graph, {}, default=1.0))
    spans = spans_of_run(run)
    assert classes_of(spans).tolist() == ["F", "B", "host", "F", "B"]
    assert text_gantt(spans, width=8 + 11, legend=False).startswith("rank 0 |FF")


def axes_of(width: float = 10.0):
    figure = Figure(figsize=(width, 3), dpi=100)
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def bars_of(axes) -> list[tuple[float, float, float]]:
    """(left, right, middle of the row) of every bar."""
    found = []
    for collection in axes.collections:
        for path in collection.get_paths():
            (x0, y0), (x1, y1) = path.get_extents().get_points()
            found.append((x0, x1, (y0 + y1) / 2))
    return found


def test_bars_are_the_spans() -> None:
    run = run_of(2, 2, send=0.5)
    spans = spans_of_run(run)
    axes = axes_of()
    assert draw_gantt(axes, spans, run.layout.plan.placement, title="t") is axes
    bars = bars_of(axes)
    compute = sorted((x0, x1, round(y)) for x0, x1, y in bars if y - round(y) < 0.1)
    mine = spans.where("kind", lambda k: k in ("F", "B", "OPT"))
    expected = sorted(
        zip(*(spans[k][mine].tolist() for k in ("start_s", "end_s", "rank")), strict=True)
    )
    assert len(compute) == len(expected)
    for bar, span in zip(compute, expected, strict=True):
        assert bar == pytest.approx(span)
    # A transfer shows at both of its ends.
    sent = spans.where("kind", lambda k: k.startswith("SEND"))
    assert len(bars) - len(compute) == 2 * sent.sum()


def test_numbers_stand_only_where_they_fit() -> None:
    placement = run_of(2, 2).layout.plan.placement
    axes = draw_gantt(axes_of(), spans_of_run(run_of(2, 2)), placement)
    assert sorted(t.get_text() for t in axes.texts) == sorted("0011" * 2)
    narrow = draw_gantt(axes_of(1.0), spans_of_run(run_of(2, 64)), placement)
    assert len(narrow.texts) == 0


def test_legend_names_what_is_shown() -> None:
    run = run_of(2, 2, schedule="interleaved", chunks=2, send=0.5)
    axes = draw_gantt(axes_of(), spans_of_run(run), run.layout.plan.placement)
    labels = [t.get_text() for t in axes.get_legend().get_texts()]
    assert labels == [
        "forward F", "backward B", "optimizer OPT", "transfer", "paler: later chunk",
    ]  # fmt: skip
    assert axes.get_xlabel() == "time [s]"


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_saved_picture_has_the_plan_and_its_step_time(tmp_path, ending: str) -> None:
    path = save_gantt(run_of(4, 8, replicas=2), tmp_path / f"g.{ending}")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    if ending == "svg":
        assert b"picture: step 36 s" in data


def test_text_stays_within_its_width() -> None:
    text = text_of(run_of(4, 8, replicas=2, send=0.5), 60)
    lines = text.splitlines()
    assert len(lines) == 4 + 2
    assert {len(line) for line in lines[:4]} == {60}
    assert lines[-1].strip() == ("F forward, B backward, t transfer, g collective, . idle")
