"""hetlab run --restarts: a killed rank costs time, and the loss curve stays the same."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

from real_runtime.errors import RunError
from real_runtime.restarts import train
from real_runtime.resume import complete
from real_runtime.summary import last_run

sys.path.insert(0, str(Path(__file__).parent))
import killing
import plans

pytestmark = pytest.mark.timeout(300)


def test_a_run_with_killed_ranks_trains_as_if_none_had_died(tmp_path: Path) -> None:
    plan = plans.plan_of(plans.problem_of(), [[1], [1]])
    quiet = killing.settings_of(tmp_path / "quiet", plan)
    other = threading.Thread(target=train, args=(quiet, 2, 0, lambda line: None, print))
    other.start()
    hits, warned = killing.killed_run(tmp_path / "killed", plan, seed=1, kills=2)
    other.join()
    print(hits, warned)
    assert len(hits) == 2 and len(warned) == 2
    assert all("SIGKILL" in line or "gone or silent" in line for line in warned), warned
    events = killing.events_of(tmp_path / "killed" / "run")
    assert [e["event"] for e in events].count("restart") == 2 and events[-1]["event"] == "end"
    killed, same_twice = killing.curve(tmp_path / "killed" / "run")
    assert killed == killing.curve(tmp_path / "quiet" / "run")[0] and same_twice


def test_a_log_with_restarts_is_one_run() -> None:
    def event(name: str, **fields: int) -> dict[str, Any]:
        return {"event": name, **fields}

    def step(number: int, loss: int) -> dict[str, Any]:
        return event("step", step=number, loss=loss)

    before = [event("start", seed=1), step(0, 9), event("end")]
    mine = [
        event("start", seed=2), step(0, 8), step(1, 7), event("restart"), event("restart"),
        event("start", seed=2), event("resume"), step(1, 6), step(2, 5), event("end"),
    ]  # fmt: skip
    start, steps, restarts = last_run(before + mine)
    assert start["seed"] == 2 and restarts == 2
    assert [(s["step"], s["loss"]) for s in steps] == [(0, 8), (1, 6), (2, 5)]
    assert last_run(before)[1:] == ([before[1]], 0)
    assert last_run([event("restart"), *mine])[2] == 2


def test_without_restarts_left_the_death_is_the_error_and_the_checkpoint_stays(
    tmp_path: Path,
) -> None:
    plan = plans.plan_of(plans.problem_of(), [[1]])
    settings = killing.settings_of(tmp_path / "one", plan)
    killer = killing.Killer(Path(settings.out), 1, killing.Fixed(0, 9), 1)
    with killer, pytest.raises(RunError, match="rank 0 was ended by SIGKILL"):
        train(settings, 1, 0, lambda line: None, lambda line: None)
    assert len(killer.hits) == 1
    assert int(complete(Path(settings.out) / "checkpoints")[-1].name[5:]) >= 9
