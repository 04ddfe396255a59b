"""Options of plan and demo that are wrong are refused before anything is read or searched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sim.errors import UsageError
from sim.problem import load_problem
from strategies.search.options import Choices, choices_of


def hetlab(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from sim.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["plan", "no", "no", "no", "--fail-if", "speed>1"], 2, "no metric speed"),
        (["plan", "no", "no", "no", "-o", "none/p.json"], 4, "no folder none"),
        (["plan", "no", "no", "no", "--store", "none/s"], 4, "no folder none"),
        (["demo", "--cluster", "no", "--folder", "file/x"], 4, "is a file"),
        (
            ["plan", "v100_t4", "gpt2_355m", "v100_t4", "--set", "job.global_batch=x"],
            4,
            "hetlab: --set job.global_batch=x:global_batch: not a number and a unit",
        ),
        (
            ["plan", "v100_t4", "gpt2_355m", "v100_t4", "--pin", "tp=8,pp=2"],
            2,
            "one knob per --pin: --pin tp=8 --pin pp=2",
        ),
    ],
)
def test_wrong_options_are_refused_early(
    tmp_path: Path, args: list[str], code: int, text: str
) -> None:
    (tmp_path / "file").write_text("")
    done = hetlab(*args, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "unexpected" not in done.stderr


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        ({"tp": "four"}, "--pin tp=four: expected a whole number"),
        ({"zero": "8,pp=2"}, "one knob per --pin"),
        ({"split_backward": "maybe"}, "--pin split_backward=maybe: expected yes or no"),
        ({"recompute": "some"}, "expected one of none selective full"),
        ({"tpp": "4"}, "no such pin: tpp; there are tp pp"),
    ],
)
def test_wrong_pins_say_what_is_expected(pins: dict[str, str], text: str) -> None:
    problem = load_problem("v100_t4", "gpt2_355m", "v100_t4")
    with pytest.raises(UsageError) as error:
        choices_of(problem, pins)
    assert text in str(error.value)
    assert "Expected `" not in str(error.value)


def test_switches_are_written_as_people_do() -> None:
    problem = load_problem("v100_t4", "gpt2_355m", "v100_t4")
    pins = {"split_backward": "no", "all_types": "yes", "accelerators": "T4, V100-SXM2-16GB"}
    found = choices_of(problem, pins)
    assert (found.split_backward, found.all_types) == (False, True)
    assert found.accelerators == ("T4", "V100-SXM2-16GB")


def test_help_names_every_pin(tmp_path: Path) -> None:
    done = hetlab("plan", "--help", cwd=tmp_path)
    words = set(re.findall(r"\w+", done.stdout))
    assert {f.name for f in msgspec.structs.fields(Choices)} <= words
