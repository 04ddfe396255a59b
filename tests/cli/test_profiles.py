"""``hetlab profiles``: what there is, where each number comes from, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sim.errors import InputError
from sim.hardware.build import build_machine
from sim.hardware.catalog import Catalog, bundled_catalog
from sim.hardware.listing import numbers_of, profile
from sim.hardware.plausible import implausible
from sim.root_command import build_app
from sim.spec.load import Source, parse_text, read_source, validate
from sim.spec.profiles import AcceleratorDoc, LinkDoc, NodeDoc, ProcessorDoc

SOURCES = "source: a data sheet\nconfidence: high\nevidence: found\n"


APP = build_app()


def hetlab(*args: str) -> Result:
    return CliRunner().invoke(APP, ["profiles", *args])


def listed(*args: str) -> dict[str, dict[str, Any]]:
    done = hetlab("list", *args, "--json")
    assert done.exit_code == 0, done.output
    return {row["name"]: row for row in json.loads(done.stdout)["profiles"]}


def test_a_list_is_filtered() -> None:
    rows = listed("accelerators", "--vendor", "google", "--min-memory", "90 GB")
    assert set(rows) == {"TPU-v5p", "TPU-v7x"}
    assert rows["TPU-v5p"]["facts"]["memory"] == 95e9
    assert rows["TPU-v5p"]["facts"]["peak"] == 459e12
    assert set(listed("node", "--accelerator", "mi300x")) == {"mi300x_8"}
    assert set(listed("links", "--match", "ib_")) == {
        "ib_edr_100g", "ib_hdr_200g", "ib_ndr_400g", "ib_xdr_800g"
    }  # fmt: skip
    certain = listed("accelerators", "--confidence", "high")
    assert "H100-SXM5-80GB" in certain and "Ascend-910C" not in certain


def test_models_are_listed_with_their_parameters() -> None:
    rows = listed("models")
    assert len(rows) >= 47 + 6
    assert rows["Llama-2-7B"]["facts"]["params"] == 6738415616
    assert rows["llama3_8b"]["facts"]["family"] == "llama"
    assert rows["Nemotron4-340B"]["evidence"] == ["remembered"]
    assert "DeepSeek-V3" in hetlab("list", "models", "--match", "deepseek").stdout


def test_a_list_is_readable() -> None:
    done = hetlab("list", "accelerators", "--match", "RTX")
    assert done.exit_code == 0
    head, first = done.stdout.splitlines()[1:3]
    assert head.split() == ["name", "vendor", "GB", "GB/s", "TFLOP/s", "in", "W", "USD/h",
                            "confidence"]  # fmt: skip
    assert first.split()[:5] == ["RTX-2080-Ti", "NVIDIA", "11", "616", "53.8"]
    assert "no such profile" in hetlab("list", "--match", "nothing-like-it").stdout
    assert "stands in for" in hetlab("list", "nodes", "--match", "h2_").stdout


def test_show_gives_every_number_with_its_source() -> None:
    shown = json.loads(hetlab("show", "T4", "--json").stdout)
    numbers = {row["key"]: row for row in shown["numbers"]}
    assert numbers["memory_bandwidth"]["value"] == 320e9
    assert numbers["memory_bandwidth"]["evidence"] == "remembered"
    assert numbers["peaks.fp16"]["text"] == "65 TFLOP/s"
    assert "pytorch-lightning" in numbers["peaks.fp16"]["source"]
    assert {"memory", "power", "price"} <= set(numbers)
    text = hetlab("show", "T4").stdout
    assert "[1]" in text and "recalled data sheet" in text and "no bf16" in text


def test_show_of_curves_counts_and_clusters() -> None:
    numbers = {
        row["key"]: row for row in json.loads(hetlab("show", "nvlink4", "--json").stdout)["numbers"]
    }
    curve = numbers["collectives.all_reduce.curve"]
    assert len(curve["value"]) == 16 and curve["text"].startswith("4 KiB 0.0546 ... 16 points")
    node = json.loads(hetlab("show", "p5_48xlarge", "--json").stdout)["numbers"]
    assert ("nics.count", 32) in {(r["key"], r["value"]) for r in node if r["key"] == "nics.count"}
    cluster = json.loads(hetlab("show", "v100_t4", "--json").stdout)
    assert cluster["num_chips"] == 16
    assert "12 V100" not in hetlab("show", "v100_t4").stdout  # nodes, not prose
    assert "3 x p3_8xlarge" in hetlab("show", "v100_t4").stdout


def test_every_number_of_the_bundle_can_be_shown() -> None:
    catalog = bundled_catalog()
    for kind in ("accelerators", "links", "hosts", "nodes"):
        for name in catalog.names(kind):
            rows = numbers_of(profile(kind, name, catalog))
            assert rows and all(r.text and r.source and r.confidence for r in rows), name


def test_an_unknown_name_says_what_is_near() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from sim.cli import main; main()", "profiles", "show", "h100"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 4
    assert "H100-SXM5-80GB" in done.stderr and "Traceback" not in done.stderr
    assert hetlab("list", "chips").exit_code != 0


def test_everything_bundled_is_sound() -> None:
    done = hetlab("check", "--json")
    assert done.exit_code == 0, done.output
    files = json.loads(done.stdout)["files"]
    assert len(files) >= 320 and not [f for f in files if f["error"]]


CHIP = {
    "memory": "80 GB", "memory_bandwidth": "3 TB/s", "peaks": "{bf16: 900 TFLOP/s}",
}  # fmt: skip


def chip(name: str = "Mine", sources: str = SOURCES, **changes: str) -> str:
    lines = [f"{k}: {v}" for k, v in (CHIP | changes).items()]
    return f"name: {name}\n{sources}" + "\n".join(lines) + "\n"


def link(name: str, sources: str = SOURCES, **numbers: str) -> str:
    return f"name: {name}\n{sources}" + "".join(f"{k}: {v}\n" for k, v in numbers.items())


WRONG = [
    (chip(sources=""), "memory", "without source"),
    (chip(name="H100", peaks="{bf16: 1979 TFLOP/s}"), "peaks.bf16", "structured sparsity"),
    (chip(peaks="{bf16: 989 TFLOP/s, fp8: 3958 TFLOP/s}"), "peaks.fp8", "structured sparsity"),
    (chip(peaks="{bf16: {value: 1979 TFLOP/s, sparse: true}}"), "peaks.bf16", "dense peaks"),
    (chip(peaks="{tf32: 156 TFLOP/s, bf16: 78 TFLOP/s}"), "peaks.bf16", "slower than the wider"),
    (chip(memory="-80 GB"), "memory", "negative"),
    (chip(memory="80 TB"), "memory", "impossible value"),
    (chip(memory_bandwidth="3 GB/s"), "memory_bandwidth", "do not belong together"),
    (chip(memory_bandwidth="3000 TB/s"), "memory_bandwidth", "impossible value"),
    (chip(peaks="{bf16: 900 GFLOP}"), "peaks.bf16", "GFLOP"),
    (chip(power="70 kW"), "power", "impossible value"),
    (chip(price="9000 USD/h"), "price", "impossible value"),
    (
        chip(sources="source: recalled data sheet\nconfidence: low\nevidence: found\n"),
        "memory",
        "called found",
    ),
    (
        chip(sources="source: recalled data sheet\nconfidence: high\nevidence: remembered\n"),
        "memory",
        "high confidence",
    ),
    (link("pcie4_x16_mine", kind="pcie", rate="63 GB/s"), "rate", "its class"),
    (link("nvlink3", kind="fabric", rate="600 GB/s"), "rate", "per direction"),
    (link("ib_200g", kind="nic", rate="200 GB/s"), "rate", "200 Gb/s"),
    (link("mine", kind="nic", rate="900 GB/s"), "rate", "impossible value"),
    (link("mine", kind="nic", rate="25 GB/s", latency="2 s"), "latency", "impossible value"),
    (link("mine", kind="wan", rate="1 Gb/s", flow_cap="2 Gb/s"), "flow_cap", "one flow"),
    (link("mine", kind="wan", rate="1 Gb/s", price="20 USD/GB"), "price", "impossible value"),
    (
        link("mine", rate="25 GB/s",
             curve="[{size: 1 MiB, fraction: 0.1}, {size: 2 MiB, fraction: 0.9}]"),
        "curve",
        "takes less time",
    ),
    (link("mine", accelerator="T5", chips="1"), "accelerator", "no profile T5"),
    (link("mine", accelerator="T4", chips="2", fabric="nvlink9"), "fabric.profile", "no profile"),
    (
        link("mine", accelerator="T4", chips="1",
             nics="{profile: ib_hdr_200g, nonaffine_rate: 30 GB/s}"),
        "nics.nonaffine_rate",
        "more than the NIC",
    ),
    (link("mine", cores="64", memory_bandwidth="20 TB/s", flops="4 TFLOP/s"),
     "memory_bandwidth", "impossible value"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "key", "message"), WRONG, ids=lambda v: v[:24].strip())
def test_check_refuses(tmp_path: Path, text: str, key: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    done = hetlab("check", str(file), "--json")
    assert done.exit_code == 4
    (found,) = json.loads(done.stdout)["files"]
    problems = {p["key"]: p for p in found["problems"]}
    assert key in problems, problems
    assert message in problems[key]["text"]
    assert problems[key]["line"] >= 1 and problems[key]["file"] == str(file)


def test_a_folder_of_ones_own_is_checked_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "pcie4_x16.yaml").write_text(
        link("pcie4_x16", kind="pcie", rate="64 GB/s")
    )
    done = hetlab("check", "pcie4_x16", "--profiles", str(tmp_path), "--json")
    assert done.exit_code == 4 and "its class" in done.stdout
    assert hetlab("check", "pcie4_x16").exit_code == 0


def test_plain_check_asks_no_source_of_ones_own_profile(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(chip(sources=""))
    done = CliRunner().invoke(APP, ["check", str(file)])
    assert done.exit_code == 0, done.output
    file.write_text(chip(sources="", peaks="{bf16: 989 TFLOP/s, fp8: 3958 TFLOP/s}"))
    assert CliRunner().invoke(APP, ["check", str(file)]).exit_code == 4


def test_sound_profiles_have_no_problems() -> None:
    catalog = Catalog()
    kinds = {AcceleratorDoc: chip(), LinkDoc: link("mine", rate="25 GB/s")}
    kinds |= {
        NodeDoc: link("mine", accelerator="T4", chips="2", fabric="pcie3_x16"),
        ProcessorDoc: link("p", cores="8", memory_bandwidth="50 GB/s", flops="1 TFLOP/s"),
    }
    for kind, text in kinds.items():
        assert implausible(validate(kind, parse_text(text)), catalog) == []


def test_a_cluster_reads_only_the_profiles_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hundred files lie there; planning on one cluster must not parse them."""
    read: list[str] = []

    def counted(path: str | Path) -> Source:
        read.append(Path(path).name)
        return read_source(path)

    monkeypatch.setattr("sim.hardware.catalog.read_source", counted)
    catalog = Catalog()
    build_machine(catalog.cluster("a100x64"), catalog)
    assert sorted(read) == [
        "A100-SXM4-80GB.yaml", "a100_80gb_hdr.yaml", "a100x64.yaml", "defaults.yaml",
        "ib_hdr_200g.yaml", "nvlink3.yaml",
    ]  # fmt: skip


def test_a_long_list_of_names_is_cut() -> None:
    with pytest.raises(InputError) as error:
        Catalog().accelerator("H1000")
    assert "hetlab profiles list accelerators" in error.value.expected
    assert "H100-SXM5-80GB" in error.value.expected and len(error.value.expected) < 400
