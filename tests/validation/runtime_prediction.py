"""Predicted beside measured step times on this machine, nothing tuned to the measured plans.

    .venv/bin/python -m tests.validation.runtime_prediction

Probes the machine (or reads ``--cluster``), simulates plans of two ranks, and trains each of them:
one thread and one core per rank, repeats interleaved over plans, so that all see the same machine.
One plan has a rank whose core another process shares half of. Quiet machines only: the load
average is printed with each repeat. ``--emulated`` takes plans of three and four ranks instead, on
shares of this machine's cores (tests.validation.emulated_prediction), and reports them apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import real_runtime
from sim.engine.faults import Straggler
from sim.engine.simulate import simulate
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.io import save_plan
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem
from sim.report.metrics import pace_of
from sim.report.record import spans_of_run
from tests.validation.emulated_prediction import (
    Rehearsal,
    emulated_cases,
    emulated_problem,
    rehearse,
)

__all__ = ["Case", "cases", "predicted_s", "problem_on", "summary"]

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
JOB: dict[str, Any] = {
    "global_batch": 16, "sequence_length": 128, "dtype": "fp32", "optimizer": "adamw",
}  # fmt: skip
SAMPLE = Path(real_runtime.__file__).parent / "sample.txt"
SPINNER = "while True: pass"
SKIPPED = 2
"""First steps of a run that do not count: memory is touched, connections are made."""


class Case(NamedTuple):
    """A plan, and the rank whose core another process shares, -1 for none."""

    plan: Plan
    slowed: int = -1


def problem_on(cluster: str | Path | dict[str, Any]) -> Problem:
    """The model and job of this study on a cluster of two chips."""
    return load_problem(cluster, MODEL, JOB)


def cases(problem: Problem) -> dict[str, Case]:
    """Name -> plan, written by hand: no search chose them."""
    blocks = len(problem.model.blocks)
    even, uneven = (0, blocks // 2, blocks), (0, 3, blocks)
    drafts = {
        "dp2": _draft([[1, 1]], (2, 2), 4),
        "dp2 m8": _draft([[1, 1]], (8, 8), 1),
        "pp2 m2": _draft([[1], [1]], (2,), 8, cuts=even),
        "pp2 m8": _draft([[1], [1]], (8,), 2, cuts=even),
        "pp2 m8 uneven": _draft([[1], [1]], (8,), 2, cuts=uneven),
        "pp2 m8 recompute": _draft([[1], [1]], (8,), 2, cuts=even, recompute="full"),
        "tp2": _draft([[2]], (2,), 8),
        "dp2 recompute": _draft([[1, 1]], (2, 2), 4, recompute="full"),
    }
    found = {name: Case(lower(problem, draft)) for name, draft in drafts.items()}
    return found | {"dp2 slowed": Case(found["dp2"].plan, slowed=1)}


def _draft(
    tp: list[list[int]],
    microbatches: tuple[int, ...],
    microbatch: int,
    cuts: tuple[int, ...] = (),
    recompute: Any = "none",
) -> PlanDraft:
    cells, chip = [], 0
    for stage, row in enumerate(tp):
        for replica, size in enumerate(row):
            chips = tuple(range(chip, chip + size))
            chip += size
            cells.append(
                CellKnobs(stage=stage, replica=replica, chips=chips, tp=size, recompute=recompute)
            )
    return PlanDraft(
        cells=tuple(cells),
        pipeline=PipelineKnobs(microbatch=microbatch, cuts=cuts),
        data=DataKnobs(microbatches=microbatches),
    )


def predicted_s(case: Case, problem: Problem) -> float:
    """Simulated step time [s]; a shared core computes half as fast."""
    faults = [Straggler(ranks=(case.slowed,), factor=2.0)] if case.slowed >= 0 else []
    run = simulate(case.plan, problem, faults=faults)
    return pace_of(spans_of_run(run), barrier=case.plan.barrier).step_time_s


def measured_s(case: Case, folder: Path, steps: int) -> float:
    """Median step time of one run [s], each rank on a core of its own."""
    save_plan(case.plan, folder / "plan.json")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two ranks need two cores")
    command = [
        sys.executable, "-c", "from sim.cli import main; main()", "run", str(folder / "plan.json"),
        "--data", str(SAMPLE), "--steps", str(steps + SKIPPED), "--out", str(folder / "run"),
    ]  # fmt: skip
    with (
        _shared(cores[case.slowed] if case.slowed >= 0 else -1),
        # hetlab run takes as many threads per rank as it may use cores per rank, and pins them.
        subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as run,
    ):  # fmt: skip
        assert run.stderr is not None
        said = run.stderr.read()
        if run.wait():
            raise SystemExit(said)
    events = [json.loads(x) for x in (folder / "run" / "events.jsonl").read_text().splitlines()]
    seconds = [e["seconds"] for e in events if e["event"] == "step"]
    return float(np.median(seconds[SKIPPED:]))


@contextmanager
def _shared(core: int) -> Iterator[None]:
    """Let another process use a core as much as a rank does; -1 for none."""
    if core < 0:
        yield
        return
    command = ["taskset", "-c", str(core), sys.executable, "-c", SPINNER]
    with subprocess.Popen(command) as spinner:
        try:
            yield
        finally:
            spinner.kill()


def summary(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, Any]:
    """Errors and order of the predictions.

    Args:
        predicted, measured: [s] by plan.
    """
    from scipy.stats import spearmanr

    names = list(predicted)
    left, right = ([d[n] for n in names] for d in (predicted, measured))
    errors = [abs(a / b - 1) for a, b in zip(left, right, strict=True)]
    return {
        "median_absolute_error": float(np.median(errors)),
        "largest_absolute_error": max(errors),
        "rank_correlation": float(spearmanr(left, right).statistic),
        "predicted_order": sorted(names, key=predicted.__getitem__),
        "measured_order": sorted(names, key=measured.__getitem__),
        "measured_spread": max(right) / min(right) - 1,
    }


def _probe(folder: Path, quick: bool) -> Path:
    command = [
        sys.executable, "-c", "from sim.cli import main; main()", "probe", "--threads", "1",
        "--out", str(folder),
    ]  # fmt: skip
    subprocess.run(command + ["--quick"] * quick, check=True, stdout=sys.stderr)
    return folder / "clusters" / "probed.yaml"


def main(argv: list[str] | None = None) -> None:
    """Probe, predict, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", help="probed before; otherwise the machine is probed now")
    parser.add_argument("--quick", action="store_true", help="a quick probe")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="that count, of each run")
    parser.add_argument("--plans", default="", help="names, separated by commas; all by default")
    parser.add_argument("--emulated", action="store_true", help="plans of three and four ranks")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="hetlab-prediction-") as temporary:
        folder = Path(temporary)
        # What hetlab probe has seen before has no say about the plans of this script.
        os.environ["XDG_STATE_HOME"] = str(folder)
        cluster = Path(args.cluster) if args.cluster else _probe(folder / "profiles", args.quick)
        problem = problem_on(cluster)
        if args.emulated:
            _emulated(problem, folder, args)
            return
        chosen = cases(problem)
        if args.plans:
            chosen = {name: chosen[name] for name in args.plans.split(",")}
        predicted = {name: predicted_s(case, problem) for name, case in chosen.items()}
        times: dict[str, list[float]] = {name: [] for name in chosen}
        loads = [os.getloadavg()[0]]
        for k in range(args.repeats):
            for name, case in chosen.items():
                at = folder / name.replace(" ", "-")
                at.mkdir(exist_ok=True)
                times[name].append(measured_s(case, at, args.steps))
            loads.append(os.getloadavg()[0])
            print(f"repeat {k + 1}/{args.repeats}: load average {loads[-1]:.2f}", flush=True)
    measured = {name: float(np.median(t)) for name, t in times.items()}
    found = summary(predicted, measured)
    _print(predicted, measured, times, found, loads)
    if args.out:
        document = {"predicted_s": predicted, "measured_s": times, "load": loads, **found}
        args.out.write_text(json.dumps(document, indent=2) + "\n")


