"""What hetlab probe saw of this machine decides which plans hetlab run takes without being told."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import plans
import recorded

from real_runtime.probed import (
    check_probed,
    cluster_of,
    record_file,
    remember,
    remember_calibrated,
)
from sim.cli import main
from sim.errors import InputError
from sim.interop.files import yaml_text
from sim.plan.io import save_plan
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import problem_hash

SAMPLE = Path(__file__).parents[2] / "real_runtime" / "sample.txt"
DATE = "2026-01-31"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "hetlab" / "probed.json"


def cluster_file(folder: Path, **link: str) -> Path:
    file = folder / f"pair{len(list(folder.glob('*.yaml')))}.yaml"
    file.write_text(yaml_text(recorded.machine(link)))
    return file


def plan_for(cluster: Path) -> Plan:
    draft = plans.draft_of([[1], [1]], (4,), microbatch=4, cuts=(0, 5, 10))
    return lower(recorded.problem_of(str(cluster)), draft)  # type: ignore[arg-type]


def test_a_plan_for_the_probed_cluster_goes_and_another_is_refused(
    tmp_path: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, other = cluster_file(tmp_path), cluster_file(tmp_path, rate="2 GB/s")
    mine, its = plan_for(here), plan_for(other)
    check_probed(its, tmp_path / "its.json", False)  # nothing was probed
    remember(cluster_of(here), here, DATE)
    assert record_file() == state and state.is_file() and not list(state.parent.glob("*.part"))
    check_probed(mine, tmp_path / "mine.json", False)
    with pytest.raises(InputError) as caught:
        check_probed(its, tmp_path / "its.json", False)
    hashes = [problem_hash(p.problem["cluster"]) for p in (mine, its)]
    for word in (str(tmp_path / "its.json"), *hashes, str(here), DATE, "--allow-other-cluster"):
        assert word in str(caught.value), (word, str(caught.value))
    assert caught.value.exit_code == 4
    with caplog.at_level(logging.WARNING, "hetlab"):
        check_probed(its, tmp_path / "its.json", True)
    assert hashes[1] in caplog.text and "--allow-other-cluster" not in caplog.text
    remember(cluster_of(other), other, DATE)  # the newest probe counts
    check_probed(its, tmp_path / "its.json", False)
    with pytest.raises(InputError, match="was probed as"):
        check_probed(mine, tmp_path / "mine.json", False)


def test_what_another_host_probed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other = cluster_file(tmp_path), cluster_file(tmp_path, rate="2 GB/s")
    its = plan_for(other)
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: "elsewhere")
        remember(cluster_of(here), here, DATE)
    check_probed(its, tmp_path / "its.json", False)
    remember(cluster_of(other), other, DATE)
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(InputError, match="was probed as"):
            check_probed(its, tmp_path / "its.json", False)


def test_a_calibration_of_the_probed_cluster_describes_the_host_too(tmp_path: Path) -> None:
    here, better = cluster_file(tmp_path), cluster_file(tmp_path, rate="1.1 GB/s")
    other, worse = cluster_file(tmp_path, rate="2 GB/s"), cluster_file(tmp_path, rate="3 GB/s")
    remember(cluster_of(here), here, DATE)
    assert remember_calibrated(cluster_of(better), cluster_of(here), better, DATE)
    assert not remember_calibrated(cluster_of(worse), cluster_of(other), worse, DATE)
    for file in (here, better):
        check_probed(plan_for(file), tmp_path / "plan.json", False)
    with pytest.raises(InputError, match="was probed as"):
        check_probed(plan_for(worse), tmp_path / "plan.json", False)


def test_a_broken_record_is_named_and_the_next_probe_replaces_it(
    tmp_path: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = cluster_file(tmp_path)
    state.parent.mkdir(parents=True)
    state.write_text("{")
    with pytest.raises(InputError, match="record of hetlab probe cannot be read") as caught:
        check_probed(plan_for(here), tmp_path / "plan.json", False)
    assert str(state) in str(caught.value)
    with caplog.at_level(logging.WARNING, "hetlab"):
        check_probed(plan_for(here), tmp_path / "plan.json", True)
    assert "record of hetlab probe cannot be read" in caplog.text
    remember(cluster_of(here), here, DATE)
    check_probed(plan_for(here), tmp_path / "plan.json", False)


def test_more_threads_than_cores_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["probe", "--threads", "100000"])
    assert left.value.code == 2 and not list(tmp_path.glob("*.yaml"))
    assert "--threads 100000: this process may use" in " ".join(capsys.readouterr().err.split())


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from sim.cli import main; main()", "run", "plan.json"]
    return subprocess.run(
        [*command, "--data", str(SAMPLE), "--dry-run", *more], cwd=folder, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip


def test_the_bundled_example_after_a_probe(tmp_path: Path) -> None:
    here = cluster_file(tmp_path)
    save_plan(plan_for("two_processes"), tmp_path / "plan.json")  # type: ignore[arg-type]
    remember(cluster_of(here), here, DATE)
    refused = run(tmp_path)
    said = " ".join(refused.stderr.split())
    assert refused.returncode == 4 and not refused.stdout, said
    assert "two_processes" in said and f"from {here} on {DATE}" in said, said
    assert "--allow-other-cluster" in said
    wrong = run(tmp_path, "--allow-other-cluster", "--trace", "t.xyz")
    assert wrong.returncode == 2 and "unknown trace format" in " ".join(wrong.stderr.split())
    for more in (("--allow-other-cluster",), ("--probed", "two_processes")):
        done = run(tmp_path, *more)
        assert done.returncode == 0 and "torch.distributed.run" in done.stdout, done.stderr
