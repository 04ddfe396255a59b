"""The files the README shows are complete, and its commands name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hardware_profiles
from sim.checks import check_file
from sim.problem import load_problem

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("readme")
    for block in re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL):
        name = re.match(r"# ([\w.]+)", block)
        assert name is not None, "every file says its name"
        (place / name[1]).write_text(block)
    return place


def test_the_files_of_the_text_have_no_problem(folder: Path) -> None:
    files = sorted(folder.iterdir())
    assert [f.name for f in files] == ["cluster.yaml", "job.yaml"]
    assert [(check_file(f).kind, check_file(f).problems) for f in files] == [
        ("cluster", ()),
        ("job", ()),
    ]
    problem = load_problem(folder / "cluster.yaml", "llama2_7b", folder / "job.yaml")
    assert problem.machine.num_chips == 2 * 4 + 8
    assert problem.machine.accelerators["X1"].peak_flops_per_s == {"bf16": 300e12}


def test_commands_name_files_and_bundled_documents_that_exist(folder: Path) -> None:
    text = README.read_text()
    shell = "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL))
    written = set(re.findall(r"(?:-o|--gantt|--trace) (\S+)", shell))
    bundled = {
        f.name.rpartition(".")[0]
        for kind in ("clusters", "models", "jobs")
        for f in hardware_profiles.folder(kind).iterdir()
    }
    known = written | bundled | {f.name for f in folder.iterdir()}
    calls = re.findall(
        r"^(?:\$ )?\.venv/bin/hetlab (?:plan|check|simulate|export) (.*?)(?: -| *#|$)", shell, re.M
    )
    named = [word for call in calls for word in call.split()]
    assert len(named) > 10
    assert [word for word in named if word not in known] == []
    assert not re.findall(r"^(?:\$ )?hetlab ", shell, re.M)


def test_overrides_of_the_text_work() -> None:
    changes = re.findall(r'--set "?([^"\n]+)', README.read_text())
    assert len(changes) == 3
    for change in changes:
        load_problem("v100_t4", "gpt2_355m", "v100_t4", [change])
