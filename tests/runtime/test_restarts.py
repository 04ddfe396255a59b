"""hetlab run --restarts: a killed rank costs time, and the loss curve stays the same."""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

import real_runtime.restarts
from real_runtime.cli import _resumed
from real_runtime.errors import RunError
from real_runtime.restarts import train
from real_runtime.resume import INDEX, Index, complete, run_of, seal
from real_runtime.settings import Recipe, told_of
from real_runtime.summary import last_run

sys.path.insert(0, str(Path(__file__).parent))
import killing
import plans

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_a_run_with_killed_ranks_trains_as_if_none_had_died(tmp_path: Path) -> None:
    plan = plans.plan_of(plans.problem_of(), [[1], [1]])
    quiet = killing.settings_of(tmp_path / "quiet", plan)
    other = threading.Thread(target=train, args=(quiet, 2, 0, lambda line: None, print))
    other.start()
    hits, warned = killing.killed_run(tmp_path / "killed", plan, seed=1, kills=2)
    other.join()
    print(hits, warned)
    assert len(hits) == 2 and len(warned) == 2
    assert [saving for *_, saving in hits] == [True, False]  # one while a checkpoint is written
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


def write_empty(folder: Path, steps: int) -> None:
    """A checkpoint of nothing, whole."""
    at = folder / "checkpoints" / f"step-{steps:08d}"
    at.mkdir(parents=True)
    (at / INDEX).write_bytes(
        seal(Index(steps=steps, plan_hash="", run={}, files={}, parameters={}))
    )


@pytest.mark.parametrize(
    ("steps", "launches", "begins"), [((21, 24), 2, "step-00000021"), ((24,), 1, ""), ((), 2, "")]
)
def test_a_restart_begins_at_a_checkpoint_that_leaves_steps_and_drops_none(
    steps: tuple[int, ...], launches: int, begins: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    settings = killing.settings_of(tmp_path / "run", plans.plan_of(plans.problem_of(), [[1]]))
    seen: list[str] = []

    def dies(ranks: int, folder: Path, *_: Any) -> None:
        seen.append(json.loads((folder / "run.json").read_text())["resume"])
        for number in steps if len(seen) == 1 else ():
            write_empty(folder, number)
        raise RunError("rank 0 was ended by SIGKILL")

    monkeypatch.setattr(real_runtime.restarts, "launch", dies)
    with pytest.raises(RunError, match="SIGKILL"):
        train(settings, 1, 1, lambda line: None, lambda line: None)
    assert len(seen) == launches and Path(seen[-1]).name == begins
    assert [int(p.name[5:]) for p in complete(Path(settings.out) / "checkpoints")] == list(steps)


def test_a_resumed_run_says_what_else_it_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plans.plan_of(plans.problem_of(), [[1]])
    before = msgspec.structs.replace(
        killing.settings_of(tmp_path / "run", plan), data_digest="aa (1 B)"
    )
    at = Path(before.out) / "checkpoints" / "step-00000004"
    at.mkdir(parents=True)
    index = Index(
        steps=4, plan_hash=plan.hash, run=run_of(plan, before), files={}, parameters={},
        schedule=before.steps, told=told_of(before),
    )  # fmt: skip
    (at / INDEX).write_bytes(seal(index))
    with caplog.at_level(logging.WARNING, "hetlab"):
        _resumed(plan, before)
        assert not caplog.text
        recipe = Recipe(learning_rate=2e-2, warmup=3, weight_decay=0.2, clip=0.5)
        _resumed(plan, msgspec.structs.replace(before, recipe=recipe, data_digest="bb (2 B)"))
    for words in (
        "where step-00000004 was written", "--data is bb (2 B) and was aa (1 B)",
        "--learning-rate is 0.02 and was 0.01", "--warmup is 3 and was 2",
        "--weight-decay is 0.2 and was 0.1", "--clip is 0.5 and was 1",
    ):  # fmt: skip
        assert words in caplog.text


@pytest.mark.parametrize(("schedule", "said"), [(0, True), (4, False)])
def test_resuming_with_other_steps_says_what_becomes_of_the_schedule(
    schedule: int, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plans.plan_of(plans.problem_of(), [[1]])
    settings = killing.settings_of(tmp_path / "run", plan)
    settings = msgspec.structs.replace(
        settings, steps=8, recipe=msgspec.structs.replace(settings.recipe, length=schedule)
    )
    at = Path(settings.out) / "checkpoints" / "step-00000004"
    at.mkdir(parents=True)
    index = Index(
        steps=4, plan_hash=plan.hash, run=run_of(plan, settings), files={}, parameters={},
        schedule=4,
    )  # fmt: skip
    (at / INDEX).write_bytes(seal(index))
    with caplog.at_level(logging.WARNING, "hetlab"):
        assert _resumed(plan, settings).resume == str(at)
    assert ("ends after 8 steps and ended after 4" in caplog.text) is said
    assert ("--schedule-steps 4 keeps it" in caplog.text) is said
