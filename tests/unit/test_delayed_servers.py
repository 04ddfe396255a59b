"""Servers in the ledgers and among the chips counted, slow servers, and versions of answers."""

from __future__ import annotations

from math import inf, nan
from time import process_time
from typing import Any

import msgspec
import pytest

from sim.cost.ledger import knobs_of, server_memory
from sim.cost.offload import host_ledgers
from sim.engine.faults import ChipLoss, Fault, LinkChange, Straggler
from sim.engine.kernel import Kernel
from sim.engine.network import Network
from sim.engine.simulate import Run, simulate
from sim.errors import InputError, PlanError
from sim.hardware.machine import Machine
from sim.plan.plan import Plan
from sim.plan.validate import validate
from sim.problem import Problem
from sim.report.report import report_of
from strategies.offload.policies import short_of
from strategies.search.hosted import shortfall
from tests.unit.delayed_cases import NBYTES, PARAMS, UPDATE, machine_of, plan_of, problem_of


def held(problem: Problem) -> float:
    """[B] of all parameters, one gradient of each and their states."""
    job = problem.job
    return PARAMS * (job.param_bytes + job.gradient_bytes + job.optimizer_bytes)


def with_memory(problem: Problem, *, chip: float = 0.0, host: float = 0.0) -> Problem:
    machine = problem.machine
    kinds = {
        name: msgspec.structs.replace(a, memory_bytes=chip or a.memory_bytes)
        for name, a in machine.accelerators.items()
    }
    nodes = tuple(
        msgspec.structs.replace(n, host_memory_bytes=host or n.host_memory_bytes)
        for n in machine.nodes
    )
    changed: Machine = msgspec.structs.replace(machine, accelerators=kinds, nodes=nodes)
    return msgspec.structs.replace(problem, machine=changed)


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "verdict"), [(1.3, "fits"), (1.02, "at risk"), (0.9, "does not fit")]
)
def test_a_chip_that_serves_has_a_ledger(share: float, verdict: str) -> None:
    plain = problem_of([3.0, 3.0])
    problem = with_memory(plain, chip=share * held(plain))
    plan = plan_of(problem, place="chip")
    ((rank, found),) = server_memory(plan, problem).items()
    kind = problem.machine.accelerators["server"]
    fixed = kind.allocator_gap * held(plain) + kind.context_bytes
    assert rank == plan.placement.extra_ranks[0]
    assert found.peak_bytes == pytest.approx(held(plain) + fixed)
    assert found.verdict == verdict
    host = report_of(simulate(plan, problem, steps=3), problem).host
    assert host is not None
    row = host.memory[-1]
    assert (row.node, row.tier, row.verdict) == ("server", "server", verdict)
    assert row.peak_bytes == pytest.approx(found.peak_bytes)
    assert (short_of(plan, problem) == "accelerator memory") == (verdict != "fits")
    short = found.peak_bytes - found.limit_bytes
    assert shortfall(plan, problem).chip_bytes == pytest.approx(max(short, 0.0))


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_parts_of_a_node_add_up_in_its_host_memory(shards: int) -> None:
    plain = problem_of([3.0, 3.0])
    for share, verdict in ((1.01, "fits"), (0.99, "does not fit")):
        problem = with_memory(plain, host=share * held(plain))
        plan = plan_of(problem, shards=shards)
        ((node, found),) = host_ledgers(plan, problem, knobs_of).items()
        assert (node, found.peak_bytes) == (0, pytest.approx(held(plain)))
        assert found.verdict == verdict
        host = report_of(simulate(plan, problem, steps=3), problem).host
        assert host is not None and host.memory[0].verdict == verdict
        assert (short_of(plan, problem) == "host memory") == (verdict != "fits")
    assert server_memory(plan, problem) == {}


def test_parts_on_two_nodes_hold_half_each() -> None:
    problem = problem_of([3.0, 3.0], pcie=1e9)
    found = host_ledgers(plan_of(problem, shards=2, at=(0, 1)), problem, knobs_of)
    assert {n: x.peak_bytes for n, x in found.items()} == {
        n: pytest.approx(held(problem) / 2) for n in (0, 1)
    }


