"""Times of every block on one cell, with what is boxed inside its passes.

A pass of a block holds, besides its own work, the tensor-parallel collective behind it, the two
exchanges of an MoE block (each way, forward and backward) and the key/value gathering of context
parallelism. A measured time already holds all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.collective import collective_cost, places
from sim.cost.compute import BlockTime, Shape, block_time, routed_part
from sim.cost.measured import MeasuredTimes
from sim.errors import InputError
from sim.hardware.machine import Accelerator, Machine
from sim.model.amounts import output_elements
from sim.model.graph import Block, Model
from sim.problem import Problem

__all__ = [
    "INNER_GROUPS",
    "BlockClasses",
    "CellSpec",
    "CellTimes",
    "alike",
    "cell_times",
    "side_by_side",
]

Floats = NDArray[np.float64]
Inner = tuple[float, float, float]
"""Seconds by ``INNER_GROUPS``."""

INNER_GROUPS = ("tp", "ep", "cp")
"""Roles of the groups whose collectives a pass may hold."""


class CellSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What decides a cell's times.

    Args:
        accelerator: profile name. shape: the rank's share of a microbatch.
        tp_chips, cp_chips, ep_chips: chips of one group of each kind; () where the size is 1.
        tp_share, ep_share: equal groups side by side on the links between nodes.
        inline_tp, inline_ep: the plan lists these collectives as ops, so passes leave them out.
    """

    accelerator: str
    shape: Shape
    tp_chips: tuple[int, ...] = ()
    cp_chips: tuple[int, ...] = ()
    ep_chips: tuple[int, ...] = ()
    tp_share: float = 1.0
    ep_share: float = 1.0
    inline_tp: bool = False
    inline_ep: bool = False


class CellTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Passes of one microbatch, per block, shape (L,).

    Args:
        forward, input_grad, weight_grad, recompute: [s].
        flops: [FLOP] of one rank, shape (4, L), in the same order.
        comm: [s] of the passes that boxed collectives take, by ``INNER_GROUPS``, shape (3, 4, L);
            0 for measured blocks, whose collectives were not measured apart.
        routed: [s] of the passes, then [FLOP], that routed tokens make (sim.cost.compute),
            shape (8, L); nan for measured blocks with experts.
    """

    forward: Floats
    input_grad: Floats
    weight_grad: Floats
    recompute: Floats
    flops: Floats
    comm: Floats
    routed: Floats


class BlockClasses:
    """The distinct blocks of a model, so that equal layers are priced once.

    Attributes:
        blocks: one block per class. member: class of each block, shape (L,).
        output: [elements per token] of each class's output. measured: measured times, or None.
    """

    def __init__(self, model: Model) -> None:
        outputs = output_elements(model).tolist()
        numbers: dict[object, int] = {}
        self.blocks: list[Block] = []
        self.output: list[int] = []
        member = []
        for block, output in zip(model.blocks, outputs, strict=True):
            name = block.name if model.times else ""
            key = (msgspec.structs.replace(block, name=name, layer=0, shares=""), output)
            if key not in numbers:
                numbers[key] = len(self.blocks)
                self.blocks.append(block)
                self.output.append(output)
            member.append(numbers[key])
        self.member = np.array(member, np.int64)
        self.measured = MeasuredTimes(model) if model.times else None


def cell_times(
    problem: Problem, classes: BlockClasses, spec: CellSpec, part: str = ""
) -> CellTimes:
    """Return the times of all blocks on one cell.

    Args:
        problem: machine and job. classes: of the problem's model. spec: the cell.
        part: only what routed "experts" do, only the "rest", or both ("").

    Raises:
        InputError: a measured table lacks this split, or the accelerator the dtype, or a part is
            asked for of blocks that are measured whole.
    """
    accelerator = problem.machine.accelerators[spec.accelerator]
    rows = []
    for block, output in zip(classes.blocks, classes.output, strict=True):
        own = block_time(block, accelerator, spec.shape, problem.job.dtype, classes.measured)
        forward, backward = (_NONE, _NONE) if own.measured else _boxed(problem, block, output, spec)
        again = forward if spec.shape.recompute == "full" and own.recompute else _NONE
        routed = _routed(block, accelerator, spec, problem.job.dtype, own.measured)
        rows.append((*_row(own, forward, backward, again), *routed))
    table = np.array(rows, np.float64).reshape(-1, 16 + 4 * len(INNER_GROUPS))[classes.member].T
    times = CellTimes(
        forward=table[0],
        input_grad=table[1],
        weight_grad=table[2],
        recompute=table[3],
        flops=table[4:8],
        comm=table[8:-8].reshape(4, len(INNER_GROUPS), -1).swapaxes(0, 1),
        routed=table[-8:],
    )
    return _in_part(times, part) if part else times


def _in_part(times: CellTimes, part: str) -> CellTimes:
    """Experts' passes hold no collective: the exchanges are ops where experts are."""
    if np.isnan(times.routed).any():
        raise InputError(
            "a measured block is not measured in parts",
            key="model.times",
            found="a block with experts",
            expected="a model whose experts' times are worked out",
        )
    whole = np.stack([times.forward, times.input_grad, times.weight_grad, times.recompute])
    own, flops = times.routed[:4], times.routed[4:]
    if part == "rest":
        own, flops = whole - own, times.flops - flops
    return msgspec.structs.replace(
        times,
        forward=own[0],
        input_grad=own[1],
        weight_grad=own[2],
        recompute=own[3],
        flops=flops,
        comm=np.zeros_like(times.comm) if part == "experts" else times.comm,
    )


