"""The planner on two positions: bounds, search, memory, priority."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.cost.ledger import knobs_of, peak_memory
from sim.cost.offload import host_ledgers
from sim.engine.simulate import simulate
from sim.errors import InputError
from strategies.offload import planner
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.bounds import bounds_of
from strategies.offload.planner import plan_offload, settled
from strategies.offload.program import Choice
from strategies.offload.units import plan_with
from tests.unit.offload_cases import spacing, two

HOST = AutoHeteKnobs(priority=False, clipping="speculate")


def some(sizes: tuple[tuple[int, int, int], ...], count: int) -> list[Choice]:
    """Seeded choices, the extremes among them."""
    rng = random.Random(count)
    found = [tuple((0, 0, 0) for _ in sizes), tuple((c - 1, p - 1, o - 1) for c, p, o in sizes)]
    for _ in range(count - 2):
        found.append(
            tuple((rng.randrange(c), rng.randrange(p), rng.randrange(o)) for c, p, o in sizes)
        )
    return found


def arrays(choice: Choice) -> list[list[Any]]:
    return [[np.asarray(x) for x in counts] for counts in choice]


@pytest.mark.parametrize(("schedule", "m"), [("1f1b", 1), ("1f1b", 3), ("gpipe", 2), ("zb-h1", 3)])
@pytest.mark.parametrize(("first", "base"), [(1, AutoHeteKnobs()), (3, HOST)])
def test_no_step_of_two_positions_beats_its_bound(
    schedule: str, m: int, first: int, base: AutoHeteKnobs
) -> None:
    problem, start = two(m=m, first=first)
    pipeline = msgspec.structs.replace(start.pipeline, schedule=schedule)
    start = msgspec.structs.replace(start, pipeline=pipeline)
    bounds = bounds_of(problem, start, base)
    for choice in some(bounds.sizes, 10):
        bound = float(bounds.step(arrays(choice)))
        assert spacing(problem, start, base, choice) >= bound * (1 - 1e-9)


@pytest.mark.parametrize(("first", "replicas", "m"), [(1, 1, 3), (3, 2, 1)])
def test_memory_forms_of_two_positions_are_the_ledgers(first: int, replicas: int, m: int) -> None:
    problem, start = two(first=first, replicas=replicas, m=m)
    bounds = bounds_of(problem, start, AutoHeteKnobs())
    for choice in some(bounds.sizes, 12):
        plan = plan_with(problem, start, AutoHeteKnobs(), choice)
        peaks = sorted({x.peak_bytes for x in peak_memory(plan, problem).values()})
        forms = sorted(float(bounds.value(form, arrays(choice))) for form, _ in bounds.on_chip)
        assert forms == pytest.approx(peaks)
        hosts = sorted(x.peak_bytes for x in host_ledgers(plan, problem, knobs_of).values())
        forms = sorted(float(bounds.value(form, arrays(choice))) for form, _ in bounds.on_host)
        assert [x for x in forms if x] == pytest.approx(hosts)


@pytest.mark.parametrize("listed", [10**6, 0])
@pytest.mark.parametrize("memory", [(2.4, 80.0), (2.4, 2.4)])
def test_two_positions_find_what_simulating_all_finds(
    memory: tuple[float, float], listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer each: all 64 choices; listed by their bounds, or by moves and the program."""
    monkeypatch.setattr(planner, "LISTED", listed)
    problem, start = two(memory, first=1, layers=2)
    bounds = bounds_of(problem, start, AutoHeteKnobs())
    every = []
    for choice in itertools.product(itertools.product((0, 1), repeat=3), repeat=2):
        pair: Choice = tuple((c, p, o) for c, p, o in choice)
        found = settled(problem, start, AutoHeteKnobs(), pair)
        assert bool(bounds.fits(arrays(pair))) == (not found.short)
        if not found.short:
            every.append(max(found.step_s, float(bounds.step(arrays(pair)))))
    found_ = plan_offload(problem, start)
    assert found_.proven and found_.gap == 0 and every
    assert found_.best.step_s == pytest.approx(min(every), rel=1e-12)


