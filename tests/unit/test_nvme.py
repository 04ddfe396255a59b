"""NVMe below host memory: prices, the pass and its rings, and ledgers."""

from __future__ import annotations

from functools import cache
from io import StringIO
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sim.cost.ledger import knobs_of
from sim.cost.occupancy import memory_over_time
from sim.cost.offload import host_ledgers, nvme_ledgers
from sim.cost.prices import Prices
from sim.engine.simulate import Run, lay_out, run_layout, simulate
from sim.errors import HetlabError, InputError, PlanError
from sim.hardware.machine import HostSide
from sim.plan.draft import CellKnobs, DataKnobs, PlanDraft
from sim.plan.io import plan_from_json, plan_to_json
from sim.plan.lower import lower
from sim.plan.plan import Amount, Plan
from sim.plan.validate import validate
from sim.problem import Problem, load_problem
from sim.report.report import report_of
from sim.report.table import print_simulation
from strategies.compose import compose
from strategies.lowering.nvme import NVME_READ, NVME_WRITE
from strategies.offload.policies import short_of
from tests.unit.test_offload import LAYERS, gpt, most, plan_of, spans
from tests.validation.exercise import BACKWARD, FORWARD, FREE, machine, model, problem
from tests.validation.host_side import offloaded, with_host

DRIVE = HostSide(nvme_read=4e9, nvme_write=2e9, nvme_bytes=1e12)
TEXT = f"F0 B0 ; {NVME_READ.name}[x] <- B0 ; {NVME_WRITE.name}[x] <- {NVME_READ.name}[x] ; OPT"
AMOUNTS = {f"{NVME_READ.name}[x]": Amount(nbytes=8e9), f"{NVME_WRITE.name}[x]": Amount(nbytes=8e9)}

# -- prices


@pytest.mark.parametrize(("chips", "nodes", "seconds"), [(1, 1, 6.0), (2, 1, 12.0), (2, 2, 12.0)])
def test_chips_of_a_node_share_its_drives(chips: int, nodes: int, seconds: float) -> None:
    given_, plan = offloaded(TEXT, AMOUNTS, chips=chips, nodes=nodes, host=DRIVE)
    for fold in (True, False):
        makespan = simulate(plan, given_, fold=fold).makespan
        assert makespan == pytest.approx(FORWARD + BACKWARD + seconds, rel=1e-9)
    alone = simulate(plan, given_, contention=False).makespan
    assert alone == pytest.approx(FORWARD + BACKWARD + 6.0, rel=1e-9)


def test_reads_and_writes_run_side_by_side() -> None:
    text = f"F0 B0 ; {NVME_READ.name}[x] <- B0 ; {NVME_WRITE.name}[x] <- B0 ; OPT"
    given_, plan = offloaded(text, AMOUNTS, host=DRIVE)
    run = simulate(plan, given_)
    assert run.makespan == pytest.approx(FORWARD + BACKWARD + 4.0, rel=1e-9)
    assert "ideal: NVMe reads and writes do not slow each other" in run.prices.assumptions
    assert {n for n in run.prices.link_names if "nvme" in n} == {
        "node0/nvme_read", "node0/nvme_write",
    }  # fmt: skip


def test_a_node_without_drives_is_refused_by_name() -> None:
    given_, plan = offloaded(TEXT, AMOUNTS)
    with pytest.raises(InputError, match=r"NVME_READ\[x\] of rank 0 has no drive") as error:
        simulate(plan, given_)
    assert "nvme:" in error.value.expected


def three_layers(host: HostSide, params: int, slots: int, **knobs: int) -> tuple[Problem, Plan]:
    """Three layers whose states live on NVMe, on one ideal chip; copies cost nothing."""
    given_ = problem(with_host(machine(1, 1), FREE, host), model(3, params=params), 1)
    draft = PlanDraft(
        cells=(CellKnobs(stage=0, replica=0, chips=(0,)),), data=DataKnobs(microbatches=(1,))
    )
    plan = lower(given_, compose(given_, [("offload", knobs)], start=draft))
    placement = msgspec.structs.replace(plan.placement, nvme_buffers=slots)
    return given_, msgspec.structs.replace(plan, placement=placement)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("write", [6e9, 12e9, 24e9])
