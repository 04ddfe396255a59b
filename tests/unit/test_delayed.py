"""Delayed SGD on parameter servers: closed forms of times, delays and rates."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sim.cost.ledger import peak_memory
from sim.engine.faults import ChipLoss, Straggler
from sim.engine.simulate import Run, simulate
from sim.errors import InputError
from sim.model.amounts import rank_params
from sim.plan.lower import lower
from sim.problem import load_problem
from sim.report.links import link_use
from sim.report.record import spans_of_run
from sim.report.report import report_of
from strategies.compose import compose
from strategies.data.delayed_runs import common_window, delays_of, order_of
from tests.contract.test_strategies import MOE
from tests.unit.delayed_cases import NBYTES, UPDATE, machine_of, plan_of, problem_of


def run_of(
    compute: list[float], steps: int = 20, *, knobs: dict[str, Any] | None = None, **more: Any
) -> Run:
    made = {k: more.pop(k) for k in ("rate", "update", "pcie") if k in more}
    problem = problem_of(compute, **made)
    return simulate(plan_of(problem, **(knobs or {})), problem, steps=steps, **more)


def updates(run: Run) -> list[tuple[float, int, int]]:
    return [(a.time, a.worker, t - a.read) for t, a in enumerate(order_of(run))]


def test_the_third_miniature() -> None:
    run = run_of([3.0, 6.0], 3, contention=False)
    assert updates(run)[:5] == [
        (4.25, 0, 0),
        (7.25, 1, 1),
        (8.5, 0, 1),
        (12.75, 0, 0),
        (14.5, 1, 2),
    ]


def test_the_third_miniature_with_replies_that_do_not_wait() -> None:
    run = run_of([3.0, 6.0], 3, contention=False, knobs={"current": True})
    assert [d for _, _, d in updates(run)[:5]] == [0, 1, 2, 1, 3]
    assert updates(run)[4][0] == 14.25


def test_first_answers_share_the_servers_nic() -> None:
    # Both first answers take 1 s instead of 0.5 s; nothing else meets anything.
    alone, shared = (updates(run_of([3.0, 6.0], 3, contention=c)) for c in (False, True))
    assert [t for t, _, _ in shared] == [t + 0.5 for t, _, _ in alone]


def test_one_worker_has_no_delay() -> None:
    run = run_of([3.0], 5)
    period = 0.5 + 3.0 + 0.5 + UPDATE
    assert updates(run) == [(pytest.approx(period * k), 0, 0) for k in range(1, 6)]


@pytest.mark.parametrize("workers", [2, 5])
def test_equal_workers_are_one_less_than_their_number_late(workers: int) -> None:
    found = delays_of(run_of([3.0] * workers, rate=1e15, update=1e-9))
    assert found.histogram == {workers - 1: found.updates}
    assert found.updates_per_s == pytest.approx(workers / 3.0, rel=1e-6)
    assert found.samples_per_s == pytest.approx(workers / 3.0, rel=1e-6)


def test_a_worker_of_a_third_the_speed() -> None:
    run = run_of([3.1, 3.0, 3.05, 9.0], 60, rate=1e15, update=1e-9)
    found = delays_of(run)
    pace = [1 / 3.1, 1 / 3.0, 1 / 3.05, 1 / 9.0]
    assert found.updates_per_s == pytest.approx(sum(pace), rel=0.01)
    for worker, own in enumerate(pace):
        assert found.worker_mean[worker] == pytest.approx((sum(pace) - own) / own, rel=0.05)
    assert found.stop < run.makespan / 2.5


def test_a_straggler_is_a_slow_worker() -> None:
    slow = Straggler(ranks=(3,), factor=3.0)
    times = {"rate": 1e15, "update": 1e-9}
    run = run_of([3.1, 3.0, 3.05, 3.0], 30, faults=[slow], **times)
    same = run_of([3.1, 3.0, 3.05, 9.0], 30, **times)
    assert updates(run) == [(pytest.approx(t), w, d) for t, w, d in updates(same)]


def test_pushes_fill_the_servers_link() -> None:
    # Only the way into the server is narrow: 0.5 s for each gradient, whoever's it is.
    machine = machine_of([0.01] * 6, rate=1e15, update=1e-9)
    links = tuple(
        msgspec.structs.replace(x, rate=8e6) if x.name == "node0/nic0/in" else x
        for x in machine.links
    )
    machine = msgspec.structs.replace(machine, links=links)
    problem = problem_of([0.01] * 6, machine)
    found = delays_of(simulate(plan_of(problem), problem, steps=20))
    assert found.updates_per_s == pytest.approx(8e6 / NBYTES, rel=0.01)


def test_updates_fill_the_servers_processors() -> None:
    found = delays_of(run_of([0.1] * 6, 20, rate=1e15, update=0.5))
    assert found.updates_per_s == pytest.approx(2.0, rel=0.02)


def test_two_parts_update_at_once_on_two_nodes() -> None:
    problem = problem_of([3.0, 3.0])
    for at, wait in (((0,), UPDATE), ((0, 2), UPDATE / 2)):
        plan = plan_of(problem, chips=(1,), shards=2, at=at)
        run = simulate(plan, problem, steps=1)
        # Both parts are worked on at once: by one node in turns, by two in half the time.
        last = max(h.end for h in run.handled if h.op.kind == "APPLY")
        pushed = max(h.ready for h in run.handled if h.op.kind == "APPLY")
        assert last - pushed == pytest.approx(wait)


def test_a_server_beside_its_worker_copies_over_pcie() -> None:
    problem = problem_of([3.0], pcie=16e6)
    run = simulate(plan_of(problem, at=(1,)), problem, steps=3)
    period = NBYTES / 16e6 * 2 + 3.0 + UPDATE
    assert updates(run) == [(pytest.approx(period * k), 0, 0) for k in (1, 2, 3)]
    nbytes = dict(zip(run.prices.link_names, link_use(run)[0].tolist(), strict=True))
    assert nbytes["node1/nic0/in"] == nbytes["node1/nic0/out"] == 0.0


def test_every_byte_is_on_its_links() -> None:
    run = run_of([3.0, 4.0], 5)
    nbytes = dict(zip(run.prices.link_names, link_use(run)[0].tolist(), strict=True))
    for name in ("node0/nic0/in", "node0/nic0/out"):
        assert nbytes[name] == pytest.approx(10 * NBYTES)
    assert nbytes["node1/nic0/out"] == pytest.approx(5 * NBYTES)


def test_a_server_with_a_chip_of_its_own() -> None:
    problem = problem_of([3.0])
    run = simulate(plan_of(problem, place="chip"), problem, steps=2)
    assert run.layout.plan.placement.chips == (1, 0)
    assert not [name for name in run.prices.link_names if "processors" in name]
    # Its memory is free in this machine, so the update takes no time.
    assert updates(run) == [(pytest.approx(4.0), 0, 0), (pytest.approx(8.0), 0, 0)]


def test_a_lost_worker_leaves_the_others_fresher() -> None:
    run = run_of([3.0] * 4, 40, rate=1e15, update=1e-9, faults=[ChipLoss(rank=2, at=50.0)])
    before, after = delays_of(run, stop=50.0), delays_of(run, start=60.0, stop=run.makespan)
    assert before.worker_mean == {0: 3.0, 1: 3.0, 2: 3.0, 3: 3.0}
    assert after.worker_mean == {0: 2.0, 1: 2.0, 3: 2.0}
    assert common_window(run)[1] <= 50.0
    assert run.makespan == pytest.approx(120.0, rel=1e-3)


def test_a_run_ends_when_it_is_told() -> None:
    whole = run_of([3.0, 4.0], 20)
    part = run_of([3.0, 4.0], 20, until=30.0)
    assert part.makespan <= 30.0
    assert updates(part) == [u for u in updates(whole) if u[0] <= 30.0]
    assert max(spans_of_run(part).columns["end_s"]) <= 30.0


@pytest.mark.parametrize("place", ["host", "chip"])
def test_folding_changes_nothing(place: str) -> None:
    problem = problem_of([3.0] * 4)
    # The server's chip is outside: four equal workers may not stand for one another.
    plan = plan_of(problem, place=place)
    runs = [simulate(plan, problem, steps=6, fold=fold) for fold in (True, False)]
    assert updates(runs[0]) == updates(runs[1])
    assert runs[0].layout.graph.classes == [0, 1, 2, 3, 4]


def test_the_same_run_twice() -> None:
    first, second = (spans_of_run(run_of([3.0, 4.0, 3.5], 6)).to_bytes() for _ in range(2))
    assert first == second


def test_the_report_counts_samples() -> None:
    problem = problem_of([3.0] * 3, batch=6, rate=1e15, update=1e-9)
    run = simulate(plan_of(problem), problem, steps=20)
    report = report_of(run, problem, memory={})
    # Two microbatches of one token behind each update.
    assert report.basis.tokens_per_step == 2.0
    assert report.metrics.updates_per_s == pytest.approx(3 / 6.0, rel=0.05)
    assert delays_of(run).samples_per_s == pytest.approx(1.0, rel=1e-6)


def test_the_report_counts_an_update_of_several_parts_once() -> None:
    problem = problem_of([3.0, 3.0], rate=1e15, update=1e-9)
    found = []
    for shards in (1, 4):
        run = simulate(plan_of(problem, shards=shards), problem, steps=12)
        report = report_of(run, problem, memory={})
        found.append((report.metrics.updates_per_s, report.basis.tokens_per_step))
    assert found[1] == pytest.approx(found[0])


def test_workers_on_two_sites() -> None:
    # Eight workers of four chips on each site; the server's host is on the first.
    job = {"global_batch": 64, "sequence_length": 1024, "limits": {"allow_inexact": True}}
    given = load_problem("h100_a100_wan", "gpt2_355m", job)
    grid = [("megatron", {"tp": 4}), ("1f1b", {}), ("ddp", {}), ("partition", {})]
    steps, runs = 6, {}
    for contention in (False, True):
        draft = compose(given, [*grid, ("delayed_sgd", {"variant": "server"})])
        run = simulate(lower(given, draft), given, steps=steps, contention=contention)
        runs[contention] = run
        found = delays_of(run, start=0.0, stop=run.makespan)
        assert found.updates == 16 * steps and sum(found.histogram.values()) == found.updates
        # The far workers' gradients are the older ones.
        near, far = ([found.worker_mean[w] for w in range(*r)] for r in ((0, 8), (8, 16)))
        assert max(near) < min(far)
    params = sum(rank_params(given.model.blocks))
    names = runs[True].prices.link_names
    nbytes = dict(zip(names, link_use(runs[True])[0].tolist(), strict=True))
    pushed = 8 * steps * params * given.job.gradient_bytes
    assert nbytes["california->oregon"] == pytest.approx(pushed)
    assert nbytes["oregon->california"] == pytest.approx(pushed / 2)
    trunk = given.machine.links[names.index("california->oregon")].rate
    assert runs[True].makespan > pushed / trunk
    assert runs[True].makespan > 1.1 * runs[False].makespan


def test_workers_do_not_hold_optimizer_states() -> None:
    problem = problem_of([3.0, 3.0])
    served, alone = plan_of(problem), plan_of(problem, variant="allreduce")
    terms = [peak_memory(p, problem)[0, 0].terms for p in (served, alone)]
    assert (terms[0]["optimizer"], terms[1]["optimizer"] > 0) == (0.0, True)
    assert terms[0]["parameters"] == terms[1]["parameters"]
    assert any("memory is counted with one gradient" in text for text in served.assumptions)


def test_a_job_must_allow_it() -> None:
    problem = problem_of([3.0, 3.0])
    job = msgspec.structs.replace(
        problem.job, limits=msgspec.structs.replace(problem.job.limits, allow_inexact=False)
    )
    with pytest.raises(InputError, match="changes the mathematics"):
        plan_of(msgspec.structs.replace(problem, job=job))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"at": (9,)}, "no node 9"),
        ({"at": (1,)}, "node 1 has workers and no link"),
        ({"place": "chip", "at": (2,)}, "chip 2 is used"),
        ({"place": "chip", "shards": 2}, "2 servers need chips"),
        ({"shards": -1}, "parts do not go"),
        ({"rule": "drop", "bound": -1}, "a bound is at least 0"),
        ({"variant": "allreduce", "tau": -1}, "at least 0 steps"),
    ],
)
def test_what_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_of(problem_of([3.0, 3.0]), **knobs)


@pytest.mark.parametrize(
    ("more", "message"),
    [(("zero", {}), "ZeRO has none to share"), (("expert", {"ep": 2}), "bind the workers")],
)
def test_strategies_that_do_not_go_with_servers(
    more: tuple[str, dict[str, Any]], message: str
) -> None:
    given = load_problem("v100_t4", MOE, {"global_batch": 16, "sequence_length": 256})
    grid = [("megatron", {}), ("1f1b", {}), ("ddp", {}), ("partition", {})]
    with pytest.raises(InputError, match=message):
        compose(given, [*grid, more, ("delayed_sgd", {"variant": "server"})])
