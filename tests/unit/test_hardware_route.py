"""Routes and message times, against numbers worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import InputError
from sim.hardware.build import build_machine
from sim.hardware.catalog import bundled_catalog
from sim.hardware.machine import Link, Machine, Path
from sim.hardware.route import curve_factor, island_routes, path, route_key, transfer_time
from sim.spec.cluster import ClusterDoc
from sim.spec.load import parse_text, validate

CHIP = """
profiles:
  accelerators:
    - name: chip
      memory: 16 GB
      memory_bandwidth: 900 GB/s
      peaks: {fp16: 100 TFLOP/s}
"""
FAST = """accelerator: chip
        chips: 4
        fabric: {rate: 100 GB/s, latency: 1 us}
        nics: {rate: 10 GB/s, latency: 5 us, count: 2, nonaffine_rate: 8 GB/s}"""
SLOW = """accelerator: chip
        chips: 2
        fabric: {rate: 50 GB/s, latency: 2 us, duplex: half}
        nics: {rate: 4 GB/s, latency: 7 us, curve: [{size: 1 MB, fraction: 0.5}]}"""
TWO_SITES = f"""
name: tiny
sites:
  - name: east
    nodes:
      - count: 2
        {FAST}
  - name: west
    nodes:
      - island: w1
        {SLOW}
      - island: w2
        {SLOW}
links:
  - between: [east, west]
    rate: 1 GB/s
    latency: 10 ms
    flow_cap: 0.5 GB/s
    price: 0.02 USD/GB
  - {{between: [w1, west], rate: 2 GB/s, latency: 3 us}}
{CHIP}"""


def machine_of(text: str) -> Machine:
    return build_machine(validate(ClusterDoc, parse_text(text, "tiny.yaml")))


@pytest.fixture(scope="module")
def tiny() -> Machine:
    """Chips 0-3 and 4-7 in the east, 8-9 on w1 and 10-11 on w2 in the west."""
    return machine_of(TWO_SITES)


def names(machine: Machine, route: Path) -> list[str]:
    return [machine.links[i].name for i in route.links]


def test_same_chip_costs_nothing(tiny: Machine) -> None:
    route = path(tiny, 3, 3)
    assert (route.links, route.latency, route.rate) == ((), 0.0, math.inf)
    assert transfer_time(route, 1e9) == 0.0


def test_same_node_goes_port_to_port(tiny: Machine) -> None:
    route = path(tiny, 1, 2)
    assert names(tiny, route) == ["node0/chip1/out", "node0/chip2/in"]
    assert route.latency == pytest.approx(2e-6)
    assert route.rate == 100e9


def test_same_island_takes_the_affine_nics(tiny: Machine) -> None:
    route = path(tiny, 1, 6)
    assert names(tiny, route) == ["node0/nic0/out", "node1/nic1/in"]
    assert route.latency == pytest.approx(10e-6)
    assert route.rate == 10e9
    assert transfer_time(route, 20e6) == pytest.approx(10e-6 + 2e-3)


def test_other_island_crosses_its_uplink(tiny: Machine) -> None:
    route = path(tiny, 8, 10)
    assert names(tiny, route) == ["node2/nic0/out", "w1->west", "node3/nic0/in"]
    assert route.latency == pytest.approx(17e-6)
    assert route.rate == 2e9  # the uplink, below both NICs
    assert route.curve == ()


def test_other_site_crosses_the_wan(tiny: Machine) -> None:
    route = path(tiny, 7, 9)
    assert names(tiny, route) == ["node1/nic1/out", "east->west", "west->w1", "node2/nic0/in"]
    assert route.latency == pytest.approx(5e-6 + 10e-3 + 3e-6 + 7e-6)
    assert route.rate == 0.5e9  # one flow's share, not the trunk's 1 GB/s
    assert route.price_per_byte == pytest.approx(0.02e-9)
    back = path(tiny, 9, 7)
    assert names(tiny, back) == ["node2/nic0/out", "w1->west", "west->east", "node1/nic1/in"]


def test_the_weaker_end_rules_with_its_curve(tiny: Machine) -> None:
    text = f"""
