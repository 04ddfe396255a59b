"""plan, demo, simulate and check, as a person types them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SMALL_CLUSTER = """
name: small
sites:
  - name: here
    nodes: [{profile: p3_8xlarge, count: 1}, {profile: g4dn_12xlarge, count: 1}]
"""
SMALL_JOB = "{global_batch: 8, sequence_length: 512, dtype: fp16}"


def hetlab(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from sim.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=110
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "cluster.yaml").write_text(SMALL_CLUSTER)
    (folder / "job.yaml").write_text(SMALL_JOB)
    done = hetlab(
        "plan", "cluster.yaml", "gpt2_355m", "job.yaml", "-o", "plan.json", "--json", "--top", "2",
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "plan.out").write_text(done.stdout)
    return folder


def test_plan_prints_one_document(planned: Path) -> None:
    document = json.loads((planned / "plan.out").read_text())
    metrics = document["metrics"]
    for key in (
        "step_time_s", "tokens_per_s", "tgs", "mfu", "hfu", "bubble_fraction", "exposed_comm_s",
        "cost_per_mtoken",
    ):  # fmt: skip
        assert key in metrics
    assert document["plan_hash"] and document["exact"] is True
    assert set(document["search"]) >= {"space", "evaluated", "pruned", "wall_s"}
    cell = document["stages"][0]["cells"][0]
    assert set(cell) >= {
        "accelerator", "replicas", "num_chips", "tp", "microbatches", "recompute",
        "peak_memory_bytes", "verdict",
    }  # fmt: skip
    assert sum(s["layers"] for s in document["stages"]) == 24


def test_simulate_gives_the_same_step_time(planned: Path) -> None:
    done = hetlab("simulate", "plan.json", "--json", cwd=planned)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = json.loads((planned / "plan.out").read_text())
    assert found["metrics"]["step_time_s"] == pytest.approx(expected["metrics"]["step_time_s"])
    assert found["plan_hash"] == expected["plan_hash"]
    assert set(found) >= {"events", "cpu_s", "folded", "per_link"}


def test_simulate_writes_picture_and_trace(planned: Path) -> None:
    done = hetlab(
        "simulate", "plan.json", "--gantt", "g.png", "--trace", "t.json.gz", "--no-fold",
        cwd=planned,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (planned / "g.png").read_bytes().startswith(b"\x89PNG")
    assert (planned / "t.json.gz").read_bytes().startswith(b"\x1f\x8b")


def test_fail_if(planned: Path) -> None:
    assert (
        hetlab("simulate", "plan.json", "--fail-if", "step_time>1us", cwd=planned).returncode == 5
    )
    assert hetlab("simulate", "plan.json", "--fail-if", "mfu>1", cwd=planned).returncode == 0
    wrong = hetlab("simulate", "plan.json", "--fail-if", "speed>1", cwd=planned)
    assert wrong.returncode == 2 and "no metric speed" in wrong.stderr


def test_check_names_the_kind_and_the_error(planned: Path) -> None:
    done = hetlab("check", "cluster.yaml", "job.yaml", "plan.json", cwd=planned)
    assert done.returncode == 0, done.stderr
    (planned / "bad.yaml").write_text("global_batch: 8\nsequence_lenght: 512\n")
    bad = hetlab("check", "bad.yaml", cwd=planned)
    assert bad.returncode == 4
    assert "bad.yaml:2" in bad.stderr and "sequence_length" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_nothing_fits_exits_3(planned: Path) -> None:
    done = hetlab("plan", "cluster.yaml", "llama3_70b", "job.yaml", cwd=planned)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr and "memory" in done.stderr.lower()


def test_a_truncated_plan_exits_4(planned: Path) -> None:
    data = (planned / "plan.json").read_bytes()
    (planned / "cut.json").write_bytes(data[: len(data) // 2])
    done = hetlab("simulate", "cut.json", cwd=planned)
    assert done.returncode == 4 and "truncated" in done.stderr


def test_faults_are_typed(planned: Path) -> None:
    def step(*args: str) -> float:
        done = hetlab("simulate", "plan.json", "--json", *args, cwd=planned)
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout)["metrics"]["step_time_s"])

    plain = step()
    assert step("--straggler", "0=3.0") > plain
    lost = hetlab("simulate", "plan.json", "--lose", "0@0.001", cwd=planned)
    assert lost.returncode == 1 and "lost rank 0 at 0.001 s" in lost.stderr
    assert hetlab("simulate", "plan.json", "--straggler", "zero", cwd=planned).returncode == 2
    unknown = hetlab("simulate", "plan.json", "--link", "nowhere=0.5", cwd=planned)
    assert unknown.returncode == 4 and "nowhere" in unknown.stderr


def test_a_single_node_needs_no_nic(planned: Path) -> None:
    (planned / "nonic.yaml").write_text(
        "name: one\nsites:\n  - name: here\n    nodes:\n      - accelerator: T4\n        chips: 2\n"
        "        fabric: {rate: 10 GB/s, latency: 1 us}\n"
    )
    done = hetlab(
        "plan", "nonic.yaml", "gpt2_355m", "job.yaml", "--top", "1", "--json", cwd=planned
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_prints_and_writes_the_best_so_far(planned: Path) -> None:
    code = "from sim.cli import main; main()"
    args = ["plan", "h2_1024", "h2_100b", "h2_1024", "-o", "cut.json", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        cwd=planned, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if "before a plan was found" not in err:
        assert json.loads(out)["plan_hash"]
        assert (planned / "cut.json").exists()
    assert not list(planned.glob("*.part"))
