"""Critical paths of the eight miniatures against the longest path of networkx; parts by hand."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import networkx as nx
import pytest

from sim.engine.simulate import Run
from sim.plan.unroll import stream_of
from sim.report.explain import explain
from sim.report.explain_parts import OpParts, Window, parts_of_path
from sim.report.explain_path import critical_path
from sim.report.explain_ranks import class_numbers, rank_classes
from sim.report.report import report_of
from tests.contract import miniatures as mini


def event_graph(run: Run) -> nx.DiGraph:
    """Starts ("s", node) and ends ("e", node) of all ops; edges weigh what passes between [s]."""
    graph, out = run.layout.graph, run.outcome
    g = nx.DiGraph()
    for n in range(graph.num_nodes):
        g.add_edge(("s", n), ("e", n), weight=float(out.end[n] - out.start[n]))
    for src, dst in ((graph.dep_src, graph.dep_dst), (graph.order_src, graph.order_dst)):
        g.add_edges_from(
            (("e", a), ("s", b), {"weight": 0.0})
            for a, b in zip(src.tolist(), dst.tolist(), strict=True)
        )
    for a, b in zip(graph.gate_src.tolist(), graph.gate_dst.tolist(), strict=True):
        g.add_edge(("s", a), ("s", b), weight=0.0)
    for stream in {int(graph.stream[n]) for n in graph.priority}:
        served = [n for n in graph.priority if graph.stream[n] == stream]
        served.sort(key=lambda n: out.start[n])
        for a, b in pairwise(served):
            g.add_edge(("e", a), ("s", b), weight=0.0)
    _add_messages(g, run)
    return g


def _add_messages(g: nx.DiGraph, run: Run) -> None:
    """Instances of ``on`` blocks in order of arrival; a PULL takes what its answer takes."""
    graph, out = run.layout.graph, run.outcome
    tails: dict[object, object] = {}
    arrivals: dict[tuple[str, int], list[int]] = {}
    for n, op in enumerate(graph.ops):
        if op.kind in ("PULL", "PUSH"):
            end = graph.wires[graph.wire[n]].end
            assert end is not None
            arrivals.setdefault((op.kind, end.src), []).append(n)
            if op.kind == "PULL":
                g.remove_edge(("s", n), ("e", n))  # the request takes no time here
    for k, h in enumerate(run.handled):
        g.add_edge(("hs", k), ("he", k), weight=h.end - h.start)
        message = "PUSH" if h.op.kind == "APPLY" else "PULL"
        n = min(
            (m for m in arrivals[message, h.sender] if not g.nodes.get(("s", m), {}).get("taken")),
            key=lambda m: out.start[m],
        )
        g.nodes["s", n]["taken"] = True
        g.add_edge(("e", n) if message == "PUSH" else ("s", n), ("hs", k), weight=0.0)
        if message == "PULL":
            g.add_edge(("he", k), ("e", n), weight=0.0)
        before = [tails.get((h.rank, stream_of(h.op) if h.op.kind == "APPLY" else h.sender))]
        if h.op.reads == "latest":
            before.append(tails.get((h.rank, "host")))
        for b in before:
            if b is not None:
                g.add_edge(b, ("hs", k), weight=0.0)
        tails[h.rank, stream_of(h.op) if h.op.kind == "APPLY" else h.sender] = ("he", k)


def place(interval: object) -> tuple[tuple[str, int], tuple[str, int]]:
    node, handled = interval.node, interval.handled  # type: ignore[attr-defined]
    return (("s", node), ("e", node)) if node >= 0 else (("hs", handled), ("he", handled))


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", mini.ALL)
def test_critical_path_is_the_longest_path(name: str, fold: bool) -> None:
    case = mini.ALL[name]()
    run = case.run(fold=fold)
    path = critical_path(run, 0.0, run.makespan)
    g = event_graph(run)
    assert nx.dag_longest_path_length(g) == pytest.approx(case.makespan, abs=1e-12)
    assert sum(i.end - i.start for i in path) == pytest.approx(case.makespan, abs=1e-12)
    assert path[0].start == 0.0
    assert path[-1].end == case.makespan
    for a, b in pairwise(path):
        assert a.end == b.start
        assert nx.has_path(g, place(a)[1], place(b)[0])  # the one did let the other start


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", mini.ALL)
def test_parts_add_up_to_the_step(name: str, fold: bool) -> None:
    report = report_of(mini.ALL[name]().run(fold=fold))
    found = explain(report)
    step = report.metrics.step_time_s
    assert found.step_time_s == pytest.approx(step, rel=1e-12)
    for parts in (found.parts, found.path_parts, *(c.parts for c in found.classes)):
        assert sum(parts.values()) == pytest.approx(step, rel=1e-9)
    assert sum(r.share for r in found.path) == pytest.approx(1.0, rel=1e-9)
    assert all(sum(r.parts.values()) == pytest.approx(r.seconds, rel=1e-9) for r in found.path)


def whole_run(run: Run) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Parts of the path, and of each class, over all of a run."""
    window = Window(start=0.0, stop=run.makespan, steps=1)
    parts = OpParts(run, None)
    path = critical_path(run, 0.0, run.makespan, class_numbers(run)[0])
    classes = rank_classes(run, parts, window)
    return parts_of_path(parts, path, window)[0], {c.label: c.parts for c in classes}


