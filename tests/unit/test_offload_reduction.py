"""What three integers give away against a choice for every layer, and how early fetches are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from sim.cost.ledger import peak_memory
from sim.cost.occupancy import memory_over_time
from sim.engine.simulate import Run, simulate
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.report.report import report_of
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.bounds import bounds_of
from strategies.offload.policies import short_of
from strategies.offload.units import plan_with
from tests.unit.offload_cases import gpt

Bits = tuple[int, ...]


def by_layer(memory: float, update: str, layers: int) -> dict[tuple[Bits, Bits, Bits], float]:
    """Step [s] of every plan that fits, of all 8 ** layers: what each layer does by itself.

    Layers are equal, so whether a plan fits follows from its three sums.
    """
    problem, start = gpt(memory, layers=layers, update=update)
    knobs = AutoHeteKnobs(checkpointed=layers, parameters=layers, optimizer=layers)
    full = compose(problem, [("offload", knobs)], start=start)
    bounds = bounds_of(problem, start, AutoHeteKnobs())
    every = list(itertools.product((0, 1), repeat=layers))
    found = {}
    for c, p, o in itertools.product(every, repeat=3):
        if not bounds.fits([[np.asarray(sum(bits)) for bits in (c, p, o)]]):
            continue
        segments = []
        own = iter(range(layers))
        for s in full.offload.segments:
            if s.name not in ("embed", "head"):
                k = next(own)
                host = [w for w, bits in (("parameters", p), ("optimizer", o)) if bits[k]]
                again = "full" if c[k] else "none"
                s = msgspec.structs.replace(s, recompute=again, offload=tuple(host))
            segments.append(s)
        offload = msgspec.structs.replace(full.offload, segments=tuple(segments))
        plan = lower(problem, msgspec.structs.replace(full, offload=offload))
        assert not short_of(plan, problem)
        run = simulate(plan, problem, steps=16)
        found[c, p, o] = report_of(run, problem).metrics.step_time_s
    return found


def three_integers(choice: tuple[Bits, Bits, Bits]) -> bool:
    c, p, o = choice
    return all(list(x) == sorted(x, reverse=True) for x in (c, p, o[::-1]))


@pytest.mark.parametrize(
    ("memory", "update", "layers", "lost"),
    [
        (3.2, "0.4 ns", 3, 0.0),
        (3.6, "0.1 ns", 3, 0.0),
        # The last layer's parameters are fetched once a step, every other's twice.
        (3.2, "0.1 ns", 4, 0.042),
    ],
)
def test_what_three_integers_lose(memory: float, update: str, layers: int, lost: float) -> None:
    found = by_layer(memory, update, layers)
    best = min(found.values())
    three = min(step for choice, step in found.items() if three_integers(choice))
    assert len(found) > 20
    assert three / best - 1 == pytest.approx(lost, abs=1e-3)


# -- fetches


def fetches(plan: Plan, run: Run) -> Iterator[tuple[float, float]]:
    """(when a buffer and the parameters are there, start) of every fetch after the first step."""
    graph, out = run.layout.graph, run.outcome
    at = {
        (int(graph.step[k]), op.kind, op.label): (float(out.start[k]), float(out.end[k]))
        for k, op in enumerate(graph.ops)
    }
    away = {s.name for s in plan.placement.segments if "parameters" in s.offload}
    both = {s.name for s in plan.placement.segments if len(s.offload) == 2}
    passes = [(v, k) for k, v in at.items() if k[1] in ("F", "B") and k[2] in away]
    # An update on the chip leaves its buffer when its copy is back on the host.
    passes += [
        ((v[0], at[k[0], "D2H", k[2]][1]), k)
        for k, v in at.items()
        if k[1] == "OPT" and k[2] in away - both
    ]
    passes.sort()
    left: list[float] = []
    for (step, label), group in itertools.groupby(passes, key=lambda x: (x[1][0], x[1][2])):
        uses = list(group)
        fetch = at[step, f"FETCH_{uses[0][1][1]}", label]
        if step:
            source = at[step - 1, "OPT" if label in both else "D2H", label][1]
            yield max(source, left[-plan.placement.parameter_buffers]), fetch[0]
        left.append(uses[-1][0][1])


@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("triple", [(4, 4, 4), (2, 3, 1), (4, 2, 4)])
def test_every_fetch_is_as_early_as_a_buffer_allows(
    buffers: int, triple: tuple[int, int, int]
) -> None:
    """From when it may to when it does, the stream of copies to the chip never rests."""
    problem, start = gpt(80.0, layers=4)
    plan = plan_with(problem, start, AutoHeteKnobs(parameter_buffers=buffers), (triple,))
    run = simulate(plan, problem, steps=5)
    graph, out = run.layout.graph, run.outcome
    copies = [
        (float(out.start[k]), float(out.end[k]))
        for k in range(graph.num_nodes)
        if graph.stream_names[graph.stream[k]][1] == "h2d"
    ]
    seen = 0
    for may, does in fetches(plan, run):
        busy = sum(max(0.0, min(does, end) - max(may, begin)) for begin, end in copies)
        assert does >= may - 1e-12 and does - may == pytest.approx(busy, abs=1e-12)
        seen += 1
    assert seen >= 4 * (2 * triple[1] - 1)


@pytest.mark.parametrize("memory", [3.2, 3.6])
def test_occupancy_stays_within_the_budget(memory: float) -> None:
    """Of all choices that fit, none passes its ledger, and no ledger the chip, at any time."""
    problem, start = gpt(memory, layers=3)
    bounds = bounds_of(problem, start, AutoHeteKnobs())
    grid = [np.arange(4)[:, None, None], np.arange(4)[:, None], np.arange(4)]
    fits = np.argwhere(bounds.fits([grid]))
    for c, p, o in fits.tolist():
        plan = plan_with(problem, start, AutoHeteKnobs(), ((c, p, o),))
        run = simulate(plan, problem, steps=4)
        (ledger,) = peak_memory(plan, problem).values()
        graph, out = run.layout.graph, run.outcome
        ((_, nbytes),) = memory_over_time(
            graph, run.layout.wiring, plan, problem, out.start, out.end
        )
        assert 0 < nbytes.max() <= ledger.peak_bytes * (1 + 1e-9)
        assert ledger.peak_bytes <= ledger.limit_bytes
    assert len(fits)
