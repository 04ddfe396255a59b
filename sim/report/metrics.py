"""Every metric, defined once, for simulated and measured runs alike."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import SimulationError
from sim.plan.kinds import KINDS
from sim.report.basis import Basis
from sim.report.spans import Spans

__all__ = [
    "Busy", "Metrics", "Pace",
    "busy_of", "is_communication", "metrics_of", "pace_of", "rates_of",
]  # fmt: skip

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast steps follow one another.

    Args:
        step_time_s: [s] see ``pace_of``. p50_s, p95_s: [s] percentiles over the counted steps.
        steps: steps of the run. warm_up: steps left out of the slope.
    """

    step_time_s: float
    p50_s: float
    p95_s: float
    steps: int
    warm_up: int


class Busy(msgspec.Struct, frozen=True, kw_only=True):
    """What each class of ranks did with its compute stream over the whole run; arrays, shape (R,).

    Args:
        rank: representative. weight: members. compute_s: [s] the compute stream was busy.
        exposed_s: [s] the compute stream was idle while a communication op of the rank ran.
        communication_s: [s] any communication op of the rank ran.
        makespan_s: [s] from the first start to the last end of the table.
    """

    rank: Ints
    weight: Ints
    compute_s: Floats
    exposed_s: Floats
    communication_s: Floats
    makespan_s: float


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The headline numbers; each field's formula stands in ``metrics_of``."""

    step_time_s: float
    step_p50_s: float
    step_p95_s: float
    tokens_per_s: float
    tgs: float
    mfu: float
    hfu: float
    bubble_fraction: float
    exposed_comm_s: float
    cost_per_mtoken: float | None
    updates_per_s: float
    imbalance: float
    straggler_rank: int


