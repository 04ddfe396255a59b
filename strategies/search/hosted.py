"""What an offloaded plan keeps on the host, what it lacks, and what bounds it."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from sim.cost.ledger import knobs_of, peak_memory, server_memory
from sim.cost.offload import host_ledgers
from sim.engine.simulate import Run
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.record import spans_of_run

__all__ = ["ENDS", "HostedStage", "Shortfall", "busiest_stream", "hosted_stages", "shortfall"]

ENDS = {"embed": "embedding", "head": "head"}
"""Names of the segments that are no layers, and what people call them."""
_STREAMS = {
    "compute": "compute",
    "host": "updates on the host",
    "d2h": "copies to the host",
    "h2d": "copies from the host",
}


class HostedStage(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline position.

    Args:
        index: position. layers: of it. optimizer, parameters: layers of which these live on the
            host. recomputed: layers that keep their inputs only.
        ends: embedding and head, where their optimizer lives on the host.
    """

    index: int
    layers: int
    optimizer: int
    parameters: int
    recomputed: int
    ends: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """In words."""
        ends = f" and {' and '.join(self.ends)}" if self.ends else ""
        return (
            f"optimizer of {self.optimizer} of {self.layers} layers{ends}, "
            f"parameters of {self.parameters}; {self.recomputed} recomputed"
        )


def hosted_stages(plan: Plan) -> tuple[HostedStage, ...]:
    """Count what each position of a plan of the strategy ``offload`` keeps on the host."""
    found = []
    for index in range(plan.placement.num_stages):
        mine = [s for s in plan.placement.segments if s.cell == index]
        layers = [s for s in mine if s.name not in ENDS]
        ends = [ENDS[s.name] for s in mine if s.name in ENDS and "optimizer" in s.offload]
        found.append(
            HostedStage(
                index=index,
                layers=len(layers),
                optimizer=sum("optimizer" in s.offload for s in layers),
                parameters=sum("parameters" in s.offload for s in layers),
                recomputed=sum(s.recompute == "full" for s in layers),
                ends=tuple(ends),
            )
        )
    return tuple(found)


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan lacks.

    Args:
        plan: its name. chip_bytes, host_bytes: [B] short, 0 where it fits. chip, host: where.
    """

    plan: str
    chip_bytes: float = 0.0
    chip: str = ""
    host_bytes: float = 0.0
    host: str = ""

    @property
    def nbytes(self) -> float:
        """Both together [B]."""
        return self.chip_bytes + self.host_bytes


def shortfall(plan: Plan, problem: Problem) -> Shortfall:
    """Return what a plan lacks on its fullest accelerator and its fullest node."""
    kinds = {(c.stage, c.replica): c.accelerator for c in plan.placement.cells}
    found = Shortfall(plan=plan.name)
    for at, ledger in peak_memory(plan, problem).items():
        short = ledger.peak_bytes - ledger.limit_bytes
        if short > found.chip_bytes:
            where = f"stage {at[0]} on {kinds[at]}"
            found = msgspec.structs.replace(found, chip_bytes=short, chip=where)
    for rank, ledger in server_memory(plan, problem).items():
        short = ledger.peak_bytes - ledger.limit_bytes
        if short > found.chip_bytes:
            where = f"server rank {rank}"
            found = msgspec.structs.replace(found, chip_bytes=short, chip=where)
    for node, held in host_ledgers(plan, problem, knobs_of).items():
        short = held.peak_bytes - held.capacity_bytes if held.capacity_bytes else 0.0
        if short > found.host_bytes:
            where = f"node {node}"
            found = msgspec.structs.replace(found, host_bytes=short, host=where)
    return found


def busiest_stream(run: Run) -> str:
    """Name the stream of one rank that works most in a run, and its share of the time."""
    spans = spans_of_run(run)
    c = spans.columns
    busy: dict[tuple[int, int], float] = defaultdict(float)
    lasted = c["end_s"] - c["start_s"]
    for rank, stream, seconds in zip(
        c["rank"].tolist(), c["stream"].tolist(), lasted.tolist(), strict=True
    ):
        if spans.names["stream"][stream] in _STREAMS:
            busy[rank, stream] += seconds
    (rank, stream), most = max(busy.items(), key=lambda kv: kv[1])
    what = _STREAMS[spans.names["stream"][stream]]
    return f"{what} of rank {rank}, busy {100 * most / run.makespan:.0f} %"
