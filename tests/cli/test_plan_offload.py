"""plan where a model is larger than the accelerators' memory, as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLUSTER = """
name: one
accelerators: {A100-SXM4-80GB: {memory: 16 GB}}
sites:
  - name: here
    nodes:
      - accelerator: A100-SXM4-80GB
        chips: 1
        count: 1
        pcie: {rate: 25 GB/s}
        host: {update: 0.5 ns}
        host_memory: 440 GB
"""
JOB = "global_batch: 8\nsequence_length: 1024\nmicrobatch: 8\n"
CONFIG = {
    "model_type": "gpt2", "n_embd": 3072, "n_layer": 32, "n_head": 24,
    "vocab_size": 50304, "n_positions": 1024,
}  # fmt: skip
PLAN = ("plan", "cluster.yaml", "config.json", "job.yaml")


def hetlab(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from sim.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=110
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("offload")
    (place / "cluster.yaml").write_text(CLUSTER)
    (place / "job.yaml").write_text(JOB)
    (place / "config.json").write_text(json.dumps(CONFIG))
    return place


def test_plan_and_simulate_agree_on_an_offloaded_plan(folder: Path) -> None:
    done = hetlab(*PLAN, "-o", "plan.json", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (stage,) = found["offload"]["stages"]
    assert stage["optimizer"] > 0 and found["host"]["memory"]
    assert found["offload"]["why"].startswith("nothing fits without offloading: short by")
    assert "cheapest change" in found["notes"][0]
    again = hetlab("simulate", "plan.json", "--json", cwd=folder)
    assert again.returncode == 0, again.stderr
    step = json.loads(again.stdout)["metrics"]["step_time_s"]
    assert step == pytest.approx(found["metrics"]["step_time_s"], rel=1e-9)
    checked = hetlab("check", "plan.json", cwd=folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_answer_says_what_lives_on_the_host(folder: Path) -> None:
    done = hetlab(*PLAN, cwd=folder)
    assert done.returncode == 0, done.stderr
    for text in (
        "offload: nothing fits without",
        "on the host, stage 0: optimizer of",
        "recomputed",
    ):
        assert text in done.stdout


def test_offload_no_is_infeasible_as_before(folder: Path) -> None:
    done = hetlab(*PLAN, "--pin", "offload=no", cwd=folder)
    assert done.returncode == 3
    assert "is short of" in done.stderr and "host" not in done.stderr
