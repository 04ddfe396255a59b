"""The bundled profiles, and how they are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hardware_profiles
from sim.errors import InputError
from sim.hardware.build import build_machine
from sim.hardware.catalog import Catalog, ProfileKind, bundled_catalog, bundled_directory
from sim.hardware.route import path
from sim.spec.cluster import ClusterDoc
from sim.spec.fields import Doc
from sim.spec.job import JobDoc
from sim.spec.load import parse_text, read_source, validate
from sim.spec.origins import Origin, Tag, require_sources, stated_numbers, tags
from sim.spec.profiles import AcceleratorDoc, LinkDoc, NodeDoc

PROMISED = (
    "a100x64", "h100_a100_wan", "h2_1024", "h2_1024_oversubscribed", "one_a100_40gb",
    "two_processes", "uneven_workers", "v100_t4",
)  # fmt: skip
CLUSTERS = bundled_catalog().names("clusters")
KINDS: dict[ProfileKind, type[Doc]] = {
    "accelerators": AcceleratorDoc,
    "links": LinkDoc,
    "nodes": NodeDoc,
}
PROFILES = [(kind, name) for kind in KINDS for name in bundled_catalog().names(kind)]


@pytest.mark.parametrize(("kind", "name"), PROFILES)
def test_every_number_has_a_source_and_a_confidence(kind: ProfileKind, name: str) -> None:
    file = bundled_directory() / kind / f"{name}.yaml"
    doc = validate(KINDS[kind], read_source(file))
    assert isinstance(doc, Origin)
    require_sources(doc, str(file))
    for key, tag in tags(doc).items():
        assert tag.source and tag.confidence and tag.evidence, (name, key)
        if tag.source.startswith(("recalled", "hetlab's own")):
            assert tag.evidence in ("remembered", "assumed"), (name, key)


# What the hardware table behind the profiles says nobody re-read: keys of the profiles that show
# it. A field of the table is one or more keys here: intra_bw is the fabric, nic the NICs.
NOT_READ = {
    ("accelerators", "T4"): ("memory", "memory_bandwidth", "price"),
    ("accelerators", "C500"): ("peaks.fp32",),
    ("accelerators", "Ascend-910B3"): ("memory", "memory_bandwidth", "peaks.bf16", "peaks.fp16"),
    ("nodes", "a100_80gb_hdr"): ("nics.count", "nics.profile", "host_memory"),
    ("nodes", "h100_ndr"): ("host_memory",),
    ("nodes", "g4dn_12xlarge"): ("fabric.profile", "nics.count", "pcie.rate", "host_memory"),
    ("nodes", "p3_8xlarge"): ("nics.count", "pcie.rate", "host_memory"),
    ("nodes", "h2_h20"): ("fabric.profile", "nics.count", "nics.profile", "host_memory"),
    ("nodes", "h2_ascend_910b3"): (
        "chips", "fabric.profile", "nics.count", "nics.profile", "pcie.rate", "host_memory",
    ),
}  # fmt: skip
# The table has no such number at all: whatever stands there is a guess.
NOT_KNOWN = {
    ("nodes", "h2_c500"): ("nics.count", "nics.profile", "host_memory"),
    ("nodes", "h2_bi_v100"): ("chips", "nics.count", "nics.profile", "host_memory"),
}
# Measured on another chip, or submitted by the vendor and worked out by us.
NOT_AS_PRINTED = {
    ("links", "nvlink4"): ("curve", "stand-in"),
    ("links", "roce_200g"): ("curve", "stand-in"),
    ("links", "nvlink3"): ("curve", "derived"),
    ("links", "ib_hdr_200g"): ("curve", "derived"),
}


def tags_of(kind: ProfileKind, name: str) -> dict[str, Tag]:
    doc = validate(KINDS[kind], read_source(bundled_directory() / kind / f"{name}.yaml"))
    assert isinstance(doc, Origin)
    return tags(doc)


def test_what_nobody_read_is_not_tagged_found() -> None:
    for (kind, name), keys in (NOT_READ | NOT_KNOWN).items():
        found = tags_of(kind, name)
        for key in keys:
            assert found[key].evidence != "found", (name, key)
            assert found[key].confidence != "high", (name, key)
    for (kind, name), keys in NOT_READ.items():
        assert {tags_of(kind, name)[k].evidence for k in keys} <= {"remembered", "assumed"}, name
    for (kind, name), keys in NOT_KNOWN.items():
        assert {tags_of(kind, name)[k].evidence for k in keys} <= {"assumed", "stand-in"}, name


def test_curves_say_what_they_were_measured_on() -> None:
    for (kind, name), (key, evidence) in NOT_AS_PRINTED.items():
        tag = tags_of(kind, name)[key]
        assert (tag.evidence, tag.confidence == "high") == (evidence, False), name
    for name in ("nvlink3", "ib_hdr_200g"):
        assert "FlagPerf" in tags_of("links", name)["curve"].source


def test_guessed_counts_and_curves_are_reported() -> None:
    machine = build_machine(bundled_catalog().cluster("h2_1024"))
    assert any(
        text.startswith("node h2_bi_v100: assumed") and "chips" in text and "nics.count" in text
        for text in machine.assumptions
    )
    assert any(
        text.startswith("link nvlink4: assumed") and "curve" in text
        for text in build_machine(bundled_catalog().cluster("h100_a100_wan")).assumptions
    )


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_number_of_a_cluster_has_a_source(name: str) -> None:
    doc = bundled_catalog().cluster(name)
    for link in doc.links:
        for key, number in stated_numbers(link):
            assert number.source and number.confidence and number.evidence, (link.between, key)
            if number.source.startswith("hetlab's own"):
                assert number.evidence == "assumed", (link.between, key)


def test_the_bundle_is_what_was_promised() -> None:
    catalog = bundled_catalog()
    assert set(PROMISED) <= set(CLUSTERS)
    chips = {}
    for name in PROMISED:
        machine = build_machine(catalog.cluster(name))
        chips[name] = {
            a: sum(n.chips[1] - n.chips[0] for n in machine.nodes if n.accelerator == a)
            for a in machine.accelerators
        }
    assert chips["v100_t4"] == {"V100-SXM2-16GB": 12, "T4": 4}
    assert chips["a100x64"] == {"A100-SXM4-80GB": 64}
    assert chips["h100_a100_wan"] == {"H100-SXM5-80GB": 32, "A100-SXM4-80GB": 32}
    assert chips["uneven_workers"] == {"A100-SXM4-80GB": 4}
    assert chips["one_a100_40gb"] == {"A100-SXM4-40GB": 1}
    quarters = {"H20": 256, "C500": 256, "BI-V100": 256, "Ascend-910B3": 256}
    assert chips["h2_1024"] == chips["h2_1024_oversubscribed"] == quarters


def test_stand_ins_are_said() -> None:
    catalog = bundled_catalog()
    machine = build_machine(catalog.cluster("h2_1024"))
    for profile in {node.profile for node in machine.nodes}:
        assert catalog.node(profile).stands_in_for
        assert any(f"node {profile} stands in for" in text for text in machine.assumptions)
    assert any("does not disclose" in text for text in machine.assumptions)


def test_uplinks_of_the_two_h2_bundles() -> None:
    catalog = bundled_catalog()
    for name, share in (("h2_1024", 1.0), ("h2_1024_oversubscribed", 0.25)):
        machine = build_machine(catalog.cluster(name))
        for island in ("h20", "c500", "bi_v100", "ascend_910b3"):
            nics = sum(n.nics * n.nic_rate for n in machine.nodes if n.island == island)
            up = next(link for link in machine.links if link.name == f"{island}->hall")
            assert up.rate == pytest.approx(share * nics)


def test_amp_links_are_the_fitted_ones() -> None:
    """FIDELITY's fit of the AMP trials: 0.67 GB/s between V100 nodes, 2.8 GB/s at the T4 node."""
    machine = build_machine(bundled_catalog().cluster("v100_t4"))
    assert path(machine, 0, 4).rate == pytest.approx(0.67e9)
    assert path(machine, 12, 0).rate == pytest.approx(0.67e9)
    assert path(machine, 12, 13).rate == pytest.approx(2.8e9)


