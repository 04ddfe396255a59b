"""What each op of a plan amounts to on its rank: seconds of compute, bytes of communication."""

from __future__ import annotations

import msgspec
import numpy as np

from sim.cost.cell import BlockClasses, CellSpec, CellTimes, alike, cell_times, side_by_side
from sim.cost.collective import collective_cost, places
from sim.cost.compute import Shape, optimizer_time
from sim.errors import InputError
from sim.hardware.machine import Accelerator
from sim.model.amounts import rank_params
from sim.model.graph import Block
from sim.plan.deps import of_experts, segment_of
from sim.plan.graph import OpGraph
from sim.plan.op import Op
from sim.plan.placement import Cell
from sim.plan.plan import Amount, Plan
from sim.plan.wiring import Wiring
from sim.problem import Problem

__all__ = ["PASSES", "Effort", "Work"]

PASSES = ("F", "B", "I", "W", "R")
_LOCAL = ("LOOKUP", "ENCODE", "DECODE", "OPT", "APPLY")
WIDTH = 1e4
"""[B] per token that groups are compared by: some thousand 16-bit elements."""


class Effort(msgspec.Struct, frozen=True):
    """What a compute or host op takes on its rank.

    Args:
        seconds: [s]. flops: [FLOP].
        comm: [s] of them spent in boxed collectives, by ``INNER_GROUPS``; () for none.
    """

    seconds: float
    flops: float = 0.0
    comm: tuple[float, ...] = ()


