"""hetlab explain and hetlab compare of two plan files, mistakes included."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from sim.plan.io import load_plan, save_plan
from sim.plan.lower import lower
from sim.plan.uniform import uniform
from sim.problem import load_problem
from tests.cli.test_check_and_simulate import hetlab


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plans")
    p = load_problem("v100_t4", "gpt2_355m", "v100_t4")
    for name, knobs in {"a": {"recompute": "full"}, "b": {"zero": 1}}.items():
        draft = uniform(p.model, p.job.global_batch, range(16), pp=4, tp=2, **knobs)
        save_plan(lower(p, draft), place / f"{name}.json")
    bare = msgspec.structs.replace(load_plan(place / "a.json"), problem={}, problem_hash="")
    save_plan(bare, place / "bare.json")
    return place


def test_explain(folder: Path) -> None:
    done = hetlab("explain", "a.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    for words in ("where a step goes", "critical path", "bubble", "fullest memory", "inputs:"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_explain_as_json_and_unfolded(folder: Path) -> None:
    found = [
        json.loads(hetlab("explain", "a.json", "--json", more, cwd=folder).stdout)
        for more in ("--fold", "--no-fold")
    ]
    for document in found:
        step = document["step_time_s"]
        assert sum(document["parts"].values()) == pytest.approx(step, rel=1e-9)
        assert sum(r["seconds"] for r in document["path"]) == pytest.approx(step, rel=1e-9)
    assert [r["first"] for r in found[0]["path"]] == [r["first"] for r in found[1]["path"]]


def test_against_another_plan_from_stdin(folder: Path) -> None:
    piped = (folder / "b.json").read_bytes()
    done = hetlab("explain", "a.json", "--against", "-", "--json", cwd=folder, stdin=piped)
    against = json.loads(done.stdout)["against"]
    assert {k["name"] for k in against["knobs"]} == {"recompute", "zero"}
    total = sum(r["difference_s"] for r in against["parts"])
    assert total == pytest.approx(against["difference_s"], rel=0.01)


def test_compare_of_two_plans_prints_the_difference(folder: Path) -> None:
    done = hetlab("compare", "a.json", "b.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "difference by part" in done.stdout
    assert "where a step goes" not in done.stdout
    whole = hetlab("explain", "a.json", "--against", "b.json", cwd=folder).stdout
    start = done.stdout.index("difference by part")
    assert done.stdout[start : done.stdout.index("assumed:")] in whole


def test_mistakes_are_one_message(folder: Path) -> None:
    cases = {
        ("explain", "none.json"): (4, "cannot read the plan file"),
        ("explain", "bare.json"): (4, "the plan carries no problem"),
        ("explain", "a.json", "--against", "bare.json"): (4, "the plan carries no problem"),
        ("explain", "-", "--against", "-"): (2, "only one of the two plans"),
        ("compare", "a.json", "b.json", "--cluster", "v100_t4"): (2, "--cluster is for a run"),
        ("compare", "a.json", "nothing"): (4, "nothing"),
    }
    for args, (code, words) in cases.items():
        done = hetlab(*args, cwd=folder, stdin=b"")
        assert done.returncode == code, (args, done.stderr)
        assert words in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
        assert not done.stdout
