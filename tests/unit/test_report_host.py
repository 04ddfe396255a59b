"""The host side in reports: exposed time against ticks counted one by one, and verdicts."""

from __future__ import annotations

from io import StringIO

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sim.engine.simulate import simulate
from sim.plan.plan import Amount, Plan
from sim.problem import Problem
from sim.report.host import HostStream, HostUse, host_use, stream_texts, stream_use
from sim.report.metrics import Pace, pace_of
from sim.report.record import spans_of_run
from sim.report.report import Report, report_of
from sim.report.spans import Spans
from sim.report.table import print_simulation
from tests.unit.test_offload import gpt, plan_of
from tests.validation.host_side import offloaded

STREAMS = ("compute", "d2h", "h2d", "host")
Rows = list[tuple[int, int, int, int, int]]


def table(rows: Rows) -> Spans:
    """Spans of (stream, rank, step, start, length) of 2 B a second."""
    stream, rank, step, start, length = np.array(rows, np.int64).reshape(-1, 5).T
    columns = {
        "stream": stream.astype(np.int32), "rank": rank, "step": step, "weight": rank + 1,
        "start_s": start * 1.0, "end_s": (start + length) * 1.0, "nbytes": length * 2.0,
        "kind": np.zeros(len(rows), np.int32),
    }  # fmt: skip
    return Spans(columns, {"stream": STREAMS, "kind": ("F",)})


row = st.tuples(
    st.integers(0, 3), st.integers(0, 1), st.integers(0, 3), st.integers(0, 30), st.integers(0, 9)
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=24), barrier=st.booleans())
def test_exposed_time_is_that_of_ticks_without_compute(rows: Rows, barrier: bool) -> None:
    pace = Pace(step_time_s=1, p50_s=1, p95_s=1, steps=4, warm_up=1)
    found = {(s.stream, s.rank): s for s in stream_use(table(rows), pace, barrier=barrier)}
    steps = range(4) if barrier else range(2, 3)
    for number, name in enumerate(STREAMS[1:], 1):
        for rank in (0, 1):
            mine = [r for r in rows if r[:2] == (number, rank) and r[2] in steps]
            computes = [r for r in rows if r[:2] == (0, rank)]
            ticks = {t for r in mine for t in range(r[3], r[3] + r[4])}
            idle = ticks - {t for r in computes for t in range(r[3], r[3] + r[4])}
            if not ticks:
                assert (name, rank) not in found
                continue
            assert found[name, rank] == HostStream(
                stream=name, rank=rank, ranks=rank + 1,
                nbytes=2 * sum(r[4] for r in mine) / len(steps), busy_s=len(ticks) / len(steps),
                bytes_per_s=2 * sum(r[4] for r in mine) / len(ticks),
                exposed_s=len(idle) / len(steps),
            )  # fmt: skip


def used(given_: Problem, plan: Plan, steps: int) -> HostUse:
    spans = spans_of_run(simulate(plan, given_, steps=steps))
    found = host_use(plan, given_, spans, pace_of(spans, barrier=plan.barrier))
    assert found is not None
    return found


CROSSING = "F0 ; B0 ; D2H <- B0 ; OPT"


def test_the_next_step_hides_what_runs_into_it() -> None:
    # The copy takes 0.02 s of the 0.03 s in which the next step computes.
    given_, plan = offloaded(CROSSING, {"D2H": Amount(nbytes=20e6)}, pcie_rate=1e9)
    (one,) = used(given_, plan, 1).streams
    assert (one.busy_s, one.exposed_s) == pytest.approx((0.02, 0.02))
    hidden = ("d2h", "20 MB", "0.02 s at 1.0 GB/s, hidden by compute")
    for steps in (3, 4, 8):
        found = used(given_, plan, steps)
        assert found.streams[0].exposed_s == 0.0 and found.steady == (steps > 3)
        assert stream_texts(found)[0] == hidden
    text = [line[2] for line in stream_texts(used(given_, plan, 1))]
    assert text == [
        "0.02 s at 1.0 GB/s, exposed 0.02 s",
        "of too few steps: the compute of a next step hides more",
    ]


def test_ranks_that_differ_are_listed_and_the_worst_is_shown() -> None:
    programs = [((0,), "F0 B0 ; D2H <- B0 ; OPT <- D2H"), ((1,), CROSSING)]
    given_, plan = offloaded(
        "", {"D2H": Amount(nbytes=20e6)}, chips=2, pcie_rate=1e9, programs=programs
    )
    found = used(given_, plan, 8)
    assert [(s.rank, s.ranks) for s in found.streams] == [(0, 1), (1, 1)]
    assert [s.exposed_s for s in found.streams] == pytest.approx([0.02, 0.0])
    assert "exposed 0.02 s (rank 0, the most)" in stream_texts(found)[0][2]


# -- host memory


def reported(host_memory: float, **knobs: int) -> Report:
    given_ = gpt(2, 2)
    nodes = tuple(
        msgspec.structs.replace(n, host_memory_bytes=host_memory) for n in given_.machine.nodes
    )
    machine = msgspec.structs.replace(given_.machine, nodes=nodes)
    given_ = msgspec.structs.replace(given_, machine=machine)
    plan = plan_of(given_, replicas=2, **knobs)
    return report_of(simulate(plan, given_, steps=4), given_)


def printed(report: Report, width: int = 120) -> str:
    out = StringIO()
    print_simulation(Console(file=out, width=width), report.simulate_document())
    return out.getvalue()


def test_host_memory_stands_beside_that_of_the_chips() -> None:
    report = reported(440e9, parameters=2, optimizer=4)
    document = msgspec.to_builtins(report.simulate_document())
    (row,) = document["host"]["memory"]
    layer = 12 * 1024**2 + 13 * 1024
    assert row["optimizer_bytes"] == pytest.approx(2 * 4 * 12 * layer, rel=0.01)
    assert row["gradients_bytes"] == pytest.approx(2 * 4 * 2 * layer, rel=0.01)
    assert row["memory_bytes"] == 440e9 and row["verdict"] == "fits" and row["nodes"] == 1
    assert {s["stream"] for s in document["host"]["streams"]} == {"d2h", "h2d", "host"}
    assert all(c["verdict"] == "fits" and c["host_fits"] for c in document["stages"][0]["cells"])
    assert "host memory" in printed(report)


@pytest.mark.parametrize("width", [80, 120])
def test_short_host_memory_is_nowhere_called_fitting(width: int) -> None:
    report = reported(1e9, optimizer=4)
    for document in (report.simulate_document(), report.plan_document()):
        assert document.host is not None and document.host.memory[0].verdict == "does not fit"
        assert {c.verdict for s in document.stages for c in s.cells} == {"does not fit"}
    text = printed(report, width)
    assert "does not fit: " in text and "fits" not in text


def test_host_memory_that_nobody_stated_is_unknown() -> None:
    report = reported(0.0, optimizer=4)
    host = report.simulate_document().host
    assert host is not None and host.memory[0].memory_bytes is None
    assert host.memory[0].verdict == "unknown" and "unknown" in printed(report)


def test_a_plan_without_host_ops_has_no_section() -> None:
    report = reported(440e9)
    assert report.simulate_document().host is None
    assert "h2d" not in printed(report).split("busiest")[0] and "host memory" not in printed(report)
