"""A run's folder: one run at a time, nothing dropped too early; options are checked before."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

import real_runtime.restarts
from real_runtime.errors import RunError
from real_runtime.launch import LOG, _failure, prepare
from real_runtime.restarts import train
from real_runtime.run_folder import EARLIER, begun, held
from sim.cli import main
from sim.errors import HetlabError, InputError
from sim.plan.io import save_plan

sys.path.insert(0, str(Path(__file__).parent))
import killing
import plans

HISTORY = ("checkpoints/step-00000003/index.json", "events.jsonl", "tensorboard/scalars")
OLD = (*HISTORY, "spans.npz", "run.json")


def write_old(folder: Path) -> None:
    """What a run leaves."""
    for name in OLD:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")


def test_a_folder_is_held_by_one_run_and_let_go(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        with (
            pytest.raises(InputError, match=f"another run writes there.*process {os.getpid()} on"),
            held(tmp_path / "run"),
        ):
            pass
        assert not (tmp_path / "run" / EARLIER).exists()
    with held(tmp_path / "run"):
        pass
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="no run's folder"), held(tmp_path):
        pass
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.parametrize("error", [HetlabError, RunError])
@pytest.mark.parametrize("trains", [False, True])
def test_old_results_come_back_where_no_rank_began_to_train(
    trains: bool, error: type[HetlabError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = killing.settings_of(tmp_path / "mine", plans.plan_of(plans.problem_of(), [[1]]))
    folder = Path(settings.out)
    write_old(folder)

    def fails(ranks: int, folder: Path, *_: Any) -> None:
        assert not (folder / HISTORY[0]).exists()
        if trains:
            begun(folder)
        raise error("pre-flight")

    monkeypatch.setattr(real_runtime.restarts, "launch", fails)
    with pytest.raises(error, match="pre-flight"):
        train(settings, 1, 1, lambda line: None, lambda line: None)
    assert not (folder / EARLIER).exists()
    if trains:
        assert not (folder / HISTORY[0]).exists() and not (folder / "spans.npz").exists()
    else:
        assert all((folder / name).read_text() == "{}\n" for name in OLD)


def test_a_command_that_died_too_early_leaves_the_old_results_to_the_next(tmp_path: Path) -> None:
    settings = killing.settings_of(tmp_path / "mine", plans.plan_of(plans.problem_of(), [[1]]))
    folder = Path(settings.out)
    write_old(folder)
    prepare(settings)
    assert not (folder / "checkpoints").exists()
    with held(folder):
        assert all((folder / name).read_text() == "{}\n" for name in OLD)


def test_files_where_folders_go_do_no_harm_and_restarts_keep_the_launch_log(tmp_path: Path) -> None:
    settings = killing.settings_of(tmp_path / "mine", plans.plan_of(plans.problem_of(), [[1]]))
    folder = Path(settings.out)
    write_old(folder)
    for name in ("errors", "pids", LOG):
        (folder / name).write_text("")
    prepare(settings)
    assert (folder / "errors").is_dir() and (folder / "pids").is_dir()
    assert not (folder / LOG).exists()
    (folder / LOG).write_text("first")
    prepare(settings, again=True)
    assert (folder / LOG).read_text() == "first"


def test_a_dead_torchrun_and_a_removed_folder_are_named(tmp_path: Path) -> None:
    error = _failure(tmp_path, "", -9)
    assert isinstance(error, RunError) and "torchrun was ended by SIGKILL" in str(error)
    error = _failure(tmp_path / "gone", "", 1)
    assert isinstance(error, InputError) and "was removed while it ran" in str(error)


def hetlab(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["run", "plan.json", *args])
    return int(left.value.code or 0)


def test_the_command_refuses_before_it_touches_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(plans.plan_of(plans.problem_of(), [[1]]), "plan.json")
    write_old(Path("old"))
    Path("odd").mkdir()
    for name in ("run.json", "checkpoints"):
        Path("odd", name).write_text("{}")
    args = ("--data", str(plans.write_tokens(tmp_path)), "--allow-other-cluster", "--dry-run")
    raw = os.fsdecode(b"a\xff")
    for wrong, code, words in (
        (("--learning-rate", "inf"), 2, "--learning-rate inf: expected a finite number"),
        (("--weight-decay", "nan"), 2, "weight-decay"),
        (("--deadline", "inf"), 2, "deadline"),
        (("--deadline", "nan"), 2, "deadline"),
        (("--deadline", "1e15"), 2, "deadline"),
        (("--resume", "--overwrite"), 2, "contradict each other"),
        (("--weights", "nonexist"), 4, "no weights there"),
        (("--weights", "old"), 4, "no weights there"),
        (("--out", raw), 4, "--out: the path is not UTF-8; found b'a\\xff'"),
        (("--out", "old"), 4, "--overwrite to drop them"),
        (("--out", "odd"), 4, "a file has the name"),
        (("--out", "new", "--resume"), 4, "no checkpoint to resume from"),
    ):
        assert hetlab(*args, *wrong) == code, wrong
        assert words in " ".join(capsys.readouterr().err.split()), wrong
    assert hetlab(*args[:-1], "--out", "new", "--resume") == 4 and not Path("new").exists()
    assert hetlab(*args, "--out", "old", "--overwrite") == 0
    assert all(Path("old", name).read_text() == "{}\n" for name in OLD)
