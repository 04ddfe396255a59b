"""Local SGD and DiLoCo as plans: closed forms of a round, wire bytes, memory, what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sim.cost.ledger import peak_memory
from sim.engine.simulate import Run, simulate
from sim.errors import InputError, PlanError
from sim.plan.lower import lower
from sim.plan.passes import expand
from sim.plan.plan import Plan, ProgramText
from sim.plan.validate import validate
from sim.problem import Problem, load_problem
from sim.report.links import link_use
from sim.report.metrics import pace_of
from sim.report.record import spans_of_run
from sim.report.report import report_of
from strategies.compose import compose
from strategies.data.cosim_learners import Network, ring_data
from strategies.data.cosim_local import Outer, train_local
from strategies.data.cosim_order import round_ends
from strategies.data.cosim_task import Inner, Task
from tests.contract.test_strategies import MOE
from tests.unit.delayed_cases import NBYTES, PARAMS, machine_of, problem_of

GRID: list[tuple[str, dict[str, Any]]] = [
    ("megatron", {}), ("1f1b", {}), ("ddp", {}), ("partition", {}),
]  # fmt: skip
COMPUTE = 3.0


def round_of(replicas: int, comm: float, **knobs: Any) -> tuple[Plan, Problem]:
    """Workers of one chip whose whole exchange alone takes ``comm`` [s] at 32 bits."""
    times = [COMPUTE] * replicas
    rate = 2 * (replicas - 1) / replicas * NBYTES / comm
    problem = problem_of(times, machine_of(times, rate=rate))
    grid = [("megatron", {"chips": tuple(range(1, replicas + 1))}), *GRID[1:]]
    choice = {"workers": replicas} | knobs
    plan = lower(problem, compose(problem, [*grid, ("local_sgd", choice)]))
    validate(plan)
    return plan, problem


def step_time(plan: Plan, problem: Problem, **more: Any) -> float:
    run = simulate(plan, problem, steps=20, **more)
    return pace_of(spans_of_run(run), barrier=plan.barrier).step_time_s


@pytest.mark.parametrize("inner", [1, 5])
@pytest.mark.parametrize("comm", [2.0, 40.0])
def test_a_round(inner: int, comm: float) -> None:
    for overlap, expected in ((False, inner * COMPUTE + comm), (True, max(inner * COMPUTE, comm))):
        plan, problem = round_of(4, comm, inner=inner, overlap=overlap)
        assert step_time(plan, problem) == pytest.approx(expected)
        assert step_time(plan, problem, fold=False) == pytest.approx(expected)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_bits_and_fragments_shorten_the_exchange(bits: int) -> None:
    plan, problem = round_of(4, 40.0, inner=6, bits=bits)
    assert step_time(plan, problem) == pytest.approx(6 * COMPUTE + 40.0 * bits / 32)
    # A step is a third of the round, with a third of the parameters.
    plan, problem = round_of(4, 40.0, inner=6, bits=bits, fragments=3)
    assert step_time(plan, problem) == pytest.approx(2 * COMPUTE + 40.0 * bits / 32 / 3)
    plan, problem = round_of(4, 40.0, inner=6, bits=bits, fragments=3, overlap=True)
    assert step_time(plan, problem) == pytest.approx(max(2 * COMPUTE, 40.0 * bits / 32 / 3))


def test_samples_of_a_round() -> None:
    plan, problem = round_of(4, 2.0, inner=5)
    report = report_of(simulate(plan, problem, steps=10), problem, memory={})
    assert report.basis.tokens_per_step == 5 * problem.job.global_batch
    assert report.metrics.tokens_per_s == pytest.approx(5 * 4 / (5 * COMPUTE + 2.0))


def sites(inner: int, **knobs: Any) -> tuple[Run, Problem, Plan]:
    job = {"global_batch": 64, "sequence_length": 1024, "limits": {"allow_inexact": True}}
    given = load_problem("h100_a100_wan", "gpt2_355m", job)
    grid = [("megatron", {"tp": 4}), *GRID[1:]]
    plan = lower(given, compose(given, [*grid, ("local_sgd", {"inner": inner} | knobs)]))
    validate(plan)
    return simulate(plan, given, steps=4), given, plan


def test_sites_are_workers_and_sum_inside() -> None:
    run, given, plan = sites(8)
    assert plan.placement.workers == (8, 8)
    wiring = run.layout.wiring
    inside = [g for g, roles in zip(wiring.groups, wiring.roles, strict=True) if "local" in roles]
    assert sorted(map(len, inside)) == [8] * 8
    # Bytes between the sites do not grow with the number of local steps.
    crossing = []
    for inner in (8, 16):
        other, _, _ = sites(inner)
        names = other.prices.link_names
        crossing.append(link_use(other)[0][names.index("oregon->california")])
    assert crossing[0] == pytest.approx(crossing[1]) and crossing[0] > 0
    whole = simulate(lower(given, compose(given, [("megatron", {"tp": 4}), *GRID[1:]])), given)
    per_step = link_use(whole)[0][whole.prices.link_names.index("oregon->california")]
    assert crossing[0] / 4 == pytest.approx(per_step, rel=0.1)


def test_folding_changes_nothing_on_two_sites() -> None:
    for knobs in ({}, {"overlap": True, "bits": 8, "fragments": 4}):
        run, given, plan = sites(8, **knobs)
        each = simulate(plan, given, steps=4, fold=False)
        assert len(run.layout.graph.actors) < len(each.layout.graph.actors)
        assert run.makespan == pytest.approx(each.makespan, rel=1e-9)


def test_the_shared_parameters_are_in_the_ledger() -> None:
    plan, problem = round_of(4, 2.0, inner=5)
    plain = lower(problem, compose(problem, [("megatron", {"chips": (1, 2, 3, 4)}), *GRID[1:]]))
    more = [peak_memory(p, problem)[0, 0].terms["optimizer"] for p in (plan, plain)]
    assert more[0] - more[1] == 8 * PARAMS
    plan, _ = round_of(4, 2.0, inner=6, overlap=True, fragments=2, bits=8, momentum=False)
    here = peak_memory(plan, problem)[0, 0].terms["optimizer"]
    assert here - more[1] == (4 + 0.5) * PARAMS


def test_training_on_the_rounds_of_a_plan() -> None:
    train, test = ring_data(120, 80, seed=5)
    net = Network(num_features=2, hidden=6)
    task = Task(learner=net, train=train, test=test, batch=10, seed=6)
    plan, problem = round_of(4, 2.0, inner=5)
    ends = round_ends(simulate(plan, problem, steps=10))
    inner = Inner(rate=0.1, steps=5)
    run = train_local(task, ends, range(4), inner, Outer(rate=0.7, momentum=0.9))
    assert run.times.tolist() == [0.0, *ends]
    assert ends[0] == pytest.approx(17.0) and run.train[-1] < run.train[0]


def test_validation_of_rounds() -> None:
    plan, _ = round_of(2, 2.0, inner=3)
    ranks = (0, 1)

    def written(text: str) -> Plan:
        return msgspec.structs.replace(plan, lowering=(), programs=(ProgramText(ranks, text),))

    end = (
        "0ALL_REDUCE[outer]:dp{amount=exchange0} <- 0OPT ; "
        "0OPT[outer]{amount=outer0} <- 0ALL_REDUCE[outer]"
    )
    good = "repeat(steps){ repeat(3){ 0F0 ; 0B0 ; 0OPT } ; " + end + " }"
    validate(written(good))
    for text, message in (
        ("repeat(steps){ repeat(3){ 0F0 ; 0B0 ; 0OPT ; 0OPT } ; " + end, "twice"),
        ("repeat(steps){ repeat(3){ 0F0 ; 0B0 ; 0OPT }", "never exchange"),
        ("repeat(steps){ 0F0 ; 0B0 ; repeat(3){ 0OPT } ; " + end, "twice"),
    ):
        with pytest.raises(PlanError, match=message):
            validate(written(text + " }"))
    with pytest.raises(PlanError, match="workers that take steps of their own"):
        validate(msgspec.structs.replace(plan, exact=True, reason=""))
    odd = msgspec.structs.replace(plan.placement, workers=(1, 2))
    with pytest.raises(PlanError, match="every replica belongs to one worker"):
        validate(msgspec.structs.replace(plan, placement=odd))


def test_gradients_of_a_worker_must_meet_inside_it() -> None:
    _, given, plan = sites(8)
    text = (
        "repeat(steps){ repeat(8){ 0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3 0OPT }"
        " 0ALL_REDUCE[outer]:dp{amount=exchange0} <- 0OPT }"
    )
    programs = [ProgramText(p.ranks, text) for p in expand(plan)]
    with pytest.raises(PlanError, match="never reduced"):
        validate(msgspec.structs.replace(plan, lowering=(), programs=tuple(programs)), given)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"inner": -1}, "at least 0"),
        ({"inner": 4, "fragments": 3}, "equal distances"),
        ({"inner": 4, "workers": 3}, "3 workers do not divide 4"),
        ({"inner": 4, "workers": 1}, "nobody to exchange with"),
        ({"inner": 4, "workers": 0}, "nobody to exchange with"),
    ],
)
def test_what_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        round_of(4, 2.0, **knobs)


@pytest.mark.parametrize(
    ("more", "message"),
    [(("zero", {}), "ZeRO shares"), (("expert", {"ep": 4}), "share experts span workers")],
)
def test_strategies_that_do_not_go_with_workers(
    more: tuple[str, dict[str, Any]], message: str
) -> None:
    given = load_problem("v100_t4", MOE, {"global_batch": 16, "sequence_length": 256})
    with pytest.raises(InputError, match=message):
        compose(given, [*GRID, more, ("local_sgd", {"inner": 4, "workers": 8})])
