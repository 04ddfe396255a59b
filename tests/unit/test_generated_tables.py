"""Tables made from a seed: named streams, rows that do not depend on how far a run goes, runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import sim
from sim.errors import PlanError
from sim.plan.generators import generated_rows, generator, random_stream
from sim.plan.plan import Plan, ProgramText, Table
from sim.plan.tables import resolve_tables
from sim.report.spans import Spans

JITTER = Table(origin="generator", generator="lognormal", parameters={"keys": ["x"], "sigma": 0.3})


@pytest.fixture(scope="module")
def problem() -> sim.Problem:
    return sim.load_problem("v100_t4", "gpt2_355m", "v100_t4")


def jittering(problem: sim.Problem) -> Plan:
    """Two ranks whose forward takes what a generated table says."""
    draft = sim.uniform(problem.model, problem.job.global_batch, [0, 1])
    plan = sim.lower(problem, draft)
    text = ProgramText((0, 1), "F0{ref=jitter/x} B0 <- F0 ; OPT <- B0")
    return msgspec.structs.replace(
        plan, lowering=(), programs=(text,), amounts={}, tables={"jitter": JITTER}
    )


def written(spans: Spans) -> bytes:
    return b"".join(np.ascontiguousarray(spans.columns[k]).tobytes() for k in spans.columns)


def test_equal_seeds_give_equal_runs_and_others_differ(problem: sim.Problem) -> None:
    plan = jittering(problem)
    reports = [sim.report_of(sim.simulate(plan, problem, steps=3, seed=n)) for n in (0, 0, 5)]
    first, again, other = (written(r.spans) for r in reports)
    assert first == again
    assert first != other
    assert [r.seed for r in reports] == [0, 0, 5]
    assert reports[2].simulate_document().seed == reports[2].plan_document().seed == 5
    unchanged = msgspec.structs.replace(plan, tables={"jitter": Table(values={"x": [1.0]})})
    runs = [sim.simulate(unchanged, problem, seed=seed) for seed in (0, 5)]
    assert runs[0].makespan == runs[1].makespan


def test_a_factor_scales_the_op(problem: sim.Problem) -> None:
    plan = jittering(problem)
    flat = msgspec.structs.replace(plan, tables={"jitter": Table(values={"x": [1.0]})})
    unit = forward_times(flat, problem, 0)
    drawn = resolve_tables(plan.tables, 2, 9)
    factors = [row["x"] for row in drawn.rows["jitter"]]
    assert factors[0] != factors[1]
    assert forward_times(plan, problem, 9) == pytest.approx([unit[0] * f for f in factors])


def forward_times(plan: Plan, problem: sim.Problem, seed: int) -> list[float]:
    run = sim.simulate(plan, problem, steps=2, seed=seed)
    graph = run.layout.graph
    nodes = [n for n, op in enumerate(graph.ops) if op.kind == "F" and graph.actor[n] == 0]
    return [float(run.outcome.end[n] - run.outcome.start[n]) for n in nodes]


def test_streams_have_names() -> None:
    def first(*names: str, seed: int = 0) -> float:
        return float(random_stream(seed, *names).random())

    assert first("a", "g") == first("a", "g")
    assert len({first("a", "g"), first("b", "g"), first("a", "h"), first("ag")}) == 4
    assert first("a", "g", seed=1) != first("a", "g", seed=-1)


def test_the_stream_is_the_sha256_of_seed_and_names() -> None:
    """The text [0, "t", "g"], hashed and read as one big number."""
    whole = hashlib.sha256(b'[0, "t", "g"]').hexdigest()
    expected = np.random.Generator(np.random.PCG64(int(whole, 16))).random(3)
    assert random_stream(0, "t", "g").random(3).tolist() == expected.tolist()


def test_longer_runs_begin_like_shorter_ones_and_other_tables_change_nothing() -> None:
    alone = resolve_tables({"a": JITTER}, 2, 3).rows["a"]
    longer = resolve_tables({"b": JITTER, "a": JITTER}, 5, 3).rows
    assert longer["a"][:2] == alone
    assert longer["b"] != longer["a"]


def test_lognormal_has_mean_one() -> None:
    (row,) = generated_rows(
        "t", "lognormal", {"keys": ["x"], "sigma": 0.5, "members": 40_000}, 1, 1
    )
    values = np.array(row["x"])
    assert values.mean() == pytest.approx(1.0, abs=0.01)
    assert np.log(values).std() == pytest.approx(0.5, abs=0.01)
    (same,) = generated_rows("t", "lognormal", {"keys": ["x"], "sigma": 0.0}, 1, 1)
    assert same == {"x": 1.0}


def test_routing_loses_no_token() -> None:
    parameters = {"keys": ["b0", "b1"], "members": 4, "tokens": 1000, "nbytes": 2.0}
    for row in generated_rows("t", "routing", parameters, 0, 3):
        for key in ("b0", "b1"):
            sent = np.array(row[key]) / 2.0
            assert sent.sum(1).tolist() == [1000.0] * 4
            assert row[f"{key}.load"] == (sent.sum(0) / 1000).tolist()
        assert row["b0"] != row["b1"]
    even = generated_rows("t", "routing", parameters | {"concentration": 1e9}, 0, 1)[0]["b0.load"]
    assert even == pytest.approx([1.0] * 4, abs=0.1)


@generator("two-rows")
def _two_rows(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    yield {"x": rng.random()}
    yield {"x": rng.random()}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (Table(origin="generator"), "not installed"),
        (Table(origin="generator", generator="nothing"), "not installed"),
        (Table(origin="generator", generator="lognormal"), "refuses its parameters"),
        (
            Table(
                origin="generator", generator="lognormal", parameters={"keys": ["x"], "sigma": -1}
            ),
            "refuses its parameters",
        ),
        (Table(origin="generator", generator="two-rows"), "ends early"),
        (Table(origin="dice"), "unknown origin"),
        (Table(generator="lognormal"), "what belongs to origin generator"),
        (
            Table(origin="generator", generator="lognormal", values={"x": [1.0]}),
            "what belongs to origin file",
        ),
        (Table(origin="controller"), "controller of this plan is not installed"),
    ],
)
def test_a_wrong_table_is_named(table: Table, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        resolve_tables({"mine": table}, 3)
    assert caught.value.key.startswith("tables.mine")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="already registered"):
        generator("lognormal")(_two_rows)
