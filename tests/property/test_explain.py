"""Random plans: critical paths have no gap, parts add up, folding changes no word."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from sim.engine.maxplus import longest_path
from sim.engine.simulate import simulate
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft, split_layers
from sim.plan.lower import lower
from sim.plan.order import find_cycle
from sim.plan.plan import Plan
from sim.plan.uniform import layer_cuts
from sim.problem import Problem
from sim.report.explain import Explanation, explain, window_of
from sim.report.explain_parts import CONTENTION, EXPOSED, OpParts, Window
from sim.report.explain_path import critical_path
from sim.report.explain_sweep import parts_of_ranks
from sim.report.explain_table import print_explanation
from sim.report.record import spans_of_run
from sim.report.report import Report, report_of
from tests.property.pipelines import RandomPipeline, random_pipelines
from tests.property.test_simulate import of_batch, plans


def text_of(found: Explanation) -> str:
    console = Console(file=StringIO(), width=100, no_color=True)
    print_explanation(console, found)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def check(report: Report, found: Explanation) -> None:
    run, step = report.run, report.metrics.step_time_s
    window = window_of(report)
    assert window.step_time_s == pytest.approx(step, rel=1e-12)
    path = critical_path(run, window.start, window.stop)
    assert path[0].start == window.start
    assert path[-1].end == window.stop
    assert all(a.end == b.start for a, b in pairwise(path))
    for i in path[1:]:  # the first may be cut off at the window's start
        assert i.node >= 0
        assert abs(run.outcome.start[i.node] - i.start) <= 1e-9 * run.makespan
        assert run.outcome.end[i.node] >= i.end - 1e-9 * run.makespan
    for parts in (found.parts, found.path_parts, *(c.parts for c in found.classes)):
        assert min(parts.values()) >= 0.0
        assert sum(parts.values()) == pytest.approx(step, rel=1e-9)


@given(random_pipelines())
@settings(max_examples=40)
def test_stated_times(case: RandomPipeline) -> None:
    assume(not find_cycle(case.layout(fold=True).graph))
    for fold in (True, False):
        run = case.run(fold=fold)
        assume(run.makespan > 0.0)
        check(report_of(run), explain(report_of(run)))
        start, end = longest_path(run.layout.graph, run.prices.seconds)
        path = critical_path(run, 0.0, run.makespan)
        assert sum(i.end - i.start for i in path) == pytest.approx(end.max(), rel=1e-9)
        assert all(run.prices.seconds[i.node] > 0 for i in path)
        assert start.min() == 0.0


@given(plans(), st.integers(1, 4))
@settings(max_examples=15)
def test_whole_plans_on_a_machine(case: tuple[Problem, Plan], steps: int) -> None:
    problem, plan = case
    texts = []
    for fold in (True, False):
        report = report_of(simulate(plan, problem, steps=steps, fold=fold), problem)
        found = explain(report)
        check(report, found)
        texts.append(text_of(found))
        if plan.barrier:
            groups = report.metrics.exposed_by_group
            for role, seconds in groups.items():
                mine = [found.parts.get(n + role, 0.0) for n in (EXPOSED, CONTENTION)]
                assert sum(mine) == pytest.approx(seconds, rel=1e-6, abs=1e-9 * found.step_time_s)
            assert {n.removeprefix(EXPOSED) for n in found.parts if EXPOSED in n} <= set(groups)
    assert texts[0] == texts[1]


@given(plans())
@settings(max_examples=6)
def test_nothing_is_contention_where_all_have_links_of_their_own(
    case: tuple[Problem, Plan],
) -> None:
    problem, plan = case
    run = simulate(plan, problem, contention=False, overlap=False)
    found = explain(report_of(run, problem))
    late = [seconds for name, seconds in found.parts.items() if CONTENTION in name]
    assert sum(late) <= 1e-9 * found.step_time_s
    assert "slow-down" not in found.parts


@pytest.mark.parametrize("tps", [(1, 1, 2), (2, 1, 4), (4, 2, 1)])
def test_pieces_that_folding_joins_count_as_several(tps: tuple[int, ...]) -> None:
    """Two pieces of a transfer beside one of another share an instant in three parts."""
    problem, cells = of_batch(3), []
    for stage, tp in enumerate(tps):
        chips = tuple(range(4 * stage, 4 * stage + tp))
        cells.append(CellKnobs(stage=stage, replica=0, chips=chips, tp=tp))
    cuts = layer_cuts(problem.model, split_layers(6, 3))
    draft = PlanDraft(
        cells=tuple(cells),
        pipeline=PipelineKnobs(schedule="gpipe", cuts=cuts, buffers=2),
        data=DataKnobs(microbatches=(3,)),
        barrier=False,
    )
    plan = lower(problem, draft)
    one, other = (
        explain(report_of(simulate(plan, problem, fold=fold), problem)) for fold in (True, False)
    )
    for a, b in zip(one.classes, other.classes, strict=True):
        assert a.parts == pytest.approx(b.parts, rel=1e-9, abs=1e-9 * one.step_time_s)
    assert any("contention pp" in c.parts for c in one.classes)


ROLE = {
    "SEND_F": "pp", "SEND_B": "pp", "ALL_GATHER": "tp", "REDUCE_GRAD": "dp", "UNSHARD": "dp",
    "ALL_REDUCE": "embed",
}  # fmt: skip
PART = {"F": "forward", "OPT": "optimizer"} | dict.fromkeys("BIW", "backward")


@given(random_pipelines(max_positions=3))
@settings(max_examples=30)
def test_parts_of_a_rank_instant_by_instant(case: RandomPipeline) -> None:
    """Between any two events of a rank, what runs is looked up in the span table."""
    assume(not find_cycle(case.layout(fold=False).graph))
    run = case.run(fold=False)
    assume(run.makespan > 0.0)
    spans = spans_of_run(run)
    names = ("kind", "rank", "peer", "start_s", "end_s")
    rows = list(zip(*(spans[n].tolist() for n in names), strict=True))
    found = parts_of_ranks(OpParts(run, None), Window(start=0.0, stop=run.makespan, steps=1))
    for actor, parts in zip(run.layout.graph.actors, found, strict=True):
        mine = [(k, s, e) for k, r, p, s, e in rows if actor.rank in (r, p)]
        expected: dict[str, float] = {}
        times = sorted({0.0, run.makespan, *(t for _, s, e in mine for t in (s, e))})
        for a, b in pairwise(times):
            now = {kind for kind, s, e in mine if s <= a and b <= e and s < e}
            computing = [PART[k] for k in now if k in PART]
            roles = {f"exposed {ROLE[k]}" for k in now if k in ROLE}
            for part in computing or roles or ["bubble"]:
                share = (b - a) / (1 if computing else max(len(roles), 1))
                expected[part] = expected.get(part, 0.0) + share
        assert parts == pytest.approx(expected, abs=1e-9 * run.makespan)
