"""Tables of the study of late updates: `.venv/bin/python -m tests.validation.async_study`.

Four workers, one three times slower and one behind a WAN link; then fixed delays with the published
rate, beside the confound, the bounds and the limits. ``--pictures DIR`` draws them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.engine.faults import Straggler
from sim.engine.simulate import simulate
from sim.model.amounts import rank_params
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.problem import Problem, load_problem
from strategies.compose import compose
from strategies.data.cosim_order import round_ends
from strategies.data.study import Outcome, common_loss, outcome_of, summary
from strategies.data.study_delays import DelayRow, fixed_delays
from strategies.data.study_plot import draw_delays, draw_study
from strategies.data.study_tasks import study_task
from strategies.data.study_timing import WAYS, Timing, timing_of

__all__ = [
    "RATES",
    "SECONDS",
    "SLOW",
    "delay_rows",
    "envelope",
    "given",
    "near_samples_per_s",
    "outcomes",
    "timings",
]

SECONDS = 1200.0
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
SLOW = Straggler(ranks=(1,), factor=3.0)
LEARNERS = ("breast_cancer", "digits", "rings")
BATCHES = {"linear": (16, 0), "breast_cancer": (16,), "rings": (16,)}
"""Samples per gradient; 16 is the batch of a worker in the official code of arXiv:2308.09430."""


def given() -> tuple[Problem, PlanDraft]:
    problem = load_problem("uneven_workers", "gpt2_355m", "uneven_workers")
    grid = [("megatron", {}), ("1f1b", {}), ("ddp", {"microbatch": 32}), ("partition", {})]
    return problem, compose(problem, grid)


def envelope(problem: Problem) -> dict[str, float]:
    """By hand: no step is shorter and no rate is higher than these."""
    job, chip = problem.job, next(iter(problem.machine.accelerators.values()))
    params = sum(rank_params(problem.model.blocks))
    tokens = job.global_batch / 4 * job.sequence_length
    compute = 6 * params * tokens / (chip.peak_flops_per_s["bf16"] * chip.gemm_efficiency)
    wan = next(link.flow_cap for link in problem.machine.links if link.kind == "wan")
    push, pull = params * job.gradient_bytes / wan, params * job.param_bytes / wan
    return {
        "compute of a worker [s]": compute,
        "gradients over the WAN [s]": push,
        "parameters over the WAN [s]": pull,
        "sync step at least [s]": SLOW.factor * compute + push,
        "sync samples/s at most": job.global_batch / (SLOW.factor * compute + push),
        "async updates/s at most": 2 / compute
        + 1 / (SLOW.factor * compute)
        + 1 / (compute + push + pull),
    }


def near_samples_per_s() -> float:
    """Synchronous, without the far worker, and with few microbatches on the slow one [1/s]."""
    problem, _ = given()
    counts = {"microbatch": 32, "microbatches": (7, 2, 7)}
    grid = [("megatron", {"chips": (0, 1, 2)}), ("1f1b", {}), ("ddp", counts), ("partition", {})]
    run = simulate(lower(problem, compose(problem, grid)), problem, steps=4, faults=[SLOW])
    ends = round_ends(run)
    return problem.job.global_batch / (ends[-1] - ends[-2])


def timings() -> tuple[Timing, ...]:
    problem, draft = given()
    return tuple(timing_of(problem, draft, w, seconds=SECONDS, faults=[SLOW]) for w in WAYS)


def outcomes(learner: str, found: Sequence[Timing], seed: int = 0) -> tuple[Outcome, ...]:
    task = study_task(learner, seed=seed)  # type: ignore[arg-type]
    return tuple(outcome_of(task, timing, RATES) for timing in found)


def delay_rows(
    learner: str, batch: int, *, repeats: int = 12, updates: int = 1600
) -> tuple[DelayRow, ...]:
    tasks = [study_task(learner, batch=batch, seed=s) for s in range(repeats)]  # type: ignore[arg-type]
    return fixed_delays(tasks, updates=updates, every=10)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as columns, one line per name."""
    for name in rows[0]:
        cells = [r[name] for r in rows]
        texts = [c if isinstance(c, str) else f"{c:.4g}" for c in cells]
        print(f"{name:16}" + "".join(f"{t:>18}" for t in texts))


def show_delays(rows: Sequence[DelayRow]) -> None:
    show(
        [
            {
                "delay": r.tau,
                "rate, its cap": r.rate,
                "train": r.train[-1],
                "gap": r.gap[-1],
                "gap, prompt *": r.prompt_gap[-1],
                "gap, one rate": r.level_gap[-1],
                "gap, one loss": r.at_loss_gap,
                "  after updates": r.at_loss_updates,
                "B [L^2/mu]": r.bound.value,
                "limit: cap": r.limits[0].value,
                "limit: no swing": r.limits[1].value,
                "limit: stable": r.limits[2].value,
            }
            for r in rows
        ]
    )
    print("* no delay, at the rate of that column")
    print(rows[0].bound)
    for limit in rows[0].limits:
        print(limit)


def show_curves(rows: Sequence[DelayRow]) -> None:
    print(f"{'updates':>8}" + "".join(f"{f'train, gap {r.tau}':>20}" for r in rows))
    for i in range(0, len(rows[0].updates), 16):
        cells = (f"{r.train[i]:.4f}, {r.gap[i]:+.4f}" for r in rows)
        print(f"{rows[0].updates[i]:>8}" + "".join(f"{c:>20}" for c in cells))


def main(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path)
    folder: Path | None = parser.parse_args(args).pictures
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    problem, _ = given()
    print("by hand")
    for name, value in envelope(problem).items():
        print(f"  {name:32} {value:8.3f}")
    print(f"sync, near workers, 7 + 2 + 7 microbatches: {near_samples_per_s():.1f} samples/s")
    found = timings()
    for learner in LEARNERS:
        each = outcomes(learner, found)
        print(f"\n{learner}: {SECONDS:g} simulated s, one loss = {common_loss(each):.4g}")
        show(summary(each))
        if folder:
            draw_study(each).savefig(folder / f"study_{learner}.png")
    for learner, batches in BATCHES.items():
        for batch in batches:
            rows = delay_rows(learner, batch)
            print(f"\nfixed delays, {learner}, {f'batches of {batch}' if batch else 'all samples'}")
            show_delays(rows)
            show_curves(rows)
            if folder:
                draw_delays(rows).savefig(folder / f"delays_{learner}_{batch}.png")
    if folder:
        print(f"\npictures in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
