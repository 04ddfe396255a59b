"""A run that is told to stop leaves no process behind and says so; ranks stay on their cores."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from real_runtime.cores import cores_of
from real_runtime.resume import complete
from sim.plan.io import save_plan

pytest.importorskip("torch", reason="the runtime needs PyTorch")
sys.path.insert(0, str(Path(__file__).parent))
import plans

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc"),
]


def parents() -> dict[int, int]:
    """Process -> its parent, of all that live; what has ended and is not waited for is left out."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it ended meanwhile
            continue
        if state != "Z":
            found[int(entry.name)] = int(parent)
    return found


def below(process: int) -> set[int]:
    """All that a process has started, and what that has."""
    tree, found = parents(), {process}
    while more := {p for p, above in tree.items() if above in found} - found:
        found |= more
    return found - {process}


@pytest.mark.parametrize(
    ("sign", "word"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGINT, "interr"),
    ],
)
def test_a_stopped_run_leaves_no_process(tmp_path: Path, sign: signal.Signals, word: str) -> None:
    save_plan(plans.plan_of(plans.problem_of(), [[1], [1]]), tmp_path / "plan.json")
    command = (
        sys.executable, "-c", "from sim.cli import main; main()", "run", "plan.json", "--data",
        str(plans.write_tokens(tmp_path)), "--steps", "1000000", "--allow-other-cluster",
    )  # fmt: skip
    seen, mine, allowed = "", set[int](), {}
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            seen += line
            if "step" in line and "loss" in line and not mine:
                mine = below(run.pid)
                files = (tmp_path / "hetlab-run" / "pids").iterdir()
                ranks = {int(f.name): int(f.read_text()) for f in files}
                allowed = {r: os.sched_getaffinity(p) for r, p in ranks.items()}
                assert set(ranks.values()) < mine and len(ranks) == 2
                run.send_signal(sign)
        code = run.wait(timeout=60)
    assert code == 128 + sign, seen
    assert word in seen and "all ranks are stopped" in " ".join(seen.split()), seen
    assert len(mine) >= 3 and not mine & set(parents())
    expected = cores_of(2)
    if expected:
        assert allowed == {r: set(c) for r, c in enumerate(expected)}


def test_a_second_signal_does_not_end_the_command_by_itself() -> None:
    code = (
        "import os, pathlib, signal;"
        "from real_runtime.launch import _ended_by_signals;"
        "from sim.errors import StoppedError\n"
        "try:\n with _ended_by_signals(pathlib.Path('x')): os.kill(os.getpid(), signal.SIGINT)\n"
        "except StoppedError as error:\n"
        " os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGTERM)\n"
        " raise SystemExit(error.exit_code)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 130


def command_of(folder: Path) -> list[str]:
    """hetlab run of two ranks that writes a checkpoint every step."""
    save_plan(plans.plan_of(plans.problem_of(), [[1], [1]]), folder / "plan.json")
    return [
        sys.executable, "-c", "from sim.cli import main; main()", "run", "plan.json", "--data",
        str(plans.write_tokens(folder)), "--checkpoint-every", "1", "--allow-other-cluster",
    ]  # fmt: skip


def told(command: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    return done.returncode, " ".join(done.stderr.split())


def ended(handles: list[int]) -> bool:
    """Wait until all processes have ended, 20 s for each at most."""
    found = all(select.select([h], [], [], 20)[0] for h in handles)
    for handle in handles:
        os.close(handle)
    return found


@contextmanager
def killed(run: subprocess.Popen[str]) -> Iterator[None]:
    """Leave no command behind where a test fails."""
    try:
        yield
    finally:
        run.kill()


def steps_seen(run: subprocess.Popen[str], count: int) -> str:
    """Read what a command says up to some lines of steps."""
    seen = ""
    assert run.stderr is not None
    for line in run.stderr:
        seen += line
        count -= "step" in line and "loss" in line
        if not count:
            return seen
    raise AssertionError(seen)


def test_a_killed_command_takes_its_ranks_along_and_leaves_a_folder_to_go_on_from(
    tmp_path: Path,
) -> None:
    command, folder = command_of(tmp_path), tmp_path / "hetlab-run"
    endless = [*command, "--steps", "1000000"]
    with (
        subprocess.Popen(endless, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run,
        killed(run),
    ):
        steps_seen(run, 2)  # the second is a second later: a checkpoint is there
        code, said = told([*endless, "--overwrite"], tmp_path)
        assert code == 4 and f"another run writes there; found process {run.pid} on" in said, said
        mine = below(run.pid)
        handles = [os.pidfd_open(p) for p in mine]
        run.kill()
        assert len(mine) >= 3 and ended(handles)
    kept = complete(folder / "checkpoints")
    assert kept
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"event": "st')
    code, said = told(command, tmp_path)
    assert code == 4 and f"found {kept[-1].name}; expected --resume" in said, said
    assert complete(folder / "checkpoints") == kept
    more = ("--resume", "--steps", str(int(kept[-1].name[5:]) + 2), "--learning-rate", "1e-2")
    code, said = told([*command, *more], tmp_path)
    assert code == 0 and "--learning-rate is 0.01 and was 0.0003" in said, said
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert [json.loads(x)["event"] for x in lines][-1] == "end"


def test_a_dead_torchrun_is_noticed_and_all_ranks_start_again(tmp_path: Path) -> None:
    command = [*command_of(tmp_path), "--steps", "1000000", "--restarts", "1"]
    with (
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run,
        killed(run),
    ):
        steps_seen(run, 2)
        (torchrun,) = (p for p, above in parents().items() if above == run.pid)
        handles = [os.pidfd_open(p) for p in below(torchrun)]
        os.kill(torchrun, signal.SIGKILL)
        said = " ".join(steps_seen(run, 1).split())
        assert ended(handles)
        assert "torchrun was ended by SIGKILL; its ranks were stopped" in said, said
        assert "all ranks start again from step-" in said, said
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130


def test_cores_are_dealt_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("real_runtime.cores.usable_cores", lambda: (2, 3, 5, 7, 9))
    assert cores_of(2) == ((2, 3), (5, 7)) and cores_of(5) == ((2,), (3,), (5,), (7,), (9,))
    assert cores_of(6) == cores_of(2, asked=False) == ()
    assert cores_of(7, asked=True)[5:] == ((2,), (3,))
