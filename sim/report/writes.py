"""The writes of a run with parameter servers: who wrote when, and how late.

A worker is a replica. Counted are one server's writes, the first one's by default: servers of other
parts see the same workers and nearly the same delays.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.engine.simulate import Run
from sim.errors import InputError

__all__ = [
    "Writes", "common_window", "fewest_in", "sequences_of_write", "server_of_run", "window_of",
    "worker_of", "writes_of",
]  # fmt: skip

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Writes(msgspec.Struct, frozen=True, kw_only=True):
    """The writes of one server in order; arrays, shape (U,).

    Args:
        end_s: [s] when each is done. worker: replica. sender: rank that pushed. delay: [updates].
    """

    end_s: Floats
    worker: Ints
    sender: Ints
    delay: Ints

    def times(self) -> dict[int, Floats]:
        """Worker -> ends of its writes [s], rising."""
        return {int(w): self.end_s[self.worker == w] for w in np.unique(self.worker)}


def worker_of(run: Run, rank: int) -> int:
    """Replica of a rank, or the rank itself outside cells."""
    cell = run.layout.wiring.cell_of.get(rank)
    return rank if cell is None else cell.replica


def server_of_run(run: Run) -> int | None:
    """The first rank that writes, None when nobody does."""
    return min((h.rank for h in run.handled if h.op.writes), default=None)


def writes_of(run: Run, server: int | None = None) -> Writes:
    """The writes of a run that are done.

    Args:
        run: simulated. server: rank whose writes count; None for the first.

    Raises:
        InputError: nothing was written.
    """
    mine = server_of_run(run) if server is None else server
    done = [h for h in run.handled if h.op.writes and h.rank == mine and np.isfinite(h.end)]
    if not done:
        raise InputError(
            "no gradient was applied", key="delays", found="no writes", expected="more steps"
        )
    done.sort(key=lambda h: h.version)
    return Writes(
        end_s=np.array([h.end for h in done], np.float64),
        worker=np.array([worker_of(run, h.sender) for h in done], np.int64),
        sender=np.array([h.sender for h in done], np.int64),
        delay=np.array([h.delay for h in done], np.int64),
    )


def common_window(run: Run, server: int | None = None) -> tuple[float, float]:
    """When every worker writes [s]: from the last first write to the first last one.

    A worker that stopped early, or was lost, ends the window; where one has stopped before another
    began, or none writes twice, it ends before it starts, or there.

    Raises:
        InputError: nothing was written.
    """
    return window_of(writes_of(run, server))


def window_of(writes: Writes) -> tuple[float, float]:
    """The same from the writes [s]."""
    times = writes.times().values()
    return max(float(t[0]) for t in times), min(float(t[-1]) for t in times)


def fewest_in(writes: Writes, start: float, stop: float) -> int:
    """Writes in the window of the worker with the fewest."""
    return min(int(((t > start) & (t <= stop)).sum()) for t in writes.times().values())


def sequences_of_write(run: Run, sender: int) -> float:
    """Microbatches behind one gradient of a rank: its replica's, or its forwards per push."""
    counts, cell = run.layout.plan.placement.microbatches, run.layout.wiring.cell_of.get(sender)
    if counts and cell is not None:
        return float(counts[cell.replica])
    graph = run.layout.graph
    mine = [
        op.kind for n, op in enumerate(graph.ops) if graph.actors[graph.actor[n]].rank == sender
    ]
    found = Counter(mine)
    return found["F"] / found["PUSH"] if found["F"] and found["PUSH"] else 1.0
