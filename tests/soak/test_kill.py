"""20 runs whose ranks are killed at random moments train as if none had died."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

import killing
import plans

from real_runtime.restarts import train

pytestmark = pytest.mark.timeout(600)

RUNS = 20
PLANS: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "pp2": ([[1], [1]], {}),
    "dp2 zero1": ([[1, 1]], {"microbatches": (2, 2), "zero": 1}),
    "tp2": ([[2]], {}),
    "tp 1 to 2": ([[1], [2]], {"schedule": "zb-h1"}),
}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Loss curve of each plan when nothing happens."""
    found = {}
    for name, (tp, knobs) in PLANS.items():
        plan = plans.plan_of(plans.problem_of(), tp, **knobs)
        settings = killing.settings_of(tmp_path_factory.mktemp("quiet") / "run", plan)
        train(settings, plan.placement.num_ranks, 0, lambda line: None, print)
        found[name] = killing.curve(Path(settings.out))[0]
    return found


@pytest.mark.parametrize("number", range(RUNS))
def test_killed_ranks_change_no_loss(number: int, quiet: dict[str, Any], tmp_path: Path) -> None:
    seed = int(os.environ["HETLAB_SOAK_SEED"]) + number
    name = list(PLANS)[number % len(PLANS)]
    tp, knobs = PLANS[name]
    plan = plans.plan_of(plans.problem_of(), tp, **knobs)
    hits, warned = killing.killed_run(tmp_path / "run", plan, seed, kills=1 + number % 2)
    print(f"run {number}, seed {seed}, {name}: {hits}", *warned, sep="\n  ")
    curve, same_twice = killing.curve(tmp_path / "run" / "run")
    assert hits and curve == quiet[name] and same_twice
