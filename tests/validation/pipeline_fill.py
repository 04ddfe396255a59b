"""How full a real pipeline of two equal stages is, beside what its own compute allows.

    .venv/bin/python -m tests.validation.pipeline_fill

Trains plans of two stages on two processes, takes each step's measured compute spans, and works out
the makespan that 1F1B would have with these durations, no transfer and nothing to issue. What the
step took on top of it is transfers, waiting and the runtime itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from sim.plan.io import save_plan
from sim.plan.plan import Plan
from sim.report.spans import Spans
from tests.validation.runtime_prediction import SAMPLE, cases, problem_on

__all__ = ["Row", "fills", "ideal_makespan", "rows_of"]

Row = tuple[int, str, int, float, float]
"""(Rank, kind, microbatch, start [s], end [s]) of a compute op; rank is the stage."""


def ideal_makespan(rows: list[Row]) -> float:
    """Return what a two-stage step takes with these durations and nothing else [s].

    Each rank keeps its own order. F of stage 1 waits for F of stage 0, B of stage 0 for B of stage
    1, both of the same microbatch.
    """
    waiting = {
        rank: sorted((r for r in rows if r[0] == rank), key=lambda r: r[3]) for rank in (0, 1)
    }
    free = dict.fromkeys(waiting, 0.0)
    ended: dict[tuple[int, str, int], float] = {}
    while any(waiting.values()):
        moved = False
        for rank, mine in waiting.items():
            while mine:
                _, kind, mb, start, end = mine[0]
                other = (1 - rank, kind, mb)
                needs = (kind == "F" and rank == 1) or (kind == "B" and rank == 0)
                if needs and other not in ended:
                    break
                begin = max(free[rank], ended[other] if needs else 0.0)
                free[rank] = ended[rank, kind, mb] = begin + end - start
                mine.pop(0)
                moved = True
        if not moved:
            raise ValueError("the spans are of no two-stage pipeline")
    return max(ended.values())


def rows_of(spans: Spans, step: int) -> list[Row]:
    """Return the passes of one step."""
    rows = spans.take((spans["step"] == step) & spans.where("kind", lambda k: k in ("F", "B")))
    names = ("rank", "kind", "microbatch", "start_s", "end_s")
    return list(zip(*(rows[name].tolist() for name in names), strict=True))


def fills(spans: Spans) -> list[float]:
    """Return ideal over measured makespan of each step but the first two."""
    found = []
    for step in sorted(set(spans["step"].tolist()))[2:]:
        rows = rows_of(spans, step)
        took = max(r[4] for r in rows) - min(r[3] for r in rows)
        found.append(ideal_makespan(rows) / took)
    return found


def run(plan: Plan, folder: Path, steps: int) -> Spans:
    """Train a plan on this machine and return what it measured."""
    save_plan(plan, folder / "plan.json")
    command = [
        sys.executable, "-c", "from sim.cli import main; main()", "run", str(folder / "plan.json"),
        "--data", str(SAMPLE), "--steps", str(steps), "--out", str(folder / "run"),
        "--allow-other-cluster",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Spans.load(folder / "run" / "spans.npz")


def main() -> None:
    """Train, work out, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14)
    steps = parser.parse_args().steps
    plan = cases(problem_on("two_processes"))["pp2 m8"].plan
    with tempfile.TemporaryDirectory(prefix="hetlab-fill-") as folder:
        found = fills(run(plan, Path(folder), steps))
    low, middle, high = np.percentile(found, (25, 50, 75))
    print(
        f"two equal stages, 8 microbatches: {middle:.1%} of the ideal makespan, quartiles "
        f"{low:.1%} to {high:.1%}, {len(found)} steps"
    )


if __name__ == "__main__":
    main()
