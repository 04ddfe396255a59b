"""The order of a simulated run with parameter servers, for the co-simulation, and its delays.

A worker is a replica. Delays and the window in which all workers write are those of the report.
"""

from __future__ import annotations

from sim.engine.simulate import Run
from sim.report.delays import Delays, delays_of
from sim.report.writes import common_window, server_of_run, worker_of
from strategies.data.cosim_order import Arrival, arrivals

__all__ = ["Delays", "common_window", "delays_of", "order_of", "worker_of"]


def order_of(run: Run, server: int | None = None) -> tuple[Arrival, ...]:
    """Writes of a run in order, by worker, for ``strategies.data.cosim.train_async``.

    Args:
        run: simulated. server: rank whose writes count; None for the first.

    Raises:
        InputError: nothing was written.
    """
    found = arrivals(run.handled, server_of_run(run) if server is None else server)
    of = {a.worker: worker_of(run, a.worker) for a in found}
    return tuple(Arrival(a.time, of[a.worker], a.read) for a in found)
