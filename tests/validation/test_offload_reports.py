"""Faults that users of offloading reported: what copies cost, and what still lives on the chip."""

from __future__ import annotations

import pytest

from sim.engine.simulate import simulate
from sim.hardware.machine import HostSide
from sim.plan.plan import Amount
from sim.plan.validate import validate
from sim.report.links import link_use
from tests.validation.exercise import BACKWARD, FORWARD
from tests.validation.host_side import offloaded

# 6. Optimizer states that live on the host cost 12 B per parameter over the host link

PARAMS = 300_000_000
STATES = Amount(nbytes=12.0 * PARAMS)
FETCHED = "F0 B0 ; H2D[states] <- B0 ; OPT <- H2D[states]"
RESIDENT = "F0 B0 OPT"


def added(**machine: object) -> float:
    """What fetching the states adds to a step [s]."""
    times = []
    for text in (FETCHED, RESIDENT):
        given, plan = offloaded(text, {"H2D[states]": STATES}, params=PARAMS, **machine)  # type: ignore[arg-type]
        validate(plan)
        times.append([simulate(plan, given, fold=fold).makespan for fold in (True, False)])
    assert times[0][0] == pytest.approx(times[0][1], rel=1e-12)
    assert times[1][0] == pytest.approx(FORWARD + BACKWARD, rel=1e-6)
    return times[0][0] - times[1][0]


@pytest.mark.parametrize(("rate", "seconds"), [(16e9, 0.225), (25e9, 0.144)])
def test_states_over_the_host_link(rate: float, seconds: float) -> None:
    assert added(pcie_rate=rate) == pytest.approx(seconds, rel=1e-9)


def test_two_chips_behind_one_switch_take_twice_as_long() -> None:
    shared = HostSide(shared_by=2, shared_rate=16e9)
    assert added(chips=2, host=shared) == pytest.approx(0.45, rel=1e-9)
    assert added(chips=2) == pytest.approx(0.225, rel=1e-9)
    assert added(chips=4, nodes=2, host=shared) == pytest.approx(0.45, rel=1e-9)


def test_the_link_report_says_where_the_time_went() -> None:
    given, plan = offloaded(FETCHED, {"H2D[states]": STATES}, params=PARAMS)
    run = simulate(plan, given)
    nbytes, busy = link_use(run)
    at = run.prices.link_names.index("node0/chip0/h2d")
    assert nbytes[at] == pytest.approx(3.6e9)
    assert busy[at] == pytest.approx(0.225)
