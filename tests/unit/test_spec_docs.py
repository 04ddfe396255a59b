from __future__ import annotations

import pytest

from sim.errors import InputError
from sim.spec.cluster import ClusterDoc
from sim.spec.job import Job, JobDoc, job_from_doc
from sim.spec.load import parse_text, validate
from sim.spec.origins import missing_sources, require_sources, stated_numbers, tags
from sim.spec.profiles import AcceleratorDoc, LinkDoc, NodeDoc

CHIP = """\
name: chip
source: a data sheet
confidence: high
evidence: found
memory: 16 GB
memory_bandwidth: {value: 900 GB/s, source: a test, confidence: medium, evidence: derived}
peaks: {fp16: 125 TFLOP/s, fp32: 15.7 TFLOP/s}
"""
CLUSTER = """\
name: c
sites:
  - name: here
    nodes:
      - {profile: box, count: 2}
      - {accelerator: chip, chips: 4, fabric: {rate: 25 GB/s}, nics: {rate: 10 Gb/s}, island: b}
  - name: there
    nodes: [{profile: box}]
links:
  - {between: [here, there], rate: 10 Gb/s, latency: 30 ms, price: 0.02 USD/GB}
accelerators: {chip: {memory: 24 GiB}}
"""


def refused(kind, text: str) -> InputError:
    with pytest.raises(InputError) as error:
        validate(kind, parse_text(text, "f.yaml"))
    return error.value


def accelerator(text: str = CHIP) -> AcceleratorDoc:
    return validate(AcceleratorDoc, parse_text(text, "chip.yaml"))


def test_numbers_carry_or_inherit_their_origin():
    doc = accelerator()
    assert doc.peaks["fp16"].value == 125e12
    assert (doc.memory.source, doc.memory_bandwidth.source) == ("", "a test")
    assert {k for k, _ in stated_numbers(doc)} == {
        "memory",
        "memory_bandwidth",
        "peaks.fp16",
        "peaks.fp32",
    }
    require_sources(doc)


def test_bundled_profiles_must_state_sources():
    bare = accelerator(CHIP.replace("source: a data sheet\n", ""))
    assert missing_sources(bare) == ("memory", "peaks.fp16", "peaks.fp32")
    with pytest.raises(InputError) as error:
        require_sources(bare, "chip.yaml")
    assert (error.value.file, error.value.key) == ("chip.yaml", "memory")
    unsure = accelerator(CHIP.replace("confidence: high\n", ""))
    assert missing_sources(unsure) == ("memory", "peaks.fp16", "peaks.fp32")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("name: chip", "name: chip\nsparse: true", ""),
        ("fp16: 125 TFLOP/s", "fp16: {value: 250 TFLOP/s, sparse: true}", "peaks.fp16"),
    ],
)
def test_sparse_peaks_are_refused(old, new, key):
    error = refused(AcceleratorDoc, CHIP.replace(old, new))
    assert error.message == "peaks are dense peaks"
    assert error.key == key


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("gemm_efficiency: 1.2", "a share above 1"),
        ("compute_slowdown: 0.9", "a slowdown below 1"),
        ("peaks: {fp17: 1 TFLOP/s}", "not one of the choices"),
        ("peaks: {}", "too few entries"),
    ],
)
def test_impossible_accelerators(line, text):
    base = CHIP if not line.startswith("peaks") else CHIP[: CHIP.index("peaks")]
    assert text in refused(AcceleratorDoc, base + line).message


def test_link_curves_grow():
    points = "[{size: 1 MiB, fraction: 0.9}, {size: 1 KiB, fraction: 0.5}]"
    text = f"name: l\nrate: 10 GB/s\ncurve: {points}"
    assert "sizes do not grow" in refused(LinkDoc, text).message
    doc = validate(LinkDoc, parse_text("name: l\nrate: 200 Gb/s\nduplex: half\nkind: wan"))
    assert (doc.rate.value, doc.duplex, doc.kind) == (25e9, "half", "wan")


def test_nodes_name_existing_nics():
    text = "name: n\naccelerator: a\nchips: 2\nnics: {profile: x, count: 2, affinity: [0, 2]}"
    error = refused(NodeDoc, text)
    assert (error.key, error.expected) == ("nics", "indices from 0 to 1")
    assert (
        "neither a profile nor a rate" in refused(NodeDoc, text.replace("profile: x, ", "")).message
    )


