"""Cut the model into stages: equal layers, layers by speed, or the cut with the fastest bottleneck.

Legend of shapes: V virtual stages, U units (layers with what surrounds them, or blocks), L blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.compute import Shape, block_time
from sim.cost.measured import MeasuredTimes
from sim.errors import InputError
from sim.model.graph import Model
from sim.plan.draft import CellKnobs, PlanDraft, split_layers
from sim.plan.uniform import check_layers, layer_cuts
from sim.problem import Problem
from strategies.base import Space, draft_or_default, fill
from strategies.registry import register

__all__ = [
    "PARTITION",
    "Partition",
    "PartitionKnobs",
    "block_seconds",
    "cell_seconds",
    "min_max_cuts",
    "unit_starts",
    "weighted_counts",
]

Floats = NDArray[np.float64]
TIE = 1e-12
"""Relative difference below which two times are the same."""


class PartitionKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``partition``.

    Args:
        method: "equal" layers, the larger shares first; "weighted" by the stages' speeds;
            "min-max": the cut whose slowest virtual stage is fastest, embedding and head included.
        at: where a cut may fall: between layers, or between any two blocks ("min-max" only).
        layers: of each virtual stage, instead of a method; () for the method.
    """

    method: Literal["equal", "weighted", "min-max"] = "equal"
    at: Literal["layer", "block"] = "layer"
    layers: tuple[int, ...] = ()


def unit_starts(model: Model, at: str = "layer") -> tuple[int, ...]:
    """Block index where each unit starts, and the number of blocks; length U + 1.

    Units are layers, the first with the blocks before it and the last with those after it; or
    single blocks.
    """
    n = len(model.blocks)
    if at == "block" or model.num_layers == 0:
        return tuple(range(n + 1))
    return layer_cuts(model, (1,) * model.num_layers)


def cell_seconds(problem: Problem, draft: PlanDraft, cell: CellKnobs) -> Floats:
    """Forward, backward and recomputation of each block for one microbatch on a cell [s].

    Tensor-parallel collectives are not included, unless the times were measured.

    Args:
        problem: what. draft: microbatch size and switches. cell: where.

    Returns:
        Times, shape (L,).

    Raises:
        InputError: a measured table lacks the cell's split.
    """
    machine, job, model = problem.machine, problem.job, problem.model
    node = next(n for n in machine.nodes if n.chips[0] <= cell.chips[0] < n.chips[1])
    shape = Shape(
        microbatch=draft.pipeline.microbatch,
        sequence_length=job.sequence_length,
        tp=cell.tp,
        ep=draft.expert.ep,
        cp=cell.cp,
        sequence_parallel=draft.tensor.sequence_parallel,
        recompute=cell.recompute,
    )
    measured = MeasuredTimes(model) if model.times else None
    chip = machine.accelerators[node.accelerator]
    times = [block_time(b, chip, shape, job.dtype, measured) for b in model.blocks]
    return np.array([t.forward + t.backward + t.recompute for t in times])


def block_seconds(problem: Problem, draft: PlanDraft) -> Floats:
    """Times of each block on each pipeline position: ``cell_seconds`` of its slowest cell [s].

    Args:
        problem: what. draft: its cells, microbatch size and switches.

    Returns:
        Times, shape (positions, L).

    Raises:
        InputError: a measured table lacks a split that the cells use.
    """
    machine = problem.machine
    names = [n.accelerator for n in machine.nodes for _ in range(*n.chips)]
    positions = 1 + max(c.stage for c in draft.cells)
    found = np.zeros((positions, len(problem.model.blocks)))
    seen: dict[tuple[str, int, int, str], Floats] = {}
    for cell in draft.cells:
        key = (names[cell.chips[0]], cell.tp, cell.cp, cell.recompute)
        if key not in seen:
            seen[key] = cell_seconds(problem, draft, cell)
        found[cell.stage] = np.maximum(found[cell.stage], seen[key])
    return found


