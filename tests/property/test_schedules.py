"""Schedules against their closed forms; event engine, max-plus and folding against one another."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.maxplus import find_cycle, longest_path
from sim.errors import InputError, SimulationError
from sim.plan.schedules import SCHEDULES, interleaved_1f1b, text_grid
from tests.property.pipelines import RandomPipeline, pipeline, random_pipelines, run

SECONDS = st.integers(1, 40).map(lambda k: k / 8)
"""Dyadic, so that sums are exact and the closed forms hold with ==."""


def makespans(plan, seconds):  # type: ignore[no-untyped-def]
    """The same makespan from the event engine, folded or not, and from max-plus."""
    found = run(plan, seconds)
    _, end = longest_path(found.layout.graph, found.prices.seconds)
    assert run(plan, seconds, fold=False).makespan == found.makespan == end.max()
    return found.makespan


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 7), st.integers(1, 10), SECONDS, SECONDS)
def test_one_f_one_b_and_gpipe(name: str, p: int, m: int, f: float, b: float) -> None:
    """(m + p - 1)(f + b), with fewer microbatches than stages too (Narayanan et al. 2021)."""
    assert makespans(pipeline(p, m, name), {"F": f, "B": b}) == (m + p - 1) * (f + b)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), SECONDS, SECONDS)
def test_interleaved(p: int, groups: int, v: int, f: float, b: float) -> None:
    """(m v + p - 1)(f + b), f and b of one chunk: the bubble is v times smaller."""
    m = groups * p
    expected = (m * v + p - 1) * (f + b)
    assert makespans(pipeline(p, m, "interleaved", v), {"F": f, "B": b}) == expected


@given(st.integers(2, 6), st.integers(0, 5), SECONDS, SECONDS, SECONDS)
def test_zb_h1(p: int, more: int, f: float, i: float, w: float) -> None:
    """m (F + I + W) + (p - 1)(F + I - W) for m >= p, exactly when W <= min(F, I).

    A longer W makes the bubble larger than that (Qi et al. 2023, table 1, assumes equal thirds).
    """
    m = p + more
    seconds = {"F": f, "I": i, "W": w}
    closed = m * (f + i + w) + (p - 1) * (f + i - w)
    found = makespans(pipeline(p, m, "zb-h1"), seconds)
    assert (found == closed) == (w <= min(f, i))
    assert found >= closed


@given(st.integers(2, 6), st.integers(0, 6), SECONDS, SECONDS)
def test_zb_h1_is_never_slower_than_1f1b_on_equal_thirds(
    p: int, more: int, f: float, w: float
) -> None:
    w = min(f, w)
    m = p + more
    zero_bubble = makespans(pipeline(p, m, "zb-h1"), {"F": f, "I": f, "W": w})
    assert zero_bubble <= (m + p - 1) * (2 * f + w) - (p - 1) * w


# Forward time per stage, B = 2 F, microbatches, makespan: worked out by hand (spec sheet of H2).
UNEVEN = [
    ([1, 1, 2, 2], 8, 60),
    ([2, 2, 1, 1], 4, 32),
    ([2, 2, 1, 1], 8, 56),
    ([2, 2, 1, 1], 16, 104),
    ([2, 2, 1, 1], 64, 392),
    ([1, 2, 1, 1], 8, 53),
    ([1.5, 1, 1, 1.25], 4, 25.5),
    ([1.5, 1, 1, 1.25], 8, 42),
    ([1.5, 1, 1, 1.25], 16, 78),
    ([1.5, 1, 1, 1.25], 64, 294),
]


@pytest.mark.parametrize(("forward", "m", "expected"), UNEVEN)
def test_uneven_stages(forward: list[float], m: int, expected: float) -> None:
    seconds = {f"{s}F": f for s, f in enumerate(forward)}
    seconds |= {f"{s}B": 2 * f for s, f in enumerate(forward)}
    found = makespans(pipeline(len(forward), m, "1f1b"), seconds)
    assert found == expected
    slowest, total = 3 * max(forward), 3 * sum(forward)
    closed = (m - 1) * slowest + total
    assert found <= closed and (found == closed) == (forward[-1] == max(forward))


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_every_schedule_runs_every_microbatch_once(name: str, p: int, m: int, v: int) -> None:
    if name == "interleaved":
        m *= p
    order = SCHEDULES[name](p, m, v) if name == "interleaved" else SCHEDULES[name](p, m)
    virtual = p * v if name == "interleaved" else p
    seen = Counter(slot for row in order for slot in row)
    kinds = "FIW" if name == "zb-h1" else "FB"
    assert seen == Counter({(k, s, i): 1 for k in kinds for s in range(virtual) for i in range(m)})
    for position, row in enumerate(order):
        assert {s % p for _, s, _ in row} == {position}


@given(st.integers(2, 6), st.integers(1, 30), st.integers(2, 4))
def test_interleaved_refuses_other_multiples_and_offers_the_nearest(p: int, m: int, v: int) -> None:
    if m % p == 0:
        assert len(interleaved_1f1b(p, m, v)) == p
        return
    with pytest.raises(InputError) as caught:
        interleaved_1f1b(p, m, v)
    offers = [int(x) for x in caught.value.expected.split(" or ")]
    assert all(x % p == 0 and abs(x - m) < p for x in offers)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 2), (3, 3)])
def test_live_microbatches_are_bounded_by_the_depth(name: str, p: int, m: int) -> None:
    """Position s keeps at most min(m, p - s) microbatches, ZB-H1 as 1F1B (Qi et al. 2023, 2.1)."""
    for s, row in enumerate(SCHEDULES[name](p, m)):
        live = peak = 0
        for kind, _, _ in row:
            live += {"F": 1, "B": -1, "I": -1}.get(kind, 0)
            peak = max(peak, live)
        assert peak == min(m, p - s)


def test_text_grid() -> None:
    assert text_grid(SCHEDULES["1f1b"](2, 3)) == (
        "0: 0F0 0F1 0B0 0F2 0B1 0B2\n1: 1F0 1B0 1F1 1B1 1F2 1B2"
    )


def blocks_for_ever(case: RandomPipeline) -> bool:
    """Compute that waits for its sends may deadlock for want of buffers, and only then."""
    graph = case.layout(True).graph
    if not find_cycle(graph):
        return False
    assert any(call.name == "blocking_sends" for call in case.plan.lowering)
    for fold in (False, True):
        with pytest.raises(SimulationError, match="never start"):
            case.run(fold)
    with pytest.raises(SimulationError, match="in a circle"):
        longest_path(graph, np.zeros(graph.num_nodes))
    return True


@given(random_pipelines())
def test_event_engine_equals_max_plus(case: RandomPipeline) -> None:
    if blocks_for_ever(case):
        return
    for fold in (False, True):
        found = case.run(fold)
        graph = found.layout.graph
        start, end = longest_path(graph, found.prices.seconds)
        np.testing.assert_allclose(found.outcome.start, start, rtol=1e-9, atol=0)
        np.testing.assert_allclose(found.outcome.end, end, rtol=1e-9, atol=0)


@given(random_pipelines())
def test_folded_equals_unfolded(case: RandomPipeline) -> None:
    if blocks_for_ever(case):
        return
    folded, single = case.run(True), case.run(False)
    assert folded.makespan == pytest.approx(single.makespan, rel=1e-9)
    classes = folded.layout.graph.classes
    representative = {c: a.rank for a in folded.layout.graph.actors for c in [classes[a.rank]]}
    expected = local_spans(folded)
    for (rank, name, step), span in local_spans(single).items():
        assert span == pytest.approx(expected[representative[classes[rank]], name, step], rel=1e-9)


def local_spans(found):  # type: ignore[no-untyped-def]
    graph, out = found.layout.graph, found.outcome
    return {
        (graph.actors[graph.actor[n]].rank, op.name, int(graph.step[n])): (out.start[n], out.end[n])
        for n, op in enumerate(graph.ops)
        if graph.wire[n] < 0
    }


@given(random_pipelines(max_positions=3))
def test_same_run_gives_the_same_bytes(case: RandomPipeline) -> None:
    if blocks_for_ever(case):
        return
    first, second = case.run(True).outcome, case.run(True).outcome
    assert first.start.tobytes() == second.start.tobytes()
    assert first.end.tobytes() == second.end.tobytes()
