"""The pipelining schedule CSV: what torch writes is read, and the round trip loses nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.ledger import live_microbatches
from sim.errors import InputError, PlanError
from sim.interop.schedule_csv import (
    load_schedule_csv,
    plan_order,
    save_schedule_csv,
    schedule_from_csv,
    schedule_knobs,
    schedule_to_csv,
)
from sim.plan.io import plan_from_json, plan_to_json
from sim.plan.placement import Segment
from sim.plan.schedules import SCHEDULES, explicit_order
from tests.property.pipelines import pipeline, run

# Laid out as torch does: no-ops are empty cells, rows differ in length, lines end in CR LF.
GPIPE = "0F0,0F1,0F2,,,0B0,0B1,0B2\r\n,1F0,1F1,1F2,1B0,1B1,1B2\r\n"


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.integers(2, 3))
def test_round_trip(name: str, p: int, m: int, v: int) -> None:
    chunks = v if name == "interleaved" else 1
    m = m * p if name == "interleaved" else m
    plan = pipeline(p, m, name, chunks)
    call = schedule_from_csv(schedule_to_csv(plan))
    again = msgspec.structs.replace(plan, lowering=(call, *plan.lowering[1:]))
    assert plan_order(again) == plan_order(plan)
    assert schedule_to_csv(again) == schedule_to_csv(plan)
    assert plan_from_json(plan_to_json(again)) == again
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "SEND_F": 0.25, "SEND_B": 0.25}
    assert run(again, seconds).makespan == run(plan, seconds).makespan


def test_slots_are_aligned_in_time() -> None:
    assert schedule_to_csv(pipeline(2, 3, "1f1b")) == (
        "0F0,0F1,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2,\n"
    )


def test_reads_what_torch_writes() -> None:
    knobs = schedule_knobs(GPIPE)
    assert knobs.order == ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    assert knobs.chunks == 1


def test_stages_may_fold_back_over_the_ranks() -> None:
    """A V-shaped placement (stages 0 and 3 on rank 0) runs: the file says what sits where."""
    text = (
        "0F0,,,3F0,3I0,3W0,,0I0,0W0\n"
        ",1F0,2F0,,,2I0,1I0,1W0,2W0\n"
    )  # fmt: skip
    plan = pipeline(2, 1, "1f1b", 2)
    call = schedule_from_csv(text)
    segments = tuple(Segment(stage=v, cell=c) for v, c in enumerate((0, 1, 1, 0)))
    placement = msgspec.structs.replace(plan.placement, segments=segments)
    plan = msgspec.structs.replace(plan, placement=placement, lowering=(call, *plan.lowering[1:]))
    assert run(plan, {"F": 1.0, "I": 1.0, "W": 1.0}).makespan == 9.0


def test_files(tmp_path: Path) -> None:
    plan = pipeline(3, 4, "zb-h1")
    save_schedule_csv(plan, tmp_path / "zb.csv")
    knobs = load_schedule_csv(tmp_path / "zb.csv")
    assert explicit_order(knobs.order) == plan_order(plan)
    with pytest.raises(InputError, match="cannot read the schedule"):
        load_schedule_csv(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("0F0,0X0\n", "not a compute op", 1),
        ("0F0,0B0\n1F0,1SEND_B0\n", "not a compute op", 2),
        ("0F0,0B0\n0F1,0B1\n", "in two rows", 2),
        ("0F0,0B0\n2F0,2B0\n", "every stage", 0),
        ("0F0,0B0\n1F0\n", "needs one F and one B", 2),
        ("0F0,0I0\n", "needs one F and one B", 1),
        ("0F0,0B0,0W0\n", "needs one F and one B", 1),
        ("0F0,0F0,0B0\n", "needs one F and one B", 1),
        ("0F1,0B1\n", "needs one F and one B", 1),
        ("0F0,0B0\n\n1F0,1B0\n", "a stage in every row", 0),
        ("0B0,0F0\n", "never finish", 0),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "never finish", 0),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "equally many stages", 0),
        ("", "every stage", 0),
    ],
)
def test_wrong_files_say_where(text: str, message: str, line: int) -> None:
    with pytest.raises(InputError, match=message) as caught:
        schedule_knobs(text, source="a.csv")
    assert caught.value.file == "a.csv" and caught.value.line == line


@pytest.mark.parametrize(
    ("name", "p", "m", "v"), [("1f1b", 4, 6, 1), ("zb-h1", 3, 5, 1), ("interleaved", 3, 6, 2)]
)
def test_memory_of_a_written_order_is_that_of_its_schedule(
    name: str, p: int, m: int, v: int
) -> None:
    knobs = schedule_knobs(schedule_to_csv(pipeline(p, m, name, v)))
    written = live_microbatches("csv", p, m, v, knobs.order)
    assert written == live_microbatches(name, p, m, v)


def test_another_number_of_microbatches_is_refused() -> None:
    plan = pipeline(2, 4, "1f1b")
    call = schedule_from_csv(GPIPE)
    plan = msgspec.structs.replace(plan, lowering=(call, *plan.lowering[1:]))
    with pytest.raises(PlanError, match="does not fit the pipeline"):
        plan_order(plan)


def test_an_unknown_replica_is_refused() -> None:
    with pytest.raises(InputError, match="no such replica"):
        plan_order(pipeline(2, 2, "1f1b"), replica=1)
