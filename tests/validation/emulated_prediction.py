"""Plans of three and four ranks under ``hetlab run --emulate``, predicted beside measured.

    .venv/bin/python -m tests.validation.runtime_prediction --emulated

The cluster is made of this machine's probed chip, one a node, and of one half as fast, behind NICs
of 1 Gb/s with 1 ms. An emulated second's length comes from the ranks' own passes in each run, so
what is compared is everything else: schedules, uneven stages and replicas, unlike chips, links.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.io import save_plan
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem

__all__ = ["Rehearsal", "emulated_cases", "emulated_cluster", "emulated_problem", "rehearse"]

FAST, HALF = 4, 2
"""Nodes of each chip type: chips 0 to 3 are the probed one, 4 and 5 half as fast."""
FIRST = 4
"""First steps of a run, in which the emulation finds its pace (real_runtime.emulate)."""


class Rehearsal(NamedTuple):
    """A run's predicted and measured step time [s], real seconds of an emulated one, and by what
    share its passes were late at most.
    """

    predicted_s: float
    measured_s: float
    scale: float
    late: float


def emulated_cluster(problem: Problem) -> dict[str, Any]:
    """The cluster of this study, from the chip of a problem's machine."""
    (document,) = problem.documents["cluster"]["profiles"]["accelerators"]
    chip = problem.machine.accelerators[document["name"]]
    half = document | {
        "name": f"half {chip.name}", "source": f"half the speed of {chip.name}, made up",
        "confidence": "low", "evidence": "assumed",
        "peaks": {k: f"{v / 2} FLOP/s" for k, v in chip.peak_flops_per_s.items()},
        "memory_bandwidth": f"{chip.memory_bytes_per_s / 2} B/s",
        "kernel_overhead": f"{chip.kernel_overhead_s * 2} s",
    }  # fmt: skip
    node = {"chips": 1, "nics": {"rate": "1 Gb/s", "latency": "1 ms"}}
    nodes = [
        node | {"accelerator": d["name"], "count": count, "name": d["name"]}
        for d, count in ((document, FAST), (half, HALF))
    ]
    return {
        "name": "emulated", "profiles": {"accelerators": [document, half]},
        "sites": [{"name": "here", "nodes": nodes}],
    }  # fmt: skip


def emulated_cases(problem: Problem) -> dict[str, Plan]:
    """Name -> plan, written by hand: no search chose them."""
    n = len(problem.model.blocks)
    drafts = {
        "pp3": _draft(((0,), (1,), (2,)), (8,), 2, (0, 5, 9, n)),
        "pp3 uneven": _draft(((0,), (1,), (2,)), (8,), 2, (0, 3, 6, n)),
        "pp3 unlike": _draft(((0,), (4,), (1,)), (8,), 2, (0, 6, 8, n)),
        "pp4": _draft(((0,), (1,), (2,), (3,)), (8,), 2, (0, 4, 7, 10, n)),
        "dp3": _draft(((0, 1, 2),), (6, 5, 5), 1),
        "dp3 unlike": _draft(((0, 1, 4),), (6, 6, 4), 1),
        "dp2 x pp2": _draft(((0, 1), (2, 3)), (4, 4), 2, (0, 7, n)),
    }
    return {name: lower(problem, draft) for name, draft in drafts.items()}


def _draft(
    chips: tuple[tuple[int, ...], ...],
    microbatches: tuple[int, ...],
    microbatch: int,
    cuts: tuple[int, ...] = (),
) -> PlanDraft:
    """A draft; ``chips[stage][replica]`` is the cell's chip."""
    cells = tuple(
        CellKnobs(stage=s, replica=r, chips=(chip,), tp=1)
        for s, row in enumerate(chips)
        for r, chip in enumerate(row)
    )
    return PlanDraft(
        cells=cells, pipeline=PipelineKnobs(microbatch=microbatch, cuts=cuts),
        data=DataKnobs(microbatches=microbatches),
    )  # fmt: skip


def emulated_problem(probed: Problem) -> Problem:
    """The same model and job on the cluster of this study."""
    documents = probed.documents
    return load_problem(emulated_cluster(probed), documents["model"], documents["job"])


def rehearse(
    plan: Plan, cluster: dict[str, Any], data: Path, folder: Path, steps: int
) -> Rehearsal:
    """Run a plan emulated.

    Args:
        plan: to run. cluster: of it. data: to train on. folder: for the run's files.
        steps: that count.
    """
    save_plan(plan, folder / "plan.json")
    (folder / "cluster.yaml").write_text(json.dumps(cluster))  # JSON is YAML
    done = subprocess.run(
        (sys.executable, "-c", "from sim.cli import main; main()", "run",
         str(folder / "plan.json"), "--data", str(data), "--steps", str(steps + FIRST + 1),
         "--emulate", str(folder / "cluster.yaml"), "--out", str(folder / "run"), "--json"),
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    said = found["emulation"]
    return Rehearsal(
        said["predicted_step_time_s"], found["step_time_s"], said["scale"], max(said["late"])
    )
