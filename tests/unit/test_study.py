"""The study of ways of training: closed forms of its speeds and leads, and what it trains."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import msgspec
import numpy as np
import pytest

from sim.engine.faults import ChipLoss, Straggler
from sim.errors import InputError, SimulationError, UsageError
from sim.plan.draft import PlanDraft
from sim.problem import Problem
from strategies.compose import compose
from strategies.data.cosim_local import Outer, train_local, train_sync
from strategies.data.cosim_task import Inner, Task
from strategies.data.delayed import DelayedKnobs
from strategies.data.local_sgd import LocalKnobs
from strategies.data.study import common_loss, outcome_of, study, summary, train
from strategies.data.study_delays import fixed_delays
from strategies.data.study_plot import draw_delays, draw_study
from strategies.data.study_tasks import study_task
from strategies.data.study_timing import WAYS, Timing, Way, plan_of, timing_of
from tests.unit.delayed_cases import NBYTES, problem_of

COMPUTE = [1.0, 1.1, 3.0, 1.3]
FAST = 1e15
"""[B/s] NICs that take no time."""


def given(compute: Sequence[float] = COMPUTE, **more: float) -> tuple[Problem, PlanDraft]:
    problem = problem_of(list(compute), **({"rate": FAST, "update": 1e-9} | more))
    chips = tuple(range(1, len(compute) + 1))
    grid = [("megatron", {"chips": chips}), ("1f1b", {}), ("ddp", {}), ("partition", {})]
    return problem, compose(problem, grid)


def served(**knobs: object) -> Way:
    return Way(name="served", served=DelayedKnobs(variant="server", **knobs))  # type: ignore[arg-type]


def local(**knobs: object) -> Way:
    return Way(name="local", local=LocalKnobs(workers=4, **knobs))  # type: ignore[arg-type]


SYNC = Way(name="sync")


@pytest.mark.parametrize("comm", [0.0, 2.0])
def test_a_synchronous_step_is_the_slowest_worker_and_the_ring(comm: float) -> None:
    rate = 2 * 3 / 4 * NBYTES / comm if comm else FAST
    problem, draft = given(rate=rate)
    found = timing_of(problem, draft, SYNC, seconds=100.0)
    assert 1 / found.updates_per_s == pytest.approx(max(COMPUTE) + comm, rel=1e-6)
    assert found.samples_per_s == pytest.approx(4 * found.updates_per_s)
    slow = timing_of(problem, draft, SYNC, seconds=100.0, faults=[Straggler(ranks=(0,), factor=4)])
    assert 1 / slow.updates_per_s == pytest.approx(4.0 + comm, rel=1e-6)


def test_asynchronous_updates_are_the_sum_of_the_workers_rates() -> None:
    problem, draft = given()
    found = timing_of(problem, draft, served(), seconds=300.0)
    assert found.updates_per_s == pytest.approx(sum(1 / t for t in COMPUTE), rel=0.01)
    assert found.samples_per_s == pytest.approx(found.updates_per_s)
    assert found.delays is not None
    # In one period of a worker everybody else writes as often as their rates say.
    for w, t in enumerate(COMPUTE):
        others = t * sum(1 / x for i, x in enumerate(COMPUTE) if i != w)
        assert found.delays.worker_mean[w] == pytest.approx(others, rel=0.02)


def test_the_server_is_a_limit_too() -> None:
    problem, draft = given(update=1.0)
    found = timing_of(problem, draft, served(), seconds=100.0)
    assert found.updates_per_s == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_no_worker_leads_by_more_than_the_slack(slack: int) -> None:
    problem, draft = given()
    found = timing_of(problem, draft, served(rule="ssp", bound=slack), seconds=200.0)
    clock, leads = dict.fromkeys(range(4), 0), []
    for a in found.order:
        leads.append(clock[a.worker] - min(clock.values()))
        clock[a.worker] += 1
    assert max(leads) == slack
    # In the long run everybody is as fast as the slowest, at any slack.
    assert found.updates_per_s == pytest.approx(4 / max(COMPUTE), rel=0.03)


def test_a_slack_buys_speed_where_nobody_is_always_slow() -> None:
    """Turns at being slow: synchronous < slack < asynchronous."""
    problem, draft = given([1.0] * 4)
    turns = [
        Straggler(ranks=(r,), factor=3.0, start=s, stop=s + 15.0)
        for k, s in enumerate(range(0, 300, 15))
        for r in [k % 4]
    ]
    ways = (SYNC, served(rule="ssp", bound=0), served(rule="ssp", bound=3), served())
    speeds = [timing_of(problem, draft, w, seconds=240.0, faults=turns).samples_per_s for w in ways]
    assert speeds[0] == pytest.approx(speeds[1], rel=0.05)
    assert 1.2 * speeds[1] < speeds[2] and 1.2 * speeds[2] < speeds[3]


@pytest.mark.parametrize("overlap", [False, True])
def test_rounds(overlap: bool) -> None:
    problem, draft = given(rate=2 * 3 / 4 * NBYTES / 4.0)
    found = timing_of(problem, draft, local(inner=6, overlap=overlap), seconds=300.0)
    expected = max(18.0, 4.0) if overlap else 18.0 + 4.0
    assert 1 / found.updates_per_s == pytest.approx(expected)
    assert found.samples_per_s == pytest.approx(6 * 4 / expected)
    assert found.delays is None and found.order == ()


def test_a_lost_chip_ends_rounds_but_not_servers() -> None:
    problem, draft = given()
    lost = [ChipLoss(rank=1, at=50.0)]
    with pytest.raises(SimulationError, match="lost rank 1 at 50 s"):
        timing_of(problem, draft, SYNC, seconds=100.0, faults=lost)
    going_on = timing_of(problem, draft, served(), seconds=100.0, faults=lost)
    assert {a.worker for a in going_on.order if a.time > 60.0} == {0, 2, 3}


TASK = study_task("rings", batch=10, seed=3)


def test_sync_and_plain_diloco_train_as_their_own_functions_do() -> None:
    problem, draft = given()
    sync = timing_of(problem, draft, SYNC, seconds=60.0)
    plain = train_sync(TASK, sync.ends, range(4), 0.1)
    assert train(TASK, sync, 0.1).train.tobytes() == plain.train.tobytes()
    way = local(inner=6)
    timing = timing_of(problem, draft, way, seconds=100.0)
    outer = Outer(rate=0.7, momentum=0.9)
    rounds = train_local(TASK, timing.ends, range(4), Inner(rate=0.1, steps=6), outer)
    run = train(TASK, timing, 0.1)
    assert run.train.tobytes() == rounds.train.tobytes()
    np.testing.assert_allclose(run.times, rounds.times, rtol=1e-12)


def test_the_best_rate_is_kept_and_what_diverges_is_not() -> None:
    problem, draft = given()
    timing = timing_of(problem, draft, served(), seconds=60.0)
    task = study_task("linear", batch=4, seed=1)
    kept = outcome_of(task, timing, [1e-4, 0.03, 1e200])
    assert kept.rate == 0.03 and not kept.training.diverged
    with pytest.raises(InputError, match="every rate diverges"):
        outcome_of(task, timing, [1e200])


def outcomes_of(task: Task, ways: Sequence[Way] = WAYS) -> tuple:
    problem, draft = given()
    return study(problem, draft, task, ways, seconds=80.0, rates=[0.05, 0.2])


def test_the_same_seed_draws_the_same_curves() -> None:
    first, second = outcomes_of(TASK), outcomes_of(TASK)
    for a, b in zip(first, second, strict=True):
        assert (a.name, a.rate, a.timing) == (b.name, b.rate, b.timing)
        for field in ("times", "updates", "samples", "train", "test", "params", "delays"):
            assert getattr(a.training, field).tobytes() == getattr(b.training, field).tobytes()
    other = outcomes_of(study_task("rings", batch=10, seed=4), WAYS[:1])
    assert other[0].training.train.tobytes() != first[0].training.train.tobytes()


def test_the_table_reads_the_curves() -> None:
    found = outcomes_of(TASK)
    goal = common_loss(found)
    rows = summary(found)
    assert [r["way"] for r in rows] == [w.name for w in WAYS]
    for row, o in zip(rows, found, strict=True):
        t = o.training
        assert row["train end"] == t.train[-1] and row["gap end"] == t.test[-1] - t.train[-1]
        assert row["gap loss"] == pytest.approx(row["test loss"] - goal)
        assert 0.0 < row["s to loss"] <= t.times[-1]
    fewest = min(int(o.training.updates[-1]) for o in found)
    short = next(r for r, o in zip(rows, found, strict=True) if o.training.updates[-1] == fewest)
    assert short["train updates"] == short["train end"]
    nowhere = summary(found, loss=0.0)
    assert all(np.isnan([r["s to loss"], r["gap loss"]]).all() for r in nowhere)
    assert nan not in [r["gap updates"] for r in nowhere]


def test_the_pictures_show_every_way() -> None:
    found = outcomes_of(TASK)
    axes = draw_study(found).axes
    assert len(axes) == 4 and len(axes[0].lines) == 2 * len(WAYS) + 1
    assert len(axes[2].patches) == 2 * len(WAYS)
    assert all(a.get_ylabel() for a in axes)
    assert len(axes[3].patches) == 2 * len(WAYS)
    names = [t.get_text() for t in axes[1].get_legend().get_texts()]
    assert [n.split(":")[0] for n in names] == ["async", "SSP 2"]
    rows = fixed_delays([TASK], (0, 4), updates=60)
    gaps = draw_delays(rows).axes
    assert [len(a.lines) for a in gaps] == [2, 4, 2]
    prompt, late = ([x for x in gaps[1].lines if (x.get_linestyle() == ":") == k] for k in (1, 0))
    assert len(prompt) == len(late) == 2
    assert min(x.get_zorder() for x in prompt) > max(x.get_zorder() for x in late)


def test_fixed_delays_repeat_and_start_prompt() -> None:
    tasks = [study_task("linear", batch=4, seed=s) for s in (0, 1)]
    first, second = (fixed_delays(tasks, (0, 3), updates=100) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for field in ("train", "gap", "prompt_train", "prompt_gap", "level_gap"):
            assert getattr(a, field).tobytes() == getattr(b, field).tobytes()
        assert a.updates.tolist() == [0, *range(20, 101, 20)]
    prompt = first[0]
    assert prompt.train.tobytes() == prompt.prompt_train.tobytes()
    assert first[1].level_gap.tobytes() == first[1].gap.tobytes()
    with pytest.raises(InputError, match="delays that grow"):
        fixed_delays(tasks, (4, 0), updates=10)


@pytest.mark.parametrize("name", ["breast_cancer", "digits", "rings", "linear"])
def test_tasks_follow_their_seed(name: str) -> None:
    one, same, other = (study_task(name, seed=s) for s in (0, 0, 1))  # type: ignore[arg-type]
    assert one.train.x.tobytes() == same.train.x.tobytes() != other.train.x.tobytes()
    assert np.isfinite(one.train.x).all() and np.isfinite(one.test.x).all()
    if name in ("breast_cancer", "digits"):
        np.testing.assert_allclose(one.train.x.mean(axis=0), 0.0, atol=1e-9)
        assert one.train.num_samples + one.test.num_samples in (569, 1797)
    assert one.learner.loss(one.start(), one.test) > 0.0


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.optional._is_installed", lambda module: False)
    with pytest.raises(UsageError, match=r"hetlab\[notebook\]"):
        study_task("digits")


def test_what_the_study_refuses() -> None:
    problem, draft = given()
    uneven = msgspec.structs.replace(
        draft, data=msgspec.structs.replace(draft.data, microbatches=(1, 1, 2, 1))
    )
    with pytest.raises(InputError, match="equally many samples"):
        plan_of(problem, uneven, SYNC)
    pairs = Way(name="pairs", local=LocalKnobs(workers=2, inner=4))
    with pytest.raises(InputError, match="one replica per worker"):
        plan_of(problem, draft, pairs)
    with pytest.raises(InputError, match="two rounds"):
        timing_of(problem, draft, SYNC, seconds=4.0)
    assert isinstance(timing_of(problem, draft, SYNC, seconds=7.0), Timing)