def test_a_plan_without_servers_has_no_ledger_of_them() -> None:
    problem = problem_of([3.0, 3.0])
    plan = plan_of(problem, variant="allreduce")
    assert not server_memory(plan, problem) and not host_ledgers(plan, problem, knobs_of)


# -- chips --------------------------------------------------------------------------------------


def test_a_server_on_a_chip_is_a_chip_and_one_on_a_host_none() -> None:
    machine = machine_of([3.0, 3.0])
    kinds = {
        n: msgspec.structs.replace(a, price_per_s=1.0) for n, a in machine.accelerators.items()
    }
    problem = problem_of([3.0, 3.0], msgspec.structs.replace(machine, accelerators=kinds))
    bases = [
        report_of(simulate(plan_of(problem, place=p), problem, steps=3), problem).basis
        for p in ("host", "chip")
    ]
    assert [b.num_chips for b in bases] == [2, 3]
    assert [b.price_per_s for b in bases] == [2.0, 3.0]
    assert [b.unused for b in bases] == [{"server": 1}, {}]
    peaks = [b.peak_flops_per_s or 0.0 for b in bases]
    assert peaks[1] > peaks[0]


@pytest.mark.parametrize("at", [(0, 0, 3), (0, 0), (3, 3)])
def test_two_servers_on_one_chip(at: tuple[int, ...]) -> None:
    problem = problem_of([3.0, 3.0], machine_of([3.0, 3.0, 3.0]))
    with pytest.raises(InputError, match="would have two servers"):
        plan_of(problem, chips=(1, 2), place="chip", shards=2, at=at)
    plan = plan_of(problem, chips=(1, 2), place="chip", shards=2, at=(0, 3))
    for chip in (0, 1):  # in a file that somebody edited
        chips = (*plan.placement.chips[:-1], chip)
        placement = msgspec.structs.replace(plan.placement, chips=chips)
        with pytest.raises(PlanError, match="computes on a chip that another rank uses"):
            validate(msgspec.structs.replace(plan, placement=placement))


# -- slow servers -------------------------------------------------------------------------------


def applies(run: Run) -> list[float]:
    """[s] of the first update of every server."""
    first: dict[int, float] = {}
    for h in run.handled:
        if h.op.kind == "APPLY":
            first.setdefault(h.rank, h.end - h.start)
    return list(first.values())


def servers(plan: Plan) -> tuple[int, ...]:
    return plan.placement.extra_ranks


@pytest.mark.parametrize("contention", [True, False])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_slow_servers_are_slow_however_many_share_a_node(
    shards: int, fold: bool, contention: bool
) -> None:
    problem = problem_of([3.0])
    plan = plan_of(problem, shards=shards)
    slow = [Straggler(ranks=servers(plan), factor=5.0)]
    run = simulate(plan, problem, steps=2, fold=fold, contention=contention, faults=slow)
    alone = UPDATE if contention else UPDATE / shards
    assert applies(run) == pytest.approx([5.0 * alone] * shards)


def test_one_slow_server_of_two_keeps_the_others_share() -> None:
    problem = problem_of([3.0])
    plan = plan_of(problem, shards=2)
    slow = [Straggler(ranks=servers(plan)[:1], factor=3.0)]
    run = simulate(plan, problem, steps=1, faults=slow)
    # Work 3/2 and 1/2: shared until the second is over at 2 x 1/2, the rest alone.
    assert applies(run) == pytest.approx([2.0 * UPDATE, UPDATE])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_pace_that_changes_during_an_update(shards: int) -> None:
    problem = problem_of([3.0])
    plan = plan_of(problem, shards=shards)
    first = next(h for h in simulate(plan, problem).handled if h.op.kind == "APPLY")
    half = first.start + UPDATE / 2
    for start, stop, wanted in (
        (half, inf, UPDATE / 2 + 5.0 * UPDATE / 2),
        (first.start, first.start + UPDATE, UPDATE + 4 / 5 * UPDATE),
        (half, half + 0.5 * UPDATE, UPDATE + 4 / 5 * UPDATE / 2),
    ):
        slow = [Straggler(ranks=servers(plan), factor=5.0, start=start, stop=stop)]
        assert applies(simulate(plan, problem, faults=slow)) == pytest.approx([wanted] * shards)