def _emulated(probed: Problem, folder: Path, args: argparse.Namespace) -> None:
    """Rehearse the plans of three and four ranks, interleaved, and print."""
    problem = emulated_problem(probed)
    chosen = emulated_cases(problem)
    if args.plans:
        chosen = {name: chosen[name] for name in args.plans.split(",")}
    runs: dict[str, list[Rehearsal]] = {name: [] for name in chosen}
    loads = [os.getloadavg()[0]]
    for k in range(args.repeats):
        for name, plan in chosen.items():
            at = folder / name.replace(" ", "-")
            at.mkdir(exist_ok=True)
            runs[name].append(rehearse(plan, problem.documents["cluster"], SAMPLE, at, args.steps))
        loads.append(os.getloadavg()[0])
        print(f"repeat {k + 1}/{args.repeats}: load average {loads[-1]:.2f}", flush=True)
    predicted = {n: float(np.median([r.predicted_s for r in x])) for n, x in runs.items()}
    times = {n: [r.measured_s for r in x] for n, x in runs.items()}
    found = summary(predicted, {n: float(np.median(t)) for n, t in times.items()})
    print("emulated, plans of 3 and 4 ranks:")
    _print(predicted, {n: float(np.median(t)) for n, t in times.items()}, times, found, loads)
    for name, x in runs.items():
        scales, late = [r.scale for r in x], max(r.late for r in x)
        print(f"{name:<20}1 s lasts {np.median(scales):.3g} s, passes late by {late:.1%} at most")
    if args.out:
        document = {n: [r._asdict() for r in x] for n, x in runs.items()}
        args.out.write_text(json.dumps({"runs": document, "load": loads, **found}, indent=2) + "\n")


def _print(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    times: Mapping[str, list[float]],
    found: Mapping[str, Any],
    loads: list[float],
) -> None:
    print(f"{'plan':<20}{'predicted':>12}{'measured':>12}{'quartiles':>22}{'error':>9}")
    for name in found["measured_order"]:
        low, high = np.percentile(times[name], (25, 75))
        error = predicted[name] / measured[name] - 1
        print(
            f"{name:<20}{predicted[name] * 1e3:>9.1f} ms{measured[name] * 1e3:>9.1f} ms"
            f"{low * 1e3:>9.1f} to {high * 1e3:>6.1f} ms{error:>9.1%}"
        )
    print(f"worst over best plan: {found['measured_spread']:+.0%}")
    print(
        f"median absolute error {found['median_absolute_error']:.1%}, largest "
        f"{found['largest_absolute_error']:.1%}; rank correlation {found['rank_correlation']:.2f}"
    )
    print("predicted order: " + ", ".join(found["predicted_order"]))
    print("measured order:  " + ", ".join(found["measured_order"]))
    print("load average:    " + " ".join(f"{x:.2f}" for x in loads))


if __name__ == "__main__":
    main()
