"""How late and how fast the updates of a run are.

Workers make equally many steps, so the slowest is alone in the end; rates are those of the time in
which every worker writes.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.engine.simulate import Run
from sim.errors import InputError
from sim.plan.program import Program, walk
from sim.report.writes import (
    fewest_in,
    sequences_of_write,
    server_of_run,
    window_of,
    writes_of,
)

__all__ = [
    "SETTLED_STEPS", "SETTLED_WRITES", "Delays", "delay_texts", "delays_of", "fixed_delays",
    "settled_delays",
]  # fmt: skip

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SETTLED_STEPS = 8
"""Steps of a plan without BARRIER after which their pace has settled."""
SETTLED_WRITES = SETTLED_STEPS - 2
"""Writes in the common window of a worker that made so many steps: it leaves out the first, and
may leave out the last."""


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Delays of a window of a run; workers are replicas.

    Args:
        unit: of the delays, "updates" of a server or "steps" of a late all-reduce.
        start, stop: [s] of the window. updates: number of writes in it.
        mean, p50, p95, max: of their delays. worker_mean, worker_max, worker_updates: by worker.
        histogram: delay -> updates. worker_histogram: the same by worker.
        worker_rates: worker -> its writes a second [1/s]. updates_per_s: their sum.
        samples_per_s: the sequences behind them [1/s].
        note: why the window says little, or "".
    """

    unit: str = "updates"
    start: float
    stop: float
    updates: int
    mean: float
    p50: float
    p95: float
    max: int
    worker_mean: dict[int, float]
    worker_max: dict[int, int]
    worker_updates: dict[int, int]
    histogram: dict[int, int]
    worker_histogram: dict[int, dict[int, int]]
    worker_rates: dict[int, float]
    updates_per_s: float
    samples_per_s: float
    note: str = ""


def delays_of(
    run: Run,
    server: int | None = None,
    *,
    start: float | None = None,
    stop: float | None = None,
) -> Delays:
    """Delays of the writes with start < end <= stop, and the rates in that time.

    A worker's rate is what it wrote in the window, a write counting for the time since the
    worker's last one in equal parts, so that no edge counts half; nothing is written behind its
    last.

    Args:
        run: simulated. server: rank whose writes count; None for the first.
        start, stop: [s]; None for those of ``common_window``.

    Raises:
        InputError: nothing was written in the window.
    """
    writes = writes_of(run, server)
    common = window_of(writes)
    begin = common[0] if start is None else start
    end = common[1] if stop is None else stop
    inside = (writes.end_s > begin) & (writes.end_s <= end)
    if not inside.any():
        raise InputError(
            "no update in the window",
            key="delays",
            found=f"{begin:g} s to {end:g} s",
            expected="more steps of every worker, or a window of your own",
        )
    late, who = writes.delay[inside], writes.worker[inside]
    of = {int(w): late[who == w] for w in np.unique(who)}
    rates = {w: _rate(t, begin, end) for w, t in writes.times().items()}
    size = run.layout.plan.mathematics.microbatch
    sender = dict(zip(writes.worker.tolist(), writes.sender.tolist(), strict=True))
    return Delays(
        start=begin,
        stop=end,
        updates=len(late),
        mean=float(late.mean()),
        p50=float(np.quantile(late, 0.5)),
        p95=float(np.quantile(late, 0.95)),
        max=int(late.max()),
        worker_mean={w: float(d.mean()) for w, d in of.items()},
        worker_max={w: int(d.max()) for w, d in of.items()},
        worker_updates={w: len(d) for w, d in of.items()},
        histogram=_histogram(late),
        worker_histogram={w: _histogram(d) for w, d in of.items()},
        worker_rates=rates,
        updates_per_s=sum(rates.values()),
        samples_per_s=sum(r * size * sequences_of_write(run, sender[w]) for w, r in rates.items()),
    )


def _rate(times: Floats, begin: float, end: float) -> float:
    """Writes a second of one worker in a window; the first took since the run's start."""
    count = np.arange(len(times) + 1)
    done = np.interp((begin, end), np.concatenate([[0.0], times]), count)
    return float(done[1] - done[0]) / (end - begin)


