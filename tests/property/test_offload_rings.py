"""Updates on the chip of parameters that live on the host: what stands there fits the ring."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.stated import stated_prices
from sim.engine.simulate import Layout, Run, lay_out, run_layout
from sim.plan.plan import Plan
from sim.plan.validate import validate
from tests.unit.test_offload import LAYERS, gpt, most, plan_of
from tests.unit.zero_cases import sharded

PASSES = ("F", "B", "I")
GATHERS = ("UNSHARD", "UNSHARD_B")
FETCHES = ("FETCH_F", "FETCH_B")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, bool]:
    """A plan with parameters on the host, and whether there are master weights."""
    replicas, stages = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    zero3 = replicas > 1 and draw(st.booleans())
    chunks = draw(st.sampled_from([1, 2])) if zero3 else 1
    m = draw(st.sampled_from([1, 2])) * (stages if chunks > 1 else 1)
    masters = draw(st.booleans())
    # In fp32 there are 8 bytes of states and no second copy of the parameters.
    problem = gpt(replicas * stages, replicas * m, dtype="bf16" if masters else "fp32")
    assert problem.job.master_weights == masters
    knobs: dict[str, Any] = {
        "parameters": draw(st.integers(1, LAYERS)),
        "optimizer": draw(st.integers(0, LAYERS - 1)),
        "priority": draw(st.booleans()),
        "clipping": draw(st.sampled_from(["none", "global", "speculate", "previous-norm"])),
        "whole_steps": draw(st.booleans()),
        "parameter_buffers": draw(st.integers(1, 3)),
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
    }
    if zero3:
        return sharded(problem, 3, stages=stages, chunks=chunks, **knobs), masters
    return plan_of(problem, replicas=replicas, stages=stages, **knobs), masters


def run_of(plan: Plan, seed: int, fold: bool) -> Run:
    """Three steps in which every op takes a time of its own, a few very long."""

    def prices(layout: Layout) -> Any:
        names = sorted({op.name for op in layout.graph.ops})
        times = np.random.default_rng(seed).exponential(1.0, len(names)) ** 3
        return stated_prices(layout.graph, dict(zip(names, times.tolist(), strict=True)))

    return run_layout(lay_out(plan, steps=3, fold=fold), prices)


def check(plan: Plan, run: Run, masters: bool) -> None:
    """Count what stands in the ring of every actor: fetched parameters and updated copies."""
    graph, out = run.layout.graph, run.outcome
    away = {(s.stage, s.name) for s in plan.placement.segments if "parameters" in s.offload}
    mine: dict[int, dict[tuple[int, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for k, op in enumerate(graph.ops):
        if (op.stage, op.label) in away:
            mine[int(graph.actor[k])][op.stage, op.label].append(k)
    readers = GATHERS if plan.mathematics.zero == 3 else PASSES
    for segments in mine.values():
        if not any(graph.ops[k].kind in readers for nodes in segments.values() for k in nodes):
            continue  # a collective stands with its first member
        copies: list[tuple[float, int]] = []
        held: list[tuple[float, int]] = []
        for nodes in segments.values():
            at = {(int(graph.step[k]), graph.ops[k].kind, graph.ops[k].mb): k for k in nodes}
            left: dict[int, float] = {}
            fetched = -1
            # A use without a fetch of its own finds what an earlier use in the list left.
            for (step, kind, mb), k in at.items():
                start, end = float(out.start[k]), float(out.end[k])
                if kind == "OPT" and graph.ops[k].stream != "host":
                    end = float(out.end[at[step, "D2H", mb]])
                    copies += [(start, 1), (end, -1)]
                    if masters:
                        held += [(start, 1), (end, -1)]
                        continue
                elif kind not in readers:
                    continue
                source = "FETCH_F" if kind in ("F", "UNSHARD") else "FETCH_B"
                fetched = at.get((step, source, mb), fetched)
                assert fetched >= 0 and out.end[fetched] <= start
                left[fetched] = max(left.get(fetched, 0.0), end)
            fetches = {k for (_, kind, _), k in at.items() if kind in FETCHES}
            assert fetches == set(left)
            held += [x for k in left for x in ((float(out.start[k]), 1), (left[k], -1))]
        most(copies, plan.placement.parameter_buffers)
        most(held, plan.placement.parameter_buffers)


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_updated_copies_fit_the_ring_at_any_timing(case: tuple[Plan, bool], seed: int) -> None:
    plan, masters = case
    validate(plan)
    runs = [run_of(plan, seed, fold) for fold in (True, False)]
    assert runs[0].makespan == pytest.approx(runs[1].makespan)
    for run in runs:
        check(plan, run, masters)
