"""What a person meets who types check and simulate, mistakes included; no search runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.plan.io import save_plan
from sim.plan.lower import lower
from sim.plan.uniform import uniform
from sim.problem import load_problem

CODE = "from sim.cli import main; main()"
CLUSTER = """\
name: small
sites:
  - name: here
    nodes: [{profile: p3_8xlarge}, {profile: g4dn_12xlarge}]
"""


def hetlab(*args: str, cwd: Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *args], cwd=cwd, input=stdin, capture_output=True, timeout=60
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("files")
    (place / "cluster.yaml").write_text(CLUSTER)
    job = {"global_batch": 8, "sequence_length": 2048, "dtype": "fp16"}
    problem = load_problem(place / "cluster.yaml", "gpt2_355m", job)
    draft = uniform(problem.model, 8, range(4), pp=2, tp=1)
    save_plan(lower(problem, draft), place / "plan.json")
    return place


def test_check_lists_every_problem_with_its_line(folder: Path) -> None:
    (folder / "bad.yaml").write_text(
        "name: x\nsites:\n  - name: a\n    nodes:\n"
        "      - {profile: nope}\n      - {accelerator: none, chips: 1}\n"
    )
    (folder / "job.yaml").write_text("global_batch: 0\nsequence_lenght: 5\n")
    done = hetlab("check", "bad.yaml", "job.yaml", "--json", cwd=folder)
    assert done.returncode == 4
    cluster, job = json.loads(done.stdout)["files"]
    assert (cluster["kind"], job["kind"]) == ("cluster", "job")
    places = [(p["file"], p["line"], p["key"]) for p in cluster["problems"]]
    assert places == [
        ("bad.yaml", 5, "sites.0.nodes.0.profile"),
        ("bad.yaml", 6, "sites.0.nodes.1.accelerator"),
    ]
    keys = [(p["line"], p["key"]) for p in job["problems"]]
    assert keys == [(1, "global_batch"), (2, "sequence_lenght")]
    logged = " ".join(done.stderr.split())
    for row in (*cluster["problems"], *job["problems"]):
        assert " ".join(row["text"].split())[:40] in logged


def test_check_knows_plans_and_profiles(folder: Path) -> None:
    (folder / "chip.yaml").write_text(
        "name: X\nmemory: 1 GiB\nmemory_bandwidth: 1 GB/s\npeaks: {bf16: 1 TFLOP/s}\n"
    )
    plan = json.loads((folder / "plan.json").read_text())
    plan["problem"]["job"]["global_batch"] = 0
    (folder / "broken.json").write_text(json.dumps(plan))
    done = hetlab("check", "plan.json", "chip.yaml", "broken.json", "--json", cwd=folder)
    good, chip, broken = json.loads(done.stdout)["files"]
    assert (good["kind"], good["problems"]) == ("plan", [])
    assert (chip["kind"], chip["problems"]) == ("accelerator", [])
    (problem,) = broken["problems"]
    assert problem["file"] == "broken.json"
    assert problem["key"] == "problem.job.global_batch"


def test_a_plan_comes_from_stdin(folder: Path) -> None:
    done = hetlab("simulate", "-", "--json", cwd=folder, stdin=(folder / "plan.json").read_bytes())
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["unused"] == {"T4": 4}
    assert any("sequences of 2048 exceed the 1024" in a for a in document["assumptions"])
    broken = hetlab("simulate", "-", cwd=folder, stdin=b"{")
    assert broken.returncode == 4
    assert "standard input" in broken.stderr


def test_the_table_shows_that_sequences_are_too_long(folder: Path) -> None:
    done = hetlab("simulate", "plan.json", cwd=folder)
    assert "sequences of 2048 exceed the 1024" in done.stdout
    assert "not used       4 T4" in done.stdout


def test_another_kind_of_file_is_named(folder: Path) -> None:
    done = hetlab("simulate", "cluster.yaml", cwd=folder)
    assert done.returncode == 4
    assert "this is a cluster file, not a plan" in done.stderr
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    done = hetlab("simulate", "config.json", cwd=folder)
    assert done.returncode == 4
    assert "this is a model file, not a plan" in done.stderr


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ("[{profile: g4dn_12xlarge}]", "the plan uses V100-SXM2-16GB, this cluster has none"),
        (
            "[{profile: g4dn_12xlarge}, {profile: p3_8xlarge}]",
            "the plan puts rank 0 on a V100-SXM2-16GB, which chip 0 is not",
        ),
    ],
)
def test_a_cluster_without_the_plans_chips(folder: Path, cluster: str, text: str) -> None:
    nodes = "[{profile: p3_8xlarge}, {profile: g4dn_12xlarge}]"
    (folder / "other.yaml").write_text(CLUSTER.replace(nodes, cluster))
    done = hetlab("simulate", "plan.json", "--cluster", "other.yaml", cwd=folder)
    assert done.returncode == 4
    assert text in done.stderr
    assert done.stderr.startswith("hetlab: other.yaml")


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--gantt", "g.bmp"], 2, "unknown picture format"),
        (["--gantt", "g"], 2, "unknown picture format"),
        (["--gantt", "none/g.png"], 4, "no folder none"),
        (["--trace", "t.xyz"], 2, "unknown trace format"),
        (["--trace", "none/t.json"], 4, "no folder none"),
        (["--trace", "."], 4, "names a folder"),
        (["--fail-if", "speed>1"], 2, "no metric speed"),
        (["--lose", "x"], 2, "--lose RANK@SECONDS"),
    ],
)
def test_options_are_checked_before_the_plan_is_read(
    folder: Path, args: list[str], code: int, text: str
) -> None:
    done = hetlab("simulate", "there_is_no_such_plan.json", *args, cwd=folder)
    assert done.returncode == code
    assert text in done.stderr
    assert "unexpected" not in done.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_leaves_does_not_stop_the_work(folder: Path, form: list[str]) -> None:
    trace = folder / f"after{len(form)}.json"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", CODE, "simulate", "plan.json", "--trace", str(trace), *form]
    done = subprocess.run(command, cwd=folder, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert done.returncode == 0
    assert b"Broken" not in done.stderr
    assert trace.stat().st_size > 0