def test_a_lost_server_leaves_the_processors_to_the_other() -> None:
    problem = problem_of([3.0])
    plan = plan_of(problem, shards=2)
    first = next(h for h in simulate(plan, problem).handled if h.op.kind == "APPLY")
    lost = [ChipLoss(rank=servers(plan)[0], at=first.start + UPDATE / 2)]
    run = simulate(plan, problem, faults=lost, until=20.0)
    # Half of its half is done by then; the other half goes at twice the rate.
    assert applies(run) == [inf, pytest.approx(0.75 * UPDATE)]


@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("cap", [inf, 4.0])
def test_a_stretched_flow(others: int, cap: float) -> None:
    kernel = Kernel()
    network, ended = Network(kernel, [6.0, 60.0]), list[float]()
    flow = network.start((0, 1) if others == 2 else (0,), 12.0, ended.append, cap=cap)
    for _ in range(others):
        network.start((0,), 1e6, lambda _: None, cap=cap)
    rate = min(cap, 6.0 / (1 + others))
    kernel.call_at(1.0, lambda _: network.stretch(flow, 3.0))
    kernel.run_all(1000.0)
    assert ended == [pytest.approx(1.0 + 3.0 * (12.0 - rate) / rate)]
    network.stretch(flow, 3.0)
    assert flow.done


# -- versions -----------------------------------------------------------------------------------


def test_answers_that_do_not_wait_see_what_is_written() -> None:
    problem = problem_of([3.0, 5.0, 7.0])
    run = simulate(plan_of(problem, current=True), problem, steps=12)
    ends = [h.end for h in run.handled if h.op.writes]
    reads = [h for h in run.handled if h.op.reads]
    assert len({h.version for h in reads}) > 3
    assert [h.version for h in reads] == [sum(e <= h.start for e in ends) for h in reads]


def test_the_version_of_an_answer_takes_no_look_at_every_write() -> None:
    problem = problem_of([3.0] * 4, rate=1e12, update=1e-6)
    plan = plan_of(problem, current=True)
    simulate(plan, problem, steps=10)
    spent = []
    for steps in (400, 3200):
        began = process_time()
        simulate(plan, problem, steps=steps)
        spent.append(process_time() - began)
    assert spent[1] < 20 * spent[0]  # 8 times as long, 64 when each looks at all


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ChipLoss(rank=0, at=nan), "lost at a time"),
        (ChipLoss(rank=0, at=-3.0), "lost at a time"),
        (Straggler(ranks=(0,), factor=nan), "factor > 0"),
        (Straggler(ranks=(0,), factor=inf), "factor > 0"),
        (Straggler(ranks=(0,), factor=2.0, start=3.0, stop=1.0), "until a later one"),
        (Straggler(ranks=(0,), factor=2.0, start=nan), "until a later one"),
        (Straggler(ranks=(0,), factor=2.0, stop=nan), "until a later one"),
        (Straggler(ranks=(0,), factor=2.0, start=-1.0), "until a later one"),
        (LinkChange(link="node0/nic0/out", trace=((nan, 0.5),)), "times and factors"),
        (LinkChange(link="node0/nic0/out", trace=((1.0, nan),)), "times and factors"),
    ],
)
def test_faults_that_cannot_be(fault: Fault, message: str) -> None:
    problem = problem_of([3.0, 3.0])
    with pytest.raises(InputError, match=message):
        simulate(plan_of(problem), problem, faults=[fault])


@pytest.mark.parametrize(
    "how", [{"until": -1.0}, {"until": nan}, {"until": inf}, {"steps": 0}, {"steps": -1}]
)
def test_runs_that_cannot_be(how: dict[str, Any]) -> None:
    problem = problem_of([3.0, 3.0])
    with pytest.raises(InputError, match=next(iter(how))):
        simulate(plan_of(problem), problem, **how)


def test_bytes_of_a_part() -> None:
    problem = problem_of([3.0])
    found = host_ledgers(plan_of(problem), problem, knobs_of)[0].terms
    assert (found["parameters"], found["gradients"]) == (NBYTES, NBYTES)
    assert found["optimizer"] == PARAMS * problem.job.optimizer_bytes