def test_measured_numbers_reach_the_machine_with_their_origin() -> None:
    machine = build_machine(bundled_catalog().cluster("a100x64"))
    chip = machine.accelerators["A100-SXM4-80GB"]
    assert (chip.gemm_efficiency, chip.calibrated) == (0.869, True)
    assert chip.compute_slowdown == chip.comm_slowdown == 1.1256
    assert "ml-engineering" in chip.sources["gemm_efficiency"]
    assert "Galvatron" in chip.sources["compute_slowdown"]
    assert "[assumed, low]" in chip.sources["attention_efficiency"]
    assert "[found, high]" in chip.sources["peak_flops_per_s.bf16"]
    assert any("attention_efficiency" in text for text in machine.assumptions)


def test_unmeasured_chips_are_not_calibrated() -> None:
    machine = build_machine(bundled_catalog().cluster("h2_1024"))
    defaults = bundled_catalog().defaults()
    for chip in machine.accelerators.values():
        assert not chip.calibrated
        assert defaults.gemm_efficiency is not None
        assert chip.gemm_efficiency == defaults.gemm_efficiency.value


def test_model_configs_have_sources() -> None:
    models = bundled_directory() / "models"
    sources = read_source(models / "sources.yaml").data
    configs = {file.stem: json.loads(file.read_text()) for file in models.glob("*.json")}
    assert set(configs) == set(sources)
    assert all(entry["source"] and entry["evidence"] for entry in sources.values())
    h2 = configs["h2_100b"]
    hidden, ffn = h2["hidden_size"], h2["intermediate_size"]
    kv = h2["num_key_value_heads"] * hidden // h2["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn
    assert layer == pytest.approx(1.05696e9, rel=1e-4)  # h2.md section 3
    assert h2["num_hidden_layers"] * layer + 2 * h2["vocab_size"] * hidden == pytest.approx(
        103.0e9, rel=1e-3
    )


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_has_a_job_for_a_bundled_model(name: str) -> None:
    root = bundled_directory()
    job = validate(JobDoc, read_source(root / "jobs" / f"{name}.yaml"))
    config = json.loads((root / "models" / f"{job.name}.json").read_text())
    longest = config.get("max_position_embeddings") or config["n_positions"]
    assert job.sequence_length <= longest
    machine = build_machine(bundled_catalog().cluster(name))
    assert all(job.dtype in chip.peak_flops_per_s for chip in machine.accelerators.values())


