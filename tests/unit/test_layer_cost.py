"""Time of a layer under a lending: the machine's prices, the released constants, closed forms."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.collective import collective_cost
from sim.cost.compute import Shape, block_time, routed_part
from sim.errors import InputError
from sim.hardware.build import build_machine
from sim.hardware.machine import Accelerator
from sim.model.graph import Block, Gemm
from sim.spec.cluster import ClusterDoc
from strategies.expert.journeys import copies_back, copies_out, copy_ways, journey_s, tokens_out
from strategies.expert.layer_cost import (
    LayerCosts,
    MeanBandwidth,
    PerToken,
    blocking_s,
    copy_bytes,
    costs_from_plain,
    costs_to_plain,
    exchange_s,
    expert_s,
    layer_times,
    nodes_of,
    products,
    released,
    scheduled_s,
    topology,
)
from strategies.expert.lending import Lending, static

COSTS = {
    "token_bytes": 4096.0,
    "experts": PerToken(forward=1e-6, backward=2e-6),
    "param_bytes": 1e6,
    "gradient_bytes": 1e6,
}


def cluster(count=2, chips=4, nics=1, curve=(), flow_cap=None):
    """Nodes of ``chips`` behind ``nics``; ports 10 GB/s, NICs 2 GB/s."""
    nic = {"rate": "2 GB/s", "latency": "5 us"}
    if curve:
        nic["curve"] = [{"size": size, "fraction": part} for size, part in curve]
    if flow_cap:
        nic["flow_cap"] = flow_cap
    node = {
        "accelerator": "A100-SXM4-80GB",
        "chips": chips,
        "fabric": {"rate": "10 GB/s", "latency": "1 us"},
        "nics": {**nic, "count": nics},
        "count": count,
    }
    return build_machine(
        ClusterDoc.model_validate({"name": "c", "sites": [{"name": "s", "nodes": [node]}]})
    )


MACHINES = {
    "one NIC": cluster(),
    "a NIC per chip": cluster(nics=4),
    "a curve": cluster(curve=(("4 KiB", 0.1), ("1 MiB", 0.5), ("16 MiB", 0.9))),
    "a cap": cluster(flow_cap="500 MB/s"),
    "one node": cluster(count=1, chips=8),
}


@st.composite
def exchanges(draw):
    name = draw(st.sampled_from(sorted(MACHINES)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    chips = random.permutation(8)[: draw(st.integers(2, 8))].tolist()
    matrix = random.integers(0, draw(st.sampled_from([1, 10**4, 10**8])), (len(chips),) * 2)
    matrix[random.random(matrix.shape) < draw(st.sampled_from([0.0, 0.6, 1.0]))] = 0
    return MACHINES[name], chips, matrix


@given(exchanges(), st.sampled_from([1.0, 3.0]))
def test_an_exchange_costs_what_the_simulator_asks(exchange, share):
    machine, chips, matrix = exchange
    price = collective_cost(machine, "all_to_all", chips, 0.0, matrix=matrix, share=share)
    links = topology(machine, chips, share=share)
    assert exchange_s(links, matrix) == pytest.approx(price.seconds, rel=1e-12)
    both = exchange_s(links, np.stack([matrix, matrix.T]))
    assert both[1] == pytest.approx(float(exchange_s(links, matrix.T)), rel=1e-12)


@given(exchanges())
def test_ways_deliver_everything(exchange):
    machine, chips, matrix = exchange
    links = topology(machine, chips)
    journey = tokens_out(links, matrix)
    assert journey_s(links, journey) <= float(exchange_s(links, matrix)) * (1 + 1e-12)
    np.fill_diagonal(matrix, 0)
    received = journey[-1].sum(axis=0)
    if len(journey) == 2:  # what crosses and stays there does not go on
        received = received + journey[0].sum(axis=0) - journey[1].sum(axis=1)
    assert received.tolist() == matrix.sum(axis=0).tolist()


def test_a_rail_spares_a_busy_nic():
    links = topology(MACHINES["a NIC per chip"], range(8))
    hot = np.zeros((8, 8))
    hot[:4, 4] = 1e8
    journey = tokens_out(links, hot)
    assert len(journey) == 2
    assert float(exchange_s(links, hot)) == pytest.approx(4e8 / 2e9 + 10e-6)
    assert journey_s(links, journey) == pytest.approx(1e8 / 2e9 + 10e-6 + 3e8 / 10e9 + 2e-6)


def hosts_of(expert, devices, size=8):
    base = static(size, size)
    hosts = base.hosts.copy()
    hosts[expert, devices] = True
    return Lending(hosts=hosts, home=base.home)


def test_ways_of_an_expert():
    links = topology(MACHINES["one NIC"], range(8))
    everywhere = hosts_of(0, list(range(8)))
    ways = copy_ways(links, everywhere, 1e9)
    times = {name: journey_s(links, way) for name, way in ways.items()}
    assert times["direct"] == pytest.approx(4e9 / 2e9 + 10e-6)
    assert times["relay"] == pytest.approx(1e9 / 2e9 + 10e-6 + 3e9 / 10e9 + 2e-6)
    assert times["chain"] == pytest.approx((1e9 + 6 * 262144) / 2e9 + 10e-6)
    assert journey_s(links, copies_out(links, everywhere, 1e9)) == min(times.values())
    assert journey_s(links, copies_back(links, everywhere, 1e9)) == min(times.values())
    near = hosts_of(0, [1])
    for way in copy_ways(links, near, 1e9).values():
        assert len(way) == 1 and way[0][0, 1] == 1e9 and way[0].sum() == 1e9


@pytest.mark.parametrize("way", ["direct", "relay", "chain"])
def test_every_host_gets_its_copy(way):
    links = topology(MACHINES["one NIC"], range(8), ways=(way,))
    random = np.random.default_rng(5)
    for _ in range(20):
        hosts = random.random((8, 8)) < 0.4
        hosts[np.arange(8), np.arange(8)] = True
        lending = Lending(hosts=hosts, home=np.arange(8))
        out = copies_out(links, lending, 1.0)
        if way != "chain":
            assert sum(m.sum(axis=0) for m in out).tolist() == (hosts.sum(axis=0) - 1).tolist()
        else:  # one edge into every host, with the fill of its chain
            assert (out[0].sum(axis=0) >= hosts.sum(axis=0) - 1).all()
        assert [m.T.tolist() for m in out[::-1]] == [
            m.tolist() for m in copies_back(links, lending, 1.0)
        ]


# -- experts --------------------------------------------------------------------------------------


def moe(width=1024, hidden=2048, num_experts=8, top_k=2):
    each = 2 * width * hidden
    return Block(
        name="moe",
        kind="moe",
        layer=0,
        params_experts=each * num_experts,
        num_experts=num_experts,
        top_k=top_k,
        gemms=(
            Gemm(hidden, width, 1, "column", True),
            Gemm(width, hidden, 1, "row", True),
            Gemm(num_experts, width, 1, "none"),
        ),
        elementwise=12.0 * width,
        input_elements=width,
    )


CHIP = Accelerator(
    name="chip",
    memory_bytes=1e10,
    memory_bytes_per_s=4e11,
    peak_flops_per_s={"fp32": 3e13, "bf16": 1e14},
    gemm_half=96.0,
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [4, 512, 16384])
@pytest.mark.parametrize("ep", [2, 8])
@pytest.mark.parametrize("tp", [1, 2])
def test_experts_cost_what_the_simulator_asks(dtype, tokens, ep, tp):
    block = moe()
    shape = Shape(microbatch=1, sequence_length=tokens, ep=ep, tp=tp)
    whole = block_time(routed_part(block), CHIP, shape, dtype)
    each = tokens * block.top_k * ep / block.num_experts
    work = np.zeros((8, ep))
    for d in range(ep):
        work[d * 8 // ep : (d + 1) * 8 // ep, d] = each
    forward, backward = expert_s(products(block, [CHIP] * ep, dtype, tp), work)
    assert forward == pytest.approx([whole.forward] * ep)
    assert backward == pytest.approx([whole.backward] * ep)


def test_a_device_with_tokens_starts_once_per_pass():
    slow = msgspec.structs.replace(CHIP, kernel_overhead_s=1.0)
    forward, backward = expert_s(products(moe(), [slow] * 2, "bf16"), [[5, 0], [5, 0]])
    assert forward == pytest.approx([1.0, 0.0], abs=0.01)
    assert backward == pytest.approx([2.0, 0.0], abs=0.01)


def test_unlike_chips_take_their_own_times():
    fast = msgspec.structs.replace(CHIP, peak_flops_per_s={"bf16": 4e14})
    both = expert_s(products(moe(), [CHIP, fast], "bf16"), np.full((8, 2), 2048))
    alone = [expert_s(products(moe(), [c], "bf16"), np.full((8, 1), 2048)) for c in (CHIP, fast)]
    for k in (0, 1):
        assert both[k] == pytest.approx([alone[0][k][0], alone[1][k][0]])
    assert both[0][1] < both[0][0]


def test_few_tokens_are_dear_and_none_are_free():
    times = products(moe(), [CHIP, CHIP], "bf16")
    split, whole = np.array([[64, 0], [64, 0]]), np.array([[128, 0], [0, 0]])
    assert expert_s(times, split)[0][0] > 1.3 * expert_s(times, whole)[0][0]
    assert expert_s(times, split)[0][1] == 0.0
    with pytest.raises(InputError, match="no routed experts"):
        products(Block(name="x", kind="mlp", layer=0), [CHIP], "bf16")


# -- the released constants -----------------------------------------------------------------------


def zipf(exponent, k, size=16, tokens=16384):
    """Expected counts: every source alike, popularity by rank."""
    share = np.arange(1, size + 1.0) ** -exponent
    return np.outer(share / share.sum() * tokens * k, np.full(size, 1.0 / size))


def whole_numbers(counts):
    """Counts rounded per source without losing a token."""
    upto = np.round(np.cumsum(counts, axis=1)).astype(np.int64)
    return np.diff(upto, axis=1, prepend=0)


WIDTHS = {"S": 512, "M": 1024, "L": 2048}


@pytest.mark.parametrize(
    ("model", "k", "exponent", "plain_ms"),
    [
        ("S", 1, 1.0, 6.37),
        ("S", 1, 1.2, 7.89),
        ("S", 2, 1.0, 12.74),
        ("S", 2, 1.2, 15.77),
        ("M", 1, 1.2, 24.21),
        ("M", 2, 1.0, 39.27),
        ("M", 2, 1.2, 48.50),
        ("L", 1, 1.0, 66.59),
        ("L", 2, 1.2, 164.34),
    ],
)
def test_plain_layers_with_the_released_constants(model, k, exponent, plain_ms):
    # Those numbers come from one draw of the counts, which is not known; expectations differ by up
    # to half a percent.
    costs = released(WIDTHS[model], 2 * WIDTHS[model], 16)
    times = layer_times(costs, whole_numbers(zipf(exponent, k)), static(16, 16))
    assert blocking_s(times) * 1e3 == pytest.approx(plain_ms, rel=5e-3)
    assert scheduled_s(costs, times) == blocking_s(times)


def test_equations_by_hand():
    costs = LayerCosts(
        links=MeanBandwidth(exchange=((1e4, 1e8), (1e9, 1e9)), trans=1e9, agg=5e8),
        fnec_s=2e-4,
        bnec_s=1e-4,
        **COSTS,
    )
    counts = np.array([[10, 30, 20], [0, 5, 0], [1, 1, 1]])
    lending = hosts_of(0, [1], 3)
    times = layer_times(costs, counts, lending)
    # device 0: its own 10 and 20 from device 2; device 1: 30 + 5; device 2: 3
    assert times.dispatch == times.combine == times.a2a == 20 * 4096 / 1e9
    assert (times.fec, times.bec) == pytest.approx((35e-6, 70e-6))
    assert times.trans == pytest.approx(2 / 3 * 1e6 / 1e9)
    assert times.agg == pytest.approx(2 / 3 * 1e6 / 5e8)
    assert blocking_s(times) == pytest.approx(4 * times.a2a + 105e-6 + 2 / 3 * 1e-3 + 2 / 3 * 2e-3)
    assert scheduled_s(costs, times) == pytest.approx(
        4 * times.a2a + 105e-6 + (2 / 3 * 1e-3 - 235e-6) + (2 / 3 * 2e-3 - 170e-6)
    )
    assert copy_bytes(costs, lending).tolist() == [0, 2e6, 0]
    small = layer_times(costs, np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]]), static(3, 3))
    assert small.dispatch == 4096 / 1e8
    assert nodes_of(costs) is None
    slow = msgspec.structs.replace(costs, exchange_factor=1.5)
    assert layer_times(slow, counts, lending).a2a == 1.5 * times.a2a
    assert layer_times(slow, counts, lending).trans == times.trans


def test_costs_survive_as_json():
    machine = MACHINES["a curve"]
    costs = LayerCosts(
        links=topology(machine, range(8)),
        **{**COSTS, "experts": products(moe(), [CHIP] * 8, "bf16")},
    )
    again = costs_from_plain(json.loads(json.dumps(costs_to_plain(costs))))
    counts = np.random.default_rng(1).integers(0, 900, (8, 8))
    lending = hosts_of(3, [0, 4, 5])
    assert layer_times(again, counts, lending) == layer_times(costs, counts, lending)
    assert nodes_of(again).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_groups_are_checked():
    with pytest.raises(InputError, match="each chip once"):
        topology(MACHINES["one NIC"], [0, 0])
    with pytest.raises(InputError, match="known ways"):
        topology(MACHINES["one NIC"], [0, 1], ways=("pigeon",))
