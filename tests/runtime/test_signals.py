"""A run that is told to stop leaves no process behind and says so; ranks stay on their cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from real_runtime.cores import cores_of
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


def test_cores_are_dealt_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("real_runtime.cores.usable_cores", lambda: (2, 3, 5, 7, 9))
    assert cores_of(2) == ((2, 3), (5, 7)) and cores_of(5) == ((2,), (3,), (5,), (7,), (9,))
    assert cores_of(6) == cores_of(2, asked=False) == ()
    assert cores_of(7, asked=True)[5:] == ((2,), (3,))
