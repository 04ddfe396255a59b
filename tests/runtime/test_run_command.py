"""hetlab run as a person types it: it trains, logs, leaves spans, refuses, and never hangs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.engine.simulate import simulate
from sim.plan.draft import PlanDraft
from sim.plan.io import load_plan, save_plan
from sim.plan.lower import lower
from sim.problem import load_problem
from sim.report.record import spans_of_run
from sim.report.spans import Spans

pytest.importorskip("torch", reason="the runtime needs PyTorch")

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import plans  # noqa: E402

SAMPLE = FOLDER.parents[1] / "real_runtime" / "sample.txt"
pytestmark = pytest.mark.timeout(200)


def command(*args: str) -> list[str]:
    return [sys.executable, "-c", "from sim.cli import main; main()", *args]


def hetlab(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), cwd=cwd, capture_output=True, text=True, timeout=150)


def draft(**knobs: Any) -> PlanDraft:
    microbatches = knobs.pop("microbatches", (4,))
    return plans.draft_of([[1], [1]], microbatches, microbatch=4, cuts=(0, 5, 10), **knobs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The bundled example, planned as the README says but as two stages, trained 25 steps."""
    folder = tmp_path_factory.mktemp("run")
    problem = load_problem("two_processes", "llama_tiny", "two_processes")
    save_plan(lower(problem, draft()), folder / "plan.json")
    done = hetlab(
        "run", "plan.json", "--data", str(SAMPLE), "--steps", "25", "--learning-rate", "3e-3",
        "--warmup", "3", "--save", "--json", "--seed", "3", "--trace", "run.trace.json", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 25/25" in done.stderr
    return folder, json.loads(done.stdout)


def test_it_trains(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, document = trained
    assert document["steps"] == 25 and document["ranks"] == 2 and document["seed"] == 3
    assert 5.3 < document["first_loss"] < 5.8  # ln 256 = 5.545 before anything is learned
    assert document["last_loss"] < 3.5
    assert 0 < document["bubble_fraction"] < 1 and 0 < document["simulated_bubble_fraction"] < 1
    assert document["simulated_step_time_s"] > 0
    assert document["step_time_p95_s"] >= document["step_time_s"] > 0
    trace = json.loads((folder / "run.trace.json").read_text())
    assert {"0F0", "1B3", "BARRIER"} <= {e["name"] for e in trace["traceEvents"]}
    events = [json.loads(x) for x in (folder / "hetlab-run/events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == ["start", *["step"] * 25, "end"]
    assert events[0]["plan_hash"] == document["plan_hash"] == load_plan(folder / "plan.json").hash
    assert all(e["tokens_per_s"] > 0 and e["grad_norm"] > 0 for e in events[1:-1])


def test_measured_spans_have_the_rows_of_the_simulated_ones(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = trained
    measured = Spans.load(folder / "hetlab-run" / "spans.npz")
    simulated = spans_of_run(simulate(load_plan(folder / "plan.json"), steps=25, fold=False))
    names = (
        "rank", "op", "step", "kind", "segment", "microbatch", "peer", "stream", "group", "weight",
    )  # fmt: skip

    def rows(spans: Spans) -> list[tuple[Any, ...]]:
        # A simulated collective has one stage for all members, its first member's.
        stage = np.where(spans["group"] == "", spans["stage"], -1)
        return sorted(zip(*(spans[n].tolist() for n in names), stage.tolist(), strict=True))

    assert rows(measured) == rows(simulated)
    assert (measured["end_s"] >= measured["start_s"]).all()
    assert (measured["start_s"] >= measured["ready_s"]).all()
    assert set(measured["source"].tolist()) == {"measured"}
    compute = measured["stream"] == "compute"
    for rank in (0, 1):
        mine = compute & (measured["rank"] == rank)
        assert (measured["start_s"][mine][1:] >= measured["end_s"][mine][:-1]).all()
    sends = measured["kind"] == "SEND_F"
    assert (measured["nbytes"][sends] == 64 * 4 * 128 * 4).all()
    forward = measured["kind"] == "F"
    simulated_f = simulated["kind"] == "F"
    assert np.isclose(measured["flops"][forward].sum(), simulated["flops"][simulated_f].sum())


def test_weights_are_hugging_face_shards_that_a_run_can_begin_with(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    from real_runtime.weight_files import INDEX, StoredWeights

    folder, document = trained
    weights = folder / "hetlab-run" / "weights"
    files = set(json.loads((weights / INDEX).read_text())["weight_map"].values())
    assert {f.name for f in weights.iterdir()} == files | {INDEX}
    stored = StoredWeights(weights)
    assert stored["model.embed_tokens.weight"].shape == (256, 128)
    assert stored["model.layers.3.mlp.down_proj.weight"].shape == (128, 344)
    assert "lm_head.weight" not in set(stored)
    done = hetlab(
        "run", "plan.json", "--data", str(SAMPLE), "--steps", "1", "--weights", str(weights),
        "--out", "again", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = float(re.findall(r"loss +([\d.]+) ->", done.stdout)[0])
    assert abs(first - document["last_loss"]) < 0.3
    assert re.search(r"step time .* ms median, .*; simulated .* ms \([+-]\d+%\)", done.stdout)
    assert "of compute time is idle; simulated" in done.stdout


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    problem = load_problem("two_processes", "llama_tiny", "two_processes")
    tp = [[1, 1]]
    sharded = plans.draft_of(tp, (2, 2), zero=1, microbatch=4)
    save_plan(lower(problem, sharded), tmp_path / "plan.json")
    args = (
        "run", "plan.json", "--data", str(SAMPLE), "--steps", "4", "--learning-rate", "1e-2",
        "--checkpoint-every", "1", "--keep", "3", "--json", "--dtype", "bf16",
    )  # fmt: skip
    done = hetlab(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "hetlab-run"
    kept = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000003", "step-00000004"]  # step 1 was dropped
    for name in kept[1:]:
        shutil.rmtree(run / "checkpoints" / name)
    (run / "checkpoints" / "step-00000003.part").mkdir()  # as a crash would leave it
    done = hetlab(*args, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(x) for x in (run / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resume"] == [2]
    seen: dict[int, list[tuple[float, float]]] = {}
    for e in events:
        if e["event"] == "step":
            seen.setdefault(e["step"], []).append((e["loss"], e["grad_norm"]))
    assert {step: len(both) for step, both in seen.items()} == {0: 1, 1: 1, 2: 2, 3: 2}
    assert all(len(set(both)) == 1 for both in seen.values()), seen
    other = hetlab(*args, "--resume", "--seed", "1", cwd=tmp_path)
    assert other.returncode == 4 and "belongs to another run" in other.stderr, other.stderr
    spent = hetlab(*args, "--resume", cwd=tmp_path)
    assert spent.returncode == 4 and "nothing is left to train" in spent.stderr, spent.stderr


def test_dry_run_prints_the_command_and_starts_nothing(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = trained
    done = hetlab(
        "run", "plan.json", "--data", str(SAMPLE), "--dry-run", "--out", "nothing", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "-m torch.distributed.run" in done.stdout and "--nproc-per-node=2" in done.stdout
    assert not (folder / "nothing").exists()


def test_wrong_data_is_refused_before_launch(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    (folder / "short.txt").write_text("too short")
    done = hetlab("run", "plan.json", "--data", "short.txt", "--out", "short", cwd=folder)
    assert done.returncode == 4, done.stderr
    assert "shorter than one sequence" in done.stderr and "at least 65" in done.stderr
    assert not (folder / "short").exists()


def test_the_error_of_a_rank_goes_before_what_its_peers_notice(tmp_path: Path) -> None:
    from real_runtime.launch import _failure

    (tmp_path / "errors").mkdir()
    for rank, peer, when in ((0, True, 1.0), (1, False, 2.0)):
        said = {"rank": rank, "text": f"text {rank}", "unix_s": when, "peer": peer}
        file = tmp_path / "errors" / f"rank-{rank}.json"
        file.write_text(json.dumps(said | {"exit_code": 4 - 3 * peer}))
    error = _failure(tmp_path, "")
    assert str(error) == "rank 1: text 1" and error.exit_code == 4


def test_a_killed_rank_is_named_before_those_that_torchrun_ended() -> None:
    from real_runtime.launch import _killed

    entry = "  rank      : {} (local_rank: {})\n  exitcode  : -{} (pid: {})\n"
    report = entry.format(0, 0, 15, 100) + entry.format(1, 1, 9, 101)
    assert _killed(report) == (1, 9)
    assert _killed(entry.format(0, 0, 15, 100)) == (0, 15)
    stopped = "Sending process 100 closing signal SIGTERM\n"
    assert _killed(stopped + entry.format(0, 0, 15, 100)) is None


@pytest.mark.parametrize(
    ("sign", "words"),
    [(signal.SIGKILL, ("rank 1", "SIGKILL")), (signal.SIGSTOP, ("rank 0", "gone or silent"))],
)
def test_a_dead_or_silent_rank_is_a_named_error(
    trained: tuple[Path, dict[str, Any]], sign: signal.Signals, words: tuple[str, ...]
) -> None:
    folder, _ = trained
    args = ("run", "plan.json", "--data", str(SAMPLE), "--steps", "100000", "--deadline", "3")
    seen, hit = "", False
    with subprocess.Popen(
        command(*args, "--out", sign.name), cwd=folder, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            seen += line
            if "step" in line and "loss" in line and not hit:
                os.kill(_pid_of_rank_1(folder / sign.name), sign)
                hit = True
        assert run.wait(timeout=60) == 1, seen
    said = " ".join(seen.split())
    assert all(word in said for word in words), seen


def _pid_of_rank_1(folder: Path) -> int:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().split(b"\0")
            env = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if str(folder).encode() in line and b"RANK=1" in env:
            return int(entry.name)
    raise AssertionError("rank 1 does not run")
