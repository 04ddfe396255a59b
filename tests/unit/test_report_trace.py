"""The Chrome trace: what viewers need of it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sim.cost.stated import stated_prices
from sim.engine.simulate import Run, lay_out, run_layout
from sim.errors import InputError
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Plan
from sim.report.record import spans_of_run
from sim.report.trace import Counter, save_trace, trace_of_run

SECONDS = {"F": 0.001, "B": 0.002, "SEND_F": 1e-4 / 3, "SEND_B": 1e-4, "REDUCE_GRAD": 3e-4}


def run_of(fold: bool, replicas: int = 2) -> Run:
    plan = Plan(
        name='a "quoted" plan',
        placement=Placement(
            cells=tuple(
                Cell(stage=s, replica=r, ranks=(r * 3 + s,), accelerator="X1")
                for s in range(3)
                for r in range(replicas)
            ),
            segments=tuple(Segment(stage=s, cell=s) for s in range(3)),
            boundaries=tuple(Boundary(src=s, dst=s + 1) for s in range(2)),
            microbatches=(4,) * replicas,
        ),
        lowering=standard_calls("1f1b", 1, False, False, (), ()),
    )
    layout = lay_out(plan, steps=2, fold=fold)
    return run_layout(layout, lambda lay: stated_prices(lay.graph, {**SECONDS, "OPT": 1e-4}))


def events_of(path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    assert document["distributedInfo"]["world_size"] == 6
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


@pytest.mark.parametrize("fold", [True, False])
def test_slices_do_not_overlap_on_a_thread_and_are_sorted(tmp_path, fold: bool) -> None:
    events = events_of(trace_of_run(run_of(fold), tmp_path / "t.json"))
    timed = [e["ts"] for e in events if e["ph"] != "M"]
    assert timed == sorted(timed)
    threads = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0
            threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for slices in threads.values():
        for (_, end), (start, _) in pairwise(slices):
            assert start >= end - 1e-6
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(threads)


@pytest.mark.parametrize("fold", [True, False])
def test_arrows_pair_up_inside_the_slices_of_their_transfer(tmp_path, fold: bool) -> None:
    run = run_of(fold)
    spans = spans_of_run(run)
    events = events_of(trace_of_run(run, tmp_path / "t.json", spans=spans))
    begin = {e["id"]: e for e in events if e["ph"] == "s"}
    finish = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begin.keys() == finish.keys()
    assert len(begin) == (spans["peer"] >= 0).sum() > 0
    slices = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            slices[e["pid"], e["tid"]].append(e)
    for number, out in begin.items():
        into = finish[number]
        around = []
        for arrow in (out, into):
            hits = [
                e["name"]
                for e in slices[arrow["pid"], arrow["tid"]]
                if e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
            ]
            assert len(hits) == 1
            around += hits
        assert around[0].startswith(("0SEND", "1SEND", "2SEND"))
        assert around[1] == around[0].replace("SEND", "RECV")
        assert out["pid"] != into["pid"]
        assert into["ts"] >= out["ts"]


def test_durations_add_up_to_the_run(tmp_path) -> None:
    run = run_of(fold=False)
    events = events_of(trace_of_run(run, tmp_path / "t.json"))
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert last == pytest.approx(run.makespan * 1e6, abs=1e-3)
    compute = sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] in ("F", "B"))
    assert compute == pytest.approx(2 * 6 * 4 * 3000)


def test_compressed_trace_is_the_same_and_repeatable(tmp_path) -> None:
    run = run_of(fold=True)
    plain = trace_of_run(run, tmp_path / "t.json").read_bytes()
    first = trace_of_run(run, tmp_path / "a.json.gz").read_bytes()
    assert first == trace_of_run(run, tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress(first) == plain
    assert json.loads(plain)["otherData"]["plan"] == 'a "quoted" plan'


def test_counters_and_processes_are_named(tmp_path) -> None:
    spans = spans_of_run(run_of(fold=True))
    memory = Counter(
        name="memory [B]", rank=0, times_s=np.array([0.0, 0.001]), values=np.array([1e9, 2.5e9])
    )
    load = Counter(name="wan [0..1]", times_s=np.array([0.0]), values=np.array([0.5]))
    path = save_trace(spans, tmp_path / "t.json", counters=(memory, load))
    events = json.loads(path.read_text())["traceEvents"]
    counted = [(e["pid"], e["ts"], e["args"]["value"]) for e in events if e["ph"] == "C"]
    assert sorted(counted) == [(-1, 0, 0.5), (0, 0, 1e9), (0, 1000, 2.5e9)]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"rank {r} and 1 like it" for r in range(3)} | {"links"}
    wrong = Counter(name="x", times_s=np.zeros(2), values=np.zeros(1))
    with pytest.raises(InputError, match="2 times, 1 values"):
        save_trace(spans, tmp_path / "t.json", counters=(wrong,))