def test_a_cluster_reads_with_short_and_long_forms():
    doc = validate(ClusterDoc, parse_text(CLUSTER))
    inline = doc.sites[0].nodes[1]
    assert (inline.chips, inline.fabric.rate.value, inline.nics.rate.value) == (4, 25e9, 1.25e9)
    assert doc.links[0].price.value == 2e-11
    assert doc.accelerators["chip"].memory.value == 24 * 2**30
    named = validate(
        ClusterDoc, parse_text(CLUSTER.replace("fabric: {rate: 25 GB/s}", "fabric: nv"))
    )
    assert named.sites[0].nodes[1].fabric.profile == "nv"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("between: [here, there]", "between: [here, her]", "unknown place her"),
        ("between: [here, there]", "between: [here, here]", "from a place to itself"),
        ("name: there", "name: here", "two sites of one name"),
        ("{profile: box, count: 2}", "{count: 2}", "neither a node profile nor an inline node"),
        ("rate: 10 Gb/s, latency", "latency", "neither a profile nor a rate"),
        ("count: 2", "count: 0", "greater than or equal to 1"),
    ],
)
def test_impossible_clusters(old, new, text):
    assert text in refused(ClusterDoc, CLUSTER.replace(old, new, 1)).message


def test_documents_written_and_read_again_are_equal():
    for kind, text in ((ClusterDoc, CLUSTER), (AcceleratorDoc, CHIP)):
        doc = validate(kind, parse_text(text))
        again = kind.model_validate(doc.model_dump(mode="json", exclude_defaults=True))
        assert again == doc


def job(**changes) -> Job:
    data = {"global_batch": 512, "sequence_length": 4096} | changes
    return job_from_doc(JobDoc.model_validate(data))


@pytest.mark.parametrize(
    ("changes", "param", "gradient", "optimizer"),
    [
        ({}, 2, 4, 12),  # bf16 weights, fp32 gradients, two moments and a master copy
        ({"dtype": "fp32"}, 4, 4, 8),
        ({"dtype": "tf32"}, 4, 4, 8),
        ({"dtype": "fp8"}, 2, 4, 12),
        ({"gradient_dtype": "bf16"}, 2, 2, 12),
        ({"optimizer": "sgd"}, 2, 4, 4),
        ({"optimizer": {"kind": "sgd", "momentum": True}}, 2, 4, 8),
        ({"optimizer": {"kind": "adam", "state_dtype": "bf16", "master_weights": False}}, 2, 4, 4),
    ],
)
def test_job_bytes_per_parameter(changes, param, gradient, optimizer):
    resolved = job(**changes)
    assert (resolved.param_bytes, resolved.gradient_bytes, resolved.optimizer_bytes) == (
        param,
        gradient,
        optimizer,
    )


def test_job_defaults_pins_and_limits():
    resolved = job(microbatch=2, pins={"tp": 4, "zero": 1}, limits={"max_step_time": "2 s"})
    assert resolved.tokens == 512 * 4096
    assert (resolved.pins.microbatch, resolved.pins.tp, resolved.pins.pp) == (2, 4, None)
    assert resolved.limits.max_memory_fraction == 0.92
    assert (resolved.limits.max_step_time_s, resolved.limits.allow_inexact) == (2.0, False)
    assert job(dtype="fp8").activation_bytes == 2


@pytest.mark.parametrize(
    ("line", "text", "expected"),
    [
        ("microbatch: 3", "microbatch 3 does not divide global_batch 512", "2 or 4"),
        ("dtype: bf17", "not one of the choices", "'bf16'"),
        ("optimizer: {kind: adam, momentum: true}", "adam has its own moments", "sgd"),
        ("limits: {max_memory_fraction: 1.5}", "less than or equal to 1", ""),
        ("global_batch: 0", "duplicate key", ""),
        ("pins: {zero: 4}", "not one of the choices", "0, 1, 2 or 3"),
    ],
)
def test_impossible_jobs(line, text, expected):
    error = refused(JobDoc, f"global_batch: 512\nsequence_length: 4096\n{line}\n")
    assert text in error.message
    assert expected in error.expected


def test_counts_and_curves_say_where_they_come_from() -> None:
    text = """
name: n
source: a page
confidence: high
evidence: found
accelerator: x
chips: 16
fabric: f
nics: {profile: c, count: 8}
origins: {nics.count: {source: a guess, evidence: assumed}, fabric.profile: {confidence: low}}
"""
    found = tags(validate(NodeDoc, parse_text(text, "n.yaml")))
    said = {k: (t.source, t.confidence, t.evidence) for k, t in found.items()}
    assert said == {
        "chips": ("a page", "high", "found"),
        "fabric.profile": ("a page", "low", "found"),
        "nics.profile": ("a page", "high", "found"),
        "nics.count": ("a guess", "high", "assumed"),
    }
    wrong = text.replace("nics.count:", "nics.number:")
    with pytest.raises(InputError, match=r"origins names nics\.number") as caught:
        validate(NodeDoc, parse_text(wrong, "n.yaml"))
    assert "nics.count" in caught.value.expected