def _histogram(delays: Ints) -> dict[int, int]:
    return dict(sorted(Counter(delays.tolist()).items()))


def settled_delays(run: Run, *, whole: bool = False) -> Delays | None:
    """Delays and rates of the common window, or of the whole run where there is none.

    Args:
        run: simulated. whole: take the whole run in any case.

    Returns:
        None where no rank serves messages or nothing was written.
    """
    if server_of_run(run) is None or not any(
        h.op.writes and np.isfinite(h.end) for h in run.handled
    ):
        return None
    writes = writes_of(run)
    start, stop = window_of(writes)
    workers = len(writes.times())
    note = _missing(run, workers)
    if whole or stop <= start:
        why = "too short to tell a pace" if stop > start else "empty"
        text = (
            f"the time in which all {workers} workers write is {why}: rates are of the whole run, "
            "its start and the last worker's lone end counted; take more steps"
        )
        found = delays_of(run, start=0.0, stop=float(writes.end_s[-1]))
        return msgspec.structs.replace(found, note="; ".join(t for t in (note, text) if t))
    found, least = delays_of(run), fewest_in(writes, start, stop)
    if least < SETTLED_WRITES:
        text = (
            f"a worker writes only {least} times while all {workers} work: rates are rough; "
            "take more steps"
        )
        note = "; ".join(t for t in (note, text) if t)
    return msgspec.structs.replace(found, note=note)


def _missing(run: Run, workers: int) -> str:
    """What is said of workers that never write."""
    replicas = run.layout.plan.placement.num_replicas
    if workers >= replicas:
        return ""
    return f"{replicas - workers} of {replicas} workers write nothing"


def fixed_delays(run: Run, step_time_s: float) -> Delays | None:
    """The delay of updates that stand some steps behind their reduction, None for other plans.

    Args:
        run: simulated. step_time_s: [s] of it.
    """
    plan, steps = run.layout.plan, run.layout.steps
    tau = 0 if plan.exact else max(map(_lateness, run.layout.programs), default=0)
    if not tau:
        return None
    updates = max(0, steps - tau)
    samples = plan.mathematics.microbatch * sum(plan.placement.microbatches)
    return Delays(
        unit="steps", start=0.0, stop=run.makespan, updates=updates,
        mean=float(tau), p50=float(tau), p95=float(tau), max=tau,
        worker_mean={}, worker_max={}, worker_updates={},
        histogram={tau: updates} if updates else {}, worker_histogram={}, worker_rates={},
        updates_per_s=1 / step_time_s, samples_per_s=samples / step_time_s,
    )  # fmt: skip


def _lateness(program: Program) -> int:
    """Steps that its updates stand behind; one listed before the forwards is a step fresher."""
    late, forward = 0, False
    for op in walk(program):
        forward |= op.kind == "F"
        if op.kind == "OPT" and op.label != "outer":
            late = max(late, op.carried - (not forward))
    return late


def delay_texts(found: Delays) -> list[tuple[str, str]]:
    """The delays as (name, text): their spread, the window, and why it says little."""
    if found.unit == "steps":
        return [("delays", f"every update is {found.max} step{'s' * (found.max != 1)} late")]
    who = max(found.worker_mean, key=lambda w: found.worker_mean[w])
    rows = [
        (
            "delays",
            f"mean {found.mean:.3g} updates, median {found.p50:.3g}, 95th percentile "
            f"{found.p95:.3g}, at most {found.max}; worker {who} is the latest, mean "
            f"{found.worker_mean[who]:.3g}",
        ),
        (
            "",
            f"{found.updates_per_s:.4g} updates/s, {found.samples_per_s:.4g} samples/s from "
            f"{found.start:.4g} s to {found.stop:.4g} s"
            + (", while every worker writes" if found.start else ""),
        ),
    ]
    if found.note:
        rows.append(("warning", found.note))
    return rows
