"""Every metric, defined once, for simulated and measured runs alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.engine.simulate import Run
from sim.errors import SimulationError
from sim.plan.tables import unsettled_steps
from sim.report.basis import Basis
from sim.report.busy import Busy, busy_of, clipped, sum_by
from sim.report.delays import SETTLED_STEPS, Delays, settled_delays
from sim.report.spans import Spans
from sim.report.writes import server_of_run

__all__ = [
    "SETTLED_STEPS", "Metrics", "Pace", "finishes_of", "metrics_of", "pace_between", "pace_of",
    "pace_of_run", "rates_of",
]  # fmt: skip

Floats = NDArray[np.float64]


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast steps follow one another.

    Args:
        step_time_s: [s] see ``pace_of``. p50_s, p95_s: [s] percentiles over the counted steps.
        steps: steps of the run. warm_up: steps left out of the slope, or of the mean.
    """

    step_time_s: float
    p50_s: float
    p95_s: float
    steps: int
    warm_up: int


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The headline numbers; each field's formula stands in ``metrics_of``.

    None stands for what cannot be known: rates without FLOPs or peaks, costs without prices.
    """

    step_time_s: float
    step_p50_s: float
    step_p95_s: float
    tokens_per_s: float
    tgs: float
    mfu: float | None
    hfu: float | None
    bubble_fraction: float
    exposed_comm_s: float
    exposed_comm_max_s: float
    exposed_comm_max_rank: int
    exposed_by_group: dict[str, float]
    cost_per_mtoken: float | None
    updates_per_s: float
    imbalance: float
    straggler_rank: int
    unsettled: int = 0


def pace_of(spans: Spans, *, barrier: bool, warm_up: int | None = None) -> Pace:
    """Step time and its spread.

    Finish of step s: the last end of its ops; it took finish(s) - finish(s - 1). With a barrier the
    step time is makespan / steps, because steps do not overlap. Without one it is the slope of the
    finish times after the warm-up w and up to the last step but one, which ends early where no
    later step's work competes with its own: (finish(n - 2) - finish(w)) / (n - 2 - w). With fewer
    than three steps the step time is the makespan / steps, which then includes filling the
    pipeline. Steps at the end that lack late updates do not count. With a barrier a warm-up is left
    out where it is given, and where steps are left.

    Ranks that serve messages have no steps; ``pace_of_run`` knows the pace of such a run.

    Args:
        spans: one run. barrier: whether BARRIER ends each step.
        warm_up: steps w left out; None for a quarter of them, at least one, and with a barrier for
            none.

    Raises:
        SimulationError: the table is empty.
    """
    begin, finish = finishes_of(spans, barrier=barrier)
    return pace_between(finish, begin, barrier=barrier, warm_up=warm_up)


def finishes_of(spans: Spans, *, barrier: bool) -> tuple[float, Floats]:
    """Return the first start [s], and when each counted step finishes [s], rising.

    Args:
        spans: one run. barrier: whether BARRIER ends each step.

    Raises:
        SimulationError: the table is empty.
    """
    if not len(spans):
        raise SimulationError("a run without spans has no step time")
    step, end = spans.columns["step"], spans.columns["end_s"]
    begin = float(spans.columns["start_s"].min())
    finish = np.full(max(int(step.max()), 0) + 1, begin)
    np.maximum.at(finish, np.maximum(step, 0), end)
    finish = np.maximum.accumulate(finish)
    return begin, finish if barrier else finish[: _whole_steps(step)]


def pace_of_run(run: Run, spans: Spans, delays: Delays | None = None) -> Pace:
    """The same of a simulation; where ranks serve messages a step is one update.

    Its time is then 1 / updates_per_s of the common window, and its spread that between two
    writes of the first server there. Where a barrier ends each step, steps that lack the rows
    before them (``unsettled_steps``) are left out.

    Args:
        run: simulated. spans: of it. delays: from ``settled_delays``, when they are there already.

    Raises:
        SimulationError: see ``pace_of``.
    """
    found = settled_delays(run) if delays is None else delays
    if found is None:
        barrier, tables = run.layout.plan.barrier, run.layout.plan.tables
        return pace_of(spans, barrier=barrier, warm_up=unsettled_steps(tables) if barrier else None)
    server = server_of_run(run)
    ends = np.sort([h.end for h in run.handled if h.op.writes and h.rank == server])
    ends = ends[np.isfinite(ends)]
    last = ends[(ends >= found.start) & (ends <= found.stop)]
    took = np.diff(last) if len(last) > 1 else np.array([1 / found.updates_per_s])
    p50, p95 = np.percentile(took, (50, 95))
    return Pace(
        step_time_s=1 / found.updates_per_s, p50_s=float(p50), p95_s=float(p95),
        steps=len(ends), warm_up=0,
    )  # fmt: skip


def pace_between(
    finish: Floats,
    begin: float,
    *,
    barrier: bool,
    warm_up: int | None = None,
) -> Pace:
    """The same from finish times.

    Args:
        finish: [s] of every step, rising. begin: [s] of the first. barrier, warm_up: as above.
    """
    n = len(finish)
    took = np.diff(finish, prepend=begin)
    last = n - 1 if n < 3 else n - 2
    warm = min(max(1, n // 4) if warm_up is None else warm_up, last if barrier else last - 1)
    if barrier and warm_up and warm == warm_up:
        step_time, took = float(finish[-1] - finish[warm - 1]) / (n - warm), took[warm:]
    elif barrier or warm < 0 or n < 3:
        step_time, warm = float(finish[-1] - begin) / n, 0
    else:
        step_time = float(finish[last] - finish[warm]) / (last - warm)
        took = took[warm + 1 : last + 1]
    p50, p95 = np.percentile(took, (50, 95))
    return Pace(step_time_s=step_time, p50_s=float(p50), p95_s=float(p95), steps=n, warm_up=warm)


def _whole_steps(step: NDArray[Any]) -> int:
    """Steps up to the last that has as many ops as the one in the middle.

    Where updates are late the last steps of a run lack theirs, and would seem to end early.
    """
    ops = np.bincount(step[step >= 0], minlength=1)
    whole = np.flatnonzero(ops >= ops[len(ops) // 2])
    return int(whole[-1]) + 1 if len(whole) else 1


def rates_of(step_time_s: float, basis: Basis) -> dict[str, float | None]:
    """tokens/s, TGS, MFU and HFU of a step time.

    tokens_per_s = tokens / step time; tgs = tokens_per_s / chips; mfu = model FLOPs / (step time *
    sum of dense peaks), or None without them; hfu = the same with recomputation counted.

    Raises:
        SimulationError: the rate exceeds the chips' peak, so the FLOPs or the times are wrong.
    """
    tokens_per_s = basis.tokens_per_step / step_time_s
    mfu = hfu = None
    if basis.model_flops_per_step is not None and basis.peak_flops_per_s is not None:
        limit = step_time_s * basis.peak_flops_per_s
        mfu = basis.model_flops_per_step / limit
        hfu = mfu
        if basis.hardware_flops_per_step is not None:
            hfu = basis.hardware_flops_per_step / limit
        if hfu > 1 + 1e-9:
            raise SimulationError(
                f"the step would run at {hfu:.3g} times the dense {basis.dtype} peak of its "
                f"{basis.num_chips} chips: its times or its FLOPs are wrong"
            )
    return {
        "tokens_per_s": tokens_per_s,
        "tgs": tokens_per_s / max(basis.num_chips, 1),
        "mfu": mfu,
        "hfu": hfu,
    }


def metrics_of(
    spans: Spans,
    basis: Basis,
    *,
    barrier: bool = True,
    inner_comm_s: Mapping[str, Floats] | None = None,
    pace: Pace | None = None,
    delays: Delays | None = None,
) -> Metrics:
    """All headline metrics of a run; averages over ranks are weighted by class size.

    step_time_s, step_p50_s, step_p95_s [s]: see ``pace_of`` and ``pace_of_run``. Of a run with
    servers all is counted in the window of its delays, a step being an update. tokens_per_s, tgs
    [tokens/s], mfu, hfu (0..1): see ``rates_of``. bubble_fraction: average over ranks of 1 -
    compute-stream busy time / makespan. exposed_comm_s [s]: average over ranks of the time per step
    in which a communication op ran and the compute stream was idle, or a compute op waited for a
    collective inside it.
    exposed_comm_max_s [s], exposed_comm_max_rank: the largest of these times, which the mean hides
    where few ranks wait, and the representative of the class that has it.
    exposed_by_group [s]: the mean by role of the group ("tp", "ep", "cp", "dp" ...), "pp" for
    transfers between stages, "ps" for messages; instants with several count in equal parts, so the
    parts add up. cost_per_mtoken [USD per 1e6 tokens]: (price of all chips * step time + egress) /
    tokens * 1e6, or None without prices. updates_per_s [1/s]: APPLY ops per step, or 1 without any,
    / step time. imbalance: busiest compute stream over the average. straggler_rank: representative
    of the class with that stream. unsettled: steps left out (see ``unsettled_steps``).

    Args:
        spans: one run. basis: of its plan. barrier: whether BARRIER ends each step.
        inner_comm_s: role -> [s] per row, communication that a compute op contains (a boxed
            segment's collectives) and waits for; it counts as exposed, not as bubble.
        pace: of the run; None for ``pace_of``. delays: of a run with servers.

    Raises:
        SimulationError: the run is empty, or its rate exceeds the peak.
    """
    pace = pace_of(spans, barrier=barrier) if pace is None else pace
    rates = rates_of(pace.step_time_s, basis)
    spans, busy, of_rank, steps = _waits(spans, inner_comm_s or {}, delays)
    total = float(busy.weight.sum())
    exposed = {g: _mean(s, busy.weight) / steps for g, s in sorted(of_rank.items())}
    exposed = {g: s for g, s in exposed.items() if s > 0}
    waits = sum(of_rank.values(), np.zeros(len(busy.rank))) / steps
    applied = spans.where("kind", lambda k: k == "APPLY") & (spans.columns["step"] >= 0)
    updates = max(1.0, float(spans.columns["weight"][applied].sum()) / steps)
    mean_busy = _mean(busy.compute_s, busy.weight)
    cost = None
    if basis.price_per_s is not None and basis.tokens_per_step:
        step_cost = basis.price_per_s * pace.step_time_s + basis.egress_per_step
        cost = step_cost / basis.tokens_per_step * 1e6
    return Metrics(
        step_time_s=pace.step_time_s, step_p50_s=pace.p50_s, step_p95_s=pace.p95_s, **rates,  # type: ignore[arg-type]
        bubble_fraction=1 - mean_busy / busy.makespan_s if total and busy.makespan_s else 0.0,
        exposed_comm_s=sum(exposed.values()),
        exposed_comm_max_s=float(waits.max(initial=0.0)),
        exposed_comm_max_rank=int(busy.rank[np.argmax(waits)]) if total else -1,
        exposed_by_group=exposed,
        cost_per_mtoken=cost,
        updates_per_s=updates / pace.step_time_s,
        imbalance=float(busy.compute_s.max()) / mean_busy if mean_busy else 1.0,
        straggler_rank=int(busy.rank[np.argmax(busy.compute_s)]) if total else -1,
        unsettled=pace.warm_up if barrier else 0,
    )  # fmt: skip


def _waits(
    spans: Spans, inner_comm_s: Mapping[str, Floats], delays: Delays | None
) -> tuple[Spans, Busy, dict[str, Floats], float]:
    """What counts of a table, what ranks did, group -> [s] exposed by rank, and the steps."""
    steps = float(max(int(spans.columns["step"].max()), 0) + 1)
    if delays is not None:
        spans, kept, share = clipped(spans, delays.start, delays.stop)
        inner_comm_s = {group: inner[kept] * share for group, inner in inner_comm_s.items()}
        steps = delays.updates_per_s * (delays.stop - delays.start)
    busy = busy_of(spans)
    of_rank = dict(busy.exposed_s)
    mine = spans.where("stream", lambda s: s == "compute")
    row = np.searchsorted(busy.rank, spans.columns["rank"][mine])
    for group, inner in inner_comm_s.items():
        of_rank[group] = of_rank.get(group, 0.0) + sum_by(row, inner[mine], len(busy.rank))
    return spans, busy, of_rank, steps


def _mean(values: Floats, weight: NDArray[Any]) -> float:
    return float(np.average(values, weights=weight)) if weight.sum() else 0.0