_NONE: Inner = (0.0, 0.0, 0.0)


def _routed(
    block: Block, accelerator: Accelerator, spec: CellSpec, dtype: str, measured: bool
) -> tuple[float, ...]:
    if not block.num_experts:
        return (0.0,) * 8
    if measured:
        return (np.nan,) * 8
    own = block_time(routed_part(block), accelerator, spec.shape, dtype)
    return own.forward, own.input_grad, own.weight_grad, own.recompute, *own.flops


def _row(own: BlockTime, forward: Inner, backward: Inner, again: Inner) -> tuple[float, ...]:
    return (
        own.forward + sum(forward),
        own.input_grad + sum(backward),
        own.weight_grad,
        own.recompute + sum(again),
        *own.flops,
        *forward,
        *backward,
        *_NONE,
        *again,
    )


def _boxed(problem: Problem, block: Block, output: int, spec: CellSpec) -> tuple[Inner, Inner]:
    """Collectives inside a block's forward and backward pass [s].

    The backward of a column split sums the input's gradient, of a row split nothing: so a layer's
    block has one each way, the embedding only the forward's, the head only the backward's. Sequence
    parallelism turns each into a reduce_scatter and an all_gather; the extra gathering it needs for
    the weight gradient runs under the input gradient (Korthikanti et al. 2022, section 4.2.2).
    """
    machine, shape = problem.machine, spec.shape
    token_bytes = shape.tokens * problem.job.activation_bytes
    tp = ep = cp = (0.0, 0.0)
    if len(spec.tp_chips) > 1 and not spec.inline_tp:
        one = _tp_sum(machine, spec, token_bytes * output)
        backward = 0.0 if block.kind == "embedding" else block.tp_collectives * one
        if block.kind == "head":
            backward = _tp_sum(machine, spec, token_bytes * block.input_elements)
        tp = (block.tp_collectives * one, backward)
    if len(spec.ep_chips) > 1 and block.num_experts and not spec.inline_ep:
        held = token_bytes * block.top_k * block.input_elements
        held /= shape.tp if shape.sequence_parallel else 1
        cost = collective_cost(machine, "all_to_all", spec.ep_chips, held, share=spec.ep_share)
        ep = (2 * cost.seconds, 2 * cost.seconds)
    if len(spec.cp_chips) > 1 and block.attention is not None:
        a = block.attention
        width = a.kv_heads * (a.head_dim + a.v_head_dim) / shape.tp
        whole = token_bytes * shape.cp * width
        gather, scatter = (
            collective_cost(machine, kind, spec.cp_chips, whole).seconds
            for kind in ("all_gather", "reduce_scatter")
        )
        cp = (gather, gather + scatter)
    own = machine.accelerators[spec.accelerator]
    return (
        (tp[0] * own.tp_cost, ep[0] * own.ep_cost, cp[0] * own.cp_cost),
        (tp[1] * own.tp_cost, ep[1] * own.ep_cost, cp[1] * own.cp_cost),
    )


def _tp_sum(machine: Machine, spec: CellSpec, nbytes: float) -> float:
    kinds = ("all_reduce",)
    if spec.shape.sequence_parallel:
        kinds = ("reduce_scatter", "all_gather")  # type: ignore[assignment]
    return sum(
        collective_cost(machine, kind, spec.tp_chips, nbytes, share=spec.tp_share).seconds
        for kind in kinds
    )


def alike(machine: Machine, chips: tuple[int, ...]) -> tuple[int, ...]:
    """Return the same places in the first node of the same profile, for groups inside one node.

    Equal groups then have equal keys, and are priced once.
    """
    where = places(machine)
    nodes = {where.node[c] for c in chips}
    if len(nodes) != 1:
        return chips
    node = machine.nodes[nodes.pop()]
    first = next(n for n in machine.nodes if n.profile == node.profile)
    same = first.chip_nic == node.chip_nic and first.fabric_rate == node.fabric_rate
    shift = first.chips[0] - node.chips[0]
    return tuple(c + shift for c in chips) if same else chips


def side_by_side(machine: Machine, group: Sequence[int], others: Sequence[Sequence[int]]) -> float:
    """Return how many groups use the busiest NIC that a group uses, itself included.

    Args:
        machine: where. group: its chips. others: chips of all groups that run at the same time, the
            group itself among them.
    """
    where = places(machine)
    if len({where.node[c] for c in group}) < 2:
        return 1.0
    users: dict[tuple[int, int], set[int]] = defaultdict(set)
    for k, chips in enumerate(others):
        if len({where.node[c] for c in chips}) > 1:
            for c in chips:
                users[_nic(machine, where.node[c], c)].add(k)
    return float(max(len(users[_nic(machine, where.node[c], c)]) for c in group))


def _nic(machine: Machine, node: int, chip: int) -> tuple[int, int]:
    at = machine.nodes[node]
    return node, at.nic_of(chip)
