"""Stragglers, links, lost chips and overlap slow-down, by hand computation."""

from __future__ import annotations

from collections.abc import Generator
from math import inf
from typing import Any

import msgspec
import pytest

from sim.cost.prices import Prices
from sim.cost.stated import StatedFlow, stated_prices
from sim.engine.execute import Execution
from sim.engine.faults import (
    ChipLoss,
    Fault,
    Injector,
    LinkChange,
    Straggler,
    Trace,
    apply_faults,
    faulty,
)
from sim.engine.overlap import Overlap
from sim.engine.simulate import Layout, Run, lay_out, run_layout, simulate
from sim.errors import InputError, SimulationError
from sim.plan.lower import lower
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Plan, ProgramText
from sim.plan.uniform import uniform
from sim.problem import load_problem

SECONDS: dict[str, float | StatedFlow] = {
    "F": 1.0, "B": 2.0, "SEND_F": 0.5, "SEND_B": 0.5, "OPT": 0.25,
}  # fmt: skip


def pipeline(m: int = 2) -> Plan:
    first = " ".join(f"0F{i} 0SEND_F{i}" for i in range(m))
    first += " " + " ".join(f"0RECV_B{i} 0B{i}" for i in range(m)) + " OPT"
    second = " ".join(f"1RECV_F{i} 1F{i} 1B{i} 1SEND_B{i}" for i in range(m)) + " OPT"
    return Plan(
        barrier=False,
        placement=Placement(
            cells=(Cell(stage=0, replica=0, ranks=(0,)), Cell(stage=1, replica=0, ranks=(1,))),
            segments=(Segment(stage=0, cell=0), Segment(stage=1, cell=1)),
            boundaries=(Boundary(src=0, dst=1),),
            microbatches=(m,),
        ),
        programs=(ProgramText((0,), first), ProgramText((1,), second)),
    )


def run(
    faults: tuple[Fault, ...] = (),
    seconds: dict[str, float | StatedFlow] = SECONDS,
    rates: dict[str, float] | None = None,
    slow: dict[int, tuple[float, float]] | None = None,
    plan: Plan | None = None,
) -> Run:
    def price(lay: Layout) -> Prices:
        return stated_prices(lay.graph, seconds, rates or {})

    def prepare(execution: Execution) -> None:
        if faults:
            apply_faults(execution, faults)
        if slow:
            Overlap(execution, slow)

    return run_layout(lay_out(plan or pipeline()), price, prepare=prepare)


def ends(found: Run) -> dict[str, float]:
    graph = found.layout.graph
    return {
        f"{graph.actors[graph.actor[n]].rank}:{op.name}": float(found.outcome.end[n])
        for n, op in enumerate(graph.ops)
    }


def test_trace_integrates_the_pace() -> None:
    trace = Trace([(1.0, 0.5), (3.0, 1.0)])
    assert trace.finish(0.0, 1.0) == 1.0
    assert trace.finish(0.0, 1.5) == 2.0
    assert trace.finish(0.0, 2.5) == 3.5
    assert trace.finish(2.0, 0.25) == 2.5
    assert Trace([(1.0, 0.0)]).finish(0.0, 2.0) == inf


def test_without_faults() -> None:
    # 0F0 0-1, send 1.5, 1F0 2.5, 1B0 4.5, send 5, 0B0 7; 1F1 5.5, 1B1 7.5, send 8, 0B1 10, OPT.
    assert run().makespan == 10.25


def test_straggler_slows_its_own_ops_while_it_lasts() -> None:
    at = ends(run((Straggler(ranks=(1,), factor=2.0, stop=4.5),)))
    assert at["1:1F0"] == 3.5  # from 1.5, half pace
    assert at["1:1B0"] == 6.0  # 3.5-4.5 does 0.5 s of its work of 2 s, then 1.5 s are left
    assert at["0:0F1"] == 2.0


def test_two_stragglers_multiply() -> None:
    both = (Straggler(ranks=(0,), factor=2.0), Straggler(ranks=(0,), factor=3.0))
    assert ends(run(both))["0:0F0"] == 6.0


def test_link_change_stretches_the_flow_in_flight() -> None:
    flow = StatedFlow(links=("wire",), nbytes=0.5)
    seconds = SECONDS | {"SEND_F": flow}
    at = ends(run((LinkChange(link="wire", trace=((1.25, 0.5),)),), seconds, {"wire": 1.0}))
    assert at["0:0SEND_F0"] == pytest.approx(1.75)  # 0.25 B at 1 B/s, 0.25 B at 0.5 B/s
    assert at["0:0SEND_F1"] == pytest.approx(3.0)


def test_a_link_that_goes_down_and_comes_back() -> None:
    flow = StatedFlow(links=("wire",), nbytes=0.5)
    faults = (LinkChange(link="wire", trace=((1.25, 0.0), (4.0, 1.0))),)
    at = ends(run(faults, SECONDS | {"SEND_F": flow}, {"wire": 1.0}))
    assert at["0:0SEND_F0"] == pytest.approx(4.25)


