"""Clock and event queue of the engine: SimPy's environment with a cheap way to call a function.

Everything of SimPy works unchanged on a :class:`Kernel` (processes, timeouts, ``run(until=...)``),
which is what injectors are written with. Actors of the engine do not create SimPy events: they ask
for a plain call at a time. Both kinds share one heap and one tie-break counter, so the order of a
run is a function of the program alone.

Assumption held by ``tests/unit/test_kernel.py``: in SimPy 4.1.2 every event reaches the queue
through ``Environment.schedule`` and leaves it through ``Environment.step``; the private attributes
used here are ``_queue``, ``_now`` and ``_eid`` of the environment and ``_ok``, ``_value`` and
``_defused`` of an event.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy.core
import simpy.events

__all__ = ["NORMAL", "PICK", "SOLVE", "URGENT", "Call", "Kernel"]

#: Priorities at one instant, first to last: completions, starts, the network solve, stream picks.
URGENT, NORMAL, SOLVE, PICK = 0, 1, 2, 3

Call = Callable[[Any], None]


class Kernel(simpy.core.Environment):
    """A SimPy environment whose queue also holds plain calls.

    Args:
        initial_time [s]: where the clock starts.

    Attributes:
        events: calls and SimPy events processed so far; brought up to date when a run returns.
    """

    def __init__(self, initial_time: float = 0.0) -> None:
        super().__init__(initial_time)
        self._heap: list[tuple[float, int, int, Call, Any]] = []
        self._queue: Any = self._heap  # SimPy's own peek and len read it under this name
        self.events = 0

    def call_at(
        self, t: float, callback: Call, priority: int = NORMAL, value: object = None
    ) -> None:
        """Call ``callback(value)`` at time ``t`` [s].

        Calls of one instant run by priority, then in the order they were asked for. There is no
        handle to cancel with: an actor that may change its mind ignores calls it no longer waits
        for.

        Raises:
            ValueError: ``t`` lies before the clock, or is not a number.
        """
        if not t >= self._now:
            raise ValueError(f"call at {t} s asked for when the clock is at {self._now} s")
        heappush(self._heap, (t, priority, next(self._eid), callback, value))

    def schedule(
        self,
        event: simpy.events.Event,
        priority: Any = simpy.events.NORMAL,
        delay: float = 0,
    ) -> None:
        """Put a SimPy event on the queue ``delay`` [s] from now (SimPy calls this itself)."""
        heappush(self._heap, (self._now + delay, priority, next(self._eid), self._process, event))

    def step(self) -> None:
        """Process the next call or event.

        Raises:
            simpy.core.EmptySchedule: the queue is empty.
        """
        if not self._heap:
            raise simpy.core.EmptySchedule
        self._now, _, _, callback, value = heappop(self._heap)
        self.events += 1
        callback(value)

    def run_all(self, until: float | None = None) -> None:
        """Process everything up to and including time ``until`` [s], or until nothing is left.

        The same order as ``run``, without a method call per event. Ends early, with the clock where
        it is, after :meth:`stop`.

        Raises:
            ValueError: ``until`` lies before the clock.
        """
        heap, pop, count = self._heap, heappop, 0
        if until is not None and not until >= self._now:
            raise ValueError(f"cannot run until {until} s when the clock is at {self._now} s")
        try:
            if until is None:
                while heap:
                    self._now, _, _, callback, value = pop(heap)
                    count += 1
                    callback(value)
            else:
                while heap and heap[0][0] <= until:
                    self._now, _, _, callback, value = pop(heap)
                    count += 1
                    callback(value)
                self._now = until
        except simpy.core.StopSimulation:
            return
        finally:
            self.events += count

    def stop(self) -> None:
        """End the current run once the call in progress has returned; a later run continues."""
        self.call_at(self._now, _raise_stop, priority=-1)

    def _process(self, event: simpy.events.Event) -> None:
        """Run the callbacks of a SimPy event, as ``Environment.step`` does."""
        callbacks: list[Any] = event.callbacks
        event.callbacks = None  # type: ignore[assignment]
        for position, callback in enumerate(callbacks):
            try:
                callback(event)
            except simpy.core.StopSimulation:
                event.callbacks = callbacks[position + 1 :]
                self.schedule(event, -1)
                raise
        if not event._ok and not hasattr(event, "_defused"):
            failure: Any = event._value
            raise type(failure)(*failure.args) from failure


def _raise_stop(_: object) -> None:
    raise simpy.core.StopSimulation(None)
