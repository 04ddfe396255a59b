"""What a run comes to: its log and its measured spans, beside what the simulator said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from real_runtime.run_log import mfu_at
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.spans import Spans

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["document_of", "print_run"]

SHOWN = 5
"""Last steps whose spans give the idle share."""


def document_of(folder: Path, plan: Plan, problem: Problem) -> dict[str, Any]:
    """Everything about a finished run as plain data.

    The same functions read the measured and the simulated spans.

    Args:
        folder: of the run. plan, problem: that ran.
    """
    from sim.engine.simulate import simulate
    from sim.report.metrics import pace_of
    from sim.report.record import spans_of_run

    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    start, done, restarts = last_run(events)
    seconds = [e["seconds"] for e in done[1:] or done]
    middle, slow = np.percentile(seconds, [50, 95]).tolist()
    simulated = spans_of_run(simulate(plan, problem, steps=1 if plan.barrier else 8))
    tokens = plan.mathematics.global_batch * plan.mathematics.sequence_length
    ideal = mfu_at(plan, problem)
    return {
        "plan_hash": start["plan_hash"],
        "spec_hash": start["spec_hash"],
        "seed": start["seed"],
        "version": start["version"],
        "assumptions": list(plan.assumptions),
        "ranks": start["ranks"],
        "dtype": start["dtype"],
        "device": start["device"],
        "threads": start["threads"],
        "cores": start["cores"],
        "steps": len(done),
        "restarts": restarts,
        "first_loss": done[0]["loss"],
        "last_loss": done[-1]["loss"],
        "step_time_s": middle,
        "step_time_p95_s": slow,
        "tokens_per_s": tokens / middle,
        "mfu": ideal / middle if ideal is not None else None,
        "memory_bytes": events[-1].get("memory_bytes", []),
        "bubble_fraction": _idle(last_steps(folder, SHOWN)),
        "simulated_step_time_s": pace_of(simulated, barrier=plan.barrier).step_time_s,
        "simulated_bubble_fraction": _idle(simulated),
        "out": str(folder),
    }


def last_run(
    events: Sequence[dict[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Return the last run of a log: how it began, its steps, and how often it started again.

    A step that was trained twice counts as it came out last.

    Args:
        events: of the log.
    """
    starts = [i for i, e in enumerate(events) if e["event"] == "start"]
    while len(starts) > 1 and events[starts[-1] - 1]["event"] == "restart":
        starts.pop()
    mine = events[starts[-1] :]
    steps = {e["step"]: e for e in mine if e["event"] == "step"}
    restarts = sum(e["event"] == "restart" for e in mine)
    return mine[0], [steps[s] for s in sorted(steps)], restarts


def last_steps(folder: Path, count: int) -> Spans:
    """Return the measured spans of the last steps."""
    spans = Spans.load(folder / "spans.npz")
    step = spans.columns["step"]
    return spans.take(step > step.max() - count)


def _idle(spans: Spans) -> float:
    """Share of the time in which a rank computes nothing, mean over ranks."""
    from sim.report.busy import busy_of

    busy = busy_of(spans)
    return float(1 - np.average(busy.compute_s, weights=busy.weight) / busy.makespan_s)


def _mfu(d: dict[str, Any], plan: Plan) -> str:
    if d["mfu"] is None:
        return ""
    return f", MFU {d['mfu']:.1%} of the plan's {plan.mathematics.dtype} peaks"


def _counted(d: dict[str, Any]) -> str:
    """What counts as memory."""
    return "resident in its process" if d["device"] == "cpu" else "allocated on its device"


def _kept(d: dict[str, Any]) -> str:
    """Threads and cores of the ranks, where they compute on the processor."""
    if d["device"] != "cpu":
        return ""
    threads = f", {d['threads']} {'thread' if d['threads'] == 1 else 'threads'} a rank"
    cores = (",".join(map(str, mine)) for mine in d["cores"])
    return f"{threads}, on cores {' | '.join(cores)}" if d["cores"] else threads


def print_run(console: Console, d: dict[str, Any], plan: Plan) -> None:
    """Print a document, and the timeline of the run's last step."""
    from sim.report.text_gantt import text_gantt

    step, simulated = d["step_time_s"], d["simulated_step_time_s"]
    used = f"{max(d['memory_bytes'], default=0.0) / 2**30:.2f} GiB at most on a rank"
    rows = (
        ("loss", f"{d['first_loss']:.4f} -> {d['last_loss']:.4f} in {d['steps']} steps"),
        (
            "step time",
            f"{step * 1e3:,.1f} ms median, {d['step_time_p95_s'] * 1e3:,.1f} ms p95, first step "
            f"left out; simulated {simulated * 1e3:,.1f} ms ({simulated / step - 1:+.0%})",
        ),
        ("throughput", f"{d['tokens_per_s']:,.0f} tokens/s{_mfu(d, plan)}"),
        (
            "bubble",
            f"{d['bubble_fraction']:.1%} of compute time is idle; "
            f"simulated {d['simulated_bubble_fraction']:.1%}",
        ),
        ("ran on", f"{d['ranks']} x {d['device']}, {d['dtype']}{_kept(d)}"),
        ("memory", f"{used}, {_counted(d)}"),
        ("written to", f"{d['out']}: events.jsonl, spans.npz"),
    )
    for name, text in rows:
        console.print(f"{name:<15}{text}", markup=False, highlight=False, soft_wrap=True)
    console.print("")
    picture = text_gantt(last_steps(Path(d["out"]), 1), plan.placement, width=console.width)
    console.print(picture, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"plan {d['plan_hash']}, spec {d['spec_hash']}, seed {d['seed']}, hetlab {d['version']}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