def weighted_counts(num_units: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Units per virtual stage in proportion to speed, at least one each, none dropped.

    Largest remainders, ties to the earlier stage.

    Args:
        num_units: to share out. speeds: of the virtual stages, any common unit, all positive.

    Raises:
        InputError: fewer units than stages.

    >>> weighted_counts(30, (1.0, 1.0, 1.0, 1.0)), weighted_counts(12, (3.0, 1.0))
    ((8, 8, 7, 7), (9, 3))
    """
    split_layers(num_units, len(speeds))
    share = np.asarray(speeds, np.float64) / np.sum(speeds) * num_units
    counts = np.maximum(np.floor(share * (1 + TIE)).astype(np.int64), 1)
    while counts.sum() > num_units:
        excess = np.where(counts > 1, counts - share, -np.inf)
        counts[int(np.argmax(excess))] -= 1
    while counts.sum() < num_units:
        lack = np.round(share - counts, 12)
        counts[int(np.argmax(lack))] += 1
    return tuple(counts.tolist())


def min_max_cuts(costs: Floats) -> tuple[int, ...]:
    """Cut a chain of units over stages in a fixed order so that the slowest stage is fastest.

    Dynamic programming over prefixes, O(V U^2), exact; among the optimal cuts the one with the
    smallest sum of squared stage times, then the one whose later stages are smallest.

    Args:
        costs: [s] of each unit on each stage, shape (V, U).

    Returns:
        V + 1 rising unit indices from 0 to U.

    Raises:
        InputError: fewer units than stages.
    """
    num_stages, num_units = costs.shape
    split_layers(num_units, num_stages)
    sums = np.concatenate([np.zeros((num_stages, 1)), np.cumsum(costs, axis=1)], axis=1)
    # time[s][i, j]: stage s runs units i to j - 1; infinite where it would be empty.
    empty = np.tri(num_units + 1, dtype=bool)
    best = np.where(np.arange(num_units + 1) == 0, 0.0, np.inf)
    for s in range(num_stages):
        time = np.where(empty, np.inf, sums[s][None, :] - sums[s][:, None])
        best = np.maximum(best[:, None], time).min(axis=0)
    limit = best[num_units] * (1 + TIE)
    tables = [np.where(np.arange(num_units + 1) == 0, 0.0, np.inf)]
    for s in range(num_stages):
        time = np.where(empty, np.inf, sums[s][None, :] - sums[s][:, None])
        square = np.where(time <= limit, time**2, np.inf)
        tables.append((tables[-1][:, None] + square).min(axis=0))
    cuts = [num_units]
    for s in range(num_stages - 1, -1, -1):
        j = cuts[-1]
        time = sums[s][j] - sums[s][:j]
        total = tables[s][:j] + np.where(time <= limit, time**2, np.inf)
        near = np.flatnonzero(total <= tables[s + 1][j] * (1 + TIE))
        cuts.append(int(near[-1]))
    return tuple(reversed(cuts))


class Partition:
    """Layers to stages: equal, weighted by speed, or the optimal bottleneck."""

    name = "partition"
    axis = "partition"
    paper = "Bottleneck partition of a chain: Bokhari 1988, section III; min-max as in PipeDream"
    owns = frozenset({"pipeline.cuts"})
    knobs = PartitionKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[PartitionKnobs]:
        """The methods; only one of those that give the same cuts, "equal" first."""
        given = draft_or_default(problem, draft)
        virtual = _virtual(given)
        if len(unit_starts(problem.model)) - 1 < virtual:
            units = len(unit_starts(problem.model)) - 1
            return Space((), f"{units} layers do not fill {virtual} virtual stages")
        choices = [
            PartitionKnobs(),
            PartitionKnobs(method="weighted"),
            PartitionKnobs(method="min-max"),
            PartitionKnobs(method="min-max", at="block"),
        ]
        found: dict[tuple[int, ...], PartitionKnobs] = {}
        for knobs in choices:
            found.setdefault(_cuts(problem, given, knobs), knobs)
        return Space(tuple(found.values()))

    def apply(self, problem: Problem, draft: PlanDraft, knobs: PartitionKnobs) -> PlanDraft:
        """Set the cuts; every block of the model is placed once, always.

        Raises:
            InputError: stated layers contradict the model, or there are fewer than stages.
        """
        given = draft_or_default(problem, draft)
        pipeline = msgspec.structs.replace(given.pipeline, cuts=_cuts(problem, given, knobs))
        return fill(given, self.name, knobs, pipeline=pipeline)


def _virtual(draft: PlanDraft) -> int:
    return (1 + max(c.stage for c in draft.cells)) * draft.pipeline.chunks


def _cuts(problem: Problem, draft: PlanDraft, knobs: PartitionKnobs) -> tuple[int, ...]:
    """Block index where each virtual stage starts, and the number of blocks."""
    model, virtual = problem.model, _virtual(draft)
    if knobs.layers:
        return layer_cuts(model, check_layers(model.num_layers, knobs.layers, virtual))
    if knobs.at == "block" and knobs.method != "min-max":
        raise InputError(
            f"the method {knobs.method} counts layers",
            key="partition.at",
            found="block",
            expected="layer, or the method min-max",
        )
    starts = unit_starts(model, knobs.at)
    units = len(starts) - 1
    if knobs.method == "equal":
        return _at(starts, split_layers(units, virtual))
    seconds = block_seconds(problem, draft)
    positions = len(seconds)
    if knobs.method == "weighted":
        # The middle unit stands for a layer: the first and last carry embedding and head.
        a, b = starts[units // 2], starts[units // 2 + 1] if units > 1 else starts[1]
        speeds = 1.0 / np.maximum(seconds[:, a:b].sum(axis=1), 1e-30)
        return _at(starts, weighted_counts(units, [speeds[v % positions] for v in range(virtual)]))
    costs = np.add.reduceat(seconds, starts[:-1], axis=1)
    cuts = min_max_cuts(costs[np.arange(virtual) % positions])
    return tuple(starts[c] for c in cuts)


def _at(starts: tuple[int, ...], counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(starts[c] for c in itertools.accumulate(counts, initial=0))


PARTITION = register(Partition())
