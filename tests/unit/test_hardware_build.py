"""From a cluster document to a machine, and what is refused."""

from __future__ import annotations

import pytest

from sim.errors import InputError
from sim.hardware.build import build_machine
from sim.hardware.catalog import bundled_catalog
from sim.hardware.describe import describe_machine
from sim.hardware.machine import Machine
from sim.spec.cluster import ClusterDoc
from sim.spec.load import parse_text, validate
from sim.spec.overrides import apply_overrides

ONE_SITE = """
name: mixed
sites:
  - name: hall
    nodes:
      - {profile: p3_8xlarge, count: 2}
      - {accelerator: T4, chips: 3, fabric: pcie3_t4_node, nics: {profile: aws_50g, count: 2}}
"""
TWO_SITES = """
name: apart
sites:
  - {name: north, nodes: [{profile: h100_ndr}]}
  - {name: south, nodes: [{profile: a100_80gb_hdr}]}
"""
ISLANDS = """
name: islands
sites:
  - name: hall
    nodes:
      - {profile: h100_ndr, island: left}
      - {profile: a100_80gb_hdr, island: right}
"""


def build(text: str, *changes: str) -> Machine:
    source = apply_overrides(parse_text(text, "cluster.yaml"), changes)
    return build_machine(validate(ClusterDoc, source))


def test_chips_are_numbered_node_by_node() -> None:
    machine = build(ONE_SITE)
    assert [node.chips for node in machine.nodes] == [(0, 4), (4, 8), (8, 11)]
    assert [node.index for node in machine.nodes] == [0, 1, 2]
    assert machine.num_chips == 11
    assert [node.accelerator for node in machine.nodes] == ["V100-SXM2-16GB"] * 2 + ["T4"]


def test_links_of_a_node() -> None:
    machine = build(ONE_SITE)
    node = machine.nodes[2]
    assert len({link.name for link in machine.links}) == len(machine.links)
    for local, (out, into) in enumerate(node.chip_links):
        assert machine.links[out].name == f"node2/chip{local}/out"
        assert machine.links[into].name == f"node2/chip{local}/in"
        assert machine.links[out].kind == "pcie"
    for nic, (out, into) in enumerate(node.nic_links):
        assert machine.links[out].name == f"node2/nic{nic}/out"
        assert machine.links[into].name == f"node2/nic{nic}/in"
        assert machine.links[out].kind == "nic"


