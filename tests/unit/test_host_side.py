"""Host links and processors: profiles, prices, and what shares what."""

from __future__ import annotations

import msgspec
import pytest

from sim.cost.host import update_bytes, update_seconds
from sim.engine.faults import LinkChange
from sim.engine.simulate import Run, simulate
from sim.errors import InputError
from sim.hardware.host import copy_rate, host_side
from sim.hardware.machine import HostSide
from sim.plan.plan import Amount
from sim.problem import load_problem
from sim.report.links import link_use
from sim.spec.job import Job
from sim.spec.profiles import HostDoc, PcieDoc
from tests.validation.exercise import FORWARD
from tests.validation.host_side import offloaded

GB = Amount(nbytes=1e9)
JOB = Job(global_batch=1, sequence_length=1)


def at(run: Run, name: str, rank: int = 0) -> tuple[float, float]:
    graph = run.layout.graph
    node = next(
        k
        for k, op in enumerate(graph.ops)
        if op.name == name and rank in graph.actors[graph.actor[k]].ranks
    )
    return float(run.outcome.start[node]), float(run.outcome.end[node])


def test_profiles_fill_what_nobody_states() -> None:
    bare = host_side(PcieDoc(rate="25 GB/s"), None)  # type: ignore[arg-type]
    assert bare.both_ways == pytest.approx(0.44)
    assert (bare.shared_by, bare.shared_rate, bare.update_s) == (1, 0.0, 0.0)
    assert len(bare.assumed) == 3
    stated = host_side(
        PcieDoc(rate="25 GB/s", both_ways=1.0, shared_by=2, pinned=False, pageable=0.5),  # type: ignore[arg-type]
        HostDoc(update="1 ns"),  # type: ignore[arg-type]
    )
    assert stated == HostSide(
        shared_by=2,
        shared_rate=25e9,
        both_ways=1.0,
        memory_bytes_per_s=130e9,
        flops_per_s=0.5e12,
        update_s=1e-9,
    )


def test_pageable_copies_reach_a_sixth() -> None:
    assert copy_rate(PcieDoc(rate="24 GB/s", pinned=False)) == pytest.approx(4e9)  # type: ignore[arg-type]
    assert copy_rate(PcieDoc(rate="24 GB/s")) == 24e9  # type: ignore[arg-type]
    assert copy_rate(None) == 0.0


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match="not a share"):
        PcieDoc(rate="1 GB/s", both_ways=1.5)  # type: ignore[arg-type]


def test_a_cluster_file_states_its_host() -> None:
    nodes = {"profile": "a100_80gb_hdr", "count": 1}
    nodes |= {"pcie": {"rate": "25 GB/s", "shared_by": 2}, "host": {"update": "0.5 ns"}}
    cluster = {"name": "one", "sites": [{"name": "hall", "nodes": [nodes]}]}
    job = {"global_batch": 8, "sequence_length": 128}
    problem = load_problem(cluster, "gpt2_355m", job)
    node = problem.machine.nodes[0]
    assert (node.host.update_s, node.host.shared_by, node.host.shared_rate) == (0.5e-9, 2, 25e9)
    assert node.pcie_rate == 25e9


NOTHING = {
    "host_memory": "0 GB",
    "pcie": {"rate": "0 GB/s"},
    "pcie.shared_rate": {"rate": "25 GB/s", "shared_by": 2, "shared_rate": 0},
    "host.update": {"update": "0 s"},
    "host.memory_bandwidth": {"memory_bandwidth": 0},
    "host.flops": {"flops": {"value": 0, "evidence": "assumed"}},
    "nvme.read": {"read": 0, "write": "4 GB/s", "capacity": "4 TB"},
    "nvme.write": {"read": "6 GB/s", "write": 0, "capacity": "4 TB"},
    "nvme.capacity": {"read": "6 GB/s", "write": "4 GB/s", "capacity": "0 GB"},
}


@pytest.mark.parametrize("key", NOTHING)
def test_a_stated_nothing_is_refused(key: str) -> None:
    """0 stands for "not stated" inside, so a document may not say it."""
    node = {"profile": "a100_80gb_hdr", "count": 1, key.partition(".")[0]: NOTHING[key]}
    cluster = {"name": "one", "sites": [{"name": "hall", "nodes": [node]}]}
    with pytest.raises(InputError, match="nothing of it") as error:
        load_problem(cluster, "gpt2_355m", {"global_batch": 8, "sequence_length": 128})
    assert key in error.value.key and "more than 0" in error.value.expected


