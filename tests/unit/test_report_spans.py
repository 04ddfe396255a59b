"""The span table: rows, folding, serialisation."""

from __future__ import annotations

import numpy as np
import pytest

from sim.cost.stated import stated_prices
from sim.engine.simulate import Run, lay_out, run_layout
from sim.errors import InputError, UsageError
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Plan
from sim.report.frame import from_frame, to_frame
from sim.report.record import spans_of, spans_of_run
from sim.report.spans import COLUMNS, Spans, concatenate, span_name
from sim.report.wires import compact_ranks

SECONDS = {"F": 1.0, "B": 2.0, "SEND_F": 0.5, "SEND_B": 0.5, "REDUCE_GRAD": 1.0, "OPT": 0.25}


def pipeline(stages: int = 2, replicas: int = 2, microbatches: int = 2) -> Plan:
    """Replica-major numbering; cells of one rank."""
    return Plan(
        name="tiny",
        placement=Placement(
            cells=tuple(
                Cell(stage=s, replica=r, ranks=(r * stages + s,))
                for s in range(stages)
                for r in range(replicas)
            ),
            segments=tuple(Segment(stage=s, cell=s) for s in range(stages)),
            boundaries=tuple(Boundary(src=s, dst=s + 1) for s in range(stages - 1)),
            microbatches=(microbatches,) * replicas,
        ),
        lowering=standard_calls("1f1b", 1, False, False, (), ()),
    )


def simulated(plan: Plan, steps: int = 1, fold: bool = True) -> Run:
    layout = lay_out(plan, steps=steps, fold=fold)
    return run_layout(layout, lambda lay: stated_prices(lay.graph, SECONDS))


def rows_of(spans: Spans, kind: str) -> Spans:
    return spans.take(spans.where("kind", lambda k: k == kind))


def zipped(spans: Spans, *names: str) -> list[tuple[object, ...]]:
    return sorted(zip(*(spans[n].tolist() for n in names), strict=True))


def test_a_transfer_is_one_row_on_its_pair_and_a_collective_one_per_class() -> None:
    spans = spans_of_run(simulated(pipeline(), fold=False))
    sends = rows_of(spans, "SEND_F")
    assert len(sends) == 4
    assert set(sends["stream"]) == {"0->1", "2->3"}
    assert zipped(sends, "rank", "peer") == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert len(rows_of(spans, "RECV_F")) == 0
    assert zipped(rows_of(spans, "REDUCE_GRAD"), "rank", "group") == [
        (0, "dp 0,2"),
        (1, "dp 1,3"),
        (2, "dp 0,2"),
        (3, "dp 1,3"),
    ]
    barrier = rows_of(spans, "BARRIER")
    assert barrier["rank"].tolist() == [0, 1, 2, 3]
    assert (barrier["start_s"] == barrier["end_s"]).all()


def test_folded_rows_weigh_as_many_as_their_members() -> None:
    plan = pipeline(stages=2, replicas=3)
    folded, whole = (spans_of_run(simulated(plan, fold=f)) for f in (True, False))
    assert len(folded) < len(whole)
    for kind in ("F", "B", "SEND_F", "SEND_B", "REDUCE_GRAD", "OPT", "BARRIER"):
        a, b = rows_of(folded, kind), rows_of(whole, kind)
        assert a["weight"].sum() == b["weight"].sum() == len(b), kind
        key = ("microbatch", "start_s", "end_s")
        assert set(zipped(a, *key)) == set(zipped(b, *key)), kind


def test_op_names_the_position_in_the_program() -> None:
    run = simulated(pipeline())
    spans = spans_of_run(run)
    for op, kind, mb in zip(spans["op"], spans["kind"], spans["microbatch"], strict=True):
        program, index = map(int, op.split(":"))
        listed = run.layout.programs[program].blocks[0].items[index]
        assert (listed.kind, listed.mb) == (kind, mb)
    names = spans_of(run.layout.graph, run.outcome, run.prices)["op"]
    assert {"0F0", "1B1", "OPT"} <= {n[-3:] for n in names.tolist()}


