"""Steps that overlap: no plan of the contract suite leaks memory over 50 of them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import msgspec
import numpy as np
import pytest

from sim.cost.occupancy import memory_over_time
from sim.engine.simulate import simulate
from sim.plan.validate import validate
from strategies.registry import get, names
from strategies.testing import Case, companions_of
from tests.contract.test_eight_systems import CASES
from tests.contract.test_strategies import small

STEPS = 50


@pytest.mark.parametrize("name", names())
def test_fifty_steps_without_a_barrier_leak_nothing(name: str) -> None:
    # Without BARRIER a step's first forward waits for its own updates of the step before, @1.
    problem, strategy = small(), get(name)
    values = strategy.space(problem, companions_of(strategy, problem, before=True)).values
    for knobs in dict.fromkeys((values[0], values[len(values) // 2], values[-1])):
        plan = msgspec.structs.replace(Case(strategy, problem, knobs).plan, barrier=False)
        validate(plan)
        run = simulate(plan, problem, steps=STEPS)
        layout, out = run.layout, run.outcome
        rows = memory_over_time(layout.graph, layout.wiring, plan, problem, out.start, out.end)
        for times, nbytes in rows:
            assert nbytes.min() >= 0
            assert nbytes[-1] == pytest.approx(nbytes[0])
            early = times <= out.makespan / 5
            assert nbytes[~early].max() <= nbytes[early].max() * (1 + 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_fifty_steps_of_a_miniature_leak_nothing(name: str) -> None:
    # The miniatures place no blocks, so what a forward keeps counts one.
    case = CASES[name]()
    case.steps = STEPS
    programs = tuple(
        msgspec.structs.replace(p, text=re.sub(r"^repeat\(\d+\)", f"repeat({STEPS})", p.text))
        for p in case.plan.programs
    )
    case.plan = msgspec.structs.replace(case.plan, barrier=False, programs=programs)
    run = case.run(fold=False)
    graph, out = run.layout.graph, run.outcome
    kept: dict[int, list[tuple[float, int]]] = defaultdict(list)
    freed: Counter[int] = Counter()
    split = {(int(graph.actor[k]), op.stage) for k, op in enumerate(graph.ops) if op.kind == "W"}
    for node, op in enumerate(graph.ops):
        actor = int(graph.actor[node])
        if op.kind == "F":
            kept[actor].append((float(out.start[node]), 1))
        elif op.kind in ("B", "W") and (op.kind == "W") == ((actor, op.stage) in split):
            kept[actor].append((float(out.end[node]), -1))
            freed[actor] += 1
    assert kept and min(freed.values()) >= STEPS
    for changes in kept.values():
        # What is given back at an instant counts before what is taken.
        changes.sort()
        times = np.array([t for t, _ in changes])
        held = np.cumsum([change for _, change in changes])
        early = times <= times[-1] / 5
        assert held.min() >= 0 and held[-1] == 0
        assert held[~early].max() <= held[early].max()
