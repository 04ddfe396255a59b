"""hetlab calibrate: spans of a machine with distorted numbers give the distortion back."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import plans  # noqa: E402
import recorded  # noqa: E402

import real_runtime.calibrate  # noqa: E402
from real_runtime.calibrate import Calibration, calibrate  # noqa: E402
from real_runtime.calibrate_document import merged, scaled, scales  # noqa: E402
from real_runtime.calibrate_table import print_calibration  # noqa: E402
from real_runtime.compare import compare  # noqa: E402
from real_runtime.compare_run import moved, read_run  # noqa: E402
from real_runtime.measure_cli import _calibrate  # noqa: E402
from sim.errors import InputError  # noqa: E402
from sim.hardware.build import build_machine  # noqa: E402
from sim.hardware.catalog import bundled_catalog  # noqa: E402
from sim.plan.io import save_plan  # noqa: E402
from sim.plan.lower import lower  # noqa: E402
from sim.plan.plan import Plan  # noqa: E402
from sim.problem import load_problem  # noqa: E402
from sim.spec.cluster import ClusterDoc  # noqa: E402
from sim.spec.load import Source, validate  # noqa: E402

PROBLEM = recorded.problem_of(recorded.machine())
CHIP = {
    "gemm_efficiency": 0.75, "attention_efficiency": 1.5, "memory_efficiency": 0.75,
    "kernel_overhead": 1.4,
}  # fmt: skip
LINK = {"rate": 0.6, "latency": 2.5}


def uneven() -> Plan:
    pipeline = {"cuts": (0, 3, 10), "split_backward": True}
    return lower(PROBLEM, plans.draft_of([[1], [1]], (4,), microbatch=4, **pipeline))


def replicas() -> Plan:
    return lower(PROBLEM, plans.draft_of([[1, 1]], (2, 2), microbatch=4))


def distorted() -> Any:
    chip: dict[str, Any] = {
        k: recorded.CHIP[k] * f for k, f in CHIP.items() if k != "kernel_overhead"
    }
    chip["kernel_overhead"] = "140 us"
    return recorded.machine({"rate": "0.6 GB/s", "latency": "50 us"}, **chip)


def calibrated(tmp_path: Path, noise: float, *some: Plan) -> Calibration:
    slow = recorded.problem_of(distorted())
    runs = [
        (p, read_run(recorded.record(tmp_path / p.hash, p, slow, noise=noise), p)) for p in some
    ]
    return calibrate(runs, PROBLEM.documents["cluster"], "2026-01-31")


def test_a_distortion_comes_back(tmp_path: Path) -> None:
    found = calibrated(tmp_path, 0.0, uneven())
    factors = {c.name: c.factor for c in found.changes}
    for key, factor in CHIP.items():
        assert factors[f"CPU {key}"] == pytest.approx(factor, rel=0.01), key
    for key, factor in LINK.items():
        assert factors[f"nodes 0 fabric {key}"] == pytest.approx(factor, rel=0.01), key
    assert all(c.decided for c in found.changes)
    assert found.error_before > 0.2 and found.error_after < 1e-3
    ((measured, before, after),) = found.step_times_s
    assert before < 0.8 * measured and after == pytest.approx(measured, rel=1e-3)


def test_noise_of_a_twentieth_leaves_ops_as_close_and_errors_that_say_so(tmp_path: Path) -> None:
    found = calibrated(tmp_path, 0.05, uneven(), replicas())
    assert found.error_before > 0.2 and found.error_after < 0.05
    for c in (c for c in found.changes if c.decided):
        true = (CHIP | LINK)[c.name.split()[-1]]
        assert abs(c.factor / true - 1) < max(0.05, 3 * c.error), c
    well = next(c for c in found.changes if c.name == "CPU gemm_efficiency")
    assert well.factor == pytest.approx(0.75, rel=0.05)


def test_the_corrected_cluster_predicts_a_plan_it_never_saw(tmp_path: Path) -> None:
    found = calibrated(tmp_path, 0.0, uneven())
    other = replicas()
    slow = recorded.problem_of(distorted())
    run = read_run(recorded.record(tmp_path / "other", other, slow), other)
    before = compare(other, PROBLEM, run)
    plan, problem = moved(other, found.cluster)
    after = compare(plan, problem, run, other.hash)

    def error(c: Any) -> float:
        return abs(c.predicted_step_time_s / c.measured_step_time_s - 1)

    assert error(before) > 0.2 and error(after) < 0.01


@pytest.mark.parametrize("cluster", ["v100_t4", "desk_three_cards"])
def test_bundled_chips_are_calibrated(tmp_path: Path, cluster: str) -> None:
    """Their peaks stay: the catalogue refuses others, also while factors are tried."""
    problem = load_problem(cluster, "llama_tiny", "two_processes")
    plan = lower(problem, plans.draft_of([[1], [1]], (4,), microbatch=4, cuts=(0, 5, 10)))
    run = read_run(recorded.record(tmp_path / "same", plan, problem), plan)
    same = calibrate([(plan, run)], problem.documents["cluster"], "2026-01-31")
    decided = {c.name: c.factor for c in same.changes if c.decided}
    assert len(decided) == 6 and all(f == pytest.approx(1.0, abs=1e-6) for f in decided.values())
    document = merged(problem.documents["cluster"])
    gemm = next(s for s in scales(document) if s.name in decided and s.key == "gemm_efficiency")
    slow = load_problem(scaled(document, [gemm], [0.7], [""]), "llama_tiny", "two_processes")
    run = read_run(recorded.record(tmp_path / "slow", plan, slow), plan)
    found = calibrate([(plan, run)], problem.documents["cluster"], "2026-01-31")
    for c in found.changes:
        assert c.factor == pytest.approx(0.7 if c.name == gemm.name else 1.0, rel=0.01), c
    names = [chip["name"] for chip in document["profiles"]["accelerators"]]
    peaks = [load_problem(x, "llama_tiny", "two_processes").machine.accelerators
             for x in (document, found.cluster)]  # fmt: skip
    for name in names:
        assert peaks[0][name].peak_flops_per_s == peaks[1][name].peak_flops_per_s


@pytest.mark.parametrize("cluster", bundled_catalog().names("clusters"))
def test_largest_and_smallest_factors_give_documents_that_may_be(cluster: str) -> None:
    document = merged(load_problem(cluster, "llama_tiny", "two_processes").documents["cluster"])
    every = scales(document)
    for factor in (100.0, 0.01):
        factors = [min(factor, s.largest) for s in every]
        found = scaled(document, every, factors, [""] * len(every))
        assert build_machine(validate(ClusterDoc, Source(found, "scaled"))).num_chips


def test_a_chip_faster_than_its_peak_stops_there_and_says_so(tmp_path: Path) -> None:
    problem = load_problem("v100_t4", "llama_tiny", "two_processes")
    plan = lower(problem, plans.draft_of([[1], [1]], (4,), microbatch=4, cuts=(0, 5, 10)))
    document = merged(problem.documents["cluster"])
    chip = next(c for c in document["profiles"]["accelerators"] if c["name"].startswith("V100"))
    chip["gemm_efficiency"] = 0.99
    chip["peaks"] |= {"fp32": "25 TFLOP/s"}  # below 1.9 times the catalogue's, so allowed
    fast = load_problem(document, "llama_tiny", "two_processes")
    run = read_run(recorded.record(tmp_path / "fast", plan, fast), plan)
    found = calibrate([(plan, run)], problem.documents["cluster"], "2026-01-31")
    (bound,) = (c for c in found.changes if c.bound)
    assert bound.name == f"{chip['name']} gemm_efficiency" and bound.after <= 1
    assert f"as large as the cluster's file may say: {bound.name}" in printed(found)
    assert "no fit" not in printed(found)


def printed(found: Calibration) -> str:
    console = Console(file=(text := io.StringIO()), width=200)
    print_calibration(console, found)
    return text.getvalue()


def test_factors_at_the_end_of_those_tried_are_named(tmp_path: Path) -> None:
    found = calibrated(tmp_path, 0.0, uneven())
    far = msgspec.structs.replace(found.changes[0], factor=0.01)
    some = msgspec.structs.replace(found, changes=(far, *found.changes[1:]))
    assert f"so no fit: {far.name}\n" in printed(some)


def test_numbers_that_no_op_shows_stay(tmp_path: Path) -> None:
    cluster = recorded.machine()
    nics = {"rate": "10 Gb/s", "latency": "30 us"}
    cluster["sites"][0]["nodes"][0]["nics"] = nics
    problem = recorded.problem_of(cluster)
    plan = lower(problem, plans.draft_of([[1], [1]], (4,), microbatch=4, cuts=(0, 3, 10)))
    run = read_run(recorded.record(tmp_path / "run", plan, problem), plan)
    found = calibrate([(plan, run)], problem.documents["cluster"], "2026-01-31")
    unseen = {c.name: c.after for c in found.changes if not c.decided}
    assert unseen == {"nodes 0 nics rate": 1.25e9, "nodes 0 nics latency": 3e-5}
    assert found.cluster["sites"][0]["nodes"][0]["nics"] == {
        "rate": "1250000000.0 B/s", "latency": "3e-05 s",
    }  # fmt: skip


def test_an_efficiency_above_one_raises_the_peak() -> None:
    document = merged(PROBLEM.documents["cluster"])
    gemm = next(s for s in scales(document) if s.name == "CPU gemm_efficiency")
    memory = next(s for s in scales(document) if s.name == "CPU memory_efficiency")
    found = scaled(document, [gemm, memory], [5.0, 5.0], ["a", "b"])
    chip = load_problem(found, "llama_tiny", "two_processes").machine.accelerators["CPU"]
    assert chip.gemm_efficiency == chip.memory_efficiency == 1.0
    assert chip.peak_flops_per_s["fp32"] == pytest.approx(60e9 * 3.0)  # 0.6 * 5 = 3
    assert chip.memory_bytes_per_s == pytest.approx(10e9 * 2.0)
    assert document == merged(PROBLEM.documents["cluster"])  # the input stays


def test_what_a_cluster_overrides_counts_as_the_profiles() -> None:
    document = dict(PROBLEM.documents["cluster"])
    document["accelerators"] = {"CPU": {"gemm_efficiency": 0.3, "peaks": {"bf16": "1 TFLOP/s"}}}
    found = merged(document)
    assert "accelerators" not in found
    gemm = next(s for s in scales(found) if s.name == "CPU gemm_efficiency")
    assert gemm.value == 0.3
    assert set(found["profiles"]["accelerators"][0]["peaks"]) == {"fp32", "bf16"}


def test_the_command(tmp_path: Path) -> None:
    plan = uneven()
    save_plan(plan, tmp_path / "plan.json")
    recorded.record(tmp_path / "run", plan, recorded.problem_of(distorted()))

    def hetlab(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from sim.cli import main; main()", *args]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = hetlab("calibrate", "plan.json", "run", "--out", "better.yaml")
    assert done.returncode == 0, done.stderr
    assert "judge the profile on others" in done.stdout and "not decided" not in done.stdout
    text = (tmp_path / "better.yaml").read_text()
    assert f"from runs of plan {plan.hash}: factor 0.7" in text and "calibrated: true" in text
    compared = hetlab("compare", "plan.json", "run", "--cluster", "better.yaml")
    assert compared.returncode == 0 and ": +0.0%" in compared.stdout, compared.stdout
    planned = hetlab("plan", "better.yaml", "llama_tiny", "two_processes", "--json")
    assert planned.returncode == 0, planned.stderr
    assert hetlab("calibrate", "plan.json", "--out", "x.yaml").returncode == 2
    assert hetlab("calibrate", "plan.json", "run", "--out", "x.txt").returncode == 2


def test_kinds_that_got_worse_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plan = uneven()
    found = calibrated(tmp_path, 0.0, plan)
    assert found.worse == {}
    kinds = {"F": (0.2, 0.01), "SEND_F": (0.05, 0.12), "OPT": (0.03, 0.0305)}
    changed = msgspec.structs.replace(found, kinds=kinds)
    assert changed.worse == {"SEND_F": (0.05, 0.12)}
    save_plan(plan, tmp_path / "plan.json")
    monkeypatch.setattr(real_runtime.calibrate, "calibrate", lambda *_: changed)
    pair = [tmp_path / "plan.json", tmp_path / plan.hash]
    with caplog.at_level(logging.WARNING, "hetlab"):
        _calibrate(tmp_path / "better.yaml", pair)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "SEND_F is predicted worse than before: median error 12.0 %, was 5.0 %"
    ]
    marked = [line for line in capsys.readouterr().out.splitlines() if line.endswith("worse")]
    assert len(marked) == 1 and marked[0].startswith("SEND_F")


def test_runs_without_comparable_ops_are_refused(tmp_path: Path) -> None:
    plan = replicas()
    folder = recorded.record(tmp_path / "run", plan, PROBLEM)
    run = read_run(folder, plan)
    none = run.spans.take(run.spans["kind"] == "BARRIER")
    empty = type(run)(
        spans=none, step_times_s=(1.0,), dtype="fp32", device="cpu", ranks=2, seed=0
    )  # fmt: skip
    with pytest.raises(InputError, match="no op of the runs can be compared"):
        calibrate([(plan, empty)], PROBLEM.documents["cluster"], "2026-01-31")
