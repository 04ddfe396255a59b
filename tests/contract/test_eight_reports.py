"""Every miniature plan can be reported, traced and drawn, with what its plan does not say null."""

from __future__ import annotations

import gzip
import json
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from sim.plan.plan import Mathematics
from sim.report.report import report_of
from sim.report.spans import Spans
from sim.report.table import print_plan, print_simulation
from tests.contract import miniatures as mini


@pytest.mark.parametrize("name", mini.ALL)
def test_report(name: str) -> None:
    case = mini.ALL[name]()
    run = case.run()
    report = report_of(run)
    m = report.metrics
    assert m.step_time_s > 0
    assert m.tokens_per_s > 0
    assert (m.mfu, m.hfu, m.cost_per_mtoken) == (None, None, None)
    assert 0 <= m.bubble_fraction < 1
    assert sum(m.exposed_by_group.values()) == pytest.approx(m.exposed_comm_s)
    assert report.spans.columns["end_s"].max() == case.makespan
    assert report.basis.num_chips == case.plan.placement.num_ranks
    document = json.loads(msgspec.json.encode(report.simulate_document()))
    assert document["metrics"]["mfu"] is None
    assert document["peak_flops_per_s"] is None
    assert document["exact"] == case.plan.exact
    assert all(c["verdict"] == "unknown" for s in document["stages"] for c in s["cells"])
    assert name.split("-", maxsplit=1)[0] in repr(report)
    assert report.text()


@pytest.mark.parametrize("name", mini.ALL)
def test_pictures_and_tables(name: str, tmp_path: Path) -> None:
    report = report_of(mini.ALL[name]().run())
    picture = report.save_gantt(tmp_path / "gantt.svg")
    assert "<svg" in picture.read_text()
    trace = report.save_trace(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) >= len(report.spans)
    assert not [e for e in events if e["ph"] == "C"]
    console = Console(file=StringIO(), width=80, no_color=True)
    print_plan(console, report.plan_document())
    print_simulation(console, report.simulate_document())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no prices known" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", mini.ALL)
def test_ops_name_their_place_in_the_program(name: str) -> None:
    run = mini.ALL[name]().run(fold=False)
    graph, spans = run.layout.graph, report_of(run).spans
    assert graph.static.shape == graph.step.shape
    for node, op in enumerate(graph.ops):
        program = graph.actors[graph.actor[node]].program
        rows = spans.columns["rank"] == graph.actors[graph.actor[node]].rank
        rows &= spans.columns["start_s"] == run.outcome.start[node]
        rows &= spans.columns["end_s"] == run.outcome.end[node]
        assert f"{program}:{graph.static[node]}" in spans["op"][rows], op


@pytest.mark.parametrize("eager", [False, True])
def test_an_update_is_an_apply_with_the_tokens_of_its_forward(eager: bool) -> None:
    case = mini.async_sgd(eager_reply=eager)
    plan = msgspec.structs.replace(
        case.plan, mathematics=Mathematics(microbatch=4, sequence_length=100)
    )
    run = mini.Miniature(plan, case.seconds, case.makespan, messages=case.messages).run()
    report = report_of(run)
    # Writes of the fast worker end at 4.25, 8.5, 12.75 s and of the slow one at 7.25, 14.5 s; an
    # eager reply lets them go 0.25 s earlier. Both write from 7.25 s to the fast one's last.
    assert len(_ends(report.spans, "APPLY")) == 5
    fast, last = ((8.25 - 4.25), 12.25) if eager else (4.25, 12.75)
    until = (8.25 - 7.25) / fast + 1 if eager else (12.75 - 7.25) / fast
    rate = until / (last - 7.25) + 1 / (14.25 - 7.25 if eager else 7.25)
    assert report.metrics.updates_per_s == pytest.approx(rate)
    assert report.metrics.tokens_per_s == pytest.approx(400 * rate)
    assert report.basis.tokens_per_step == 400


def _ends(spans: Spans, kind: str) -> list[float]:
    found: list[float] = np.sort(spans.columns["end_s"][spans["kind"] == kind]).tolist()
    return found
