"""Memory of plans whose segments differ in what they recompute and what lives on the host.

On the chip stand, of its segments: parameters, optimizer states and gradients of those that stay,
and rings of buffers through which the others' parameters and gradients pass. In host memory, of
each rank: optimizer states and landed gradients of the segments that the host updates, and a copy
of the parameters wherever parameters or optimizer live there; NVMe may hold states and parameters
instead. Activations follow each segment's
own recomputation.

ZeRO-2 keeps shards of gradients, and a ring of gradients on their way to the sum; ZeRO-3 keeps
shards of parameters too, and a ring of gathered segments (Rajbhandari et al. 2020, sections 5.2 and
5.3). The host then holds shards as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from sim.cost.collective import places
from sim.cost.memory import TERMS, MemoryKnobs, stage_memory_terms
from sim.cost.servers import servers_of
from sim.model.amounts import BlockTable, block_table, rank_params
from sim.plan.placement import Cell, Segment
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.spec.job import Recompute

__all__ = ["HostLedger", "host_ledgers", "nvme_ledgers", "segment_terms"]

KnobsOf = Callable[[Plan, Cell], MemoryKnobs]
HOST_TERMS = ("optimizer", "gradients", "parameters")


class HostLedger(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory, or drives, of one node.

    Args:
        terms: name -> [B], of all its ranks. capacity_bytes: [B], 0 where there is none or nobody
            stated it. known: whether the capacity is.
    """

    terms: dict[str, float]
    capacity_bytes: float
    known: bool = True

    @property
    def peak_bytes(self) -> float:
        """Sum of the terms [B]."""
        return sum(self.terms.values())

    @property
    def verdict(self) -> str:
        """One of "fits", "does not fit", "unknown"."""
        if not self.known:
            return "unknown" if self.peak_bytes else "fits"
        return "fits" if self.peak_bytes <= self.capacity_bytes else "does not fit"


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one segment on one rank.

    Args:
        segment: whose. used: that its passes read. held: without what another segment holds.
        owned: that the rank updates.
    """

    segment: Segment
    used: float
    held: float
    owned: float


def _shares(plan: Plan, problem: Problem, cell: Cell, knobs: MemoryKnobs) -> list[_Share]:
    """Segments of a cell with their parameters; a parameter shared by two counts with the first."""
    seen: set[str] = set()
    found = []
    for s in plan.placement.segments_of(cell):
        blocks = problem.model.blocks[s.blocks[0] : s.blocks[1]]
        dense, experts = rank_params(blocks, knobs.tp, knobs.ep)
        used = dense + experts
        for b in {b.shares: b for b in blocks if b.shares in seen}.values():
            dense -= b.params / knobs.tp
        seen |= {b.shares for b in blocks if b.shares}
        owned = dense / knobs.shards + experts / max(1, knobs.shards // knobs.ep)
        found.append(_Share(segment=s, used=used, held=dense + experts, owned=owned))
    return found


def segment_terms(
    plan: Plan,
    problem: Problem,
    cell: Cell,
    live: Sequence[Sequence[float]],
    knobs: MemoryKnobs,
) -> dict[str, float]:
    """Return the terms of ``sim.cost.memory.TERMS`` on a cell's fullest rank.

    Args:
        plan, problem, cell: see there. knobs: of the cell.
        live: maximal vectors of microbatches in flight per virtual stage of the cell.
    """
    job, placement = problem.job, plan.placement
    accelerator = problem.machine.accelerators[cell.accelerator]
    table = block_table(problem.model, job.sequence_length, job.activation_bytes)
    stages = [s for s in placement.stages if s.cell == cell.stage]
    shares = _shares(plan, problem, cell, knobs)
    modes = {s.segment.recompute or cell.recompute for s in shares}
    mode: Recompute = "full" if "full" in modes else "selective" if "selective" in modes else "none"
    low, high = np.array([s.blocks for s in stages]).T
    base = stage_memory_terms(
        table,
        job,
        accelerator,
        low,
        high,
        np.zeros(len(stages)),
        msgspec.structs.replace(knobs, recompute=mode),
    )
    terms = {name: float(base[name]) for name in TERMS}
    copied = terms["gradient copy"] > 0
    gathers = _gathers(plan, knobs)
    # A rank's copy of what it fetches, and keeps: its shard where parameters are gathered.
    away = [_copy(s, gathers) for s in shares if "parameters" in s.segment.offload]
    staying = sum(_copy(s, gathers) for s in shares if "parameters" not in s.segment.offload)
    rings = max(away, default=0.0) + (max(s.used for s in shares) if gathers else 0.0)
    updated = sum(s.owned for s in shares if "optimizer" not in s.segment.offload)
    gradients = _gradients(plan, cell, shares, knobs)
    terms["parameters"] = staying * job.param_bytes
    gradients += terms["gathered"] / job.param_bytes  # of lent experts
    terms["gathered"] += placement.parameter_buffers * rings * job.param_bytes
    kept = sum(s.held for s in shares if "optimizer" not in s.segment.offload)
    terms["optimizer"] = updated * job.optimizer_bytes + kept * knobs.outer_bytes
    terms["gradients"] = gradients * job.gradient_bytes
    terms["gradient copy"] = gradients * job.param_bytes if copied else 0.0
    saved = {s.stage: 0.0 for s in stages}
    for share in shares:
        saved[share.segment.stage] += _kept(table, share.segment, cell, knobs)
    tokens = knobs.microbatch * job.sequence_length / knobs.cp
    sums = [sum(n * k for n, k in zip(v, saved.values(), strict=True)) for v in live]
    terms["activations"] = max(sums, default=0.0) * tokens
    fixed = ("allocator gap", "context")
    allocated = sum(nbytes for name, nbytes in terms.items() if name not in fixed)
    terms["allocator gap"] = accelerator.allocator_gap * allocated
    return terms


def _gathers(plan: Plan, knobs: MemoryKnobs) -> bool:
    """Whether a rank holds shards of parameters and gathers them."""
    return plan.mathematics.zero == 3 and knobs.shards > 1


def _copy(share: _Share, gathers: bool) -> float:
    return share.owned if gathers else share.held


def _gradients(plan: Plan, cell: Cell, shares: Sequence[_Share], knobs: MemoryKnobs) -> float:
    """Gradient elements on the chip at once: whole where microbatches add up or updates wait.

    Under ZeRO-2 and 3 shards, and the ring of gradients on their way to the sum.
    """
    placement = plan.placement
    if plan.mathematics.zero >= 2 and knobs.shards > 1:
        unsummed = placement.gradient_buffers * max(s.used for s in shares)
        return unsummed + _summed(plan, cell, shares, [s.owned for s in shares], late=True)
    sizes, outer = [s.held for s in shares], knobs.outer_bytes > 0
    return _summed(plan, cell, shares, sizes, late=placement.late_updates, outer=outer)


def _summed(
    plan: Plan,
    cell: Cell,
    shares: Sequence[_Share],
    sizes: Sequence[float],
    *,
    late: bool,
    outer: bool = False,
) -> float:
    """Gradient elements of these sizes that stand on the chip until their update.

    Args:
        plan, cell, shares, sizes: see there. late: updates stand behind all backwards.
        outer: local steps end in an exchange of all parameters.
    """
    placement = plan.placement
    m = placement.microbatches[cell.replica] if placement.microbatches else 1
    both = list(zip(shares, sizes, strict=True))
    streamed = [size for s, size in both if "optimizer" in s.segment.offload]
    local = [size for s, size in both if "optimizer" not in s.segment.offload]
    if m > 1 or outer:
        # What local steps exchange at their end takes the place of the gradients.
        return sum(streamed) + sum(local)
    ring = placement.gradient_buffers * max(streamed, default=0.0)
    # An update is listed behind the next segment's backward where replicas reduce in between.
    behind = 2 if placement.num_replicas > 1 or cell.cp > 1 else 1
    rest = sum(local) if late else sum(sorted(local)[-behind:])
    return min(ring, sum(streamed)) + rest


def _kept(table: BlockTable, segment: Segment, cell: Cell, knobs: MemoryKnobs) -> float:
    """Bytes per token that a segment's forward keeps."""
    mode: Recompute = segment.recompute or cell.recompute
    return float(table.kept_per_token(*segment.blocks, mode, knobs.tp, knobs.sequence_parallel))