def pace_of(spans: Spans, *, barrier: bool, warm_up: int | None = None) -> Pace:
    """Step time and its spread.

    Finish of step s: the last end of its ops; it took finish(s) - finish(s - 1). With a barrier the
    step time is makespan / steps, because steps do not overlap. Without one it is the slope of the
    finish times after the warm-up, (finish(n - 1) - finish(w)) / (n - 1 - w); with fewer than two
    steps after it, the makespan / steps, which then includes filling the pipeline.

    Where a rank serves messages (rows of step -1) the ranks count their own iterations and a step
    is one update instead: its finish is the end of an APPLY.

    Args:
        spans: one run. barrier: whether BARRIER ends each step.
        warm_up: steps w left out; None for a quarter of them, at least one.

    Raises:
        SimulationError: the table is empty.
    """
    if not len(spans):
        raise SimulationError("a run without spans has no step time")
    step, end = spans.columns["step"], spans.columns["end_s"]
    begin = float(spans.columns["start_s"].min())
    updates = spans.where("kind", lambda k: k == "APPLY") & (step < 0)
    if updates.any():
        finish = np.sort(end[updates])
    else:
        finish = np.full(max(int(step.max()), 0) + 1, begin)
        np.maximum.at(finish, np.maximum(step, 0), end)
        finish = np.maximum.accumulate(finish)
    n = len(finish)
    took = np.diff(finish, prepend=begin)
    warm = 0
    if not barrier and n > 1:
        warm = max(1, n // 4) if warm_up is None else warm_up
        warm = min(warm, n - 1)
    if warm and n - 1 - warm >= 1:
        step_time, took = float(finish[-1] - finish[warm]) / (n - 1 - warm), took[warm + 1 :]
    else:
        step_time, warm = float(finish[-1] - begin) / n, 0
    p50, p95 = np.percentile(took, (50, 95))
    return Pace(step_time_s=step_time, p50_s=float(p50), p95_s=float(p95), steps=n, warm_up=warm)


def busy_of(spans: Spans) -> Busy:
    """Sweep each rank's compute and communication intervals once.

    A transfer counts for its sender and its receiver, a collective for every member; BARRIER is not
    communication. Only classes of ranks with a compute stream are listed.
    """
    compute = spans.where("stream", lambda s: s == "compute")
    comm = spans.where("kind", is_communication) & ~compute
    both = comm & (spans.columns["peer"] >= 0)
    rank, start, end = (spans.columns[k] for k in ("rank", "start_s", "end_s"))
    who = np.concatenate([rank[compute], rank[comm], spans.columns["peer"][both]])
    begin = np.concatenate([start[compute], start[comm], start[both]])
    stop = np.concatenate([end[compute], end[comm], end[both]])
    is_comm = np.arange(len(who)) >= compute.sum()
    time, ranks = np.concatenate([begin, stop]), np.concatenate([who, who])
    sign = np.repeat([1, -1], len(who))
    flag = np.concatenate([is_comm, is_comm])
    order = np.lexsort((time, ranks))
    time, ranks, sign, flag = time[order], ranks[order], sign[order], flag[order]
    in_compute = np.cumsum(np.where(flag, 0, sign)) > 0
    in_comm = np.cumsum(np.where(flag, sign, 0)) > 0
    listed = np.unique(rank[compute])
    row = np.searchsorted(listed, ranks[:-1])
    inside = (ranks[:-1] == ranks[1:]) & (row < len(listed))
    inside[inside] = listed[row[inside]] == ranks[:-1][inside]
    gap = np.diff(time) * inside
    row = np.where(inside, row, 0)
    sums = []
    for mask in (in_compute, in_comm & ~in_compute, in_comm):
        seconds = np.zeros(len(listed))
        np.add.at(seconds, row, gap * mask[:-1])
        sums.append(seconds)
    weight = np.zeros(len(listed), np.int64)
    weight[np.searchsorted(listed, rank[compute])] = spans.columns["weight"][compute]
    makespan = float(end.max() - start.min()) if len(spans) else 0.0
    return Busy(
        rank=listed, weight=weight, compute_s=sums[0], exposed_s=sums[1], communication_s=sums[2],
        makespan_s=makespan,
    )  # fmt: skip


def is_communication(kind: str) -> bool:
    """True for transfers and collectives; BARRIER moves no bytes and is neither."""
    known = KINDS.get(kind)
    return known is not None and known.cost in ("transfer", "collective") and kind != "BARRIER"


def rates_of(step_time_s: float, basis: Basis) -> dict[str, float]:
    """tokens/s, TGS, MFU and HFU of a step time.

    tokens_per_s = tokens / step time; tgs = tokens_per_s / chips; mfu = model FLOPs / (step time *
    sum of dense peaks); hfu = the same with recomputation counted.

    Raises:
        SimulationError: the rate exceeds the chips' peak, so the FLOPs or the times are wrong.
    """
    tokens_per_s = basis.tokens_per_step / step_time_s
    limit = step_time_s * basis.peak_flops_per_s
    hfu = basis.hardware_flops_per_step / limit
    if hfu > 1 + 1e-9:
        raise SimulationError(
            f"the step would run at {hfu:.3g} times the dense {basis.dtype} peak of its "
            f"{basis.num_chips} chips: its times or its FLOPs are wrong"
        )
    return {
        "tokens_per_s": tokens_per_s,
        "tgs": tokens_per_s / basis.num_chips,
        "mfu": basis.model_flops_per_step / limit,
        "hfu": hfu,
    }


def metrics_of(
    spans: Spans, basis: Basis, *, barrier: bool = True, inner_comm_s: Floats | None = None
) -> Metrics:
    """All headline metrics of a run; averages over ranks are weighted by class size.

    step_time_s, step_p50_s, step_p95_s [s]: see ``pace_of``. tokens_per_s, tgs [tokens/s], mfu, hfu
    (0..1): see ``rates_of``. bubble_fraction: average over ranks of 1 - compute-stream busy time /
    makespan. exposed_comm_s [s]: average over ranks of the time per step in which a communication
    op ran and the compute stream was idle. cost_per_mtoken [USD per 1e6 tokens]: (price of all
    chips * step time + egress) / tokens * 1e6, or None without prices. updates_per_s [1/s]: APPLY
    ops per second of the run, or 1 / step time without any. imbalance: busiest compute stream over
    the average. straggler_rank: representative of the class with that stream.

    Args:
        spans: one run. basis: of its plan. barrier: whether BARRIER ends each step.
        inner_comm_s: [s] per row, communication that a compute op contains (a boxed segment's
            collectives) and waits for; it counts as exposed, not as bubble. None for none.

    Raises:
        SimulationError: the run is empty, or its rate exceeds the peak.
    """
    pace, busy = pace_of(spans, barrier=barrier), busy_of(spans)
    rates = rates_of(pace.step_time_s, basis)
    total = float(busy.weight.sum())
    exposed = busy.exposed_s.copy()
    if inner_comm_s is not None:
        mine = spans.where("stream", lambda s: s == "compute")
        row = np.searchsorted(busy.rank, spans.columns["rank"][mine])
        np.add.at(exposed, row, inner_comm_s[mine])
    applied = spans.columns["weight"][spans.where("kind", lambda k: k == "APPLY")].sum()
    mean_busy = _mean(busy.compute_s, busy.weight)
    cost = None
    if basis.price_per_s is not None:
        step_cost = basis.price_per_s * pace.step_time_s + basis.egress_per_step
        cost = step_cost / basis.tokens_per_step * 1e6
    return Metrics(
        step_time_s=pace.step_time_s, step_p50_s=pace.p50_s, step_p95_s=pace.p95_s, **rates,
        bubble_fraction=1 - mean_busy / busy.makespan_s if total and busy.makespan_s else 0.0,
        exposed_comm_s=_mean(exposed, busy.weight) / pace.steps,
        cost_per_mtoken=cost,
        updates_per_s=float(applied) / busy.makespan_s if applied else 1 / pace.step_time_s,
        imbalance=float(busy.compute_s.max()) / mean_busy if mean_busy else 1.0,
        straggler_rank=int(busy.rank[np.argmax(busy.compute_s)]) if total else -1,
    )  # fmt: skip


def _mean(values: Floats, weight: NDArray[Any]) -> float:
    return float(np.average(values, weights=weight)) if weight.sum() else 0.0
