"""The host side in a report: memory of its nodes, and what its streams do in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import numpy as np

from sim.cost.collective import places
from sim.cost.host import HOST_STREAMS
from sim.cost.ledger import knobs_of, server_memory
from sim.cost.offload import HostLedger, host_ledgers, nvme_ledgers
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.links import union
from sim.report.metrics import Pace
from sim.report.spans import Spans
from sim.units import format_quantity

__all__ = [
    "HostMemory", "HostStream", "HostUse", "host_use", "memory_texts", "short_text",
    "stream_texts", "stream_use",
]  # fmt: skip

ROUNDING = 1e-12
"""Exposed times below this share of the run are rounding."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory, or drives, of equal nodes; or the memory of equal chips that serve parameters.

    Args:
        node: profile, or the chips' accelerator. nodes: how many of them.
        tier: "memory", "nvme" or "server", a server's own chip.
        optimizer_bytes, gradients_bytes, parameters_bytes: [B] on one of them, of all its ranks.
        staging_bytes: [B] of buffers between NVMe and the rest.
        memory_bytes: [B] physical, None when the profile does not say.
        verdict: "fits", "at risk" (chips only), "does not fit" or "unknown".
        overhead_bytes: [B] of a chip's allocator and context.
    """

    node: str
    nodes: int
    tier: str = "memory"
    optimizer_bytes: float
    gradients_bytes: float
    parameters_bytes: float
    staging_bytes: float = 0.0
    memory_bytes: float | None
    verdict: str
    overhead_bytes: float = 0.0

    @property
    def terms(self) -> tuple[float, ...]:
        """Optimizer, gradients, parameters and staging [B]."""
        held = (self.optimizer_bytes, self.gradients_bytes, self.parameters_bytes)
        return (*held, self.staging_bytes)

    @property
    def peak_bytes(self) -> float:
        """Sum of the terms and the overhead [B]."""
        return sum(self.terms) + self.overhead_bytes


class HostStream(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream of the host side does in a steady step of one rank.

    Args:
        stream: its name. rank: representative of its class. ranks: members of the class.
        nbytes: [B] copied, or read and written by updates ("bytes" in documents).
        busy_s: [s] some op of the stream ran. bytes_per_s: [B/s] reached in it.
        exposed_s: [s] of it in which the rank's compute stream was idle.
    """

    stream: str
    rank: int
    ranks: int
    nbytes: float = msgspec.field(name="bytes")
    busy_s: float
    bytes_per_s: float
    exposed_s: float


class HostUse(msgspec.Struct, frozen=True, kw_only=True):
    """The host side of a run.

    Args:
        memory: of the nodes that hold something for their chips or serve, drives behind memory,
            chips that serve last.
        streams: by stream, then rank. steady: False where the run has too few steps for one with a
            step before and after it, whose compute would hide more.
        short: (stage, replica) of the cells on nodes whose host memory or drives do not fit.
    """

    memory: tuple[HostMemory, ...] = ()
    streams: tuple[HostStream, ...] = ()
    steady: bool = True
    short: tuple[tuple[int, int], ...] = ()


def host_use(plan: Plan, problem: Problem | None, spans: Spans, pace: Pace) -> HostUse | None:
    """Return the host side of a run, None when its plan does not use one.

    Args:
        plan, problem: see there. spans: of the run. pace: of the spans.
    """
    ledgers: dict[str, Mapping[int, HostLedger]] = {}
    served = bool(plan.placement.extra_ranks)
    if problem is not None and (served or any(s.offload for s in plan.placement.segments)):
        ledgers = {
            "memory": host_ledgers(plan, problem, knobs_of),
            "nvme": nvme_ledgers(plan, problem, knobs_of),
        }
    streams = stream_use(spans, pace, barrier=plan.barrier)
    if not ledgers and not streams:
        return None
    return HostUse(
        memory=(*_memory(problem, ledgers), *_served(plan, problem)) if problem else (),
        streams=streams,
        steady=plan.barrier or pace.steps > 3,
        short=_short_cells(plan, problem, ledgers) if problem else (),
    )


def _memory(
    problem: Problem, ledgers: Mapping[str, Mapping[int, HostLedger]]
) -> tuple[HostMemory, ...]:
    count: dict[HostMemory, int] = {}
    for tier, of_nodes in ledgers.items():
        for node, found in of_nodes.items():
            row = HostMemory(
                node=problem.machine.nodes[node].profile, nodes=1, tier=tier,
                optimizer_bytes=found.terms["optimizer"],
                gradients_bytes=found.terms.get("gradients", 0.0),
                parameters_bytes=found.terms["parameters"],
                staging_bytes=found.terms.get("staging", 0.0),
                memory_bytes=found.capacity_bytes or None, verdict=found.verdict,
            )  # fmt: skip
            count[row] = count.get(row, 0) + 1
    return tuple(msgspec.structs.replace(row, nodes=n) for row, n in count.items())


