"""plan with --budget and --sub-groups, as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys

PLAN = ("plan", "v100_t4", "gpt2_355m", "v100_t4", "--top", "2", "--pin", "microbatch=1")


def hetlab(*args: str) -> subprocess.CompletedProcess[str]:
    code = "from sim.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=110
    )


def test_a_budget_of_nothing_gives_a_plan_and_says_it_was_stopped() -> None:
    done = hetlab(*PLAN, "--budget", "0")
    assert done.returncode == 0, done.stderr
    assert "stopped early" in done.stdout and "short of" not in done.stdout


def test_sub_groups_are_tried_and_reported() -> None:
    pins = ("--pin", "dp=2", "--pin", "chunks=1", "--pin", "families=pipeline")
    plain = hetlab(*PLAN, *pins, "--json")
    assert plain.returncode == 0, plain.stderr
    fine = hetlab(*PLAN, *pins, "--sub-groups", "--json")
    assert fine.returncode == 0, fine.stderr
    times = [json.loads(x.stdout)["metrics"]["step_time_s"] for x in (fine, plain)]
    assert times[0] <= times[1]
    shown = hetlab(*PLAN, *pins, "--sub-groups")
    assert "ways to cut the types tried" in shown.stdout