def test_a_lost_chip_never_ends_what_it_runs() -> None:
    found = run((ChipLoss(rank=1, at=3.0),))
    left = {found.layout.graph.ops[n].name for n in found.outcome.unfinished}
    assert "1B0" in left and "0B0" in left and "1F0" not in left
    assert found.outcome.makespan == 2.5


def test_a_transfer_to_a_lost_chip_never_ends() -> None:
    flow = StatedFlow(links=("wire",), nbytes=0.5)
    seconds = SECONDS | {"SEND_F": flow}
    found = run((ChipLoss(rank=1, at=1.25),), seconds, {"wire": 1.0})
    left = {found.layout.graph.ops[n].name for n in found.outcome.unfinished}
    assert "0SEND_F0" in left and "0F1" not in left


def test_a_process_injects_what_a_record_says() -> None:
    def process(injector: Injector) -> Generator[Any, Any, None]:
        yield injector.env.timeout(1.5)
        injector.slow((1,), 2.0)
        yield injector.env.timeout(3.0)
        injector.slow((1,), 1.0)

    faults = Injector().record(process, horizon=100.0)
    assert faults == (Straggler(ranks=(1,), factor=2.0, start=1.5, stop=4.5),)
    assert ends(run(faults))["1:1B0"] == 6.0


def test_faults_are_checked() -> None:
    with pytest.raises(InputError, match="rank the plan lacks"):
        faulty((ChipLoss(rank=7, at=0.0),), 2)
    with pytest.raises(InputError, match="factor > 0"):
        faulty((Straggler(ranks=(0,), factor=0.0),), 2)
    with pytest.raises(InputError, match="no flow uses"):
        run((LinkChange(link="nowhere", trace=((0.0, 0.5),)),))


def test_overlap_slows_both_while_both_run() -> None:
    # Rank 0: 0F1 runs 1-2, the send of microbatch 0 from 1. Compute goes at 1/2, the send at 1/4.
    at = ends(run(slow={0: (2.0, 4.0)}))
    # The send has 0.5 s of work. 0F1 has 1 s: both slow until 0F1 ends at 3 (send: 0.5 done) = tie.
    assert at["0:0F1"] == pytest.approx(3.0)
    assert at["0:0SEND_F0"] == pytest.approx(3.0)


def test_overlap_ends_when_the_other_ends() -> None:
    # Compute at half pace for as long as the send runs: the send takes its own 0.5 s, 1-1.5.
    at = ends(run(slow={0: (2.0, 1.0)}))
    assert at["0:0SEND_F0"] == pytest.approx(1.5)
    assert at["0:0F1"] == pytest.approx(2.25)


def test_overlap_with_flows_caps_their_rate() -> None:
    flow = StatedFlow(links=("wire",), nbytes=0.5)
    at = ends(run(seconds=SECONDS | {"SEND_F": flow}, rates={"wire": 1.0}, slow={0: (1.0, 2.0)}))
    assert at["0:0SEND_F0"] == pytest.approx(2.0)  # 0.5 B at 0.5 B/s under 0F1, which ends at 2
    assert at["0:0F1"] == pytest.approx(2.0)


def test_overlap_factors_of_one_change_nothing() -> None:
    assert ends(run(slow={0: (1.0, 1.0), 1: (1.0, 1.0)})) == ends(run())


@pytest.mark.parametrize(
    ("buffers", "third", "fourth"), [(1, 13.5, 25.5), (2, 3.0, 13.5), (3, 3.0, 4.0)]
)
def test_a_buffer_is_held_until_its_consumer_starts(
    buffers: int, third: float, fourth: float
) -> None:
    # Forwards of stage 0 take 1 s, of stage 1 10 s: 1F0 starts at 1.5, 1F1 at 13.5, 1F2 at 25.5.
    plan = msgspec.structs.replace(pipeline(4), buffers=buffers)
    found = run(seconds=SECONDS | {"1F": 10.0}, plan=plan)
    graph = found.layout.graph
    start = {op.name: float(found.outcome.start[n]) for n, op in enumerate(graph.ops)}
    assert (start["0SEND_F2"], start["0SEND_F3"]) == (third, fourth)


def test_simulate_applies_overlap_and_faults() -> None:
    problem = load_problem(
        "a100x64", "llama2_7b", {"global_batch": 16, "sequence_length": 512, "dtype": "bf16"}
    )
    plan = lower(problem, uniform(problem.model, 16, range(16), pp=2, tp=1))
    plain = simulate(plan, problem, overlap=False).makespan
    assert simulate(plan, problem).makespan > plain
    slow = simulate(plan, problem, overlap=False, faults=(Straggler(ranks=(3,), factor=2.0),))
    assert slow.makespan > 1.3 * plain
    with pytest.raises(SimulationError, match=r"lost rank 5 at 0\.1 s"):
        simulate(plan, problem, faults=(ChipLoss(rank=5, at=0.1),))