@pytest.mark.parametrize(
    ("host", "seconds"),
    [
        (HostSide(update_s=7e-10), 7e-10),
        (HostSide(memory_bytes_per_s=130e9, flops_per_s=1e15), 30 / 130e9),
        (HostSide(memory_bytes_per_s=1e15, flops_per_s=1e11), 16 / 1e11),
    ],
)
def test_an_update_takes_the_larger_of_bytes_and_flops(host: HostSide, seconds: float) -> None:
    given, plan = offloaded(
        "F0 B0 OPT{stream=host}", {}, params=1_000_000_000, chips=1, host=host, pcie_rate=1e9
    )
    assert update_bytes(JOB) == 30
    assert update_seconds(given.machine.nodes[0], JOB) == pytest.approx(seconds)
    start, end = at(simulate(plan, given), "OPT")
    assert end - start == pytest.approx(1e9 * seconds, rel=1e-9)


@pytest.mark.parametrize("fold", [True, False])
def test_chips_of_a_node_share_its_processors(fold: bool) -> None:
    host = HostSide(update_s=1e-9)
    program = "F0 B0 OPT{stream=host}"
    one, four = (
        offloaded(program, {}, params=1_000_000_000, chips=c, nodes=2, host=host) for c in (1, 4)
    )
    alone = at(simulate(one[1], one[0], fold=fold), "OPT")
    shared = at(simulate(four[1], four[0], fold=fold), "OPT")
    assert alone[1] - alone[0] == pytest.approx(1.0)
    assert shared[1] - shared[0] == pytest.approx(4.0)


def test_host_work_is_the_larger_of_bytes_and_flops() -> None:
    host = HostSide(memory_bytes_per_s=1e9, flops_per_s=1e9)
    for amount, seconds in ((Amount(nbytes=3e9), 3.0), (Amount(flops=2e9, nbytes=1e9), 2.0)):
        given, plan = offloaded("F0 B0 HOST <- B0 OPT", {"HOST": amount}, host=host)
        start, end = at(simulate(plan, given), "HOST")
        assert end - start == pytest.approx(seconds)


def test_host_work_without_an_amount_is_refused_by_name() -> None:
    host = HostSide(memory_bytes_per_s=1e9, flops_per_s=1e9)
    given, plan = offloaded("F0 B0 HOST <- B0 OPT", {}, host=host)
    with pytest.raises(InputError, match="no time for HOST of rank 0"):
        simulate(plan, given)


def test_a_copy_without_a_host_link_is_refused_by_name() -> None:
    given, plan = offloaded("F0 B0 D2H <- B0 OPT", {}, pcie_rate=0.0)
    with pytest.raises(InputError, match="D2H of rank 0 has no link to host memory"):
        simulate(plan, given)


@pytest.mark.parametrize("fold", [True, False])
def test_copies_to_the_chip_slow_while_it_copies_back(fold: bool) -> None:
    # H2D 0.5 s at 0.4 of 1 GB/s while the D2H runs, then 0.8 s at the full rate.
    host = HostSide(both_ways=0.4)
    text = "F0 ; H2D <- F0 ; D2H <- F0 ; B0 ; OPT"
    amounts = {"H2D": GB, "D2H": Amount(nbytes=0.5e9)}
    given, plan = offloaded(text, amounts, chips=2, host=host, pcie_rate=1e9)
    run = simulate(plan, given, fold=fold)
    assert at(run, "D2H") == (FORWARD, pytest.approx(FORWARD + 0.5))
    assert at(run, "H2D") == (FORWARD, pytest.approx(FORWARD + 0.5 + 0.8))
    alone = simulate(plan, given, fold=fold, contention=False)
    assert at(alone, "H2D") == (FORWARD, pytest.approx(FORWARD + 1.0))


@pytest.mark.parametrize("fold", [True, False])
def test_priority_keeps_its_meaning_when_both_ways_are_slow(fold: bool) -> None:
    host = HostSide(both_ways=0.5)
    text = (
        "F0 ; D2H[a]{priority=1} <- F0 ; D2H[b]{priority=0} <- F0 ; H2D[c]{priority=0} <- F0 ; "
        "B0 ; OPT"
    )
    amounts = {"D2H[a]": GB, "D2H[b]": GB, "H2D[c]": GB}
    given, plan = offloaded(text, amounts, chips=2, host=host, pcie_rate=1e9)
    run = simulate(plan, given, fold=fold)
    assert at(run, "D2H[b]") == (FORWARD, pytest.approx(FORWARD + 1))
    assert at(run, "D2H[a]")[1] == pytest.approx(FORWARD + 2)
    assert at(run, "H2D[c]")[1] == pytest.approx(FORWARD + 2)


