"""Work on what others use too, of ranks whose pace varies: processors that servers share.

A rank at half its pace has twice the work: whoever it shares the processors with, all its work
takes twice as long as before.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from sim.cost.prices import FlowSpec
from sim.engine.execute import Execution
from sim.engine.kernel import NORMAL

if TYPE_CHECKING:
    from sim.engine.faults import Trace

__all__ = ["start_work"]


def start_work(run: Execution, work: FlowSpec, pace: Trace, done: Callable[[float], None]) -> None:
    """Start work now; a lost rank begins none and goes on with none.

    Args:
        run: the execution. work: at pace 1. pace: of its rank. done: called at its end [s].
    """
    now = run.kernel.now
    if pace.at(now) == 0.0:
        return
    flow = run.network.start(work.links, work.nbytes / pace.at(now), done, cap=work.cap)

    def change(before: float) -> None:
        after = pace.at(run.kernel.now)
        if flow.done:
            return
        if after == 0.0:
            run.network.set_cap(flow, 0.0)
        else:
            run.network.stretch(flow, before / after)
            watch(after)

    def watch(current: float) -> None:
        at = pace.change(run.kernel.now)
        if at < inf:
            run.kernel.call_at(at, change, NORMAL, current)

    watch(pace.at(now))
