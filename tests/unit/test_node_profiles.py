"""Nodes, processors and the clusters made of them."""

from __future__ import annotations

import pytest

from sim.hardware.build import build_machine
from sim.hardware.catalog import bundled_catalog
from sim.hardware.host import FLOP_RATE, MEMORY_RATE
from sim.hardware.resolve import resolve_node
from sim.hardware.route import path
from sim.spec.origins import require_sources, tags
from sim.spec.profiles import NodeNumbers

CATALOG = bundled_catalog()

# name: accelerator, chips, rate inside, NICs, rate of one NIC; rates in GB/s
SAMPLES = {
    "dgx1_v100_32gb": ("V100-SXM2-32GB", 8, 150, 4, 12.5),
    "dgx_a100_40gb": ("A100-SXM4-40GB", 8, 300, 8, 25),
    "p4d_24xlarge": ("A100-SXM4-40GB", 8, 300, 4, 12.5),
    "p5_48xlarge": ("H100-SXM5-80GB", 8, 450, 32, 12.5),
    "h200_ndr": ("H200-SXM", 8, 450, 8, 50),
    "b200_ndr": ("B200-SXM", 8, 900, 8, 50),
    "gb200_nvl72": ("GB200-NVL72", 72, 900, 72, 50),
    "gb300_nvl72": ("GB300-NVL72", 72, 900, 72, 100),
    "mi300x_8": ("MI300X", 8, 448, 8, 50),
    "gaudi2_8": ("Gaudi2", 8, 300, 24, 12.5),
    "tpu_v5p_64": ("TPU-v5p", 64, 300, 16, 25),
    "trn1_32xlarge": ("Trainium1", 16, 192, 8, 12.5),
    "trn2_48xlarge": ("Trainium2", 16, 640, 16, 25),
    "c500_8": ("C500", 8, 100, 8, 50),
    "ascend_910b2_8": ("Ascend-910B2", 8, 196, 8, 25),
    "rtx3090_pair": ("RTX-3090", 2, 56, 1, 1.25),
    "hpwnv": ("RTX-3090", 4, 15.75, 1, 12.5),
    "lpwnv": ("RTX-2080-Ti", 4, 15.75, 1, 12.5),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_nodes_picked_by_hand(name: str) -> None:
    node = resolve_node(NodeNumbers(), name, CATALOG, name)
    accelerator, chips, inside, nics, nic = SAMPLES[name]
    assert (node.accelerator, node.chips, node.nics) == (accelerator, chips, nics)
    assert node.fabric is not None and node.nic is not None
    assert node.fabric.rate == pytest.approx(inside * 1e9)
    assert node.nic.rate == pytest.approx(nic * 1e9)


def test_every_accelerator_has_a_node_and_every_node_resolves() -> None:
    used = set()
    for name in CATALOG.names("nodes"):
        node = resolve_node(NodeNumbers(), name, CATALOG, name)
        CATALOG.accelerator(node.accelerator)
        used.add(node.accelerator)
    assert used == set(CATALOG.names("accelerators"))


def test_two_cards_share_a_processor_in_the_pro_prophet_nodes() -> None:
    host = resolve_node(NodeNumbers(), "hpwnv", CATALOG, "hpwnv").host
    assert (host.shared_by, host.shared_rate) == (2, pytest.approx(15.75e9))


# Sockets of one processor: cores x cycles x FLOP per cycle, channels x MT/s x 8 B
PROCESSORS = {
    "Xeon-8480": (56 * 2.0e9 * 64, 8 * 4800e6 * 8),
    "Xeon-4210R": (10 * 2.4e9 * 32, 6 * 2400e6 * 8),
    "Xeon-E5-2686-v4": (18 * 2.3e9 * 32, 4 * 2400e6 * 8),
    "EPYC-7742": (64 * 2.25e9 * 32, 8 * 3200e6 * 8),
    "EPYC-9654": (96 * 2.4e9 * 64, 12 * 4800e6 * 8),
    "Grace": (72 * 3.1e9 * 32, 16 * 8534e6 * 8),
    "C86-7285": (32 * 2.0e9 * 16, 8 * 2666e6 * 8),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_follow_from_cores_and_channels(name: str) -> None:
    doc = CATALOG.host(name)
    require_sources(doc)
    flops, bandwidth = PROCESSORS[name]
    assert doc.flops.value == pytest.approx(flops, rel=5e-3)
    assert doc.memory_bandwidth.value == pytest.approx(bandwidth, rel=5e-3)
    assert {tag.evidence for tag in tags(doc).values()} == {"remembered"}


def test_a_stand_in_for_the_optimizer_is_at_most_what_the_processors_have() -> None:
    small = NodeNumbers.model_validate({"processors": {"profile": "Xeon-4210R", "sockets": 1}})
    host = resolve_node(small, "a100_80gb_hdr", CATALOG, "x").host
    assert host.memory_bytes_per_s == pytest.approx(115.2e9)
    assert host.flops_per_s == FLOP_RATE
    assert any("115.2 GB/s of host memory (0.28 s" in text for text in host.assumed)
    large = resolve_node(NodeNumbers(), "dgx_a100_40gb", CATALOG, "x").host
    assert large.memory_bytes_per_s == MEMORY_RATE


def test_the_campus_hangs_on_a_gigabit() -> None:
    """Sailor's profile: 0.116 GB/s to the RTX 3090 nodes, 2.858 between the others."""
    machine = build_machine(CATALOG.cluster("campus_three_cards"))
    first = {n.accelerator: n.chips[0] for n in machine.nodes}
    cards = ("RTX-3090", "RTX-2080-Ti", "Titan-RTX")
    a, b, c = (first[card] for card in cards)
    assert path(machine, a, b).rate == pytest.approx(0.116e9)
    assert path(machine, b, c).rate == pytest.approx(2.858e9)


def test_ten_regions_are_joined_pair_by_pair() -> None:
    machine = build_machine(CATALOG.cluster("ten_regions"))
    assert sum(link.kind == "wan" for link in machine.links) == 90
    sites = {n.site: n.chips[0] for n in machine.nodes}
    route = path(machine, sites["sydney"], sites["singapore"])
    assert route.rate * 8 == pytest.approx(0.816e9)
    assert route.latency == pytest.approx(46e-3, rel=2e-3)
    assert path(machine, sites["oregon"], sites["frankfurt"]).price_per_byte == pytest.approx(5e-11)


def test_a_route_of_less_delay_may_pass_a_third_region() -> None:
    """Sydney to Frankfurt is 265 ms there and back, 92 + 155 by Singapore."""
    machine = build_machine(CATALOG.cluster("ten_regions"))
    sites = {n.site: n.chips[0] for n in machine.nodes}
    route = path(machine, sites["sydney"], sites["frankfurt"])
    assert route.latency == pytest.approx((92 + 155) / 2 * 1e-3, rel=2e-3)
