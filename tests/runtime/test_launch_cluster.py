"""Starting a plan on several nodes: rank order, quoting, secrets, Slurm, and a real run."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from real_runtime.cluster_launch import commands_of, hosts_of, printed, sbatch_script, submit
from real_runtime.errors import RunError
from real_runtime.places import identity, nodes_of
from real_runtime.port_check import check_port
from sim.cli import main
from sim.errors import InputError, UsageError
from sim.plan.io import save_plan
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem, problem_from_documents
from sim.spec.load import Source, validate
from sim.spec.runtime import RuntimeDoc

sys.path.insert(0, str(Path(__file__).parent))
import plans

NASTY = "a b'c\"d $(touch pwned) `id` ; & | \\ %j é"
SPY = """#!{python}
import json, os, sys
keep = ("OPT", "MASTER_ADDR", "HETLAB_RANKS", "HETLAB_DEVICES")
said = {{"argv": sys.argv[1:], "env": {{k: os.environ[k] for k in keep if k in os.environ}}}}
with open({out!r}, "a") as file:
    file.write(json.dumps(said) + "\\n")
"""


def cluster(*nodes: dict[str, Any], **runtime: Any) -> dict[str, Any]:
    """Nodes of CPU chips; every one gets the runtime block unless it has its own."""
    whole = dict(plans.CLUSTER["sites"][0]["nodes"][0])
    found = [whole | ({"runtime": runtime} if runtime else {}) | n for n in nodes]
    return plans.CLUSTER | {"sites": [{"name": "here", "nodes": found}]}


def problem_of(document: dict[str, Any]) -> Problem:
    job = {"global_batch": plans.BATCH, "sequence_length": plans.SEQUENCE, "dtype": "fp32"}
    return load_problem(document, plans.CONFIG, job)


def on_chips(problem: Problem, chips: tuple[int, ...]) -> Plan:
    """A pipeline of one rank per stage, rank r on the r-th of these chips."""
    blocks, n = len(problem.model.blocks), len(chips)
    draft = plans.draft_of([[1]] * n, cuts=tuple(round(i * blocks / n) for i in range(n + 1)))
    plan = lower(problem, draft)
    return msgspec.structs.replace(
        plan, placement=msgspec.structs.replace(plan.placement, chips=chips)
    )


def spy(folder: Path, name: str = "spy") -> tuple[Path, Path]:
    """A program that notes its arguments; and where."""
    program, out = folder / name, folder / f"{name}.jsonl"
    program.write_text(SPY.format(python=sys.executable, out=str(out)))
    program.chmod(0o755)
    return program, out


def heard(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


TWO = cluster({"chips": 2}, {"chips": 3})


@pytest.mark.parametrize("chips", [(0, 1, 2, 3), (3, 0, 2, 1), (4, 2), (1, 4, 0, 3)])
def test_every_process_finds_its_rank_and_chip(chips: tuple[int, ...]) -> None:
    problem = problem_of(TWO)
    nodes = nodes_of(on_chips(problem, chips), problem)
    assert 0 in nodes[0].ranks  # torch's store listens on the first node
    launch = commands_of(nodes, Path("run"), (), 29500)
    seen: dict[int, int] = {}
    number = 0
    for node, line in zip(nodes, launch.nodes, strict=True):
        given = shlex.split(line.command)
        env = dict(x.split("=", 1) for x in given if x.startswith("HETLAB_"))
        assert f"--nproc-per-node={len(node.ranks)}" in given
        assert f"--node-rank={line.node_rank}" in given and f"--nnodes={len(nodes)}" in given
        for local in range(len(node.ranks)):  # torchrun numbers processes node by node
            said = {"RANK": str(number), "WORLD_SIZE": str(len(chips)), "LOCAL_RANK": str(local)}
            me = identity(env | said)
            seen[me.rank] = problem.machine.nodes[node.node].chips[0] + me.device
            number += 1
    assert [seen[rank] for rank in range(len(chips))] == list(chips)
    if chips == (0, 1, 2, 3):
        assert "HETLAB_" not in printed(launch)


def test_two_ranks_on_a_chip_are_refused() -> None:
    problem = problem_of(TWO)
    with pytest.raises(InputError, match=r"chip of its own; found 1; expected one of 0 to 4"):
        nodes_of(on_chips(problem, (1, 1)), problem)


def test_a_node_names_its_interpreter_container_and_variables(tmp_path: Path) -> None:
    container, out = spy(tmp_path, "my container")
    own = {"python": "/opt/my python/bin/python", "container": f"{shlex.quote(str(container))} --",
           "env": {"OPT": NASTY, "COUNT": 3}, "torch": "2.13 for X1"}  # fmt: skip
    problem = problem_of(cluster({"chips": 1, "runtime": own}, {"chips": 1}))
    problem = problem_from_documents(problem.documents)  # as a plan carries it
    folder = tmp_path / "my run"
    nodes = nodes_of(on_chips(problem, (0, 1)), problem)
    first, second = commands_of(nodes, folder, ("a", "b"), 1234).nodes
    subprocess.run(["bash", "-c", first.command], check=True, cwd=tmp_path)
    (said,) = heard(out)
    assert said["argv"] == [
        "--", "env", "COUNT=3", f"OPT={NASTY}", "/opt/my python/bin/python", "-m",
        "torch.distributed.run", "--nnodes=2", "--node-rank=0", "--nproc-per-node=1",
        "--master-addr=a", "--master-port=1234", "-m", "real_runtime.worker", str(folder),
    ]  # fmt: skip
    assert not (tmp_path / "pwned").exists()
    assert shlex.split(second.command)[0] == sys.executable and first.torch == "2.13 for X1"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"env": {"HF_TOKEN": "hunter2"}}, "value of HF_TOKEN does not belong"),
        ({"env": {"aws_secret_key": "hunter2"}}, "value of aws_secret_key does not belong"),
        ({"container": "docker run -e API_KEY=hunter2 image"}, "value of API_KEY"),
        ({"env": {"RANK": "hunter2"}}, "the launch sets RANK itself"),
        ({"inherit": ["HETLAB_RANKS"]}, "the launch sets HETLAB_RANKS itself"),
        ({"env": {"A B": "hunter2"}}, "no name of a variable: A B"),
        ({"env": {"A": "hunter2\nB"}}, "the value of A is more than one line"),
        ({"container": "run 'image"}, "not the words of a command: No closing quotation"),
        ({"python": "python\nrm"}, "more than one line"),
        ({"pythonx": "python"}, "nearest valid key is python"),
    ],
)
def test_wrong_runtime_blocks_are_refused(block: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        validate(RuntimeDoc, Source(block, "runtime"))
    assert words in str(error.value) and "hunter2" not in str(error.value)


def fake_slurm(folder: Path, names: list[str]) -> dict[str, str]:
    """srun that runs its command once per node, as Slurm would, and scontrol."""
    folder.mkdir()
    (folder / "srun").write_text(
        "#!/bin/bash\nshift\nn=0; code=0\n"
        f"for name in {' '.join(names)}; do\n"
        'SLURM_NODEID=$n SLURMD_NODENAME=$name "$@" || code=$?; n=$((n+1)); done\nexit $code\n'
    )
    listed = "".join(name + "\n" for name in names)
    (folder / "scontrol").write_text(f"#!/bin/bash\nprintf '%s' {shlex.quote(listed)}\n")
    for file in folder.iterdir():
        file.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_the_sbatch_script_starts_each_host_with_its_ranks(tmp_path: Path) -> None:
    container, out = spy(tmp_path)
    block = {"container": str(container), "env": {"OPT": NASTY}, "inherit": ("HF_TOKEN",)}
    problem = problem_of(cluster({"chips": 1}, {"chips": 2}, **block))
    nodes = nodes_of(on_chips(problem, (2, 0, 1)), problem)
    hosts = hosts_of("z9, a1", 2)
    launch = commands_of(nodes, tmp_path, hosts, 4242)
    script = sbatch_script(launch, tmp_path, "my job", ("--partition=gpu",))
    head = [x for x in script.splitlines() if x.startswith("#SBATCH")]
    assert "#SBATCH --ntasks-per-node=1" in head and "#SBATCH --nodes=2" in head
    assert "#SBATCH --nodelist=a1,z9" in head and "#SBATCH --partition=gpu" in head
    env = fake_slurm(tmp_path / "bin", ["a1", "z9"])
    lost = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert lost.returncode and "HF_TOKEN: is needed by the ranks" in lost.stderr
    done = subprocess.run(["bash", "-c", script], env=env | {"HF_TOKEN": "hunter2"}, text=True)
    assert done.returncode == 0 and "hunter2" not in script + printed(launch)
    check, first, second = heard(out)
    assert check["argv"][1:] == ["-m", "real_runtime.port_check", "4242"]
    # The plan's rank 0 sits on the second node, so that one is torchrun's first.
    assert first["argv"][:3] == ["env", f"OPT={NASTY}", "HETLAB_RANKS=2,0,1"]
    assert "--node-rank=0" in first["argv"] and "--nproc-per-node=2" in first["argv"]
    assert "--node-rank=1" in second["argv"] and "--nproc-per-node=1" in second["argv"]
    assert all("--master-addr=a1" in x["argv"] for x in (first, second))
    stray = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True,
        env=env | {"HF_TOKEN": "x"} | fake_slurm(tmp_path / "other", ["a1", "q7"]),
    )  # fmt: skip
    assert stray.returncode and "no rank of the plan runs on q7" in stray.stderr


def test_equal_nodes_need_no_hosts_and_unlike_ones_do(tmp_path: Path) -> None:
    container, out = spy(tmp_path)
    problem = problem_of(cluster({"chips": 2, "count": 2}, container=str(container)))
    launch = commands_of(nodes_of(on_chips(problem, (0, 1, 2, 3)), problem), tmp_path, (), 29500)
    assert "# MASTER_ADDR: the host of node 0" in printed(launch)
    script = sbatch_script(launch, tmp_path, "job")
    env = fake_slurm(tmp_path / "bin", ["n1", "n2"])
    subprocess.run(["bash", "-c", script], env=env, check=True)
    starts = heard(out)[1:]
    assert [x["argv"][4] for x in starts] == ["--node-rank=0", "--node-rank=1"]
    assert all("--master-addr=n1" in x["argv"] for x in starts)
    unlike = problem_of(cluster({"chips": 1}, {"chips": 2}))
    launch = commands_of(nodes_of(on_chips(unlike, (0, 1, 2)), unlike), tmp_path, (), 29500)
    with pytest.raises(UsageError, match="give --hosts"):
        sbatch_script(launch, tmp_path, "job")


def test_submit_needs_sbatch_and_says_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="no sbatch on this machine"):
        submit(tmp_path / "x")
    program = tmp_path / "sbatch"
    program.write_text('#!/bin/sh\necho "Submitted batch job 7 $1"\n')
    program.chmod(0o755)
    assert submit(tmp_path / "x") == f"Submitted batch job 7 {tmp_path / 'x'}"
    program.write_text('#!/bin/sh\necho "no such partition" >&2; exit 1\n')
    with pytest.raises(RunError, match="sbatch refused: no such partition"):
        submit(tmp_path / "x")


@pytest.mark.parametrize(
    ("text", "words"), [("a", "names 1 hosts; .* has 2"), ("a,-b", "name of a host: '-b'"),
                        ("a,b;rm", "'b;rm'")],
)  # fmt: skip
def test_wrong_hosts_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hosts_of(text, 2)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port} of .* is in use; give another --port"):
            check_port(port)
    check_port(port)


def hetlab(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["run", *args])
    return int(left.value.code or 0)


def test_the_command_writes_and_prints_but_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    problem = problem_of(cluster({"chips": 1}, {"chips": 1}, inherit=("HF_TOKEN",)))
    save_plan(on_chips(problem, (0, 1)), "plan.json")
    args = ("plan.json", "--data", str(plans.write_tokens(tmp_path)), "--no-preflight")
    assert hetlab(*args, "--launcher", "torchrun", "--dry-run") == 0
    assert "--nnodes=2" in capsys.readouterr().out and not Path("hetlab-run").exists()
    assert hetlab(*args, "--launcher", "sbatch", "--hosts", "a,b", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    script = Path("hetlab-run/launch.sbatch").read_text()
    assert document["script"].endswith("launch.sbatch") and document["nodes"][1]["ranks"] == [1]
    assert document["nodes"][0]["command"] in script
    settings = Path("hetlab-run/run.json").read_text()
    assert json.loads(settings)["preflight"] is False
    assert not Path("hetlab-run/events.jsonl").exists()
    assert "hunter2" not in json.dumps(document) + script + settings
    for wrong, words in (
        (("--submit",), "--launcher sbatch"),
        (("--launcher", "mpi"), "torchrun or sbatch"),
        (("--hosts", "a,b"), "goes with --launcher"),
        (("--launcher", "torchrun", "--restarts", "1"), "leave out --launcher"),
    ):
        assert hetlab(*args, *wrong) == 2
        assert words in capsys.readouterr().err


def test_a_plan_for_another_cluster_than_was_probed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    documents = {"mine": TWO, "other": cluster({"chips": 2}, {"chips": 4})}
    for name, document in documents.items():
        Path(f"{name}.yaml").write_text(json.dumps(document))  # JSON is YAML
    problem = problem_of(TWO)
    save_plan(on_chips(problem, (0, 1)), "plan.json")
    data = str(plans.write_tokens(tmp_path))
    args = ("plan.json", "--data", data, "--dry-run", "--probed")
    assert hetlab(*args, "mine.yaml") == 0
    assert "probed" not in capsys.readouterr().err
    assert hetlab(*args, "other.yaml") == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "other.yaml: the plan was made for another cluster than was probed" in said
    assert "--allow-other-cluster" in said
    assert hetlab(*args, "other.yaml", "--allow-other-cluster") == 0
    assert "another cluster" in " ".join(capsys.readouterr().err.split())