def _served(plan: Plan, problem: Problem) -> tuple[HostMemory, ...]:
    """Rows of the servers that have chips of their own."""
    machine, count = problem.machine, Counter[HostMemory]()
    types = [n.accelerator for n in machine.nodes for _ in range(*n.chips)]
    for rank, found in server_memory(plan, problem).items():
        terms, chips = found.terms, plan.placement.chips
        row = HostMemory(
            node=types[chips[rank] if chips else rank], nodes=1, tier="server",
            optimizer_bytes=terms["optimizer"], gradients_bytes=terms["gradients"],
            parameters_bytes=terms["parameters"], memory_bytes=found.capacity_bytes,
            overhead_bytes=terms["allocator gap"] + terms["context"], verdict=found.verdict,
        )  # fmt: skip
        count[row] += 1
    return tuple(msgspec.structs.replace(row, nodes=n) for row, n in count.items())


def _short_cells(
    plan: Plan, problem: Problem, ledgers: Mapping[str, Mapping[int, HostLedger]]
) -> tuple[tuple[int, int], ...]:
    every = [pair for of_nodes in ledgers.values() for pair in of_nodes.items()]
    short = {node for node, found in every if found.verdict == "does not fit"}
    where, chips = places(problem.machine).node, plan.placement.chips
    return tuple(
        (cell.stage, cell.replica)
        for cell in plan.placement.cells
        if short.intersection(where[chips[r] if chips else r] for r in cell.ranks)
    )


def stream_use(spans: Spans, pace: Pace, *, barrier: bool) -> tuple[HostStream, ...]:
    """Return what each stream of the host side does in a steady step, per class of ranks.

    Counted are the ops of all steps where a barrier ends each. Without one an op may run beside
    the compute of a later step: then it is the steps after the warm-up, except the last, which
    none follows; of three steps it is the second, of fewer the first. Exposed is the time in which
    such an op ran and no compute op of its rank did, of whatever step. All is per counted step.

    Args:
        spans: one run. pace: its steps. barrier: whether BARRIER ends each step.
    """
    first, last = 0, pace.steps
    if not barrier and pace.steps > 1:
        first, last = min(pace.warm_up + 1, pace.steps - 2), pace.steps - 1
    step = spans.columns["step"]
    rank, start, end = (spans.columns[k] for k in ("rank", "start_s", "end_s"))
    counted = (step >= first) & (step < last)
    compute = spans.where("stream", lambda s: s == "compute")
    least = ROUNDING * float(end.max(initial=0.0))
    found = []
    for name in HOST_STREAMS:
        stream = counted & spans.where("stream", name.__eq__)
        for r in np.unique(rank[stream]).tolist():
            mine, other = stream & (rank == r), compute & (rank == r)
            busy, both = union(start[mine], end[mine]), mine | other
            exposed = union(start[both], end[both]) - union(start[other], end[other])
            nbytes = float(spans.columns["nbytes"][mine].sum())
            if not nbytes and not busy:
                continue
            found.append(
                HostStream(
                    stream=name, rank=r, ranks=int(spans.columns["weight"][mine][0]),
                    nbytes=nbytes / (last - first), busy_s=busy / (last - first),
                    bytes_per_s=nbytes / busy if busy else 0.0,
                    exposed_s=exposed / (last - first) if exposed > least else 0.0,
                )
            )  # fmt: skip
    return tuple(found)


def memory_texts(row: HostMemory) -> tuple[str, ...]:
    """Cells of a row of host memory: node, terms, capacity."""
    known = row.memory_bytes is not None
    return (
        _name(row) + (f" ×{row.nodes}" if row.nodes > 1 else ""),
        *(format_quantity(nbytes, "bytes", 3) for nbytes in row.terms),
        format_quantity(row.memory_bytes or 0.0, "bytes", 3) if known else "-",
    )


def _name(row: HostMemory) -> str:
    if row.tier == "server":
        return f"server {row.node}"
    return row.node + (" NVMe" if row.tier == "nvme" else "")


def short_text(host: HostUse) -> str:
    """Say which nodes' host memory does not fit, "" when all does or is not known."""
    parts = [
        f"{_name(row)} holds {format_quantity(row.peak_bytes, 'bytes', 3)} of "
        f"{format_quantity(row.memory_bytes or 0.0, 'bytes', 3)}"
        for row in host.memory
        if row.verdict == "does not fit"
    ]
    return "does not fit: " + ", ".join(parts) if parts else ""


def stream_texts(host: HostUse) -> list[tuple[str, str, str]]:
    """Stream, bytes and times of the rank that each stream exposes most; last what is missing."""
    rows = []
    for name in dict.fromkeys(s.stream for s in host.streams):
        mine = [s for s in host.streams if s.stream == name]
        most = max(mine, key=lambda s: (s.exposed_s, s.busy_s))
        text = f"{_seconds(most.busy_s)} at {most.bytes_per_s / 1e9:.1f} GB/s, "
        text += f"exposed {_seconds(most.exposed_s)}" if most.exposed_s else "hidden by compute"
        if any(_unlike(s, most) for s in mine):
            text += f" (rank {most.rank}, the most)"
        rows.append((name, _size(most.nbytes), text))
    if rows and not host.steady:
        rows.append(("", "", "of too few steps: the compute of a next step hides more"))
    return rows


def _unlike(one: HostStream, other: HostStream) -> bool:
    pairs = ((one.busy_s, other.busy_s), (one.exposed_s, other.exposed_s))
    return any(abs(a - b) > 1e-3 * max(a, b) for a, b in pairs)


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 0.01 else format_quantity(value, "seconds", 3)
