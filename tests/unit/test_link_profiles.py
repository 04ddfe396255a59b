"""The links of the bundle, beside figures picked by hand and all-reduces that were measured."""

from __future__ import annotations

import pytest

from sim.cost.collective import collective_cost
from sim.hardware.build import build_machine
from sim.hardware.catalog import bundled_catalog
from sim.spec.cluster import ClusterDoc
from sim.spec.load import parse_text, validate
from sim.spec.origins import tags

GB, GBIT = 1e9, 1e9 / 8
RATES = {
    "nvlink1": 80 * GB,
    "nvlink5": 900 * GB,
    "nvlink_c2c": 450 * GB,
    "nvlink4_h800": 200 * GB,
    "xgmi_mi250x": 350 * GB,
    "xgmi_mi355x": 535.5 * GB,
    "gaudi3_ethernet": 600 * GB,
    "neuronlink3": 640 * GB,
    "ici_v5p": 300 * GB,
    "ici_v6e": 180 * GB,
    "hccs_910c": 392 * GB,
    "pcie3_x16": 15.75 * GB,
    "pcie4_x16": 31 * GB,
    "pcie5_x16": 63 * GB,
    "pcie6_x16": 121 * GB,
    "ib_edr_100g": 12.5 * GB,
    "ib_xdr_800g": 100 * GB,
    "efa_v1_100g": 100 * GBIT,
    "efa_v3_200g": 200 * GBIT,
    "slingshot_200g": 25 * GB,
    "ethernet_25g": 3.125 * GB,
    "roce_400g": 50 * GB,
    "campus_1g": 0.116 * GB,
}


@pytest.mark.parametrize("name", RATES)
def test_rates_picked_by_hand(name: str) -> None:
    assert bundled_catalog().link(name).rate.value == pytest.approx(RATES[name])


def node_of(fabric: str, accelerator: str, chips: int):
    text = (
        "name: one\nsites: [{name: a, nodes: [{accelerator: "
        f"{accelerator}, chips: {chips}, fabric: {fabric}}}]}}]\n"
    )
    return build_machine(validate(ClusterDoc, parse_text(text, "one.yaml")))


# fabric, chip, chips: (tensor [B], time [us]) as the benchmarks printed them
MEASURED = [
    ("nvlink3", "A100-SXM4-80GB", 8, [(2**20, 78.95), (2**24, 294.1), (2**30, 8140.9)]),
    ("nvlink4", "H100-SXM5-80GB", 8, [(2**20, 27.37), (2**24, 123.8), (2**28, 1112.5)]),
    ("nvlink5", "B200-SXM", 8, [(2**24, 115.16), (2**30, 2597.7), (2**34, 35551.4)]),
    ("nvlink5_nvl72", "GB200-NVL72", 72, [(2**29, 1806.7), (2**31, 5589.1)]),
]


@pytest.mark.parametrize(("fabric", "chip", "chips", "points"), MEASURED, ids=lambda v: str(v)[:16])
def test_measured_all_reduces_come_out_again(fabric, chip, chips, points) -> None:
    machine = node_of(fabric, chip, chips)
    for nbytes, micros in points:
        cost = collective_cost(machine, "all_reduce", tuple(range(chips)), nbytes)
        assert cost.seconds == pytest.approx(micros * 1e-6, rel=0.02)


def test_an_all_reduce_with_switch_help_stays_at_the_port() -> None:
    """8 x H100 reach 480 GB/s of bus bandwidth at 16 GiB, above the 450 of a port."""
    machine = node_of("nvlink4", "H100-SXM5-80GB", 8)
    cost = collective_cost(machine, "all_reduce", tuple(range(8)), 2.0**34)
    assert cost.seconds == pytest.approx(2 * 7 / 8 * 2.0**34 / 450e9, rel=1e-3)


WAN = {  # what one flow gets [b/s], delay printed [ms]
    "wan_oregon_virginia": (0.79e9, 67),
    "wan_tokyo_seoul": (1.10e9, 34),
    "wan_sydney_frankfurt": (0.328e9, 265),
    "wan_london_ireland": (1.09e9, 12),
    "wan_virginia_california": (1.05e9, 59),
}


@pytest.mark.parametrize("name", WAN)
def test_wide_area_rates_are_bits_and_delays_round_trips(name: str) -> None:
    """The source has netem rates in Gbit; its data-centre matrix says Gbps and means GB/s."""
    link = bundled_catalog().link(name)
    bits, delay = WAN[name]
    assert link.flow_cap is not None and link.latency is not None
    assert link.flow_cap.value * 8 == pytest.approx(bits)
    assert link.latency.value == pytest.approx(delay / 2 * 1e-3)
    assert tags(link)["rate"].evidence == "assumed"


def test_every_wide_area_link_stays_in_the_range_of_the_table() -> None:
    for name in bundled_catalog().names("links"):
        link = bundled_catalog().link(name)
        if link.kind == "wan" and link.source.startswith("https://github.com/DS3Lab"):
            assert link.flow_cap is not None
            assert 0.3e9 <= link.flow_cap.value * 8 <= 5e9


def test_prices_by_continent() -> None:
    catalog = bundled_catalog()

    def price(name: str) -> tuple[float, str | None]:
        link = catalog.link(name)
        assert link.price is not None
        return round(link.price.value * 1e9, 6), tags(link)["price"].evidence

    assert price("wan_oregon_ohio") == (0.02, "stand-in")
    assert price("wan_london_frankfurt") == (0.02, "stand-in")
    assert price("wan_virginia_london") == (0.05, "stand-in")
    assert price("wan_oregon_tokyo") == (0.09, "remembered")