def test_rows_of_two_steps_differ_only_in_step_and_time() -> None:
    spans = spans_of_run(simulated(pipeline(), steps=2))
    first, second = (spans.take(spans["step"] == s) for s in (0, 1))
    assert len(first) == len(second) == len(spans) // 2
    key = ("rank", "op", "stream", "group", "stage")
    assert zipped(first, *key) == zipped(second, *key)


def test_the_same_plan_gives_the_same_bytes() -> None:
    tables = [spans_of_run(simulated(pipeline(), steps=2)).to_bytes() for _ in range(2)]
    assert tables[0] == tables[1]
    assert tables[0] != spans_of_run(simulated(pipeline(), steps=1)).to_bytes()


def test_saved_table_reads_back_equal(tmp_path) -> None:
    spans = spans_of_run(simulated(pipeline()))
    path = spans.save(tmp_path / "run.npz")
    assert Spans.load(path).to_bytes() == spans.to_bytes()
    with pytest.raises(UsageError, match=r"npz or \.parquet"):
        spans.save(tmp_path / "run.csv")
    with pytest.raises(UsageError, match=r"npz or \.parquet"):
        Spans.load(tmp_path / "run.csv")
    np.savez(tmp_path / "other.npz", rank=np.zeros(3))
    with pytest.raises(InputError, match="not a span table"):
        Spans.load(tmp_path / "other.npz")


def test_frame_has_every_column_and_reads_back() -> None:
    spans = spans_of_run(simulated(pipeline()))
    frame = to_frame(spans)
    assert tuple(frame.columns) == COLUMNS
    assert frame.loc[frame.kind == "F", "end_s"].sum() == pytest.approx(
        rows_of(spans, "F")["end_s"].sum()
    )
    back = from_frame(frame)
    for name in COLUMNS:
        assert (back[name] == spans[name]).all(), name
    with pytest.raises(InputError, match="also stream"):
        from_frame(frame.drop(columns="stream"))


def test_parquet_reads_back_or_says_what_to_install(tmp_path) -> None:
    spans = spans_of_run(simulated(pipeline()))
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(UsageError, match="pyarrow is not installed; pip install"):
            spans.save(tmp_path / "run.parquet")
    else:
        back = Spans.load(spans.save(tmp_path / "run.parquet"))
        assert (back["op"] == spans["op"]).all()


def test_concatenated_tables_keep_their_texts() -> None:
    run = simulated(pipeline())
    a = spans_of_run(run, name="one")
    b = spans_of(run.layout.graph, run.outcome, run.prices, run="two", source="measured")
    both = concatenate([a, b])
    assert len(both) == 2 * len(a)
    assert (both.take(both["run"] == "two")["op"] == b["op"]).all()
    assert (both.take(both["source"] == "simulated")["stream"] == a["stream"]).all()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1, 2, 3), "0-3"),
        ((0, 8, 16, 24), "0-24/8"),
        ((4, 5), "4,5"),
        ((7,), "7"),
        ((0, 1, 2, 8, 9, 10), "0-2,8-10"),
        ((3, 2, 1), "3,2,1"),
    ],
)
def test_member_lists_are_short_and_unambiguous(ranks: tuple[int, ...], text: str) -> None:
    assert compact_ranks(ranks) == text
    back: list[int] = []
    for part in text.split(","):
        ends, _, gap = part.partition("/")
        low, _, high = ends.partition("-")
        back += range(int(low), int(high or low) + 1, int(gap or 1))
    assert tuple(back) == ranks


def test_names_are_those_of_the_program_text() -> None:
    assert span_name("SEND_F", -1, 3, -1, "") == "SEND_F3"
    assert span_name("B", 4, 2, 1, "mlp7") == "4B2.1[mlp7]"
