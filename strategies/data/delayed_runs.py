"""The delays of a simulated run with parameter servers, and its order for the co-simulation.

A worker is a replica. Delays are those of one server's writes, the first one's by default; servers
of other parts see the same workers and nearly the same delays.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.engine.simulate import Run
from sim.errors import InputError
from strategies.data.cosim_order import Arrival, arrivals

__all__ = ["Delays", "common_window", "delays_of", "order_of", "worker_of"]


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Delays [updates] of a window of a run; workers are replicas.

    Args:
        start, stop: [s] of the window. updates: number of writes in it.
        mean, p50, p95, max: of their delays. worker_mean, worker_max, worker_updates: by worker.
        histogram: delay -> updates. worker_histogram: the same by worker.
        updates_per_s: sum of the workers' own rates [1/s]. samples_per_s: the sequences behind
            them [1/s].
    """

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
    updates_per_s: float
    samples_per_s: float


def worker_of(run: Run, rank: int) -> int:
    """Replica of a rank, or the rank itself outside cells."""
    cell = run.layout.wiring.cell_of.get(rank)
    return rank if cell is None else cell.replica


def order_of(run: Run, server: int | None = None) -> tuple[Arrival, ...]:
    """Writes of a run in order, by worker, for ``strategies.data.cosim.train_async``.

    Args:
        run: simulated. server: rank whose writes count; None for the first.

    Raises:
        InputError: nothing was written.
    """
    found = arrivals(run.handled, _server(run, server))
    of = {a.worker: worker_of(run, a.worker) for a in found}
    return tuple(Arrival(a.time, of[a.worker], a.read) for a in found)


def common_window(run: Run, server: int | None = None) -> tuple[float, float]:
    """When every worker works [s]: from the last first write to the first last one.

    A worker that stopped early, or was lost, ends the window.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for a in order_of(run, server):
        first.setdefault(a.worker, a.time)
        last[a.worker] = a.time
    return max(first.values()), min(last.values())


def delays_of(
    run: Run,
    server: int | None = None,
    *,
    start: float | None = None,
    stop: float | None = None,
) -> Delays:
    """Delays of the writes with start < end <= stop.

    Args:
        run: simulated. server: rank whose writes count; None for the first.
        start, stop: [s]; None for those of ``common_window``.

    Raises:
        InputError: nothing was written in the window.
    """
    order = order_of(run, server)
    common = common_window(run, server)
    begin = common[0] if start is None else start
    end = common[1] if stop is None else stop
    inside = [(t, a) for t, a in enumerate(order) if begin < a.time <= end]
    if not inside:
        raise InputError(
            "no update in the window",
            key="delays",
            found=f"{begin:g} s to {end:g} s",
            expected="more steps of every worker, or a window of your own",
        )
    late = np.array([t - a.read for t, a in inside], np.int64)
    who = np.array([a.worker for _, a in inside], np.int64)
    of = {int(w): late[who == w] for w in np.unique(who)}
    times = np.array([a.time for _, a in inside])
    rates = {w: _rate(times[who == w], end - begin) for w in of}
    plan = run.layout.plan
    counts, size = plan.placement.microbatches, plan.mathematics.microbatch
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
        updates_per_s=sum(rates.values()),
        samples_per_s=sum(r * size * (counts[w] if counts else 1) for w, r in rates.items()),
    )


def _rate(times: NDArray[np.float64], window: float) -> float:
    """Writes a second of one worker: between its first and last, so that no edge counts half."""
    if len(times) < 2:
        return len(times) / window
    return float((len(times) - 1) / (times[-1] - times[0]))


def _histogram(delays: NDArray[np.int64]) -> dict[int, int]:
    return dict(sorted(Counter(delays.tolist()).items()))


def _server(run: Run, server: int | None) -> int | None:
    if server is not None:
        return server
    writers = sorted({h.rank for h in run.handled if h.op.writes})
    return writers[0] if writers else None