def test_chips_split_over_the_nics_in_runs() -> None:
    assert build(ONE_SITE).nodes[2].chip_nic == (0, 0, 1)
    h2 = build_machine(bundled_catalog().cluster("h2_1024"))
    bi = next(node for node in h2.nodes if node.accelerator == "BI-V100")
    assert bi.chip_nic == tuple(chip // 2 for chip in range(16))
    written = build(ONE_SITE, "sites.0.nodes.1.nics.affinity=[1, 0, 1]")
    assert written.nodes[2].chip_nic == (1, 0, 1)


def test_what_if_numbers_win_over_the_profile() -> None:
    machine = build(
        ONE_SITE,
        "accelerators.T4={memory: 32 GB, peaks: {fp16: 80 TFLOP/s}}",
        "sites.0.nodes.0.nics={profile: aws_10g, rate: 1 GB/s}",
    )
    chip = machine.accelerators["T4"]
    assert chip.memory_bytes == 32e9
    assert chip.peak_flops_per_s == {"fp32": 8.1e12, "fp16": 80e12}
    assert chip.sources["memory_bytes"].startswith("cluster file")
    assert chip.memory_bytes_per_s == 320e9
    nic = machine.nodes[0]
    assert (nic.nic_rate, nic.nic_latency) == (1e9, 25e-6)


def test_numbers_become_si() -> None:
    machine = build(TWO_SITES, "links=[{between: [north, south], profile: wan_oregon_california}]")
    chip = machine.accelerators["H100-SXM5-80GB"]
    assert chip.price_per_s == pytest.approx(4.25 / 3600)
    assert chip.kernel_overhead_s == pytest.approx(10e-6)
    trunk = machine.links[-1]
    assert (trunk.kind, trunk.rate, trunk.latency) == ("wan", 12.5e9, 6e-3)
    assert trunk.flow_cap == pytest.approx(1.25e9 / 8)
    assert trunk.price_per_byte == pytest.approx(0.02e-9)


def test_equal_documents_build_equal_machines() -> None:
    assert build(ONE_SITE) == build(ONE_SITE)


def test_islands_of_a_site_meet_freely_without_an_uplink() -> None:
    machine = build(ISLANDS)
    assert machine.routes == {
        "left>left": (),
        "left>right": (),
        "right>left": (),
        "right>right": (),
    }


def test_links_between_islands_need_no_site_switch() -> None:
    machine = build(ISLANDS, "links=[{between: [left, right], rate: 5 GB/s}]")
    # Both ways cost no latency; the one through the switch has more hops.
    assert [machine.links[i].name for i in machine.routes["left>right"]] == ["left->right"]


def test_disconnected_sites_are_named() -> None:
    with pytest.raises(InputError, match="disconnected sites: no link leads from north to south"):
        build(TWO_SITES)
    one_way = "links=[{between: [north, south], rate: 1 GB/s, directed: true}]"
    with pytest.raises(InputError, match="disconnected sites: no link leads from south to north"):
        build(TWO_SITES, one_way)


def test_disconnected_islands_are_named() -> None:
    one_way = "links=[{between: [left, hall], rate: 1 GB/s, directed: true}]"
    with pytest.raises(InputError, match=r"disconnected islands.*from right to left"):
        build(ISLANDS, one_way)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sites.0.nodes.0.profile=p3_8xlarg", "did you mean p3_8xlarge"),
        ("sites.0.nodes.1.accelerator=T5", "no profile T5"),
        ("sites.0.nodes.1.fabric=nvlink9", "did you mean nvlink"),
        ("sites.0.nodes.1.fabric={rate: 0 GB/s}", "must be positive"),
        ("sites.0.nodes.1.fabric={rate: -1 GB/s}", "must not be negative"),
        ("sites.0.nodes.1.nics={rate: 1 GB/s, flow_cap: 0 GB/s}", "must be positive"),
        ("sites.0.nodes.1.nics={rate: 1 GB/s, count: 0}", "has no NIC"),
        ("sites.0.nodes.1.nics={rate: 1 GB/s, affinity: [0, 0]}", "NIC of each chip"),
        ("sites.0.nodes.1.nics={rate: 1 GB/s, affinity: [0, 0, 1]}", "not there"),
        ("sites.0.nodes.1.chips=0", "greater than or equal to 1"),
        ("sites.0.nodes.0.count=0", "greater than or equal to 1"),
        ("accelerators.T4={memory: 0 GB}", "must be positive"),
        ("accelerators.T4={peaks: {fp16: 0 TFLOP/s}}", "must be positive"),
        ("accelerators.T4={gemm_efficiency: 0}", "must be positive"),
        ("accelerators.H20={memory: 1 GB}", "which no node has"),
        ("sites.0.name=a>b", "a place name with >"),
    ],
)
def test_refused(change: str, message: str) -> None:
    build(ONE_SITE)
    with pytest.raises(InputError, match=message):
        build(ONE_SITE, change)


def test_chips_need_a_fabric_and_nodes_a_nic() -> None:
    bare = "name: x\nsites: [{name: hall, nodes: [{accelerator: T4, chips: %d, count: %d}]}]\n"
    alone = build(bare % (1, 1))
    assert (alone.num_chips, alone.links) == (1, ())
    with pytest.raises(InputError, match="2 chips and no link between them"):
        build(bare % (2, 1))
    with pytest.raises(InputError, match="has no NIC"):
        build(bare % (1, 2))


def test_two_links_of_one_pair_are_refused() -> None:
    link = "{between: [%s, %s], rate: 1 GB/s}"
    with pytest.raises(InputError, match="two links from south to north"):
        links = [link % ("north", "south"), link % ("south", "north")]
        build(
            TWO_SITES,
            f"links=[{', '.join(links)}]".replace("south, north]", "south, north], directed: true"),
        )


def test_an_island_in_two_sites_is_refused() -> None:
    text = TWO_SITES.replace("h100_ndr", "h100_ndr, island: x").replace(
        "a100_80gb_hdr", "a100_80gb_hdr, island: x"
    )
    with pytest.raises(InputError, match="island x is in two sites"):
        build(text)
    with pytest.raises(InputError, match="island south is in two sites"):
        build(TWO_SITES.replace("h100_ndr", "h100_ndr, island: south"))


def test_a_half_duplex_trunk_is_one_link() -> None:
    machine = build(TWO_SITES, "links=[{between: [north, south], rate: 1 GB/s, duplex: half}]")
    assert machine.links[-1].name == "north<->south"
    assert (
        machine.routes["north>south"] == machine.routes["south>north"] == (len(machine.links) - 1,)
    )


def test_the_text_tree() -> None:
    machine = build(ONE_SITE)
    lines = describe_machine(machine).splitlines()
    assert lines[0] == "mixed: 11 chips in 3 nodes"
    assert lines[1] == "├─ site hall"
    assert lines[2] == (
        "│  ├─ 2 x p3_8xlarge (4 x V100-SXM2-16GB 16 GB, 150 GB/s inside, 1 NIC x 670 MB/s), "
        "chips 0-7"
    )
    assert lines[3].startswith("│  └─ 1 x 3 x T4 (3 x T4 16 GB")
    assert lines[4] == "└─ assumed"
    assert len(lines) == 5 + len(machine.assumptions)