def test_moves_end_between_the_bound_and_the_listed_best(monkeypatch: pytest.MonkeyPatch) -> None:
    given = two((2.4, 2.4))
    listed = plan_offload(*given)
    monkeypatch.setattr(planner, "LISTED", 0)
    moved = plan_offload(*given)
    assert listed.proven
    assert moved.bound_s <= listed.best.step_s * (1 + 1e-9) <= moved.best.step_s * (1 + 2e-9)
    assert not moved.proven or moved.best.step_s == pytest.approx(listed.best.step_s)


@pytest.mark.parametrize("listed", [10**6, 0])
def test_an_end_before_the_proof_is_admitted(listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LISTED", listed)
    found = plan_offload(*two((2.4, 2.4)), most=1)
    assert not found.proven and found.simulated == 1
    assert 0 < found.bound_s < found.best.step_s and 0 < found.gap < 1


def test_only_the_small_chip_offloads() -> None:
    large = plan_offload(*two()).best.knobs
    assert large.stages == ((0, 0, 0), (0, 0, 0))
    found = plan_offload(*two((3.0, 80.0), first=3))
    assert found.proven and not found.best.short
    assert found.best.knobs.stages[0][2] > 0
    assert found.best.knobs.stages[1][1:] == (0, 0)


def test_more_memory_is_never_slower_on_two_positions() -> None:
    times = [plan_offload(*two((gb, gb))).best.step_s for gb in (2.4, 3.0, 4.0, 80.0)]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1] > 0


def test_priority_does_not_hurt_two_positions_with_fast_links() -> None:
    for memory in ((2.4, 2.4), (3.0, 80.0)):
        first = 2 if memory[1] < 80 else 3
        with_, without = (
            plan_offload(*two(memory, first=first), AutoHeteKnobs(priority=p)).best
            for p in (True, False)
        )
        assert with_.step_s <= without.step_s * (1 + 1e-9)


@pytest.mark.parametrize("m", [1, 2])
def test_the_host_serves_by_readiness_or_by_need(m: int) -> None:
    """Without priority what was ready first; with it the first of the ready layers."""
    given = two(m=m, layers=8, first=4)
    orders = {}
    for priority in (True, False):
        choice = ((0, 0, 4), (0, 0, 4))
        plan = plan_with(*given, AutoHeteKnobs(priority=priority), choice)
        run = simulate(plan, given[0], steps=4)
        graph, out = run.layout.graph, run.outcome
        at = {
            (int(graph.step[k]), op.kind, op.label): (float(out.start[k]), float(out.end[k]))
            for k, op in enumerate(graph.ops)
            if op.mb in (-1, m - 1)
        }
        for (kind, source), labels, step in itertools.product(
            (("D2H", "B"), ("OPT", "D2H")), ([0, 1, 2, 3], [4, 5, 6, 7]), range(4)
        ):
            queue = [(at[step, kind, f"l{x}"][0], at[step, source, f"l{x}"][1], x) for x in labels]
            for (start, ready, x), (other, then, y) in itertools.permutations(queue, 2):
                if other > start and then <= start * (1 - 1e-12):
                    assert x < y if priority else ready <= then
            orders[priority, kind, labels[0], step] = [x for _, _, x in sorted(queue)]
    assert orders[False, "OPT", 0, 3] == [3, 2, 1, 0] != orders[True, "OPT", 0, 3]


def test_several_chunks_are_refused() -> None:
    problem, start = two()
    blocks = problem.model.blocks
    cuts = tuple(next(i for i, b in enumerate(blocks) if b.layer == x) for x in (1, 2, 3))
    pipeline = msgspec.structs.replace(
        start.pipeline, schedule="interleaved", chunks=2, cuts=(0, *cuts, len(blocks))
    )
    with pytest.raises(InputError, match="one chunk"):
        plan_offload(problem, msgspec.structs.replace(start, pipeline=pipeline))


def test_nvme_is_refused() -> None:
    with pytest.raises(InputError, match="without NVMe"):
        plan_offload(*two(), AutoHeteKnobs(nvme=1))