def test_the_package_only_locates() -> None:
    assert all(hardware_profiles.folder(kind).is_dir() for kind in hardware_profiles.KINDS)
    assert hardware_profiles.folder().joinpath("defaults.yaml").is_file()


def test_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean A100-SXM4-80GB") as caught:
        bundled_catalog().accelerator("a100-sxm-80gb")
    assert "H100-SXM5-80GB" in caught.value.expected
    with pytest.raises(InputError, match=r"did you mean .*V100-SXM2-16GB"):
        bundled_catalog().accelerator("v100")
    for name in ("../accelerators/T4", "", "T4.yaml", "*"):
        with pytest.raises(InputError, match="no profile"):
            bundled_catalog().link(name)


def own_directory(tmp_path: Path, text: str, name: str = "T4") -> Catalog:
    folder = tmp_path / "accelerators"
    folder.mkdir()
    (folder / f"{name}.yaml").write_text(text)
    return Catalog([tmp_path])


def test_own_directory_comes_first(tmp_path: Path) -> None:
    text = "name: T4\nmemory: 15 GB\nmemory_bandwidth: 300 GB/s\npeaks: {fp16: 60 TFLOP/s}\n"
    catalog = own_directory(tmp_path, text)
    assert catalog.accelerator("T4").memory.value == 15e9
    assert catalog.accelerator("H20").memory.value == 96e9
    machine = build_machine(catalog.cluster("v100_t4"), catalog)
    assert machine.accelerators["T4"].peak_flops_per_s == {"fp16": 60e12}
    assert bundled_catalog().accelerator("T4").memory.value == 16e9
    with pytest.raises(InputError, match="no such directory"):
        Catalog([tmp_path / "missing"])


def test_files_are_read_once(tmp_path: Path) -> None:
    text = "name: T4\nmemory: 15 GB\nmemory_bandwidth: 300 GB/s\npeaks: {fp16: 60 TFLOP/s}\n"
    catalog = own_directory(tmp_path, text)
    first = catalog.accelerator("T4")
    (tmp_path / "accelerators" / "T4.yaml").unlink()
    assert catalog.accelerator("T4") is first


def test_a_profile_is_named_like_its_file(tmp_path: Path) -> None:
    text = "memory: 15 GB\nname: T5\nmemory_bandwidth: 300 GB/s\npeaks: {fp16: 60 TFLOP/s}\n"
    with pytest.raises(InputError, match="named like its file") as caught:
        own_directory(tmp_path, text).accelerator("T4")
    assert (caught.value.line, caught.value.key, caught.value.found) == (2, "name", "T5")


@pytest.mark.parametrize(
    ("peaks", "flag"),
    [
        ("{bf16: 1979 TFLOP/s}", ""),  # the data sheet's figure with sparsity, not marked
        ("{bf16: 989 TFLOP/s}", "sparse: true\n"),
        ("{bf16: {value: 989 TFLOP/s, sparse: true}}", ""),
    ],
)
def test_sparse_peaks_are_refused(tmp_path: Path, peaks: str, flag: str) -> None:
    text = (
        "name: H100-SXM5-80GB\nmemory: 80 GB\nmemory_bandwidth: 3350 GB/s\n"
        + f"{flag}peaks: {peaks}\n"
    )
    with pytest.raises(InputError, match="dense peaks"):
        own_directory(tmp_path, text, "H100-SXM5-80GB").accelerator("H100-SXM5-80GB")


def test_sparse_peaks_in_a_cluster_file_are_refused() -> None:
    text = """
name: mine
sites: [{name: hall, nodes: [{profile: h100_ndr}]}]
profiles:
  accelerators:
    - {name: H100-SXM5-80GB, memory: 80 GB, memory_bandwidth: 3 TB/s, peaks: {bf16: 1979 TFLOP/s}}
"""
    with pytest.raises(InputError, match="structured sparsity"):
        build_machine(validate(ClusterDoc, parse_text(text, "mine.yaml")))
