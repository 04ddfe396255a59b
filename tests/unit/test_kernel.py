"""The queue holds calls and SimPy events together, in one reproducible order."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any

import pytest
import simpy.core
import simpy.events

from sim.engine.kernel import NORMAL, PICK, SOLVE, URGENT, Kernel


def test_calls_run_by_time_then_priority_then_order_of_asking() -> None:
    kernel, log = Kernel(), []
    for t, priority, name in [
        (2.0, URGENT, "late"),
        (1.0, PICK, "pick"),
        (1.0, SOLVE, "solve"),
        (1.0, NORMAL, "start a"),
        (1.0, NORMAL, "start b"),
        (1.0, URGENT, "done"),
    ]:
        kernel.call_at(t, log.append, priority, name)
    kernel.run_all()
    assert log == ["done", "start a", "start b", "solve", "pick", "late"]
    assert (kernel.now, kernel.events) == (2.0, 6)


def test_a_call_made_during_an_instant_still_runs_in_it() -> None:
    kernel, log = Kernel(), []

    def pick(_: object) -> None:
        log.append("pick")
        kernel.call_at(kernel.now, log.append, URGENT, "done after pick")

    kernel.call_at(1.0, pick, PICK)
    kernel.call_at(1.0, log.append, SOLVE, "solve")
    kernel.run_all(until=1.0)
    assert log == ["solve", "pick", "done after pick"]


@pytest.mark.parametrize("t", [0.5, float("nan")])
def test_a_call_before_the_clock_is_refused(t: float) -> None:
    kernel = Kernel(1.0)
    with pytest.raises(ValueError, match=r"clock is at 1\.0 s"):
        kernel.call_at(t, print)


def test_run_all_until_includes_that_instant_and_sets_the_clock() -> None:
    kernel, log = Kernel(), []
    for t in (1.0, 2.0, 3.0):
        kernel.call_at(t, log.append, value=t)
    kernel.run_all(until=2.0)
    assert (log, kernel.now) == ([1.0, 2.0], 2.0)
    kernel.run_all(until=2.5)
    assert kernel.now == 2.5
    with pytest.raises(ValueError, match="cannot run until"):
        kernel.run_all(until=1.0)
    kernel.run_all()
    assert (log, kernel.events) == ([1.0, 2.0, 3.0], 3)


def test_stop_ends_the_run_after_the_call_and_a_later_run_continues() -> None:
    kernel, log = Kernel(), []

    def stop(_: object) -> None:
        kernel.stop()
        log.append("stopped")

    kernel.call_at(1.0, stop)
    kernel.call_at(1.0, log.append, NORMAL, "same instant")
    kernel.run_all()
    assert (log, kernel.now) == (["stopped"], 1.0)
    kernel.run_all()
    assert log == ["stopped", "same instant"]


def _mixed(run: str) -> list[tuple[float, str]]:
    kernel, log = Kernel(), []

    def process(name: str, wait: float) -> Generator[simpy.events.Event, Any, str]:
        for _ in range(3):
            yield kernel.timeout(wait)
            log.append((kernel.now, name))
        return name

    def call(_: object) -> None:
        log.append((kernel.now, "call"))
        if kernel.now < 3.0:
            kernel.call_at(kernel.now + 0.5, call)

    kernel.process(process("a", 1.0))
    kernel.call_at(0.5, call)
    kernel.process(process("b", 0.5))
    getattr(kernel, run)()
    return log


def test_processes_and_calls_share_the_clock_under_both_loops() -> None:
    log = _mixed("run_all")
    assert log == _mixed("run")
    assert [entry for entry in log if entry[0] == 1.0] == [(1.0, "a"), (1.0, "call"), (1.0, "b")]


def test_simpys_run_until_time_and_until_event() -> None:
    kernel, log = Kernel(), []
    kernel.call_at(1.0, log.append, NORMAL, "one")
    kernel.call_at(2.0, log.append, NORMAL, "two")
    kernel.run(until=1.5)
    assert (log, kernel.now) == (["one"], 1.5)
    assert kernel.run(until=kernel.timeout(5.0, value="done")) == "done"
    assert (log, kernel.now) == (["one", "two"], 6.5)
    assert kernel.peek() == 6.5  # SimPy keeps the event for callbacks it has not called yet
    kernel.step()
    assert kernel.peek() == float("inf")
    with pytest.raises(simpy.core.EmptySchedule):
        kernel.step()


@pytest.mark.parametrize("run", ["run", "run_all"])
def test_a_failure_nobody_waits_for_ends_the_run(run: str) -> None:
    kernel = Kernel()

    def process() -> Generator[simpy.events.Event, Any, None]:
        yield kernel.timeout(1.0)
        raise OSError(5, "lost")

    kernel.process(process())
    with pytest.raises(OSError, match="lost") as caught:
        getattr(kernel, run)()
    assert caught.value.errno == 5


def test_an_interrupted_process_sees_the_cause() -> None:
    kernel, log = Kernel(), []

    def sleeper() -> Generator[simpy.events.Event, Any, None]:
        try:
            yield kernel.timeout(10.0)
        except simpy.Interrupt as why:
            log.append((kernel.now, why.cause))

    process = kernel.process(sleeper())
    kernel.call_at(2.0, lambda _: process.interrupt("chip lost"))
    kernel.run_all()
    assert log == [(2.0, "chip lost")]


def test_the_parts_of_simpy_the_kernel_leans_on() -> None:
    """Fails when a SimPy upgrade moves what sim.engine.kernel replaces or touches."""
    environment = simpy.core.Environment(3.0)
    assert environment._now == 3.0
    assert next(environment._eid) == 0
    event = environment.event()
    assert event.callbacks == []
    assert not hasattr(event, "_defused")
    event.succeed("v")
    assert (event._ok, event._value) == (True, "v")
    assert environment._queue == [(3.0, simpy.events.NORMAL, 1, event)]
    assert (simpy.events.URGENT, simpy.events.NORMAL) == (URGENT, NORMAL)
    assert inspect.getsource(simpy.core).count("heappush(") == 1, "a second way into the queue"
    assert inspect.getsource(simpy.core).count("heappop(") == 1, "a second way out of the queue"
    assert "_queue" not in inspect.getsource(simpy.events).replace("_queued", "")
