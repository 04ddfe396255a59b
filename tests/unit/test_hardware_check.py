"""All problems of a cluster document, each with the line to change."""

from __future__ import annotations

import pytest

from sim.errors import InputError
from sim.hardware.build import build_machine
from sim.hardware.catalog import bundled_catalog
from sim.hardware.check import inherit_ports, machine_problems
from sim.problem import load_problem
from sim.spec.cluster import ClusterDoc
from sim.spec.load import parse_text, validate

GOOD = """\
name: mine
profiles:
  accelerators:
    - name: X1
      memory: 64 GiB
      memory_bandwidth: 2 TB/s
      peaks: {bf16: 300 TFLOP/s}
sites:
  - name: here
    nodes:
      - {accelerator: X1, chips: 4, fabric: nvlink3, nics: {profile: ib_hdr_200g, count: 2}}
      - {profile: a100_80gb_hdr, count: 2}
  - name: there
    nodes:
      - {profile: a100_80gb_hdr}
links:
  - {between: [here, there], rate: 10 Gb/s, latency: 20 ms}
"""


def found_in(text: str) -> list[tuple[int, str, str]]:
    source = parse_text(text, "c.yaml")
    found = machine_problems(validate(ClusterDoc, source), source, bundled_catalog())
    assert all(p.file == "c.yaml" for p in found)
    return [(p.line, p.key, p.message) for p in found]


def test_a_sound_cluster_has_none() -> None:
    assert found_in(GOOD) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"{accelerator: X1,": "{accelerator: X2,", "{profile: a100_80gb_hdr}": "{profile: b}"},
            [
                (11, "sites.0.nodes.0.accelerator", "no profile X2 among the accelerators"),
                (15, "sites.1.nodes.0.profile", "no profile b among the nodes"),
            ],
        ),
        (
            {"fabric: nvlink3": "fabric: nvlink33", "rate: 10 Gb/s": "rate: 0 Gb/s"},
            [
                (11, "sites.0.nodes.0", "no profile nvlink33 among the links"),
                (17, "links.0.rate", "must be positive"),
            ],
        ),
        (
            {"memory: 64 GiB": "memory: 0 GiB", "rate: 10 Gb/s": "profile: wan"},
            [
                (5, "profiles.accelerators.0.memory", "X1: must be positive"),
                (17, "links.0", "no profile wan among the links"),
            ],
        ),
        (
            {"here, there], ": "there, here], directed: true, "},
            [(16, "links", "disconnected sites")],
        ),
    ],
)  # fmt: skip
def test_every_problem_is_found_where_it_stands(
    changes: dict[str, str], expected: list[tuple[int, str, str]]
) -> None:
    text = GOOD
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    found = found_in(text)
    assert [f[:2] for f in found] == [e[:2] for e in expected]
    for (_, _, message), (_, _, start) in zip(found, expected, strict=True):
        assert message.startswith(start)


def test_a_missing_accelerator_says_where_to_define_it(tmp_path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD.replace("- name: X1", "- name: X3"))
    job = {"global_batch": 8, "sequence_length": 512}
    with pytest.raises(InputError) as error:
        load_problem(file, "gpt2_355m", job)
    text = str(error.value)
    assert text.startswith(f"{file}:11:sites.0.nodes.0.accelerator: no profile X1")
    assert "define it under profiles.accelerators" in text


def test_an_accelerator_written_in_place_says_where_it_goes() -> None:
    text = GOOD.replace("{accelerator: X1,", "{accelerator: {memory: 64 GiB},")
    with pytest.raises(InputError) as error:
        validate(ClusterDoc, parse_text(text, "c.yaml"))
    assert (error.value.line, error.value.key) == (11, "sites.0.nodes.0.accelerator")
    assert "define it under profiles.accelerators" in str(error.value)


def test_nics_without_profile_or_rate_are_those_of_the_node() -> None:
    inline = """
profiles:
  nodes:
    - name: own
      accelerator: T4
      chips: 2
      fabric: pcie3_t4_node
      nics: {rate: 10 Gb/s, count: 2, affinity: [1, 0]}
"""
    text = "name: m\nsites: [{name: s, nodes: [{profile: own, nics: {NICS}}]}]" + inline

    def node(nics: str):
        source = inherit_ports(parse_text(text.replace("NICS", nics)), bundled_catalog())
        return build_machine(validate(ClusterDoc, source)).nodes[0]

    same = node("latency: 3 us")
    assert (same.nics, same.nic_rate, same.nic_latency) == (2, 1.25e9, 3e-6)
    assert same.chip_nic == (1, 0)
    one = node("count: 1")
    assert (one.nics, one.nic_rate, one.chip_nic) == (1, 1.25e9, (0, 0))
    # A profile or rate of its own is complete in itself.
    assert node("rate: 40 Gb/s").nics == 1
