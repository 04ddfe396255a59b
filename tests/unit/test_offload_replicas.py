"""The planner with replicas: plain, and under ZeRO-1 to 3."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from sim.cost.ledger import knobs_of, peak_memory
from sim.cost.offload import host_ledgers
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.bounds import bounds_of
from strategies.offload.planner import plan_offload, settled
from strategies.offload.units import plan_with, units_of
from tests.unit.offload_cases import gpt, spacing

BASE = AutoHeteKnobs()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("m", [1, 2])
def test_bounds_and_memory_of_two_replicas(zero: int, m: int) -> None:
    """Parameters leave under ZeRO-3 as shards, and not at all under ZeRO-1 and 2."""
    problem, start = gpt(80.0, 2, m, zero=zero)
    bounds = bounds_of(problem, start, BASE)
    (size,) = bounds.sizes
    assert size == (4, 4 if zero in (0, 3) else 1, 4)
    every = [(c, p, o) for c, p, o in itertools.product(*map(range, size))]
    for choice in random.Random(zero).sample(every, 12):
        at = [[np.asarray(x) for x in choice]]
        assert spacing(problem, start, BASE, (choice,)) >= float(bounds.step(at)) * (1 - 1e-9)
        plan = plan_with(problem, start, BASE, (choice,))
        peak = max(x.peak_bytes for x in peak_memory(plan, problem).values())
        forms = [float(bounds.value(form, at)) for form, _ in bounds.on_chip]
        assert max(forms) == pytest.approx(peak)
        hosts = [x.peak_bytes for x in host_ledgers(plan, problem, knobs_of).values()]
        forms = [float(bounds.value(form, at)) for form, _ in bounds.on_host]
        assert max(forms) == pytest.approx(max(hosts, default=0.0))


@pytest.mark.parametrize(("zero", "memory"), [(0, 3.2), (1, 3.2), (2, 3.2), (3, 3.2), (3, 2.8)])
def test_replicas_find_what_simulating_all_finds(zero: int, memory: float) -> None:
    problem, start = gpt(memory, 2, zero=zero)
    bounds = bounds_of(problem, start, BASE)
    fits = []
    for c, p, o in itertools.product(*map(range, bounds.sizes[0])):
        found = settled(problem, start, BASE, ((c, p, o),))
        if not found.short:
            bound = float(bounds.step([[np.asarray(x) for x in (c, p, o)]]))
            fits.append(max(found.step_s, bound))
    planned = plan_offload(problem, start)
    assert planned.proven and fits and planned.best.step_s == min(fits)


def test_updates_of_replicas_share_their_nodes_processors() -> None:
    """All updates on the host: those of the second replica come on top of the first's."""
    one, two = (bounds_of(*gpt(80.0, replicas), BASE) for replicas in (1, 2))
    ((unit,),) = units_of(*gpt(80.0), BASE).values()
    away = [[np.asarray(0), np.asarray(0), np.asarray(3)]]
    more = float(two.step(away)) - float(one.step(away))
    assert 2.9 * unit.host < more <= 3 * unit.host
