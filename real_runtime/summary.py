"""What a run comes to: its log and its measured spans, beside what the simulator said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from real_runtime.compare_run import read_events
from real_runtime.run_log import EVENTS, mfu_at
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

    Raises:
        InputError: the run's log or its spans are damaged.
    """
    from sim.engine.simulate import simulate
    from sim.report.metrics import pace_of
    from sim.report.record import spans_of_run

    events = read_events(folder / EVENTS)
    start, done, restarts = last_run(events)
    emulation = _emulation(events, events.index(start))
    paced = [e for e in done if emulation is None or e["unix_s"] > emulation["unix_s"]]
    seconds = [e["seconds"] for e in paced[1:] or paced]
    middle, slow = np.percentile(seconds, [50, 95]).tolist()
    simulated = spans_of_run(simulate(plan, problem, steps=1 if plan.barrier else 8))
    tokens = plan.mathematics.global_batch * plan.mathematics.sequence_length
    ideal, scale = mfu_at(plan, problem), emulation["scale"] if emulation else 1.0
    return {
        "plan_hash": start["plan_hash"],
        "spec_hash": start["spec_hash"],
        "seed": start["seed"],
        "version": start["version"],
        "assumptions": list(plan.assumptions),
        "ranks": start["ranks"],
        "dtype": start["dtype"],
        "device": start["device"],
        "threads": start.get("threads", 0),
        "cores": start.get("cores", []),
        "steps": len(done),
        "restarts": restarts,
        "first_loss": done[0]["loss"],
        "last_loss": done[-1]["loss"],
        "step_time_s": middle,
        "step_time_p95_s": slow,
        "tokens_per_s": tokens / middle,
        "mfu": ideal * scale / middle if ideal is not None else None,
        "memory_bytes": events[-1].get("memory_bytes", []),
        "bubble_fraction": _idle(last_steps(folder, SHOWN)),
        "simulated_step_time_s": pace_of(simulated, barrier=plan.barrier).step_time_s,
        "simulated_bubble_fraction": _idle(simulated),
        "emulation": emulation,
        "out": str(folder),
    }


def _emulation(events: Sequence[dict[str, Any]], first: int) -> dict[str, Any] | None:
    """What a run emulated, from its start on, and how late its passes were; None for nothing."""
    found = [e for e in events[first:] if e["event"] == "emulation"]
    return found[-1] | {"late": events[-1]["late"]} if found else None


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


def _emulated(d: dict[str, Any], step: float) -> str:
    """What the real times stand for, and how well this machine kept up."""
    e = d["emulation"]
    return (
        f"{e['cluster']}: {step / e['scale'] * 1e3:,.3g} ms a step, simulated "
        f"{d['simulated_step_time_s'] * 1e3:,.3g} ms; 1 s of it lasts {e['scale']:.3g} s here, "
        f"where each rank has {e['share']:.2f} of a core; passes were late by {max(e['late']):.1%}"
    )


def _kept(d: dict[str, Any]) -> str:
    """Threads and cores of the ranks, where they compute on the processor and the log says so."""
    if d["device"] != "cpu" or not d["threads"]:
        return ""
    threads = f", {d['threads']} {'thread' if d['threads'] == 1 else 'threads'} a rank"
    cores = (",".join(map(str, mine)) for mine in d["cores"])
    return f"{threads}, on cores {' | '.join(cores)}" if d["cores"] else threads


def print_run(console: Console, d: dict[str, Any], plan: Plan) -> None:
    """Print a document, and the timeline of the run's last step."""
    from sim.report.text_gantt import text_gantt

    step, emulation = d["step_time_s"], d["emulation"]
    simulated = emulation["predicted_step_time_s"] if emulation else d["simulated_step_time_s"]
    left = "first steps" if emulation else "first step"
    used = f"{max(d['memory_bytes'], default=0.0) / 2**30:.2f} GiB at most on a rank"
    rows = (
        ("loss", f"{d['first_loss']:.4f} -> {d['last_loss']:.4f} in {d['steps']} steps"),
        (
            "step time",
            f"{step * 1e3:,.1f} ms median, {d['step_time_p95_s'] * 1e3:,.1f} ms p95, {left} left "
            f"out; simulated {simulated * 1e3:,.1f} ms ({simulated / step - 1:+.0%})",
        ),
        *([("emulated", _emulated(d, step))] if emulation else []),
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