def host_ledgers(plan: Plan, problem: Problem, knobs_of: KnobsOf) -> dict[int, HostLedger]:
    """Return host memory of every node that holds something for its chips, or serves parameters.

    What segments keep on NVMe passes through rings of ``nvme_buffers`` per rank, the term
    "staging": one of states (and the parameters written with them), one of parameters that are
    read for fetches. Their landed gradients stay in host memory, and so does the copy of the
    parameters where only states live on NVMe.

    Args:
        plan, problem: see there. knobs_of: sim.cost.ledger.knobs_of.
    """
    machine, job, placement = problem.machine, problem.job, plan.placement
    where = places(machine).node
    sums: dict[int, dict[str, float]] = {}
    for cell in placement.cells:
        knobs = knobs_of(plan, cell)
        for s in _shares(plan, problem, cell, knobs):
            if not s.segment.offload:
                continue
            away = "parameters" in s.segment.offload
            copy = _copy(s, _gathers(plan, knobs)) if away else s.owned
            states = s.owned if "optimizer" in s.segment.offload else 0.0
            sizes = (
                states * (job.optimizer_bytes + knobs.outer_bytes),
                states * job.gradient_bytes,
                copy * job.param_bytes,
            )
            if "nvme" in s.segment.offload:
                sizes = (0.0, sizes[1], 0.0 if "parameters" in s.segment.offload else sizes[2])
            for node in _nodes(plan, cell, where):
                mine = sums.setdefault(node, dict.fromkeys(HOST_TERMS, 0.0))
                for name, nbytes in zip(HOST_TERMS, sizes, strict=True):
                    mine[name] += nbytes
        on_drive = _on_drive(plan, problem, cell, knobs_of)
        if on_drive:
            ring = max(sum(sizes) for sizes in on_drive) + max(sizes[1] for sizes in on_drive)
            for node in _nodes(plan, cell, where):
                staged = sums[node].get("staging", 0.0)
                sums[node]["staging"] = staged + placement.nvme_buffers * ring
    for server in servers_of(plan, problem):
        if not server.on_chip:
            held = sums.setdefault(where[server.chip], dict.fromkeys(HOST_TERMS, 0.0))
            for name, nbytes in server.terms.items():
                held[name] += nbytes
    capacity = {node: machine.nodes[node].host_memory_bytes for node in sums}
    return {
        node: HostLedger(terms=terms, capacity_bytes=capacity[node], known=capacity[node] > 0)
        for node, terms in sorted(sums.items())
    }


