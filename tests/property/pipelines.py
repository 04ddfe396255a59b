"""Random and regular pipelines, built directly from cells, with stated times."""

from __future__ import annotations

from hypothesis import strategies as st

from sim.cost.stated import stated_prices
from sim.engine.simulate import Layout, Run, lay_out, run_layout
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Mathematics, Plan

FREE = {
    "SEND_F": 0.0,
    "SEND_B": 0.0,
    "OPT": 0.0,
    "ALL_GATHER": 0.0,
    "REDUCE_GRAD": 0.0,
    "UNSHARD": 0.0,
}


def chain(num_positions: int, chunks: int) -> tuple[tuple[Segment, ...], tuple[Boundary, ...]]:
    """Virtual stages round robin over positions, one boundary between neighbours."""
    virtual = num_positions * chunks
    return (
        tuple(Segment(stage=v, cell=v % num_positions) for v in range(virtual)),
        tuple(Boundary(src=v, dst=v + 1) for v in range(virtual - 1)),
    )


def pipeline(
    num_positions: int,
    num_microbatches: int,
    schedule: str,
    chunks: int = 1,
    split_backward: bool = False,
) -> Plan:
    """One replica, one rank per position, no barrier."""
    segments, boundaries = chain(num_positions, chunks)
    return Plan(
        barrier=False,
        placement=Placement(
            cells=tuple(Cell(stage=s, replica=0, ranks=(s,)) for s in range(num_positions)),
            segments=segments,
            boundaries=boundaries,
            microbatches=(num_microbatches,),
        ),
        lowering=standard_calls(schedule, chunks, split_backward, False, (), ()),
    )


def run(plan: Plan, seconds: dict[str, float], *, steps: int = 1, fold: bool = True) -> Run:
    """Run with stated times; communication and optimizer are free unless stated."""
    layout = lay_out(plan, steps=steps, fold=fold)
    return run_layout(layout, lambda lay: stated_prices(lay.graph, FREE | seconds))


class RandomPipeline:
    """A plan with unlike cells, and a time for every op of every rank."""

    def __init__(
        self,
        plan: Plan,
        seconds: dict[str, float],
        steps: int,
        blocking: frozenset[int],
    ) -> None:
        self.plan, self.seconds, self.steps, self.blocking = plan, seconds, steps, blocking

    def __repr__(self) -> str:
        return f"RandomPipeline({self.plan!r}, {self.seconds!r}, {self.steps!r}, {self.blocking!r})"

    def layout(self, fold: bool) -> Layout:
        keys = [r in self.blocking for r in range(self.plan.placement.num_ranks)]
        return lay_out(
            self.plan, steps=self.steps, fold=fold, rank_keys=keys, blocking=self.blocking
        )

    def run(self, fold: bool) -> Run:
        return run_layout(
            self.layout(fold), lambda lay: stated_prices(lay.graph, FREE | self.seconds)
        )


TIMES = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.7, 1.0, 1.3, 2.0, 3.7])


@st.composite
def random_pipelines(draw: st.DrawFn, max_positions: int = 4) -> RandomPipeline:
    """Unlike accelerators, TP sizes, microbatches and recomputation per cell or replica."""
    positions = draw(st.integers(1, max_positions))
    replicas = draw(st.integers(1, 3))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"]))
    chunks = draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    split = schedule != "zb-h1" and draw(st.booleans())
    unit = positions if schedule == "interleaved" else 1
    microbatches = tuple(unit * draw(st.integers(1, 6 // unit or 1)) for _ in range(replicas))
    cells, first = [], 0
    seconds: dict[str, float] = {}
    speed = {"fast": 1.0, "slow": draw(st.sampled_from([1.0, 1.5, 2.3]))}
    base = {f"{v}{k}": draw(TIMES) for v in range(positions * chunks) for k in ("F", "B", "I", "W")}
    for stage in range(positions):
        for replica in range(replicas):
            tp = draw(st.sampled_from([1, 2, 4]))
            name = draw(st.sampled_from(["fast", "slow"]))
            ranks = tuple(range(first, first + tp))
            first += tp
            mode = draw(st.sampled_from(["none", "full"]))
            cells.append(
                Cell(
                    stage=stage,
                    replica=replica,
                    ranks=ranks,
                    accelerator=name,
                    tp=tp,
                    recompute=mode,
                )
            )
            seconds |= {
                f"rank {r} {key}": t * speed[name] / tp
                for key, t in base.items()
                for r in ranks
                if int(key[:-1]) % positions == stage
            }
    for kind in FREE:
        seconds[kind] = draw(TIMES)
    segments, boundaries = chain(positions, chunks)
    plan = Plan(
        barrier=draw(st.booleans()),
        buffers=draw(st.integers(0, 3)),
        mathematics=Mathematics(
            zero=draw(st.integers(0, 1)), sequence_parallel=draw(st.booleans())
        ),
        placement=Placement(
            cells=tuple(cells),
            segments=segments,
            boundaries=boundaries,
            microbatches=microbatches,
        ),
        lowering=standard_calls(schedule, chunks, split, draw(st.booleans()), (), ()),
    )
    blocking = frozenset(r for r in range(first) if draw(st.integers(0, 5)) == 0)
    return RandomPipeline(plan, seconds, draw(st.integers(1, 2)), blocking)
