"""The eight systems fit the plan format: each miniature loads, runs and takes its stated time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest

from sim.engine.maxplus import longest_path
from sim.plan.io import plan_from_json, plan_to_json
from sim.plan.placement import print_grid
from tests.contract import miniatures as mini

CASES: dict[str, Callable[[], mini.Miniature]] = {
    **mini.ALL,
    "h2 fused": partial(mini.h2, fused=True),
    "async, reply does not wait": partial(mini.async_sgd, eager_reply=True),
    "oases L=4 c=1": partial(mini.oases, 4, 1.0),
    "oases L=4 c=0.5": partial(mini.oases, 4, 0.5),
    "oases L=4 c=2": partial(mini.oases, 4, 2.0),
    "merak rendezvous": partial(mini.merak, buffers=0),
    "merak free transfers": partial(mini.merak, transfer=0.0),
    "merak plain": partial(mini.merak, plain=True),
    "merak plain free transfers": partial(mini.merak, plain=True, transfer=0.0),
    "embrace unscheduled": partial(mini.embrace, scheduled=False),
    "fusionllm dense": partial(mini.fusionllm, coded=False),
    "autohete first come first served": partial(mini.autohete, priority=False),
    "autohete with barrier": partial(mini.autohete, barrier=True),
    "autohete with barrier, no priority": partial(mini.autohete, barrier=True, priority=False),
}


@pytest.mark.parametrize("name", CASES)
def test_makespan(name: str) -> None:
    case = CASES[name]()
    assert case.run().makespan == case.makespan


@pytest.mark.parametrize("name", CASES)
def test_folding_changes_nothing(name: str) -> None:
    case = CASES[name]()
    assert case.run(fold=False).makespan == case.run(fold=True).makespan


@pytest.mark.parametrize("name", ["oases", "embrace", "autohete"])
def test_ranks_0_and_1_do_fold(name: str) -> None:
    layout = CASES[name]().layout()
    assert layout.graph.classes == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_doubling_every_duration_doubles_the_makespan(name: str) -> None:
    case = CASES[name]()
    assert case.run(factor=2.0).makespan == 2 * case.makespan


@pytest.mark.parametrize("name", ["h2", "merak", "fusionllm"])
def test_more_buffers_never_take_longer(name: str) -> None:
    make = {"h2": mini.h2, "merak": mini.merak, "fusionllm": mini.fusionllm}[name]
    times = [make(buffers=2).run().makespan]
    case = make(buffers=2)
    for buffers in (3, 4, 8):
        plan = msgspec.structs.replace(case.plan, buffers=buffers)
        times.append(mini.Miniature(plan, case.seconds, 0.0, case.steps).run().makespan)
    one = mini.Miniature(
        msgspec.structs.replace(case.plan, buffers=1), case.seconds, 0.0, case.steps
    )
    times.insert(0, one.run().makespan)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith(("async", "autohete"))])
@pytest.mark.parametrize("fold", [True, False])
def test_max_plus_equals_the_engine(name: str, fold: bool) -> None:
    case = CASES[name]()
    run = case.run(fold=fold)
    start, end = longest_path(run.layout.graph, run.prices.seconds)
    np.testing.assert_allclose(end, run.outcome.end, rtol=1e-9)
    np.testing.assert_allclose(start, run.outcome.start, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_plan_file_round_trip(name: str) -> None:
    plan = CASES[name]().plan
    again = plan_from_json(plan_to_json(plan))
    assert again == plan and again.hash == plan.hash


@pytest.mark.parametrize("name", CASES)
def test_prints_its_grid(name: str) -> None:
    plan = CASES[name]().plan
    lines = print_grid(plan.placement).splitlines()
    assert sum(line.startswith("stage") for line in lines) == plan.placement.num_stages


def test_h2_pieces_share_one_nic() -> None:
    assert mini.h2(nic_per_piece=False).run(fold=False).makespan == 9.5


def test_h2_a_nic_per_piece_halves_the_piece() -> None:
    run = mini.h2(nic_per_piece=True).run(fold=False)
    graph = run.layout.graph
    for node, op in enumerate(graph.ops):
        if op.kind == "SEND_F":
            assert run.outcome.end[node] - run.outcome.start[node] == pytest.approx(0.25)


def test_h2_without_gather() -> None:
    assert mini.h2(gather=0.0).run().makespan == 9.25


def test_async_delays_are_the_outcome_of_timing() -> None:
    handled = mini.async_sgd().run().handled
    updates = [(h.end, h.sender, h.delay) for h in handled if h.op.kind == "APPLY"]
    assert updates == [(4.25, 1, 0), (7.25, 2, 1), (8.5, 1, 1), (12.75, 1, 0), (14.5, 2, 2)]


def test_async_delays_when_the_reply_does_not_wait() -> None:
    handled = mini.async_sgd(eager_reply=True).run().handled
    assert [h.delay for h in handled if h.op.kind == "APPLY"] == [0, 1, 2, 1, 3]


def test_pro_prophet_step_times() -> None:
    run = mini.pro_prophet().run()
    barriers = [
        run.outcome.end[n] for n, op in enumerate(run.layout.graph.ops) if op.kind == "BARRIER"
    ]
    assert barriers == [19.75, 34.25]


def test_h2_spans_by_hand() -> None:
    run = mini.h2().run()
    graph, out = run.layout.graph, run.outcome
    at = {op.name: (out.start[n], out.end[n]) for n, op in enumerate(graph.ops)}
    assert at["1F0"] == (1.5, 2.5)
    assert at["1I0"] == (2.5, 3.5)
    assert at["SEND_B0"] == (3.5, 4.0)
    assert at["1W0"] == (3.5, 4.5)
    assert at["ALL_GATHER0[b]"] == (4.0, 4.25)
    assert at["0B0"] == (4.25, 6.25)
    assert at["0B1"] == (7.25, 9.25)
