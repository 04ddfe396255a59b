"""The optimal cut against brute force, and no layer ever lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.problem import Problem, load_problem
from strategies.compose import compose
from strategies.pipeline.partition import (
    PARTITION,
    PartitionKnobs,
    block_seconds,
    min_max_cuts,
    unit_starts,
    weighted_counts,
)
from tests.validation.exercise import machine, model, problem

COSTS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0, 7.0])


@st.composite
def cost_tables(draw: st.DrawFn) -> NDArray[np.float64]:
    """Costs of up to nine units on up to four stages; stages differ in speed, units in size."""
    num_units = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, min(4, num_units)))
    units = np.array([draw(COSTS) for _ in range(num_units)])
    speeds = np.array([draw(st.sampled_from([1.0, 2.0, 4.0])) for _ in range(num_stages)])
    return units[None, :] / speeds[:, None]


def brute_force(costs: NDArray[np.float64]) -> tuple[tuple[int, ...], float, float]:
    """The cut of smallest (slowest stage, sum of squares, then later stages smallest)."""
    num_stages, num_units = costs.shape
    found = []
    for inner in itertools.combinations(range(1, num_units), num_stages - 1):
        cuts = (0, *inner, num_units)
        times = [costs[s, a:b].sum() for s, (a, b) in enumerate(itertools.pairwise(cuts))]
        squares = sum(t * t for t in times)
        found.append((max(times), squares, tuple(-c for c in reversed(cuts)), cuts))
    best = min(found)
    return best[3], best[0], best[1]


@given(cost_tables())
def test_min_max_equals_brute_force(costs: NDArray[np.float64]) -> None:
    cuts = min_max_cuts(costs)
    expected, slowest, squares = brute_force(costs)
    times = [costs[s, a:b].sum() for s, (a, b) in enumerate(itertools.pairwise(cuts))]
    assert max(times) == pytest.approx(slowest, rel=1e-12)
    assert sum(t * t for t in times) == pytest.approx(squares, rel=1e-12)
    assert cuts == expected


@given(st.integers(1, 12), st.integers(1, 60))
def test_min_max_of_equal_layers_is_the_equal_split(num_stages: int, more: int) -> None:
    num_units = num_stages + more
    cuts = min_max_cuts(np.ones((num_stages, num_units)))
    base, rest = divmod(num_units, num_stages)
    assert np.diff(cuts).tolist() == [base + 1] * rest + [base] * (num_stages - rest)


@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8).flatmap(
        lambda speeds: st.tuples(st.just(speeds), st.integers(len(speeds), 80))
    )
)
def test_weighted_counts_place_every_layer(case: tuple[list[float], int]) -> None:
    speeds, num_units = case
    counts = weighted_counts(num_units, speeds)
    assert sum(counts) == num_units and min(counts) >= 1 and len(counts) == len(speeds)
    share = np.array(speeds) / sum(speeds) * num_units
    if share.min() >= 1:
        assert np.abs(np.array(counts) - share).max() < 1 + 1e-9


@pytest.mark.parametrize("cut", [lambda: min_max_cuts(np.ones((3, 2)))])
def test_fewer_units_than_stages_are_refused(cut) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="at least one layer"):
        cut()
    with pytest.raises(InputError, match="at least one layer"):
        weighted_counts(2, (1.0, 1.0, 1.0))


def cut(given: Problem, stages: int, chunks: int = 1, **knobs: object) -> tuple[int, ...]:
    schedule = (
        ("interleaved", {"stages": stages, "chunks": chunks})
        if chunks > 1
        else ("1f1b", {"stages": stages})
    )
    draft = compose(given, [("megatron", {"tp": 2}), schedule, ("ddp", {}), ("partition", knobs)])
    return draft.pipeline.cuts


@pytest.mark.parametrize(
    ("method", "chunked"),
    [("weighted", (0, 5, 7, 11, 12)), ("min-max", (0, 5, 6, 11, 12))],
)
def test_layers_follow_the_speed_of_the_stage(method: str, chunked: tuple[int, ...]) -> None:
    speeds = {"fast": 3.0, "slow": 1.0}
    given = problem(machine(2, 2, types=("fast", "slow")), model(12, tp=(2,), speeds=speeds), 4)
    assert cut(given, 2) == (0, 6, 12)
    assert cut(given, 2, method=method) == (0, 9, 12)
    # Chunks go round robin: fast, slow, fast, slow; 4.5 and 1.5 layers each would be even.
    assert cut(given, 2, 2, method=method) == chunked


def test_embedding_and_head_count() -> None:
    """A large vocabulary leaves the last stage fewer layers; blocks may cut finer than layers."""
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 64000,
        "max_position_embeddings": 512,
    }
    job = {"global_batch": 16, "sequence_length": 512, "dtype": "fp16"}
    given = load_problem("v100_t4", config, job)
    draft = compose(
        given,
        [("megatron", {"tp": 4}), ("1f1b", {"stages": 2}), ("ddp", {}), ("partition", {})],
    )
    seconds = block_seconds(given, draft)
    slowest = {}
    for at in ("layer", "block"):
        starts = unit_starts(given.model, at)
        costs = np.add.reduceat(seconds, starts[:-1], axis=1)
        expected, bottleneck, _ = brute_force(costs)
        found = cut_of(given, draft, at)
        assert found == tuple(starts[c] for c in expected)
        slowest[at] = bottleneck
    equal = max(
        seconds[0, : draft.pipeline.cuts[1]].sum(), seconds[1, draft.pipeline.cuts[1] :].sum()
    )
    assert slowest["block"] <= slowest["layer"] < equal


def cut_of(given: Problem, draft: PlanDraft, at: str) -> tuple[int, ...]:
    knobs = PartitionKnobs(method="min-max", at=at)  # type: ignore[arg-type]
    return PARTITION.apply(given, draft, knobs).pipeline.cuts
