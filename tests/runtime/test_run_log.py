"""What a run says of each step: the event, the line for people, and TensorBoard's scalars."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import plans
import recorded

from real_runtime.run_log import EVENTS, SCALARS, RunLog, mend, mfu_at
from real_runtime.summary import document_of
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.basis import basis_of
from sim.report.metrics import rates_of


class Result(msgspec.Struct, frozen=True):
    loss: float = 5.5
    norm: float = 1.25
    rate: float = 3e-4
    seconds: float = 0.5


def planned() -> tuple[Plan, Problem]:
    problem = recorded.problem_of(recorded.machine())
    return lower(problem, plans.draft_of([[1], [1]], (4,), microbatch=4, cuts=(0, 5, 10))), problem


def written(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


def test_a_step_says_loss_rate_utilisation_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, problem = planned()
    log = RunLog(tmp_path, 0, plan, problem, 2)
    log.step(1, Result(), 2.0**30)
    log.close()
    (event,) = written(tmp_path)
    rates = rates_of(0.5, basis_of(plan, problem.machine, problem.model))
    assert event["tokens_per_s"] == rates["tokens_per_s"] == 16 * 64 / 0.5
    assert event["mfu"] == pytest.approx(rates["mfu"]) and rates["mfu"]
    assert (event["loss"], event["grad_norm"], event["learning_rate"]) == (5.5, 1.25, 3e-4)
    assert event["memory_bytes"] == 2.0**30
    said = capsys.readouterr().err
    assert "step 2/2  loss 5.5000" in said and f"MFU {rates['mfu']:.0%}" in said
    assert "1.00 GiB" in said


@pytest.mark.parametrize("cut", [b'{"event": "st', b"\xff\x00", b""])
def test_a_last_line_that_a_death_cut_off_is_dropped(cut: bytes, tmp_path: Path) -> None:
    plan, problem = planned()
    (tmp_path / EVENTS).write_bytes(b'{"event": "start"}\n' + cut)
    log = RunLog(tmp_path, 0, plan, problem, 2)
    log.write("end")
    log.close()
    assert [e["event"] for e in written(tmp_path)] == ["start", "end"]
    mend(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, problem = planned()
    log = RunLog(tmp_path, 1, plan, problem, 2, scalars=True)
    log.write("start")
    log.step(0, Result(), 1.0)
    log.say("nothing")
    log.close()
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().err


def test_the_final_document_has_utilisation_and_memory(tmp_path: Path) -> None:
    plan, problem = planned()
    folder = recorded.record(tmp_path / "run", plan, problem)
    events = written(folder)
    seconds = events[-1]["seconds"]
    start = events[0] | {"spec_hash": "", "version": ""}
    steps = [e | {"loss": 5.0} for e in events[1:]]
    end = {"event": "end", "memory_bytes": [1.0, 2.0]}
    (folder / EVENTS).write_text("".join(json.dumps(e) + "\n" for e in (start, *steps, end)))
    document = document_of(folder, plan, problem)
    ideal = mfu_at(plan, problem)
    assert ideal is not None and document["mfu"] == pytest.approx(ideal / seconds)
    assert document["memory_bytes"] == [1.0, 2.0]
    assert document["tokens_per_s"] == pytest.approx(16 * 64 / seconds)


def test_scalars_come_back_as_tensorboard_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the runtime needs PyTorch")
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan, problem = planned()
    for first, losses in ((0, (5.0, 4.0, 9.0)), (2, (3.0, 2.0))):  # the second goes on from step 2
        log = RunLog(tmp_path, 0, plan, problem, 4, scalars=True)
        for step, loss in enumerate(losses, first):
            log.step(step, Result(loss=loss), 7.0)
        log.close()
    read = EventAccumulator(str(tmp_path / SCALARS))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {
        f"train/{name}"
        for name in (
            "loss", "grad_norm", "learning_rate", "seconds", "tokens_per_s", "mfu", "memory_bytes",
        )
    }  # fmt: skip
    found = [(e.step, e.value) for e in read.Scalars("train/loss")]
    assert found == [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0)]
    assert {e.value for e in read.Scalars("train/memory_bytes")} == {7.0}