class Work:
    """Amounts of a plan's ops, found once per distinct op and cell.

    Args:
        graph: decides which collectives are listed as ops, and into how many parts a pass is cut.
        wiring, plan, problem: see there.
    """

    def __init__(self, graph: OpGraph, wiring: Wiring, plan: Plan, problem: Problem) -> None:
        self.wiring, self.plan, self.problem = wiring, plan, problem
        self.math, self.placement = plan.mathematics, plan.placement
        self.blocks = problem.model.blocks
        self.classes = BlockClasses(problem.model)
        self.parts: dict[tuple[int, str], int] = {}
        self.listed: set[tuple[str, int]] = set()
        self.apart: set[tuple[int, str]] = set()
        for op in {id(o): o for o in graph.ops}.values():
            if op.part >= 0:
                key = (op.stage, op.label)
                self.parts[key] = max(self.parts.get(key, 1), op.part + 1)
            if op.kind in PASSES and of_experts(op.label):
                self.apart.add((op.stage, segment_of(op.label)))
            if op.kind in ("ALL_REDUCE", "ALL_TO_ALL"):
                role = op.group or ("ep" if op.kind == "ALL_TO_ALL" else "tp")
                self.listed.add((role, op.stage))
        self._specs: dict[tuple[int, int, int, int], CellSpec] = {}
        self._cells: dict[tuple[CellSpec, str], CellTimes] = {}
        self._peers: dict[tuple[int, str], list[tuple[int, ...]]] = {}

    # -- where ----------------------------------------------------------------------------------

    def chip(self, rank: int) -> int:
        """Chip of a rank."""
        chips = self.placement.chips
        return chips[rank] if chips else rank

    def cell(self, rank: int, op: Op) -> Cell:
        """Cell of a rank.

        Raises:
            InputError: the rank is outside every cell, so the op has no amounts on a machine.
        """
        found = self.wiring.cell_of.get(rank)
        if found is None:
            raise InputError(
                f"{op.name} of rank {rank} belongs to no cell",
                key="placement.cells",
                expected="a cell, or stated times",
            )
        return found

    def accelerator(self, rank: int) -> Accelerator:
        """Accelerator type of a rank's chip."""
        machine = self.problem.machine
        node = machine.nodes[places(machine).node[self.chip(rank)]]
        return machine.accelerators[node.accelerator]

    def ranges(self, op: Op, rank: int) -> list[tuple[int, int]]:
        """Block ranges of the op's segments: those of its label, or all of its stage.

        Raises:
            InputError: the op names no segment of the placement.
        """
        stage = self.wiring.stage_of(op, rank)
        mine = [s for s in self.placement.segments if s.stage == stage]
        named = [s for s in mine if s.name == segment_of(op.label)]
        found = named if op.label and named else mine
        if not found:
            raise InputError(
                f"{op.name} of rank {rank} names no segment, so the machine cannot price it",
                key="placement.segments",
                found=op.label or str(stage),
                expected="a segment with its blocks, or stated times",
            )
        return [s.blocks for s in found]

    def segment(self, op: Op, rank: int) -> tuple[Block, ...]:
        """Blocks of ``ranges``."""
        return tuple(b for first, last in self.ranges(op, rank) for b in self.blocks[first:last])

    def own_blocks(self, op: Op, rank: int) -> tuple[Block, ...]:
        """The same, without parameters that an earlier segment of the position shares and holds."""
        stage, ranges = self.wiring.stage_of(op, rank), self.ranges(op, rank)
        at = {s.cell for s in self.placement.segments if s.stage == stage}
        before = [s.blocks for s in self.placement.segments if s.cell in at]
        before = [(a, b) for a, b in before if b <= ranges[0][0]]
        held = {x.shares for a, b in before for x in self.blocks[a:b]} - {""}
        return tuple(
            msgspec.structs.replace(b, params=0) if b.shares in held else b
            for b in self.segment(op, rank)
        )

    def tokens(self, op: Op) -> float:
        """Tokens of the op's microbatch, or of its part of it."""
        whole = self.math.microbatch * self.math.sequence_length
        return whole / (self.parts.get((op.stage, op.label), 1) if op.part >= 0 else 1)

    # -- compute --------------------------------------------------------------------------------

    def compute(self, op: Op, rank: int) -> Effort:
        """Return what a compute or host op takes on its rank.

        Raises:
            InputError: the machine has no price for the op; it must be stated.
        """
        if op.kind in PASSES:
            return self._pass(op, rank)
        if op.kind == "OPT" and not op.amount:
            return Effort(self._optimizer(op, rank))
        if op.kind == "RESHARD":
            return Effort(0.0)
        amount = self.amount(op)
        if op.kind in _LOCAL and amount is not None:
            chip = self.accelerator(rank)
            rate = chip.memory_bytes_per_s * chip.memory_efficiency
            return Effort(amount.nbytes / rate + chip.kernel_overhead_s)
        raise InputError(
            f"no time for {op.name} of rank {rank} on a machine",
            key="plan.amounts",
            found=op.amount or "no amount",
            expected="an amount the machine can price, or stated times",
        )

    def amount(self, op: Op) -> Amount | None:
        """The plan's amount of an op: by its own key, or by stage, kind and label."""
        stage = str(op.stage) if op.stage >= 0 else ""
        default = f"{stage}{op.kind}" + (f"[{op.label}]" if op.label else "")
        return self.plan.amounts.get(op.amount or default)

    def _pass(self, op: Op, rank: int) -> Effort:
        times = self._times(op, rank)
        kinds = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,), "R": (3,)}[op.kind]
        if op.recompute == "inner" and op.kind in ("B", "I"):
            kinds = (3, *kinds)
        passes = (times.forward, times.input_grad, times.weight_grad, times.recompute)
        seconds = flops = 0.0
        comm = np.zeros(len(times.comm))
        for first, last in self.ranges(op, rank):
            for k in kinds:
                seconds += float(passes[k][first:last].sum())
                flops += float(times.flops[k, first:last].sum())
                comm += times.comm[:, k, first:last].sum(-1)
        return Effort(seconds, flops, tuple(comm.tolist()) if comm.any() else ())

    def _times(self, op: Op, rank: int) -> CellTimes:
        cell = self.cell(rank, op)
        parts = self.parts.get((op.stage, op.label), 1) if op.part >= 0 else 1
        key = (cell.stage, cell.replica, parts, op.stage)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = self.spec(cell, parts, op.stage)
        part = "rest" if (op.stage, op.label) in self.apart else ""
        part = "experts" if of_experts(op.label) else part
        if (spec, part) not in self._cells:
            self._cells[spec, part] = cell_times(self.problem, self.classes, spec, part)
        return self._cells[spec, part]

    def spec(self, cell: Cell, parts: int = 1, stage: int = -1) -> CellSpec:
        """What decides a cell's times, its groups and their neighbours included.

        Where the cell's groups of a role lie differently, the slowest speaks for all: the others'
        members wait for its members.
        """
        machine, rank = self.problem.machine, cell.ranks[0]
        tp = self._slowest(cell, "tp", "all_reduce")
        ep = self._slowest(cell, "ep", "all_to_all")
        cp = self._slowest(cell, "cp", "all_gather")
        whole = self.math.microbatch
        return CellSpec(
            accelerator=cell.accelerator or self.accelerator(rank).name,
            shape=Shape(
                microbatch=whole // parts if whole % parts == 0 else whole / parts,
                sequence_length=self.math.sequence_length,
                tp=cell.tp,
                ep=self.placement.ep,
                cp=cell.cp,
                sequence_parallel=self.math.sequence_parallel,
                recompute=cell.recompute,
            ),
            tp_chips=alike(machine, tp),
            cp_chips=alike(machine, cp),
            ep_chips=alike(machine, ep),
            tp_share=side_by_side(machine, tp, self._groups(cell.stage, "tp")) if tp else 1.0,
            ep_share=side_by_side(machine, ep, self._groups(cell.stage, "ep")) if ep else 1.0,
            inline_tp=bool({("tp", stage), ("tp", -1)} & self.listed),
            inline_ep=bool({("ep", stage), ("ep", -1)} & self.listed),
        )

    def _slowest(self, cell: Cell, role: str, kind: str) -> tuple[int, ...]:
        """Chips of the cell's group of a role that takes longest; () when ranks are alone."""
        machine = self.problem.machine
        groups = dict.fromkeys(self._members(r, role) for r in cell.ranks)
        apart = {alike(machine, g): g for g in reversed(groups) if len(g) > 1}
        nbytes = self.math.microbatch * self.math.sequence_length * WIDTH
        if len(apart) < 2:
            return next(iter(apart.values()), ())
        return max(
            reversed(apart.values()),
            key=lambda g: collective_cost(machine, kind, g, nbytes).seconds,
        )

    def _members(self, rank: int, role: str) -> tuple[int, ...]:
        indices = self.wiring.of_rank.get((rank, role), [])
        return tuple(self.chip(r) for r in self.wiring.groups[indices[0]]) if indices else ()

    def _groups(self, stage: int, role: str) -> list[tuple[int, ...]]:
        """Chips of all groups of a role at a pipeline position."""
        found = self._peers.get((stage, role))
        if found is None:
            ranks = [r for c in self.placement.cells if c.stage == stage for r in c.ranks]
            of_rank = self.wiring.of_rank
            indices = sorted({i for r in ranks for i in of_rank.get((r, role), ())})
            found = [tuple(self.chip(r) for r in self.wiring.groups[i]) for i in indices]
            self._peers[stage, role] = found
        return found

    def _optimizer(self, op: Op, rank: int) -> float:
        cell = self.cell(rank, op)
        blocks = self.segment(op, rank)
        accelerator = self.accelerator(rank)
        measured = self.classes.measured
        update = 0.0
        if measured is not None:
            for b in blocks:
                entry = measured.find(b, accelerator.name, cell.tp, self.math.microbatch, cell.cp)
                update += entry.update if entry is not None else 0.0
        params = self.owned_params(op, rank)
        return optimizer_time(accelerator, self.problem.job, params, update=update)

    def held_params(self, op: Op, rank: int) -> float:
        """Parameters of the op's segment that its rank keeps: its shard under ZeRO-3."""
        if self.math.zero == 3:
            return self.owned_params(op, rank)
        return sum(
            rank_params(self.own_blocks(op, rank), self.cell(rank, op).tp, self.placement.ep)
        )

    def hosted_params(self, op: Op, rank: int) -> float:
        """Parameters that the host updates for the op's rank."""
        return sum(
            self.owned_params(Op(kind="OPT", stage=s.stage, label=s.name), rank)
            for s in self.placement.segments_of(self.cell(rank, op))
            if "optimizer" in s.offload
        )

    def owned_params(self, op: Op, rank: int) -> float:
        """Parameters of the op's segment that its rank updates: its shard under ZeRO."""
        ep = self.placement.ep
        dense, experts = rank_params(self.own_blocks(op, rank), self.cell(rank, op).tp, ep)
        if self.math.zero:
            shards = max(len(self._members(rank, "dp")), 1)
            # With ep > 1 experts are replicated over other ranks than the rest.
            role = "dp" if ep == 1 else "edp"
            dense, experts = dense / shards, experts / max(len(self._members(rank, role)), 1)
        return dense + experts
