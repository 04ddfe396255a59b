"""Folders of runs that never ran: spans simulated on a machine with known other numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from sim.engine.simulate import simulate
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem
from sim.report.metrics import pace_of
from sim.report.record import spans_of_run
from sim.report.spans import Spans

CHIP: dict[str, Any] = {
    "name": "CPU", "memory": "4 GiB", "memory_bandwidth": "10 GB/s",
    "peaks": {"fp32": "60 GFLOP/s"},
    "gemm_efficiency": 0.6, "gemm_half": 8, "attention_efficiency": 0.2, "memory_efficiency": 0.4,
    "kernel_overhead": "100 us", "async_compute": False,
}  # fmt: skip
LINK: dict[str, Any] = {"rate": "1 GB/s", "latency": "20 us"}


def machine(link: dict[str, Any] | None = None, chips: int = 2, **chip: Any) -> dict[str, Any]:
    """A cluster document of one node."""
    node = {"accelerator": "CPU", "chips": chips, "count": 1, "fabric": LINK | (link or {})}
    return {
        "name": "pair",
        "profiles": {"accelerators": [CHIP | chip]},
        "sites": [{"name": "here", "nodes": [node]}],
    }


def problem_of(cluster: dict[str, Any], batch: int = 16) -> Problem:
    job = {"global_batch": batch, "sequence_length": 64, "dtype": "fp32", "optimizer": "adamw"}
    return load_problem(cluster, "llama_tiny", job)


def record(folder: Path, plan: Plan, problem: Problem, steps: int = 4, noise: float = 0.0) -> Path:
    """Write a run's folder whose spans are a simulation of ``plan`` on another problem."""
    folder.mkdir(parents=True)
    spans = spans_of_run(simulate(plan, problem, steps=steps, fold=False))
    names = dict(spans.names) | {"source": ("measured",)}
    columns = dict(spans.columns)
    if noise:
        draw = np.random.default_rng(3).lognormal(0.0, noise, len(spans))
        took = (columns["end_s"] - columns["start_s"]) * draw
        columns["end_s"] = columns["start_s"] + took
    Spans(columns, names).save(folder / "spans.npz")
    seconds = pace_of(spans, barrier=plan.barrier).step_time_s
    start = {
        "event": "start", "plan_hash": plan.hash, "dtype": "fp32", "device": "cpu", "ranks": 2,
        "seed": 0,
    }  # fmt: skip
    events = [start] + [{"event": "step", "step": k, "seconds": seconds} for k in range(steps)]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return folder
