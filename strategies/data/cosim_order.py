"""Orders of updates for co-simulation: who wrote when, and which version it had read.

Versions count writes: the parameters start at version 0 and the t-th write (from 0) takes version t
to t + 1. An order comes from a simulated run (``arrivals``) or from a delay model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.engine.messages import Handled
from sim.engine.simulate import Run
from sim.errors import InputError
from sim.plan.generators import random_stream

__all__ = [
    "Arrival",
    "DelayTable",
    "arrivals",
    "check_order",
    "delay_table",
    "drawn_delays",
    "fixed_delay",
    "published_delays",
    "published_protocol",
    "round_ends",
    "stream",
]

Ints = NDArray[np.int64]


class Arrival(msgspec.Struct, frozen=True):
    """One write of one worker's gradient.

    Args:
        time: when the write is done [s]. worker: its rank. read: version of the parameters at which
            the gradient was computed.
    """

    time: float
    worker: int
    read: int


class DelayTable(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of the delays [updates] of an order.

    Args:
        mean, p50, p95, max: over all updates. worker_mean, worker_max, worker_updates: by rank.
        updates_per_s: writes over the time of the last one [1/s].
    """

    mean: float
    p50: float
    p95: float
    max: int
    worker_mean: dict[int, float]
    worker_max: dict[int, int]
    worker_updates: dict[int, int]
    updates_per_s: float


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The random stream of these names (sim.plan.generators.random_stream); ranks are names too."""
    return random_stream(seed, *(str(n) for n in names))


def arrivals(handled: Iterable[Handled], server: int | None = None) -> tuple[Arrival, ...]:
    """The order of a simulated run, from its instances of ``on`` blocks.

    Args:
        handled: of the run. server: the rank whose writes count, needed when several write.

    Raises:
        InputError: nothing was written, or several ranks write and ``server`` does not say which.
    """
    writes = [h for h in handled if h.op.writes and np.isfinite(h.end)]
    writers = {h.rank for h in writes}
    if server is None and len(writers) != 1:
        raise InputError(
            "an order is the writes of one rank",
            key="server",
            found=f"writers {sorted(writers)}",
            expected="one writer, or its rank",
        )
    mine = sorted((h for h in writes if server in (None, h.rank)), key=lambda h: h.version)
    order = tuple(Arrival(h.end, h.sender, h.version - 1 - h.delay) for h in mine)
    return check_order(order)


def round_ends(run: Run) -> tuple[float, ...]:
    """When each synchronous step of a run ends [s]: the ends of its BARRIERs.

    Raises:
        InputError: the plan has none.
    """
    ends = run.outcome.end
    found = sorted(
        float(ends[n]) for n, op in enumerate(run.layout.graph.ops) if op.kind == "BARRIER"
    )
    if not found:
        raise InputError("the plan has no BARRIER, so it has no rounds", key="barrier")
    return tuple(found)


def check_order(order: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """The order itself.

    Raises:
        InputError: it is empty, goes back in time or reads a version before it is written.
    """
    if not order:
        raise InputError("an order has at least one write", key="order")
    for t, a in enumerate(order):
        if not 0 <= a.read <= t:
            raise InputError(
                f"write {t} reads a version that is not there",
                key=f"order.{t}.read",
                found=str(a.read),
                expected=f"0 to {t}",
            )
        if t and a.time < order[t - 1].time:
            raise InputError(
                f"write {t} is before the one it follows",
                key=f"order.{t}.time",
                found=str(a.time),
                expected=f"at least {order[t - 1].time}",
            )
    return tuple(order)


def fixed_delay(updates: int, tau: int, seconds: float = 1.0) -> tuple[Arrival, ...]:
    """One worker whose every gradient is ``tau`` updates late, one write each ``seconds`` [s].

    The first ``tau`` gradients are computed at version 0.
    """
    return check_order([Arrival((t + 1) * seconds, 0, max(0, t - tau)) for t in range(updates)])


def drawn_delays(
    updates: int,
    mean: float,
    seed: int,
    kind: Literal["geometric", "uniform"] = "geometric",
    seconds: float = 1.0,
) -> tuple[Arrival, ...]:
    """One worker whose delays are drawn anew for each write, with the given mean [updates].

    Geometric from 0, or uniform on 0 .. 2 mean; a delay reaches back to version 0 at most.
    """
    rng = stream(seed, "delays")
    if kind == "geometric":
        taus = rng.geometric(1.0 / (1.0 + mean), size=updates) - 1
    else:
        taus = rng.integers(0, round(2 * mean) + 1, size=updates)
    return check_order(
        [Arrival((t + 1) * seconds, 0, max(0, t - int(tau))) for t, tau in enumerate(taus)]
    )


def published_protocol(
    delays: Sequence[int], steps: int, seconds: float = 1.0
) -> tuple[Arrival, ...]:
    """The order in the official code of arXiv:2308.09430 (xiaogdeng/Gen-DelayedSGD).

    Worker i computes at step t if (t - i) mod delay_i is 0, on the parameters it pulled at its own
    previous push; all gradients of a step are summed and applied; only the pushing workers pull.
    A step is several writes of one time here, which is the same sum. Delays of the order count
    writes, not steps: a step with fewer pushes ages a gradient less.

    Args:
        delays: one per worker [steps]. steps: of the server. seconds: of one step [s].

    Raises:
        InputError: a delay is below 1.
    """
    if min(delays, default=0) < 1:
        raise InputError("a worker's delay is at least one step", key="delays", found=str(delays))
    order: list[Arrival] = []
    pulled = [0] * len(delays)
    for t in range(steps):
        pushing = [i for i, d in enumerate(delays) if (t - i) % d == 0]
        order += [Arrival((t + 1) * seconds, i, pulled[i]) for i in pushing]
        for i in pushing:
            pulled[i] = len(order)
    return check_order(order)


def published_delays(num_workers: int, delay: int, seed: int) -> tuple[int, ...]:
    """The random delays of that code, drawn once: worker 0 has the largest, worker 1 has 1.

    The others are uniform on 1 .. ``delay`` [steps].

    Raises:
        InputError: there are not two workers, or the delay is below 1.
    """
    if num_workers < 2 or delay < 1:
        raise InputError("two workers and a delay of one step at least", key="delays")
    others = stream(seed, "published delays").integers(1, delay + 1, size=num_workers - 2)
    return (delay, 1, *(int(d) for d in others))


def delay_table(order: Sequence[Arrival]) -> DelayTable:
    """The delays of an order: mean, quantiles, maximum, per worker; and its update rate."""
    check_order(order)
    delays: Ints = np.array([t - a.read for t, a in enumerate(order)], dtype=np.int64)
    workers = np.array([a.worker for a in order])
    of = {int(w): delays[workers == w] for w in np.unique(workers)}
    end = order[-1].time
    return DelayTable(
        mean=float(delays.mean()),
        p50=float(np.quantile(delays, 0.5)),
        p95=float(np.quantile(delays, 0.95)),
        max=int(delays.max()),
        worker_mean={w: float(d.mean()) for w, d in of.items()},
        worker_max={w: int(d.max()) for w, d in of.items()},
        worker_updates={w: len(d) for w, d in of.items()},
        updates_per_s=len(order) / end if end > 0.0 else float("inf"),
    )