def test_steps_of_a_plan_bound_by_its_drives(slots: int, write: float) -> None:
    # 1e9 parameters have 12 GB of states. With one buffer reads wait for writes; with more a step
    # takes as long as the slower way needs for all three layers.
    host = HostSide(update_s=1e-15, nvme_read=12e9, nvme_write=write, nvme_bytes=1e12)
    given_, plan = three_layers(host, 1_000_000_000, slots, optimizer=3, nvme=3)
    validate(plan)
    ends = [simulate(plan, given_, steps=n).makespan for n in (6, 12)]
    read, back = 1.0, 12e9 / write
    layer = read + back if slots == 1 else max(read, back)
    assert (ends[1] - ends[0]) / 6 == pytest.approx(3 * layer, rel=1e-6)


def test_parameters_are_read_for_every_fetch() -> None:
    # Two fetches of 2 GB a layer, and one for the last layer's passes: 10 GB; states: 36 GB.
    host = HostSide(update_s=1e-15, nvme_read=2e9, nvme_write=1e15, nvme_bytes=1e12)
    given_, plan = three_layers(host, 1_000_000_000, 2, parameters=3, optimizer=3, nvme=3)
    validate(plan)
    run = simulate(plan, given_, steps=8)
    node = run.prices.link_names.index("node0/nvme_read")
    carried = sum(size for k in run.prices.carried.values() for x, size in k if x == node)
    assert carried == pytest.approx(8 * 46e9)
    written = run.prices.link_names.index("node0/nvme_write")
    carried = sum(size for k in run.prices.carried.values() for x, size in k if x == written)
    assert carried == pytest.approx(8 * 3 * 14e9)
    # Fetches and updates take turns, so reads never end waiting for one another.
    assert run.makespan / 8 >= 46e9 / 2e9


# -- the pass