def nvme_ledgers(plan: Plan, problem: Problem, knobs_of: KnobsOf) -> dict[int, HostLedger]:
    """Return what the drives hold of every node some of whose segments live there.

    A node without drives has no capacity, so what a plan puts there does not fit.

    Args:
        plan, problem: see there. knobs_of: sim.cost.ledger.knobs_of.
    """
    machine = problem.machine
    where = places(machine).node
    sums: dict[int, dict[str, float]] = {}
    for cell in plan.placement.cells:
        for sizes in _on_drive(plan, problem, cell, knobs_of):
            for node in _nodes(plan, cell, where):
                mine = sums.setdefault(node, {"optimizer": 0.0, "parameters": 0.0})
                mine["optimizer"] += sizes[0]
                mine["parameters"] += sizes[1]
    return {
        node: HostLedger(terms=terms, capacity_bytes=machine.nodes[node].host.nvme_bytes)
        for node, terms in sorted(sums.items())
    }


def _on_drive(
    plan: Plan, problem: Problem, cell: Cell, knobs_of: KnobsOf
) -> list[tuple[float, float]]:
    """States and parameters [B] of a rank's segments on NVMe."""
    if not any("nvme" in s.offload for s in plan.placement.segments):
        return []
    job = problem.job
    return [
        (
            s.owned * (job.optimizer_bytes + knobs_of(plan, cell).outer_bytes),
            s.owned * job.param_bytes if "parameters" in s.segment.offload else 0.0,
        )
        for s in _shares(plan, problem, cell, knobs_of(plan, cell))
        if "nvme" in s.segment.offload
    ]


def _nodes(plan: Plan, cell: Cell, where: Sequence[int]) -> list[int]:
    """Node of each rank of a cell."""
    chips = plan.placement.chips
    return [where[chips[rank] if chips else rank] for rank in cell.ranks]