def test_a_switch_with_room_for_all_holds_nobody_back() -> None:
    wide = HostSide(shared_by=2, shared_rate=2e9)
    given, plan = offloaded("F0 ; H2D <- F0 ; B0 ; OPT", {"H2D": GB}, chips=2, host=wide,
                            pcie_rate=1e9)  # fmt: skip
    run = simulate(plan, given)
    assert at(run, "H2D")[1] == pytest.approx(FORWARD + 1.0)
    assert run.prices.flows == {}


def test_unlike_neighbours_behind_a_switch_are_not_folded() -> None:
    # Ranks 0-2 copy, rank 3 does not: rank 2 has its switch for itself, 0 and 1 share theirs.
    host = HostSide(shared_by=2, shared_rate=1e9)
    copies, idle = "F0 ; H2D <- F0 ; B0 ; OPT", "F0 B0 OPT"
    programs = [((0, 1, 2), copies), ((3,), idle)]
    given, plan = offloaded("", {"H2D": GB}, chips=4, host=host, pcie_rate=1e9, programs=programs)
    for fold in (True, False):
        run = simulate(plan, given, fold=fold)
        assert at(run, "H2D", 0)[1] == pytest.approx(FORWARD + 2.0)
        assert at(run, "H2D", 1)[1] == pytest.approx(FORWARD + 2.0)
        assert at(run, "H2D", 2)[1] == pytest.approx(FORWARD + 1.0)


@pytest.mark.parametrize("shared", [0.0, 1e9])
def test_folded_runs_put_every_byte_on_its_link(shared: float) -> None:
    host = HostSide(shared_by=2 if shared else 1, shared_rate=shared, both_ways=0.4, update_s=1e-9)
    text = "F0 ; B0 ; D2H <- B0 ; OPT{stream=host} <- D2H ; H2D <- OPT"
    given, plan = offloaded(text, {}, chips=4, nodes=2, host=host, params=10_000_000, pcie_rate=1e9)
    sums = []
    for fold in (True, False):
        run = simulate(plan, given, fold=fold)
        nbytes, _ = link_use(run)
        named = dict(zip(run.prices.link_names, nbytes.tolist(), strict=True))
        sums.append(
            {k: v for k, v in named.items() if k.split("/")[-1] in ("d2h", "h2d", "processors")}
        )
    assert sums[0] == pytest.approx(sums[1])
    assert sums[0]["node1/chip3/h2d"] == pytest.approx(10e6 * JOB.param_bytes)
    assert sums[0]["node1/chip3/d2h"] == pytest.approx(10e6 * JOB.gradient_bytes)
    assert sums[0]["node1/processors"] == pytest.approx(4 * 10e6 * 30)


def test_a_slow_host_link_is_a_fault_like_any_other() -> None:
    given, plan = offloaded("F0 ; H2D <- F0 ; B0 ; OPT", {"H2D": GB}, chips=2, pcie_rate=1e9)
    half = LinkChange(link="node0/chip1/h2d", trace=((0.0, 0.5),))
    run = simulate(plan, given, faults=[half])
    assert at(run, "H2D", 0)[1] == pytest.approx(FORWARD + 1.0)
    assert at(run, "H2D", 1)[1] == pytest.approx(FORWARD + 2.0)


def test_plans_say_what_they_assume_of_the_host() -> None:
    assumed = ("H2D copies beside D2H", "the CPU optimizer reaches 130 GB/s")
    host = HostSide(assumed=assumed, memory_bytes_per_s=130e9, flops_per_s=1e12)
    given, plan = offloaded("F0 ; H2D <- F0 ; B0 ; OPT", {"H2D": GB}, host=host, pcie_rate=1e9)
    texts = simulate(plan, given).prices.assumptions
    assert "ideal: H2D copies beside D2H" in texts
    assert not any("CPU" in t for t in texts)
    other = msgspec.structs.replace(
        plan, programs=offloaded("F0 B0 OPT{stream=host}", {})[1].programs
    )
    texts = simulate(other, given).prices.assumptions
    assert "ideal: the CPU optimizer reaches 130 GB/s" in texts
