"""Training along the orders that the engine gives: seconds and delays from one simulated run."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sim.cost.prices import FlowSpec
from sim.cost.stated import stated_prices
from sim.engine.simulate import Run, lay_out, run_layout
from sim.errors import InputError
from sim.plan.op import Op
from sim.plan.placement import Placement
from sim.plan.plan import Plan, ProgramText
from strategies.data.cosim import Rule, train_async
from strategies.data.cosim_learners import Network, ring_data
from strategies.data.cosim_local import train_sync
from strategies.data.cosim_order import Arrival, arrivals, delay_table, round_ends
from strategies.data.cosim_task import Task, at_training_loss
from tests.contract import miniatures as mini

TRAIN, TEST = ring_data(120, 80, seed=5)
TASK = Task(learner=Network(num_features=2, hidden=6), train=TRAIN, test=TEST, batch=10, seed=6)


def server_and_workers(
    compute: list[float], wire: list[float], steps: list[int], apply: float = 0.0
) -> Run:
    """A parameter server, rank 0, and workers with stated seconds of a gradient and a message."""
    worker = "repeat({n}){{ PULL>0 <- PUSH@1 ; F <- PULL ; B <- F ; PUSH>0 <- B }}"
    server = "on(PUSH){ APPLY{writes=next} } on(PULL){ SEND_F{reads=latest} }"
    ranks = range(1, len(compute) + 1)
    plan = Plan(
        name="async",
        exact=False,
        reason="updates are applied late",
        barrier=False,
        placement=Placement(extra_ranks=(0, *ranks)),
        programs=(
            ProgramText((0,), server),
            *(ProgramText((r,), worker.format(n=n)) for r, n in zip(ranks, steps, strict=True)),
        ),
    )
    seconds: dict[str, float] = {"PULL": 0.0}
    for rank, work, message in zip(ranks, compute, wire, strict=True):
        seconds |= {
            f"rank {rank} F": work / 3,
            f"rank {rank} B": work * 2 / 3,
            f"rank {rank} PUSH": message,
        }

    def answer(op: Op, rank: int, sender: int) -> tuple[float, tuple[FlowSpec, ...]]:
        return (apply if op.kind == "APPLY" else wire[sender - 1]), ()

    return run_layout(
        lay_out(plan),
        lambda lay: stated_prices(lay.graph, seconds, None, lay.late),
        message_price=answer,
    )


def test_the_order_of_the_miniature() -> None:
    order = arrivals(mini.async_sgd().run().handled)
    assert order == tuple(
        Arrival(*a) for a in ((4.25, 1, 0), (7.25, 2, 0), (8.5, 1, 1), (12.75, 1, 3), (14.5, 2, 2))
    )
    table = delay_table(order)
    assert (table.mean, table.p50, table.max) == (0.8, 1.0, 2)
    assert table.worker_mean == {1: pytest.approx(1 / 3), 2: 1.5}
    assert table.worker_max == {1: 1, 2: 2} and table.worker_updates == {1: 3, 2: 2}
    assert table.updates_per_s == 5 / 14.5


@pytest.mark.parametrize("eager", [False, True])
def test_delays_of_the_order_are_those_of_the_engine(eager: bool) -> None:
    handled = mini.async_sgd(eager_reply=eager).run().handled
    order = arrivals(handled, server=0)
    assert [t - a.read for t, a in enumerate(order)] == [h.delay for h in handled if h.op.writes]
    run = train_async(TASK, order, Rule(rate=0.1))
    assert run.times.tolist() == [0.0, *(a.time for a in order)]


def test_the_rounds_of_a_synchronous_run() -> None:
    ends = round_ends(mini.pro_prophet().run())
    assert ends == (19.75, 34.25)
    assert train_sync(TASK, ends, [0, 1], 0.1).times.tolist() == [0.0, 19.75, 34.25]
    with pytest.raises(InputError, match="BARRIER"):
        round_ends(mini.oases().run())


def test_an_order_needs_one_writer() -> None:
    with pytest.raises(InputError, match="one writer"):
        arrivals(())
    with pytest.raises(InputError, match="at least one write"):
        arrivals(mini.async_sgd().run().handled, server=1)


def test_a_write_that_never_ended_is_not_in_the_order() -> None:
    handled = mini.async_sgd().run().handled
    last = max(i for i, h in enumerate(handled) if h.op.writes)
    lost = [
        msgspec.structs.replace(h, end=np.inf) if i == last else h for i, h in enumerate(handled)
    ]
    assert arrivals(lost) == arrivals(handled)[:-1]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_equal_workers_are_one_less_than_their_number_late(workers: int) -> None:
    run = server_and_workers([3.0] * workers, [0.5] * workers, [20] * workers, apply=0.0)
    order = arrivals(run.handled)
    late = [t - a.read for t, a in enumerate(order)]
    assert late[workers:] == [workers - 1] * (19 * workers)
    assert delay_table(order).updates_per_s == pytest.approx(workers / 4.0)


def test_a_slow_and_a_far_worker() -> None:
    compute, wire = [3.0, 3.0, 9.0, 3.0], [0.125, 0.125, 0.125, 2.0]
    periods = [c + 2 * w + 0.0625 for c, w in zip(compute, wire, strict=True)]
    horizon = 600.0
    run = server_and_workers(compute, wire, [int(horizon / p) for p in periods], apply=0.0625)
    order = arrivals(run.handled)
    table = delay_table(order)
    # Closed form: the rate is the sum of the workers' own, less what the server's queue costs.
    assert table.updates_per_s == pytest.approx(sum(1 / p for p in periods), rel=0.03)
    # Whoever takes longer sees more of the others' updates go by.
    assert table.worker_mean[1] < table.worker_mean[4] < table.worker_mean[3]
    for worker, period in enumerate(periods, start=1):
        others = sum(1 / p for w, p in enumerate(periods, start=1) if w != worker)
        assert table.worker_mean[worker] == pytest.approx(period * others, rel=0.15)
    late = train_async(TASK, order, Rule(rate=0.2), every=20)
    slowest = max(periods)
    in_step = train_sync(
        TASK, [slowest * (k + 1) for k in range(int(horizon / slowest))], [1, 2, 3, 4], 0.2
    )
    goal = 0.9 * float(in_step.train[0])
    first, second = at_training_loss(late, goal), at_training_loss(in_step, goal)
    assert first is not None and second is not None
    assert first.time < second.time and first.updates > second.updates
    again = train_async(TASK, arrivals(run.handled), Rule(rate=0.2), every=20)
    assert again.train.tobytes() == late.train.tobytes()
    assert np.isfinite(late.train).all()
