"""Two torchruns of one plan, as on two nodes: the plan's ranks train, unlike ones are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from real_runtime.cluster_launch import commands_of
from real_runtime.launch import environment, prepare
from real_runtime.places import nodes_of
from real_runtime.settings import RunSettings
from sim.plan.io import save_plan

pytest.importorskip("torch", reason="the runtime needs PyTorch")
sys.path.insert(0, str(Path(__file__).parent))
import plans
from test_launch_cluster import cluster, on_chips, problem_of
from world import free_port

pytestmark = pytest.mark.timeout(100)


def ends(commands: list[list[str]], folder: Path, envs: list[dict[str, str]]) -> list[int]:
    """Run commands at once, each with a log, and wait for their ends."""
    children = []
    for number, (line, env) in enumerate(zip(commands, envs, strict=True)):
        with (folder / f"{number}.log").open("w") as log:
            env = environment(1) | env
            children.append(subprocess.Popen(line, stderr=log, stdout=log, env=env))
    return [child.wait(90) for child in children]


def settings_of(plan: Path, data: Path, out: Path) -> RunSettings:
    return RunSettings(plan=str(plan), data=str(data), out=str(out), steps=2, deadline=40.0)


def test_ranks_on_nodes_are_those_of_the_plan(tmp_path: Path) -> None:
    problem = problem_of(cluster({"chips": 2}, {"chips": 1}, env={"GLOO_SOCKET_IFNAME": "lo"}))
    plan = on_chips(problem, (1, 2, 0))  # nodes hold ranks 2 0 and 1
    save_plan(plan, tmp_path / "plan.json")
    data, out = plans.write_tokens(tmp_path), tmp_path / "out"
    settings = settings_of(tmp_path / "plan.json", data, out)
    prepare(settings)
    launch = commands_of(nodes_of(plan, problem), out, ("127.0.0.1",) * 2, free_port())
    assert [n.ranks for n in launch.nodes] == [(2, 0), (1,)]
    commands = [["bash", "-c", n.command] for n in launch.nodes]
    assert ends(commands, tmp_path, [{}, {}]) == [0, 0], logs(tmp_path)
    lines = (out / "events.jsonl").read_text().splitlines()
    found = [e["loss"] for e in map(json.loads, lines) if e["event"] == "step"]
    assert found == pytest.approx(alone(tmp_path, problem, data), rel=1e-5)
    assert (out / "spans.npz").is_file()


def alone(folder: Path, problem: Any, data: Path) -> list[float]:
    """Losses of one process with the same model and data."""
    import torch

    from real_runtime.rank import make_executor

    plan = on_chips(problem, (0,))
    settings = RunSettings(plan="", data=str(data), out="", steps=2)
    executor = make_executor(plan, settings, 0, torch.device("cpu"))
    assert executor is not None
    return [executor.run_step(step).loss for step in range(2)]


def logs(folder: Path) -> str:
    return "\n".join(f.read_text() for f in sorted(folder.glob("*.log")))


def test_a_rank_with_other_data_is_named_before_training(tmp_path: Path) -> None:
    problem = problem_of(cluster({"chips": 1}, {"chips": 1}, env={"GLOO_SOCKET_IFNAME": "lo"}))
    plan = on_chips(problem, (0, 1))
    save_plan(plan, tmp_path / "plan.json")
    data, other = plans.write_tokens(tmp_path), tmp_path / "other.npy"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    other.write_bytes(bytes(content))
    folders = [tmp_path / "a", tmp_path / "b"]
    settings = settings_of(tmp_path / "plan.json", data, folders[0])
    odd = msgspec.structs.replace(settings, data=str(other), out=str(folders[1]))
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    for each in (settings, odd):
        prepare(each)
    commands = [[sys.executable, "-m", "real_runtime.worker", str(f)] for f in folders]
    # Without torchrun: rank 0 keeps the store, and both see the verdict before they leave.
    codes = ends(commands, tmp_path, [meet | {"RANK": str(r)} for r in range(2)])
    assert codes[0] == 4 and codes[1], logs(tmp_path)
    failure = json.loads((folders[0] / "errors" / "rank-0.json").read_text())
    assert failure["rank"] == 1 and failure["exit_code"] == 4 and not failure["peer"]
    assert "data " in failure["text"] and "but" in failure["text"]
    assert failure["text"] in logs(tmp_path)
    assert not (folders[0] / "events.jsonl").exists()