name: pair
sites:
  - name: hall
    nodes:
      - {{{FAST.replace(chr(10), ",").replace("  ", "")}}}
      - {{{SLOW.replace(chr(10), ",").replace("  ", "")}}}
{CHIP}"""
    pair = machine_of(text)
    for src, dst in ((0, 4), (4, 0)):
        route = path(pair, src, dst)
        assert route.rate == 4e9
        assert transfer_time(route, 1e6) == pytest.approx(12e-6 + 1e6 / (4e9 * 0.5))


def test_another_nic_is_capped(tiny: Machine) -> None:
    route = path(tiny, 0, 4, nic_src=1)
    assert names(tiny, route) == ["node0/nic1/out", "node1/nic0/in"]
    assert route.rate == 8e9
    assert path(tiny, 0, 4, nic_src=0, nic_dst=0).rate == 10e9
    assert path(tiny, 0, 8, nic_src=1).rate == 0.5e9  # the cap is not the smallest here
    with pytest.raises(InputError, match="no NIC 2"):
        path(tiny, 0, 4, nic_src=2)
    with pytest.raises(InputError, match="no NIC -1"):
        path(tiny, 0, 4, nic_dst=-1)


def test_no_such_chip(tiny: Machine) -> None:
    with pytest.raises(InputError, match="no chip 12"):
        path(tiny, 0, 12)
    with pytest.raises(InputError, match="no chip -1"):
        path(tiny, -1, 0)


def test_half_duplex_is_one_link_both_ways(tiny: Machine) -> None:
    assert path(tiny, 8, 9).links == path(tiny, 9, 8).links[::-1]
    assert names(tiny, path(tiny, 8, 9)) == ["node2/chip0", "node2/chip1"]


def test_a_switch_with_a_capacity_is_crossed_once() -> None:
    text = TWO_SITES.replace(
        "  - name: east\n",
        "  - name: east\n    fabric: {rate: 3 GB/s, latency: 1 us}\n",
    )
    machine = machine_of(text)
    inside = path(machine, 0, 4)
    assert names(machine, inside) == ["node0/nic0/out", "east/switch", "node1/nic0/in"]
    assert inside.rate == 3e9
    assert names(machine, path(machine, 0, 1)) == ["node0/chip0/out", "node0/chip1/in"]
    assert names(machine, path(machine, 0, 8))[1] == "east/switch"


def test_paths_are_kept_per_machine(tiny: Machine) -> None:
    other = machine_of(TWO_SITES.replace("rate: 100 GB/s", "rate: 200 GB/s"))
    assert path(tiny, 0, 1) is path(tiny, 0, 1)
    assert path(other, 0, 1).rate == 2 * path(tiny, 0, 1).rate


def test_the_way_with_the_least_latency() -> None:
    text = TWO_SITES.replace(
        "links:\n",
        f"  - name: mid\n    nodes:\n      - count: 1\n        {FAST}\nlinks:\n"
        "  - {between: [east, mid], rate: 1 GB/s, latency: 2 ms}\n"
        "  - {between: [mid, west], rate: 1 GB/s, latency: 3 ms}\n",
    )
    machine = machine_of(text)
    assert names(machine, path(machine, 0, 10))[1:-1] == ["east->mid", "mid->west"]


def test_cross_vendor_rates_hold_within_four_percent() -> None:
    """DLSlime, 128 MiB over one NIC, GB/s (h2.md 4.3): the pairs that the bundle has."""
    catalog = bundled_catalog()
    machine = build_machine(catalog.cluster("h2_1024"), catalog)
    first = {node.accelerator: node.chips[0] for node in reversed(machine.nodes)}
    second = {
        n.accelerator: n.chips[0] for n in machine.nodes if n.chips[0] != first[n.accelerator]
    }
    measured = {
        ("C500", "C500"): 48.967,
        ("C500", "BI-V100"): 24.524,
        ("BI-V100", "C500"): 24.496,
        ("BI-V100", "BI-V100"): 24.514,
    }
    nbytes = 128 * 2**20
    for (src, dst), rate in measured.items():
        route = path(machine, first[src], second[dst])
        reached = nbytes / (transfer_time(route, nbytes) - route.latency) / 1e9
        assert reached == pytest.approx(rate, rel=0.04)


curves = st.lists(
    st.tuples(st.floats(1, 1e9), st.floats(1e-3, 1)),
    min_size=1,
    max_size=6,
    unique_by=lambda p: p[0],
).map(lambda points: tuple(sorted(points)))


@given(curve=curves, sizes=st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=8))
def test_array_and_scalar_curve_agree(
    curve: tuple[tuple[float, float], ...], sizes: list[float]
) -> None:
    shares = curve_factor(curve, sizes)
    for size, share in zip(sizes, shares, strict=True):
        alone = transfer_time(Path(links=(0,), latency=0.0, rate=1.0, curve=curve), size)
        assert alone == pytest.approx(size / share, rel=1e-9)
    knots = curve_factor(curve, [size for size, _ in curve])
    assert knots == pytest.approx([share for _, share in curve], rel=1e-9)


@given(
    steps=st.lists(st.tuples(st.floats(0.01, 5), st.floats(-1, 1)), min_size=1, max_size=6),
)
def test_larger_messages_never_arrive_sooner(steps: list[tuple[float, float]]) -> None:
    """Between points whose times do not fall, no time falls."""
    size, share = 1e3, 1e-6
    curve = [(size, share)]
    for grown, slope in steps:
        size, share = size * math.exp(grown), share * math.exp(grown * slope)
        curve.append((size, share))
    sizes = np.geomspace(1, 1e18, 2000)
    times = sizes / curve_factor(tuple(curve), sizes)
    assert (np.diff(times) >= -1e-9 * times[1:]).all()


@given(
    num=st.integers(2, 6),
    data=st.data(),
)
def test_routes_have_the_least_latency(num: int, data: st.DataObject) -> None:
    """Oracle: Floyd-Warshall."""
    pairs = [(a, b) for a in range(num) for b in range(num) if a != b]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True))
    latencies = data.draw(st.lists(st.integers(0, 9), min_size=len(chosen), max_size=len(chosen)))
    links = [Link(name=str(i), rate=1.0, latency=float(t)) for i, t in enumerate(latencies)]
    edges = [(str(a), str(b), i) for i, (a, b) in enumerate(chosen)]
    best = np.full((num, num), np.inf)
    np.fill_diagonal(best, 0.0)
    for (a, b), latency in zip(chosen, latencies, strict=True):
        best[a, b] = latency
    for k in range(num):
        best = np.minimum(best, best[:, k : k + 1] + best[k : k + 1, :])
    same = {str(i): str(i) for i in range(num)}
    routes = island_routes(same, same, edges, links)
    for a in range(num):
        for b in range(num):
            key = route_key(str(a), str(b))
            assert (key in routes) == np.isfinite(best[a, b])
            if key in routes:
                assert sum(links[i].latency for i in routes[key]) == best[a, b]
                ends = [chosen[i] for i in routes[key]]
                assert all(x[1] == y[0] for x, y in pairwise(ends))
