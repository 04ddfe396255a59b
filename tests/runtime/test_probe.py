"""hetlab probe: its fits recover what they are made from, its profiles plan, it stops cleanly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

from real_runtime.errors import RunError
from real_runtime.probe.fit import fit_chip, fit_wire
from real_runtime.probe.launch import measure
from real_runtime.probe.profile import check_name, documents_of, write_profiles
from real_runtime.probe.records import Facts, ProbeSettings, Record, merged
from real_runtime.probed import cluster_of
from sim.cost.collective import collective_cost
from sim.cost.compute import gemm_efficiency
from sim.errors import UsageError
from sim.hardware.catalog import Catalog
from sim.hardware.machine import Accelerator
from sim.hardware.route import path, transfer_time
from sim.problem import load_problem, problem_hash
from sim.spec.origins import missing_sources, stated_numbers

pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("run")]
FACTS = Facts(
    device="cpu", chip="", vendor="", memory=4e9, host_memory=8e9, context=2e8, torch="2.13.0",
    threads=1, cores=2,
)  # fmt: skip
TRUE = {"fp32": 120e9, "bf16": 400e9}
HALF, MEMORY, DISPATCH = 11.0, 20e9, 2e-6


def record(what: str, name: str, seconds: float, **sizes: float) -> Record:
    return Record(
        what=what, name=name, sizes=sizes, median=seconds, low=0.98 * seconds,
        high=1.02 * seconds, repeats=9,
    )  # fmt: skip


def known(noise: float = 0.0) -> list[Record]:
    """Records of a chip whose numbers are the constants above."""
    draw = np.random.default_rng(5)
    chip = Accelerator(
        name="x", memory_bytes=1, memory_bytes_per_s=MEMORY, peak_flops_per_s=TRUE,
        gemm_efficiency=1.0, gemm_half=HALF,
    )  # fmt: skip
    found = [
        record("dispatch", "add", DISPATCH),
        record("copy", "fp32", 1e8 / MEMORY, nbytes=1e8),
        record("elementwise", "norm", 5e6 / (0.4 * MEMORY), nbytes=5e6),
        record("elementwise", "adamw", 24e6 / (0.1 * MEMORY), nbytes=24e6),
        record("block", "both", 12 * 80e-6, passes=12),
        record("attention", "fp32", 1e9 / (0.3 * TRUE["fp32"]), flops=1e9),
        record("overlap", "compute", 1.0),
        record("overlap", "compute beside comm", 1.25),
        record("overlap", "comm", 1.0),
        record("overlap", "comm beside compute", 0.9),
    ]
    for dtype, element in (("fp32", 4), ("bf16", 2)):
        for m in (16, 64, 512):
            for n, k in ((128, 128), (512, 256), (1024, 1024)):
                for way in ("forward", "weight"):
                    held = 8 if way == "weight" else element
                    moved = (m * k + m * n) * element + n * k * held
                    rate = TRUE[dtype] * gemm_efficiency(chip, m, n, k)
                    t = DISPATCH + max(2.0 * m * n * k / rate, moved / MEMORY)
                    t *= float(np.exp(noise * draw.normal()))
                    found.append(
                        record("gemm", f"{dtype} {way}", t, m=m, n=n, k=k, element=element)
                    )
    latency, rate = 15e-6, 3e9
    found += [
        record("ping", "", latency + s / rate + 2e-6 * (s >= 4096), nbytes=s)
        for s in (4, 64, 4096, 65536, 1 << 20, 1 << 24)
    ]
    return found


def test_the_fit_recovers_the_numbers_its_times_are_made_from() -> None:
    chip = fit_chip(known())
    for dtype, rate in TRUE.items():
        assert chip.peaks[dtype].value * chip.gemm_efficiency.value == pytest.approx(rate, rel=1e-3)
    assert chip.gemm_half.value == pytest.approx(HALF, rel=1e-2)
    assert chip.memory_bandwidth.value == pytest.approx(MEMORY)
    assert chip.memory_efficiency.value == pytest.approx(0.4)
    assert chip.optimizer_efficiency.value == pytest.approx(0.1)
    assert chip.kernel_overhead.value == pytest.approx(80e-6)
    peak = chip.peaks["fp32"].value
    assert chip.attention_efficiency.value * peak == pytest.approx(0.3 * TRUE["fp32"])
    assert chip.compute_slowdown is not None and chip.comm_slowdown is not None
    assert chip.compute_slowdown.value == pytest.approx(1.25)
    assert chip.comm_slowdown.value == 1.0  # nothing gets faster beside compute


def test_noise_of_a_tenth_moves_the_fit_by_less() -> None:
    chip = fit_chip(known(noise=0.1))
    for dtype, rate in TRUE.items():
        assert chip.peaks[dtype].value * chip.gemm_efficiency.value == pytest.approx(rate, rel=0.1)
    assert chip.gemm_half.value == pytest.approx(HALF, rel=0.25)


def documents() -> Any:
    records = known()
    return documents_of(
        "probed", FACTS, fit_chip(records), fit_wire(records, 2), records, ProbeSettings(),
        "2026-01-31",
    )  # fmt: skip


def test_the_profile_gives_back_every_measured_transfer() -> None:
    problem = load_problem(documents().cluster, "llama_tiny", "two_processes")
    route = path(problem.machine, 0, 1)
    for r in known():
        if r.what == "ping":
            assert transfer_time(route, r.sizes["nbytes"]) == pytest.approx(r.median, rel=0.05)
        if r.what == "ping" and r.sizes["nbytes"] >= 4096:
            assert transfer_time(route, r.sizes["nbytes"]) == pytest.approx(r.median, rel=1e-9)


def test_the_profile_gives_back_transfers_and_each_collective() -> None:
    """A round of an all-reduce of two ranks moves half; here twice as slow as a transfer."""
    pings = [r for r in known() if r.what == "ping"]
    link = {r.sizes["nbytes"]: r.median for r in pings}
    sums = [
        record("collective", name, rounds * 2 * t, nbytes=2 * s)
        for name, rounds in (("all_reduce", 2), ("all_gather", 0.25))
        for s, t in link.items()
    ]
    records = [r for r in known() if r.what != "ping"] + pings + sums
    d = documents_of(
        "probed", FACTS, fit_chip(records), fit_wire(records, 2), records, ProbeSettings(),
        "2026-01-31",
    )  # fmt: skip
    machine = load_problem(d.cluster, "llama_tiny", "two_processes").machine
    for r in sums:
        got = collective_cost(machine, r.name, (0, 1), r.sizes["nbytes"]).seconds
        if r.sizes["nbytes"] >= 2 * 4096:
            assert got == pytest.approx(r.median, rel=1e-6)
    for size in (4096, 1 << 20):
        assert transfer_time(path(machine, 0, 1), size) == pytest.approx(link[size], rel=1e-6)


def test_files_are_a_catalogue_and_say_where_each_number_comes_from(tmp_path: Path) -> None:
    files = write_profiles(tmp_path, documents())
    assert files[-1] == tmp_path / "clusters" / "probed.yaml"
    catalog = Catalog([tmp_path])
    for doc in (
        catalog.accelerator("probed-cpu"), catalog.link("probed-link"), catalog.node("probed-node"),
    ):  # fmt: skip
        assert missing_sources(doc) == ()
        for key, number in stated_numbers(doc):
            assert number.source.startswith(
                "measured by hetlab probe on 2026-01-31, torch 2.13.0, threads 1"
            ), key
    rate = dict(stated_numbers(catalog.link("probed-link")))["rate"]
    assert "spread 4.0% of 9" in rate.source
    alone = load_problem(str(files[-1]), "llama_tiny", "two_processes")
    assert alone.machine.accelerators["probed-cpu"].calibrated
    assert not alone.machine.accelerators["probed-cpu"].async_compute
    assert not list(tmp_path.rglob("*.part"))


def test_copies_to_a_device_give_the_slower_direction_and_what_pageable_memory_keeps() -> None:
    copies = {
        "to device, pinned": 20e9, "to host, pinned": 16e9, "to device, pageable": 8e9,
        "to host, pageable": 4e9,
    }  # fmt: skip
    records = known() + [record("host_copy", k, 1e8 / r, nbytes=1e8) for k, r in copies.items()]
    d = documents_of(
        "probed", FACTS, fit_chip(records), fit_wire(records, 2), records, ProbeSettings(),
        "2026-01-31",
    )  # fmt: skip
    assert d.node["pcie"]["pageable"]["value"] == pytest.approx(0.25)
    node = load_problem(d.cluster, "llama_tiny", "two_processes").machine.nodes[0]
    assert node.pcie_rate == pytest.approx(16e9)


def test_one_rank_alone_has_no_link() -> None:
    records = [r for r in known() if r.what not in ("ping", "overlap")]
    chip = fit_chip(records)
    assert chip.compute_slowdown is None and chip.comm_slowdown is None
    settings = ProbeSettings(ranks=1)
    d = documents_of("alone", FACTS, chip, None, records, settings, "2026-01-31")
    machine = load_problem(d.cluster, "llama_tiny", "two_processes").machine
    assert machine.num_chips == 1 and d.link == {}
    assert machine.accelerators["alone-cpu"].compute_slowdown == 1.0


@pytest.mark.gpu
def test_a_device_is_copied_to_and_from() -> None:
    import torch

    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    from real_runtime.devices import local_device
    from real_runtime.probe.kernels import Meter
    from real_runtime.probe.wires import host_copies

    found = list(host_copies(Meter(local_device(0), 7, 1e-3, lambda: None)))
    assert len(found) == 4 and all(r.median > 0 for r in found)


def test_ranks_are_merged_by_their_medians() -> None:
    one, two = record("copy", "fp32", 1.0, nbytes=8), record("copy", "fp32", 3.0, nbytes=8)
    ping = record("ping", "", 5.0, nbytes=4)
    assert [r.median for r in merged([[one, ping], [two]])] == [2.0, 5.0]


def test_too_few_measurements_and_odd_names_are_refused() -> None:
    with pytest.raises(RunError, match="no copy"):
        fit_chip([])
    with pytest.raises(RunError, match="fewer than two sizes"):
        fit_wire(known()[:3], 2)
    with pytest.raises(UsageError, match="letters, digits"):
        check_name("../up")


def test_a_rank_that_fails_is_named() -> None:
    settings = ProbeSettings(dtypes=("fp99",), messages=(4,), tokens=(), elements=(), repeats=7)
    with pytest.raises(RunError, match=r"rank \d of the probe failed: .*fp99"):
        measure(settings, lambda _: None)


def hetlab(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from sim.cli import main; main()", *args]
    env = os.environ | {"XDG_STATE_HOME": str(cwd / "state")}  # other tests run other plans
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=150, env=env)


def test_a_probed_machine_is_planned_for(tmp_path: Path) -> None:
    done = hetlab("probe", "--quick", "--threads", "1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    kinds = {r["what"] for r in said["records"]}
    assert kinds == {
        "ping", "collective", "overlap", "dispatch", "block", "copy", "elementwise", "attention",
        "gemm", "layer",
    }  # fmt: skip
    assert all(r["median"] > 0 and r["repeats"] >= 7 for r in said["records"])
    assert all(r["low"] <= r["median"] <= r["high"] for r in said["records"] if r["what"] == "ping")
    assert {c["kind"] for c in said["collectives"]} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    }
    cluster = tmp_path / "profiles" / "clusters" / "probed.yaml"
    assert said["files"][-1] == "profiles/clusters/probed.yaml" and cluster.is_file()
    record = json.loads((tmp_path / "state" / "hetlab" / "probed.json").read_text())
    (seen,) = record["hosts"][socket.gethostname()]
    assert seen["file"] == str(cluster) and seen["name"] == "probed"
    assert seen["cluster_hash"] == problem_hash(cluster_of(cluster))
    planned = hetlab(
        "plan", str(cluster), "llama_tiny", "two_processes", "--pin", "pp=2", "--json", cwd=tmp_path
    )
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["metrics"]["step_time_s"] > 0


def test_interrupting_leaves_nothing(tmp_path: Path) -> None:
    args = [sys.executable, "-c", "from sim.cli import main; main()", "--debug", "probe"]
    with subprocess.Popen(args, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as probe:
        assert probe.stderr is not None
        for line in probe.stderr:
            if "ping" in line:
                probe.send_signal(signal.SIGINT)
                break
        rest = probe.stderr.read()
        assert probe.wait(timeout=60) == 130, rest
    assert "nothing was written" in rest
    assert not (tmp_path / "profiles").exists()