def test_parts_of_h2_by_hand() -> None:
    # 0F0 SEND 1F0 1I0 1W0 1F1 1I1 SEND_B1 ALL_GATHER 0B1 OPT
    path, classes = whole_run(mini.h2().run())
    assert path == pytest.approx(
        {"forward": 3.0, "backward": 1 + 1 + 1 + 2, "exposed pp": 1.0, "exposed tp": 0.25,
         "optimizer": 0.25}
    )  # fmt: skip
    # Stage 0 idles from 2 to 4.25 (SEND_F1 2-2.5, SEND_B0 3.5-4, gather) and 6.25 to 7.25.
    assert classes["stage 0 tp2"] == pytest.approx(
        {"forward": 2.0, "backward": 4.0, "optimizer": 0.25, "exposed pp": 1.5, "exposed tp": 0.5,
         "bubble": 1.0 + 0.25}
    )  # fmt: skip
    # Stage 1 waits for its first F until 1.5, the last half second for SEND_F0, then computes until
    # its OPT ends at 7.75.
    assert classes["stage 1"] == pytest.approx(
        {"forward": 2.0, "backward": 4.0, "optimizer": 0.25, "exposed pp": 0.5,
         "bubble": 1.0 + (9.5 - 7.75)}
    )  # fmt: skip


def test_parts_of_merak_by_hand() -> None:
    path, classes = whole_run(mini.merak().run())
    # Rank 0 computes all the time but 3-3 (F0-F2), 4-5 (first gradient) and 17.25: R 3 x 1, B 3 x 2
    # and one B of 3 s with its recomputation, which a stated time does not tell apart.
    assert classes["stage 0"] == pytest.approx(
        {"forward": 4.0, "recompute": 3.0, "backward": 9.0, "optimizer": 0.25, "exposed pp": 0.5,
         "bubble": 0.5}
    )  # fmt: skip
    assert classes["stage 1"]["backward"] == 8.0
    assert sum(classes["stage 1"].values()) == 17.25
    assert path["exposed pp"] == 1.0  # SEND_F0 and SEND_B0: the rest is hidden
    assert sum(path.values()) == 17.25


@pytest.mark.parametrize("double", [True, False])
def test_contention_is_what_a_shared_nic_costs(double: bool) -> None:
    """Two pieces share a NIC, so each takes twice as long as alone: half of it is contention."""
    found = whole_run(mini.h2(nic_per_piece=double).run(fold=False))[0]
    alone = 0.25 if double else 0.5
    assert found["contention pp"] == pytest.approx(alone)
    assert found["exposed pp"] == pytest.approx(alone)
    assert sum(found.values()) == pytest.approx(9.0 if double else 9.5)


def test_a_wait_that_no_op_explains_is_named() -> None:
    run = mini.merak().run()
    late = run.outcome.end == run.makespan  # rank 0's OPT, put off by a second
    outcome = msgspec.structs.replace(
        run.outcome, start=run.outcome.start + late, end=run.outcome.end + late,
        makespan=run.makespan + 1,
    )  # fmt: skip
    path, _ = whole_run(msgspec.structs.replace(run, outcome=outcome))
    assert path.pop("unexplained") == 1.0
    assert path == whole_run(run)[0]


def test_async_says_what_a_step_is() -> None:
    found = explain(report_of(mini.async_sgd().run()))
    assert found.step.startswith("one update of the parameters")
    assert found.path[-1].ops.endswith("APPLY")