@cache
def on_drives(chips: int, batch: int, read: str = "6 GB/s") -> Problem:
    base = gpt(chips, batch)
    documents = base.documents
    cluster = msgspec.json.decode(msgspec.json.encode(documents["cluster"]))
    for site in cluster["sites"]:
        for node in site["nodes"]:
            node["nvme"] = {"read": read, "write": "3 GB/s", "capacity": "1 TB"}
    return load_problem(cluster, documents["model"], documents["job"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Plan]:
    shape = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    given_ = on_drives(shape[0] * shape[1], shape[0] * draw(st.sampled_from([1, 2])))
    optimizer = draw(st.integers(1, LAYERS))
    plan = plan_of(
        given_,
        replicas=shape[0],
        stages=shape[1],
        optimizer=optimizer,
        nvme=draw(st.integers(1, optimizer)),
        parameters=draw(st.integers(0, LAYERS)),
        priority=draw(st.booleans()),
        clipping=draw(st.sampled_from(["none", "speculate", "global"])),
        whole_steps=draw(st.booleans()),
    )
    slots = draw(st.integers(1, 3))
    placement = msgspec.structs.replace(plan.placement, nvme_buffers=slots)
    return given_, msgspec.structs.replace(plan, placement=placement)


@settings(max_examples=25, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_no_ring_overflows_at_any_timing(case: tuple[Problem, Plan], seed: int) -> None:
    given_, plan = case
    validate(plan)
    assert plan_from_json(plan_to_json(plan)) == plan
    layout = lay_out(plan, steps=4)
    random = np.random.default_rng(seed)
    seconds = random.exponential(size=layout.graph.num_nodes) * random.integers(
        0, 2, layout.graph.num_nodes
    )
    drives_hold(plan, run_layout(layout, lambda _: Prices(seconds=seconds)))
    run = simulate(plan, given_, steps=4)
    drives_hold(plan, run)
    assert run.makespan == pytest.approx(simulate(plan, given_, steps=4, fold=False).makespan)


def drives_hold(plan: Plan, run: Run) -> None:
    """Rings hold, updates find what was written, and fetches what was read; on every rank."""
    graph, out = run.layout.graph, run.outcome
    low = {(s.stage, s.name) for s in plan.placement.segments if "nvme" in s.offload}
    reads = 0
    for index in range(len(graph.actors)):
        nodes = np.flatnonzero(graph.actor == index).tolist()
        at = {
            (int(graph.step[k]), op.kind, op.stage, op.label, op.mb): (out.start[k], out.end[k])
            for k in nodes
            for op in [graph.ops[k]]
        }
        states, copies = [], []
        for (step, kind, *key), (start, end) in at.items():
            if tuple(key[:2]) not in low:
                assert not kind.startswith("NVME")
                continue
            written = at.get((step - 1, "NVME_WRITE", *key[:2], -1), (0.0, 0.0))[1]
            if kind == "OPT":
                read, write = (at[step, f"NVME_{k}", *key] for k in ("READ", "WRITE"))
                assert written <= read[0] and read[1] <= start <= end <= write[0]
                states += [(read[0], 1), (write[1], -1)]
            elif kind.startswith("FETCH"):
                read = at[step, f"NVME_READ{kind[5:]}", *key]
                assert written <= read[0] and read[1] <= start
                copies += [(read[0], 1), (end, -1)]
        most(states, plan.placement.nvme_buffers)
        most(copies, plan.placement.nvme_buffers)
        reads += len(states)
    assert reads


@pytest.mark.parametrize("zero", [0, 3])
def test_whole_steps_are_whole_with_drives_too(zero: int) -> None:
    given_ = on_drives(1 + zero // 3, 2)
    draft = PlanDraft(
        cells=tuple(CellKnobs(stage=0, replica=r, chips=(r,)) for r in range(1 + zero // 3)),
        data=DataKnobs(microbatches=(2 - zero // 3,) * (1 + zero // 3), zero=zero),
    )
    knobs = {"optimizer": 3, "nvme": 2, "parameters": 3 - zero, "whole_steps": True}
    plan = lower(given_, compose(given_, [("offload", knobs)], start=draft))
    validate(plan)
    at = spans(simulate(plan, given_, steps=3))
    for step in (1, 2):
        ended = max(end for key, (_, end) in at.items() if key[0] == step - 1)
        assert min(start for key, (start, _) in at.items() if key[0] == step) >= ended


def test_fifty_steps_leak_nothing() -> None:
    given_ = on_drives(2, 4)
    plan = plan_of(given_, replicas=2, optimizer=3, parameters=2, nvme=3)
    run = simulate(plan, given_, steps=50)
    layout, out = run.layout, run.outcome
    rows = memory_over_time(layout.graph, layout.wiring, plan, given_, out.start, out.end)
    for times, nbytes in rows:
        half = np.searchsorted(times, run.makespan / 2)
        assert nbytes[half:].max() == pytest.approx(nbytes.max())
        assert nbytes[-1] == pytest.approx(nbytes[0])


def test_a_slower_drive_is_never_faster_and_a_free_one_costs_nothing() -> None:
    knobs: dict[str, Any] = {"optimizer": LAYERS, "parameters": 2}
    none = simulate(plan_of(gpt(1, 8), **knobs), gpt(1, 8), steps=6).makespan
    times = []
    for read in ("1000000 GB/s", "6 GB/s", "1 GB/s"):
        given_ = on_drives(1, 8, read)
        nodes = tuple(
            msgspec.structs.replace(
                n, host=msgspec.structs.replace(n.host, nvme_write=n.host.nvme_read)
            )
            for n in given_.machine.nodes
        )
        given_ = msgspec.structs.replace(
            given_, machine=msgspec.structs.replace(given_.machine, nodes=nodes)
        )
        plan = plan_of(given_, nvme=LAYERS, **knobs)
        # With a buffer for every layer the drives leave the order of the updates alone.
        placement = msgspec.structs.replace(plan.placement, nvme_buffers=LAYERS)
        plan = msgspec.structs.replace(plan, placement=placement)
        times.append(simulate(plan, given_, steps=6).makespan)
    assert times[0] == pytest.approx(none, rel=1e-3)
    assert none <= times[0] * (1 + 1e-9) and times[0] < times[1] < times[2]


# -- memory


def test_states_move_from_the_host_to_its_drives() -> None:
    given_ = on_drives(1, 1)
    layer = 12 * 1024**2 + 13 * 1024
    plan = plan_of(given_, optimizer=4, nvme=3, parameters=2)
    host = host_ledgers(plan, given_, knobs_of)[0].terms
    drive = nvme_ledgers(plan, given_, knobs_of)[0]
    # Layers 1 to 3 are on NVMe, 0 and 1 have their parameters away.
    assert host == pytest.approx(
        {
            "optimizer": 12 * layer,
            "gradients": 4 * 2 * layer,
            "parameters": 3 * 2 * layer,
            "staging": 2 * (14 + 2) * layer,
        }
    )
    assert drive.terms == pytest.approx({"optimizer": 36 * layer, "parameters": 2 * layer})
    assert drive.capacity_bytes == 1e12 and drive.verdict == "fits"
    assert nvme_ledgers(plan_of(given_, optimizer=4), given_, knobs_of) == {}


def with_memory(given_: Problem, memory: float, drive: float) -> Problem:
    nodes = tuple(
        msgspec.structs.replace(
            n, host_memory_bytes=memory, host=msgspec.structs.replace(n.host, nvme_bytes=drive)
        )
        for n in given_.machine.nodes
    )
    machine = msgspec.structs.replace(given_.machine, nodes=nodes)
    return msgspec.structs.replace(given_, machine=machine)


def test_a_plan_short_of_host_memory_fits_with_drives() -> None:
    given_ = with_memory(on_drives(1, 1), 0.7e9, 1e12)
    assert short_of(plan_of(given_, optimizer=4), given_) == "host memory"
    plan = plan_of(given_, optimizer=4, nvme=4)
    assert short_of(plan, given_) == ""
    report = report_of(simulate(plan, given_, steps=4), given_)
    host = report.simulate_document().host
    assert host is not None and [r.tier for r in host.memory] == ["memory", "nvme"]
    assert {s.stream for s in host.streams} == {"d2h", "h2d", "host", "nvme_read", "nvme_write"}
    assert [r.verdict for r in host.memory] == ["fits", "fits"]


def test_a_node_without_drives_holds_nothing() -> None:
    given_ = with_memory(on_drives(1, 1), 440e9, 0.0)
    plan = plan_of(given_, optimizer=4, nvme=4)
    assert nvme_ledgers(plan, given_, knobs_of)[0].verdict == "does not fit"
    assert short_of(plan, given_) == "NVMe"
    # Host memory that nobody stated is another matter: every node has some.
    unknown = with_memory(given_, 0.0, 1e12)
    assert host_ledgers(plan, unknown, knobs_of)[0].verdict == "unknown"


@pytest.mark.parametrize("width", [80, 120])
def test_drives_that_are_too_small_are_said_so(width: int) -> None:
    given_ = with_memory(on_drives(1, 1), 440e9, 0.1e9)
    report = report_of(simulate(plan_of(given_, optimizer=4, nvme=4), given_, steps=4), given_)
    out = StringIO()
    print_simulation(Console(file=out, width=width), report.simulate_document())
    text = out.getvalue()
    assert "NVMe holds 577 MiB of 95.4 MiB" in " ".join(text.split())
    assert {c.verdict for s in report.simulate_document().stages for c in s.cells} == {
        "does not fit"
    }
    assert "nvme_read" in text and "staging" in text


# -- refusals


@pytest.mark.parametrize("count", [-1, 3])
def test_more_layers_on_drives_than_on_the_host_are_refused(count: int) -> None:
    with pytest.raises(InputError, match="between none and all") as error:
        plan_of(on_drives(1, 1), optimizer=2, nvme=count)
    assert error.value.key == "offload.nvme"


def test_segments_that_the_host_does_not_update_are_refused() -> None:
    plan = plan_of(on_drives(1, 1), optimizer=2, nvme=2)
    alone = tuple(
        msgspec.structs.replace(s, offload=("nvme",) if s.offload else ())
        for s in plan.placement.segments
    )
    placement = msgspec.structs.replace(plan.placement, segments=alone)
    with pytest.raises(PlanError, match="its optimizer is not on the host"):
        validate(msgspec.structs.replace(plan, placement=placement))
    first, segments, drives = plan.lowering[:-2], plan.lowering[-2], plan.lowering[-1]
    with pytest.raises(PlanError, match="NVMe needs updates on the host"):
        validate(msgspec.structs.replace(plan, lowering=(*first, drives, segments)))
    placement = msgspec.structs.replace(plan.placement, nvme_buffers=0)
    with pytest.raises(PlanError, match="must be positive"):
        validate(msgspec.structs.replace(plan, placement=placement))


@pytest.mark.parametrize("lacking", ["read", "write", "capacity"])
def test_a_drive_states_its_rates_and_its_capacity(lacking: str) -> None:
    drive = {"read": "6 GB/s", "write": "3 GB/s", "capacity": "1 TB"}
    del drive[lacking]
    node = {"profile": "a100_80gb_hdr", "count": 1, "nvme": drive}
    cluster = {"name": "one", "sites": [{"name": "hall", "nodes": [node]}]}
    with pytest.raises(HetlabError) as error:
        load_problem(cluster, "gpt2_355m", {"global_batch": 8, "sequence_length": 128})
    assert f"nvme.{lacking}" in str(error.value)
