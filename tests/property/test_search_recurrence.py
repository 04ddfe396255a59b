"""The vectorised recurrence against the lowered graph, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.maxplus import longest_path
from sim.engine.simulate import lay_out
from sim.errors import SimulationError
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Mathematics, Plan
from strategies.search.bounds import estimate, lower_bound
from strategies.search.recurrence import StageTimes, Sync, _walk, step_times
from strategies.search.skeleton import ROWS, Shape, skeleton


def placement_of(shape: Shape, tps: list[int], dp: int) -> Placement:
    cells, rank = [], 0
    for s, tp in enumerate(tps):
        for r in range(dp):
            ranks = tuple(range(rank, rank + tp))
            cells.append(Cell(stage=s, replica=r, ranks=ranks, accelerator=f"a{s}", tp=tp))
            rank += tp
    virtual = shape.num_stages * shape.chunks
    return Placement(
        cells=tuple(cells),
        segments=tuple(
            Segment(stage=v, cell=v % shape.num_stages, blocks=(v, v + 1)) for v in range(virtual)
        ),
        boundaries=tuple(Boundary(src=v, dst=v + 1, elements=1) for v in range(virtual - 1)),
        microbatches=(shape.num_microbatches,) * dp,
    )


def lowered_time(
    shape: Shape,
    tps: list[int],
    dp: int,
    times: StageTimes,
    sync: Sync,
    k: int,
    *,
    sequence_parallel: bool = False,
    zero: int = 0,
    tied: bool = False,
) -> float:
    virtual = shape.num_stages * shape.chunks
    plan = Plan(
        mathematics=Mathematics(sequence_parallel=sequence_parallel, zero=zero),
        placement=placement_of(shape, tps, dp),
        lowering=standard_calls(
            shape.schedule,
            shape.chunks,
            shape.split_backward,
            shape.blocking_sends,
            (),
            (0, virtual - 1) if tied else (),
        ),
        buffers=shape.buffers,
    )
    graph = lay_out(plan, fold=False).graph
    seconds = np.zeros(graph.num_nodes)
    for node, op in enumerate(graph.ops):
        v = op.stage
        match op.kind:
            case "F":
                seconds[node] = times.forward[k, v]
            case "I":
                seconds[node] = times.backward[k, v]
            case "B":
                seconds[node] = times.backward[k, v]
            case "W":
                seconds[node] = times.weight[k, v]
            case "SEND_F" | "RECV_F":
                seconds[node] = times.send_f[k, v if op.kind == "SEND_F" else v - 1]
            case "SEND_B" | "RECV_B":
                seconds[node] = times.send_b[k, v if op.kind == "SEND_B" else v + 1]
            case "ALL_GATHER":
                seconds[node] = (times.gather_f if op.label == "f" else times.gather_b)[k, v]
            case "REDUCE_GRAD":
                seconds[node] = sync.reduce[k, v]
            case "OPT":
                seconds[node] = sync.update[k, v]
            case "UNSHARD":
                seconds[node] = sync.unshard[k, v]
            case "ALL_REDUCE":
                seconds[node] = sync.embed[k]
            case "BARRIER":
                seconds[node] = sync.barrier[k]
            case other:
                raise AssertionError(other)
    return float(longest_path(graph, seconds)[1].max())


def random_times(
    rng: np.random.Generator, count: int, virtual: int, gathers: np.ndarray
) -> StageTimes:
    def draw(scale: float) -> np.ndarray:
        # Small integers make ties likely, which is where orders go wrong.
        return scale * rng.integers(1, 6, (count, virtual)).astype(float)

    return StageTimes(
        forward=draw(1.0),
        backward=draw(1.5),
        weight=draw(1.0),
        send_f=draw(rng.choice([0.25, 1.0])),
        send_b=draw(rng.choice([0.25, 1.5])),
        gather_f=draw(0.5),
        gather_b=draw(0.5),
        gathers=gathers,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, list[int], int, int, bool, int, bool]:
    schedule = draw(st.sampled_from(["1f1b", "1f1b", "zb-h1", "interleaved", "gpipe"]))
    p = draw(st.integers(2 if schedule == "interleaved" else 1, 4))
    m = p * draw(st.integers(1, 3)) if schedule == "interleaved" else draw(st.integers(1, 9))
    shape = Shape(
        schedule,
        p,
        m,
        2 if schedule == "interleaved" else 1,
        schedule == "1f1b" and draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([0, 1, 2, 2, 3])) if schedule != "interleaved" else 3,
    )
    tps = [draw(st.sampled_from([1, 2])) for _ in range(p)]
    dp = draw(st.integers(1, 2))
    zero = draw(st.integers(0, 1))
    tied = p > 1 and draw(st.booleans())
    return shape, tps, dp, draw(st.integers(0, 2**16)), draw(st.booleans()), zero, tied


@given(cases())
def test_recurrence_equals_longest_path_of_the_lowered_graph(
    case: tuple[Shape, list[int], int, int, bool, int, bool],
) -> None:
    shape, tps, dp, seed, sequence_parallel, zero, tied = case
    rng = np.random.default_rng(seed)
    virtual = shape.num_stages * shape.chunks
    gathers = np.array([[tp > 1 and not sequence_parallel for tp in tps * shape.chunks]] * 3)
    times = random_times(rng, 3, virtual, gathers)
    sync = Sync(
        reduce=rng.uniform(0.5, 3, (3, virtual)) * (dp > 1),
        reduce_experts=np.zeros((3, virtual)),
        update=rng.uniform(0.1, 1, (3, virtual)),
        unshard=rng.uniform(0.5, 3, (3, virtual)) * (dp > 1 and zero == 1),
        unshard_experts=np.zeros((3, virtual)),
        embed=rng.uniform(0.5, 3, 3) * tied,
        barrier=np.full(3, 0.25) * (sum(tps) * dp > 1),
    )
    try:
        found = step_times(shape, times, sync)
    except SimulationError:
        # The schedule deadlocks with these buffers: then the lowered graph has a cycle as well.
        with pytest.raises(SimulationError):
            lowered_time(shape, tps, dp, times, sync, 0, sequence_parallel=sequence_parallel)
        return
    for k in range(3):
        expected = lowered_time(
            shape,
            tps,
            dp,
            times,
            sync,
            k,
            sequence_parallel=sequence_parallel,
            zero=zero,
            tied=tied,
        )
        assert found[k] == pytest.approx(expected, rel=1e-9)
    assert (lower_bound(shape, times, sync) <= found * (1 + 1e-12)).all()
    assert (estimate(shape, times, sync) > 0).all()


def test_one_call_mixes_cells_with_and_without_gathers() -> None:
    shape, rng = Shape("1f1b", 3, 7), np.random.default_rng(5)
    patterns = [[1, 1, 1], [2, 1, 2], [1, 2, 2], [2, 2, 2]]
    times = random_times(rng, 4, 3, np.array(patterns) > 1)
    zero = np.zeros((4, 3))
    sync = Sync(
        reduce=zero, reduce_experts=zero, update=zero, unshard=zero, unshard_experts=zero,
        embed=np.zeros(4), barrier=np.zeros(4),
    )  # fmt: skip
    found = step_times(shape, times, sync)
    for k, tps in enumerate(patterns):
        assert found[k] == pytest.approx(lowered_time(shape, tps, 1, times, sync, k), rel=1e-12)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("buffers", [0, 1, 2])
def test_full_receive_buffers_hold_transfers_back(buffers: int, gather: bool) -> None:
    # Sends as long as three forwards: the second one cannot be under way while the first waits.
    shape = Shape("gpipe", 2, 6, buffers=buffers)
    one = np.ones((1, 2))
    times = StageTimes(
        forward=np.array([[1.0, 9.0]]), backward=one, weight=one, send_f=3 * one, send_b=0.5 * one,
        gather_f=2 * one, gather_b=one, gathers=np.full((1, 2), gather),
    )  # fmt: skip
    zero = np.zeros((1, 2))
    none = Sync(
        reduce=zero, reduce_experts=zero, update=zero, unshard=zero, unshard_experts=zero,
        embed=np.zeros(1), barrier=np.zeros(1),
    )  # fmt: skip
    found = step_times(shape, times, none)[0]
    tps = [2, 2] if gather else [1, 1]
    assert found == pytest.approx(lowered_time(shape, tps, 1, times, none, 0), rel=1e-12)


@pytest.mark.parametrize(("gather", "starts"), [(False, [1, 2, 7]), (True, [1, 2, 3])])
def test_a_buffer_is_free_when_its_consumer_starts(gather: bool, starts: list[float]) -> None:
    # Stage 1 takes 5 for each F: with one buffer the third transfer waits for the second F, which
    # starts at 7; a gather empties the buffer as soon as the tensor is there.
    shape = Shape("gpipe", 2, 3, buffers=1)
    zero, one = np.zeros((1, 2)), np.ones((1, 2))
    times = StageTimes(
        forward=np.array([[1.0, 5.0]]), backward=one, weight=zero, send_f=one, send_b=one,
        gather_f=0.5 * one, gather_b=zero, gathers=np.full((1, 2), gather),
    )  # fmt: skip
    graph = skeleton(shape)
    end = _walk(graph, times)
    sends = np.flatnonzero(graph.row == ROWS.index("send_f") * 2)
    assert (end[sends, 0] - 1).tolist() == starts


def test_uniform_pipeline_without_transfers_equals_its_closed_form() -> None:
    # (m + P - 1)(f + b), Narayanan et al. 2021, section 2.2.
    p, m = 8, 32
    one, zero = np.ones((1, p)), np.zeros((1, p))
    times = StageTimes(
        forward=one, backward=2 * one, weight=zero, send_f=zero, send_b=zero, gather_f=zero,
        gather_b=zero, gathers=zero > 0,
    )  # fmt: skip
    none = Sync(
        reduce=zero, reduce_experts=zero, update=zero, unshard=zero, unshard_experts=zero,
        embed=np.zeros(1), barrier=np.zeros(1),
    )  # fmt: skip
    shape = Shape("1f1b", p, m)
    assert step_times(shape, times, none)[0] == (m + p - 1) * 3
    assert estimate(shape, times, none)[0] == pytest.approx((m + p - 1) * 3)
    assert lower_bound(shape, times, none)[0] == pytest.approx((m + p - 1) * 3)
