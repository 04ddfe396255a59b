"""The integer program: its optimum is the best of all choices under the same forms."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.bounds import bounds_of
from strategies.offload.forms import Aux, Bounds, Form
from strategies.offload.program import Choice, best_choice
from tests.unit.offload_cases import gpt, two


def ordered(bounds: Bounds) -> list[tuple[float, Choice]]:
    """All choices that fit, by their bound."""
    found = []
    triples = [list(itertools.product(*map(range, size))) for size in bounds.sizes]
    for choice in itertools.product(*triples):
        arrays = [[np.asarray(x) for x in counts] for counts in choice]
        if bounds.fits(arrays):
            found.append((float(bounds.step(arrays)), choice))
    return sorted(found)


@st.composite
def random_bounds(draw: st.DrawFn) -> Bounds:
    """Random tables and factors; some positions cannot fetch."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    sizes = tuple((n + 1, draw(st.sampled_from([1, n + 1])), n + 1) for n in layers)
    aux = []
    for s in range(len(layers)):
        table = tuple(np.round(rng.uniform(-1, 2, sizes[s][1]), 3))
        aux += [
            Aux(position=s, kind="host"),
            Aux(position=s, kind="again"),
            Aux(position=s, kind="slow", again=float(np.round(rng.uniform(0, 1), 3)), table=table),
        ]

    def form(low: float) -> Form:
        keys = [(s, axis) for s in range(len(layers)) for axis in range(3)]
        counts = {k: np.round(rng.uniform(low, 2, sizes[k[0]][k[1]]), 3) for k in keys}
        some = [k for k in range(len(aux)) if rng.uniform() < 0.5]
        return Form(
            const=float(np.round(rng.uniform(0, 3), 3)),
            counts={k: v for k, v in counts.items() if rng.uniform() < 0.7},
            extra={k: float(np.round(rng.uniform(0, 2), 3)) for k in some},
        )

    limits = [(form(-2.0), float(np.round(rng.uniform(2, 8), 3))) for _ in range(3)]
    return Bounds(
        sizes=sizes,
        layers=layers,
        aux=tuple(aux),
        times=tuple(form(-1.0) for _ in range(draw(st.integers(1, 5)))),
        on_chip=tuple(limits[:2]),
        on_host=tuple(limits[2:]),
    )


@settings(max_examples=40, deadline=None)
@given(random_bounds())
def test_the_program_finds_the_best_of_all(bounds: Bounds) -> None:
    every = ordered(bounds)
    found = best_choice(bounds)
    assert (found is None) == (not every)
    if found is not None:
        choice, bound = found
        least = max(every[0][0], 0.0)
        assert bound <= least + 1e-6 and bound == pytest.approx(least, rel=1e-5, abs=1e-5)
        mine = {c: t for t, c in every}[choice]
        assert max(mine, 0.0) == pytest.approx(least, abs=1e-5)


@pytest.mark.parametrize("memory", [80.0, 4.0, 3.2])
@pytest.mark.parametrize("base", [AutoHeteKnobs(), AutoHeteKnobs(clipping="speculate")])
def test_a_real_position(memory: float, base: AutoHeteKnobs) -> None:
    bounds = bounds_of(*gpt(memory), base)
    found = best_choice(bounds)
    assert found is not None
    assert found[1] == pytest.approx(ordered(bounds)[0][0], rel=1e-5)
    assert found[1] <= ordered(bounds)[0][0]


def test_two_real_positions_and_what_comes_next() -> None:
    """Barring what it found, the program lists choices in the order of their bounds."""
    bounds = bounds_of(*two((2.4, 2.4)), AutoHeteKnobs())
    every = ordered(bounds)
    seen: list[Choice] = []
    for bound, _ in every[:6]:
        found = best_choice(bounds, seen)
        assert found is not None and found[0] not in seen
        assert found[1] == pytest.approx(bound, rel=1e-5) and found[1] <= bound
        seen.append(found[0])


def test_nothing_fits() -> None:
    bounds = bounds_of(*gpt(1.2), AutoHeteKnobs())
    assert best_choice(bounds) is None and not ordered(bounds)


def test_host_memory_is_a_limit_of_the_node() -> None:
    """With room for two layers' states on the host no choice sends three."""
    bounds = bounds_of(*gpt(4.0), AutoHeteKnobs())
    form, _ = bounds.on_host[0]
    arrays: list[list[Any]] = [[np.asarray(3), np.asarray(0), np.asarray(2)]]
    most = float(bounds.value(form, arrays))
    tight = msgspec.structs.replace(bounds, on_host=((form, most),))
    assert all(o + p <= 3 for _, ((_, p, o),) in ordered(tight) if o == 2)
    assert max(o for _, ((_, _, o),) in ordered(tight)) == 2
    found = best_choice(tight)
    assert found is not None and found[1] == pytest.approx(ordered(tight)[0][0], rel=1e-5)
