"""The contract every strategy must pass, as a class to subclass in a test module.

    class TestMine(StrategyContract):
        @pytest.fixture
        def strategy(self): return MINE
        @pytest.fixture
        def problem(self): return load_problem("v100_t4", "gpt2_355m", "v100_t4")

The strategy and the problem must be importable and picklable: one test runs in another process.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.cost.occupancy import memory_over_time
from sim.engine.simulate import Run, lay_out, simulate
from sim.plan.deps import of_experts, segment_of
from sim.plan.draft import PlanDraft
from sim.plan.io import plan_from_json, plan_to_json
from sim.plan.lower import lower
from sim.plan.order import find_cycle
from sim.plan.passes import expand
from sim.plan.plan import Plan
from sim.plan.program import walk
from sim.plan.validate import validate
from sim.problem import Problem
from sim.report.record import spans_of_run
from strategies.base import AXES, Space, Strategy, changed_fields, draft_or_default
from strategies.compose import compose, may_change
from strategies.pipeline.partition import cell_seconds
from strategies.registry import get

__all__ = ["COMPANIONS", "Case", "StrategyContract", "companions_of", "lower_bound"]

COMPANIONS = ("megatron", "1f1b", "ddp", "partition")
"""Strategies that complete a draft, where the one under test does not own their knobs; it may name
further ones in an attribute ``builds_on``."""
MAX_VALUES = 4
"""Knob values that the slower tests run, spread evenly over the space."""


class Case:
    """One knob value, completed to a plan.

    Attributes:
        before, draft, plan: the draft the strategy saw, the complete one, and its plan.
    """

    def __init__(self, strategy: Strategy[Any], problem: Problem, knobs: Any) -> None:
        self.strategy, self.problem, self.knobs = strategy, problem, knobs
        self.before = companions_of(strategy, problem, before=True)
        rest = companions_of(strategy, problem, before=False, knobs=knobs)
        self.draft = rest
        self.plan = lower(problem, self.draft)


def companions_of(
    strategy: Strategy[Any], problem: Problem, *, before: bool, knobs: Any = None
) -> PlanDraft:
    """Compose a strategy with what completes it.

    A companion takes the second value of its space, so that sizes above 1 occur.

    Args:
        strategy, problem: under test. before: stop before the strategy's own axis.
        knobs: the strategy's knobs, unless ``before``.
    """
    draft = draft_or_default(problem, None)
    own = _rank(strategy)
    names = (*COMPANIONS, *getattr(strategy, "builds_on", ()))
    others = [get(n) for n in names if not get(n).owns & strategy.owns]
    ahead = [s for s in others if _rank(s) <= own and s.name != strategy.name]
    behind = [s for s in others if _rank(s) > own]
    for companion in ahead:
        draft = _with_second(problem, draft, companion)
    if before:
        return draft
    draft = compose(problem, [(strategy, knobs)], start=draft)
    for companion in behind:
        draft = _with_second(problem, draft, companion)
    return draft


def _rank(strategy: Strategy[Any]) -> int:
    return AXES.index(strategy.axis) if strategy.axis in AXES else len(AXES)


def _with_second(problem: Problem, draft: PlanDraft, companion: Strategy[Any]) -> PlanDraft:
    values = companion.space(problem, draft).values
    if not values:
        raise ValueError(f"{companion.name}: {companion.space(problem, draft).reason}")
    return compose(problem, [(companion, values[min(1, len(values) - 1)])], start=draft)


def lower_bound(problem: Problem, draft: PlanDraft) -> float:
    """Time that no plan of this draft can beat [s].

    The larger of: a cell's microbatches times its work on one, and one microbatch through all
    positions of a replica; compute alone.
    """
    cuts = draft.pipeline.cuts or (0, len(problem.model.blocks))
    positions = 1 + max(c.stage for c in draft.cells)
    one: dict[int, float] = {}
    busiest = 0.0
    for cell in draft.cells:
        seconds = cell_seconds(problem, draft, cell)
        mine = sum(
            float(seconds[cuts[v] : cuts[v + 1]].sum())
            for v in range(cell.stage, len(cuts) - 1, positions)
        )
        one[cell.replica] = one.get(cell.replica, 0.0) + mine
        busiest = max(busiest, draft.data.microbatches[cell.replica] * mine)
    return max(busiest, *one.values())


def plan_hashes(strategy: Strategy[Any], problem: Problem, values: Sequence[Any]) -> list[str]:
    """Hashes of the plans of some knob values: what another process must find too."""
    return [Case(strategy, problem, knobs).plan.hash for knobs in values]


class StrategyContract:
    """Subclass with the fixtures ``strategy`` and ``problem``; see the module."""

    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        """The strategy under test; override."""
        pytest.fail("override the fixture strategy")

    @pytest.fixture
    def problem(self) -> Problem:
        """A small problem it has something to do on; override."""
        pytest.fail("override the fixture problem")

    @pytest.fixture
    def space(self, strategy: Strategy[Any], problem: Problem) -> Space[Any]:
        """Its knob space after the companions of earlier axes."""
        return strategy.space(problem, companions_of(strategy, problem, before=True))

    @pytest.fixture
    def cases(self, strategy: Strategy[Any], problem: Problem, space: Space[Any]) -> list[Case]:
        """Plans of a few knob values."""
        return [Case(strategy, problem, knobs) for knobs in _spread(space.values)]

    def test_declares_itself(self, strategy: Strategy[Any]) -> None:
        """Name, axis, source and owned knobs are there, and the registry knows it."""
        assert strategy.name and strategy.axis and strategy.paper and strategy.owns
        assert get(strategy.name) is strategy
        assert strategy.knobs.__struct_config__.frozen

    def test_space_has_values_or_a_reason(
        self, strategy: Strategy[Any], problem: Problem, space: Space[Any]
    ) -> None:
        """With and without a draft, the same every time, no value twice."""
        assert space.values or space.reason
        assert space == strategy.space(problem, companions_of(strategy, problem, before=True))
        assert strategy.space(problem) == strategy.space(problem)
        assert all(isinstance(k, strategy.knobs) for k in space)
        assert len(set(space.values)) == len(space.values)

    def test_every_value_of_the_space_is_legal(
        self, strategy: Strategy[Any], problem: Problem, space: Space[Any]
    ) -> None:
        """``apply`` accepts what ``space`` offers and changes nothing but what it owns."""
        before = companions_of(strategy, problem, before=True)
        kept = msgspec.json.encode(before)
        for knobs in space:
            after = strategy.apply(problem, before, knobs)
            assert changed_fields(before, after) <= may_change(strategy)
            assert after == strategy.apply(problem, before, knobs)
            assert after.knobs[strategy.name] == msgspec.to_builtins(knobs)
        assert msgspec.json.encode(before) == kept

    def test_json_round_trip(self, strategy: Strategy[Any], cases: list[Case]) -> None:
        """Knobs, draft and plan survive JSON, the plan with its hash."""
        for case in cases:
            text = msgspec.json.encode(case.knobs)
            assert msgspec.json.decode(text, type=strategy.knobs) == case.knobs
            draft = msgspec.json.decode(msgspec.json.encode(case.draft), type=PlanDraft)
            assert lower(case.problem, draft) == case.plan
            again = plan_from_json(plan_to_json(case.plan))
            assert again == case.plan and again.hash == case.plan.hash

    def test_same_plan_in_another_process(
        self, strategy: Strategy[Any], problem: Problem, space: Space[Any]
    ) -> None:
        """Nothing depends on hash seeds, addresses or what ran before."""
        values = _spread(space.values)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            there = pool.submit(plan_hashes, strategy, problem, values).result(timeout=100)
        assert there == plan_hashes(strategy, problem, values)

    def test_every_microbatch_once(self, cases: list[Case]) -> None:
        """Each stage of each cell: one F and one B, or one I and one W, per microbatch."""
        for case in cases:
            validate(case.plan)
            assert_every_microbatch_once(case.plan)

    def test_no_deadlock(self, cases: list[Case]) -> None:
        """The dry run of two steps ends, every rank by itself."""
        for case in cases:
            graph = lay_out(case.plan, steps=2, fold=False).graph
            assert find_cycle(graph) == []

    def test_memory_comes_back(self, cases: list[Case]) -> None:
        """Never negative, and the same steps up and down in consecutive steps."""
        for case in cases:
            assert_memory_comes_back(simulate(case.plan, case.problem, steps=2), case.problem)

    def test_makespan_respects_the_bound(self, cases: list[Case]) -> None:
        """Never below compute alone: m times the slowest cell, and one microbatch end to end."""
        for case in cases:
            makespan = simulate(case.plan, case.problem).makespan
            assert makespan >= lower_bound(case.problem, case.draft) * (1 - 1e-9)

    def test_same_spans_every_time(self, cases: list[Case]) -> None:
        """The span table of a run is the same to the byte."""
        for case in cases[:1]:
            first, second = (
                spans_of_run(simulate(case.plan, case.problem)).to_bytes() for _ in range(2)
            )
            assert first == second


def _spread(values: Sequence[Any]) -> list[Any]:
    if len(values) <= MAX_VALUES:
        return list(values)
    return [values[i * (len(values) - 1) // (MAX_VALUES - 1)] for i in range(MAX_VALUES)]


def assert_every_microbatch_once(plan: Plan) -> None:
    """See StrategyContract.test_every_microbatch_once; a segment's experts may stand apart."""
    placement = plan.placement
    programs = {r: p for p in expand(plan) for r in p.ranks}
    for cell in placement.cells:
        segments = [(s.stage, s.name) for s in placement.segments if s.cell == cell.stage]
        m = placement.microbatches[cell.replica]
        for rank in cell.ranks:
            ops = walk(programs[rank])
            seen = Counter((op.kind, op.stage, op.label, op.mb) for op in ops)
            passes = {(stage, label) for kind, stage, label, _ in seen if kind in "FBIW"}
            experts = [
                x for x in passes if of_experts(x[1]) and (x[0], segment_of(x[1])) in segments
            ]
            for stage, name in [*segments, *experts]:
                for mb in range(m):
                    f, b, i, w = (seen.pop((kind, stage, name, mb), 0) for kind in "FBIW")
                    assert f == 1 and (b, i, w) in ((1, 0, 0), (0, 1, 1))
            assert not [key for key in seen if key[0] in "FBIW"]


def assert_memory_comes_back(run: Run, problem: Problem) -> None:
    """See StrategyContract.test_memory_comes_back."""
    layout, out = run.layout, run.outcome
    graph = layout.graph
    rows = memory_over_time(graph, layout.wiring, layout.plan, problem, out.start, out.end)
    for times, nbytes in rows:
        if not len(times):
            continue
        assert nbytes.min() >= 0
        changes = np.diff(nbytes)
        half = len(changes) // 2
        assert len(changes) == 2 * half
        scale = max(float(nbytes.max()), 1.0)
        np.testing.assert_allclose(nbytes[half], nbytes[0], atol=1e-9 * scale)
        np.testing.assert_allclose(changes[:half], changes[half:], atol=1e-9 * scale)
