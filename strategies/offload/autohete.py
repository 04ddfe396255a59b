"""AutoHete: three integers say what is recomputed and what lives on the host, layer by layer.

The first layers are recomputed and keep their parameters on the host, for they are used first and
last in a step; the last layers have their optimizer there, for their gradients come first and
their parameters are needed last.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from sim.errors import InputError
from sim.plan.draft import CellKnobs, OffloadKnobs, PlanDraft
from sim.plan.layers import SEGMENTS, cut_layers, not_by_segment
from sim.plan.placement import Segment
from sim.plan.plan import Call, Table
from sim.plan.schedules import explicit_order, positions
from sim.problem import Problem
from strategies.base import Space, draft_or_default, fill
from strategies.lowering.nvme import drives
from strategies.lowering.updates import CLIPPING, SPECULATION, Clipping
from strategies.registry import register

__all__ = ["OFFLOAD", "AutoHete", "AutoHeteKnobs", "layer_segments", "own_layers"]

WHOLE = (1, 2)
"""ZeRO stages whose shards of updated parameters would meet whole parameters on the host."""
INEXACT = {
    "per-block": "gradients are clipped block by block",
    "previous-norm": "gradients are clipped by the norm of the step before",
}


class AutoHeteKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``offload``.

    Args:
        checkpointed: first layers that keep their inputs only.
        parameters: first layers whose parameters live on the host.
        optimizer: last layers whose optimizer states live, and are updated, there.
        stages: (checkpointed, parameters, optimizer) of each pipeline position, counted over its
            own layers; () takes the three integers above, which count over the whole model.
        nvme: last layers, of those with the optimizer on the host, whose states live on NVMe: their
            gradients come first and their parameters are needed last, so they have most time.
        outer: embedding and head have their optimizer on the host as well.
        priority: the host's streams serve what the next forward needs first.
        clipping: what an update waits for, see strategies.lowering.updates.CLIPPING.
        whole_steps: a step begins when the one before has ended.
        parameter_buffers, gradient_buffers: layers on their way, on each chip; parameters go both
            ways through theirs.
        failure_rate: share of steps whose check fails ("speculate" only); assumed.
        accelerators: whose cells recompute and keep things on the host, the others nothing; () for
            all.
    """

    checkpointed: int = 0
    parameters: int = 0
    optimizer: int = 0
    stages: tuple[tuple[int, int, int], ...] = ()
    nvme: int = 0
    outer: bool = False
    priority: bool = True
    clipping: Clipping = "none"
    whole_steps: bool = False
    parameter_buffers: int = 2
    gradient_buffers: int = 2
    failure_rate: float = 0.01
    accelerators: tuple[str, ...] = ()


class AutoHete:
    """Checkpointing, parameters and optimizer of each layer, and updates across the step."""

    name = "offload"
    axis = "offload"
    paper = "AutoHete, arXiv:2503.01890, as a third-party digest describes it"
    owns = frozenset(
        {"cells.recompute", "cells.offload", "passes", "barrier", "exact", "reason", "tables"}
        | {f"offload.{field}" for field in OffloadKnobs.__struct_fields__}
    )
    adds = frozenset({"passes", "barrier", "exact", "reason", "tables"})
    knobs = AutoHeteKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[AutoHeteKnobs]:
        """None, half and all of the layers for each integer, least on the host first.

        fp16 skips a step whose gradients overflow, so its updates are speculated or wait.
        """
        given = draft_or_default(problem, draft)
        why = _refused(problem, given, {c.stage for c in given.cells}, given.cells)
        if why:
            return Space((), why)
        n = problem.model.num_layers
        sizes = sorted({0, n // 2, n})
        ways: tuple[Clipping, ...] = ("speculate", "global") if _skips(problem) else ("none",)
        found = [
            AutoHeteKnobs(checkpointed=c, parameters=p, optimizer=o, clipping=way)
            for way in ways
            for o, p, c in itertools.product(sizes, repeat=3)
            if not (p and given.data.zero in WHOLE)
        ]
        return Space(tuple(found))

    def apply(self, problem: Problem, draft: PlanDraft, knobs: AutoHeteKnobs) -> PlanDraft:
        """Cut the stages into layers and say what of each lives on the host.

        Raises:
            InputError: an integer outside 0..layers, or a plan that the pass does not carry.
        """
        given = draft_or_default(problem, draft)
        _check(problem, given, knobs)
        segments = layer_segments(problem, given, knobs)
        # Cells price the recomputation; segments that recompute nothing say so.
        again = {s.cell for s in segments if s.recompute == "full"}
        away = _cells_away(problem, given, knobs)
        cells = tuple(
            msgspec.structs.replace(
                c,
                recompute="full"
                if c.stage in again and (c in away or c.recompute == "full")
                else "none",
                offload="" if c in away else "none",
            )
            for c in given.cells
        )
        reason = INEXACT.get(knobs.clipping, "")
        args = {
            "priority": knobs.priority,
            "clipping": knobs.clipping,
            "whole_steps": knobs.whole_steps,
        } | ({} if problem.job.master_weights else {"masters": False})
        return fill(
            given,
            self.name,
            knobs,
            cells=cells,
            offload=OffloadKnobs(
                segments=segments,
                parameter_buffers=knobs.parameter_buffers,
                gradient_buffers=knobs.gradient_buffers,
                late_updates=knobs.clipping == "global",
            ),
            passes=(*_with_segments(given, args), *drives(segments, knobs.whole_steps)),
            barrier=knobs.whole_steps,
            exact=given.exact and not reason,
            reason="; ".join(r for r in (given.reason, reason) if r),
            tables=given.tables | _tables(knobs),
        )


def _with_segments(draft: PlanDraft, args: dict[str, Any]) -> tuple[Call, ...]:
    """The passes with the one that runs segments: at its place if it is there, else before all.

    Segments that another strategy cut do not say what is recomputed; a draft whose segments do has
    been here before, and two calls of the pass are refused.
    """
    call, again = Call(SEGMENTS, 1, args), any(s.recompute for s in draft.offload.segments)
    if again or all(c.name != SEGMENTS for c in draft.passes):
        return (call, *draft.passes)
    return tuple(call if c.name == SEGMENTS else c for c in draft.passes)


def _cells_away(problem: Problem, draft: PlanDraft, knobs: AutoHeteKnobs) -> list[CellKnobs]:
    """Cells that the knobs are for."""
    if not knobs.accelerators:
        return list(draft.cells)
    kinds = [n.accelerator for n in problem.machine.nodes for _ in range(*n.chips)]
    return [c for c in draft.cells if kinds[c.chips[0]] in knobs.accelerators]


def layer_segments(problem: Problem, draft: PlanDraft, knobs: AutoHeteKnobs) -> tuple[Segment, ...]:
    """Return one segment per layer of every virtual stage; embedding and head stand apart.

    Segments that the draft names already stay, and share their layer's choice.
    """
    places, n = _places(problem, draft), problem.model.num_layers
    own = _layers(problem, places)
    found = []
    for s, inside in places:
        layer = problem.model.blocks[s.blocks[0]].layer
        counts, place, total = (knobs.checkpointed, knobs.parameters, knobs.optimizer), layer, n
        if knobs.stages:
            counts, total = knobs.stages[s.cell], len(own[s.cell])
            place = own[s.cell].index((s.stage, layer)) if inside else 0
        host = []
        if inside and place < counts[1]:
            host.append("parameters")
        if place >= total - counts[2] if inside else knobs.outer:
            host.append("optimizer")
        if inside and place >= total - min(knobs.nvme, counts[2]):
            host.append("nvme")
        again = "full" if inside and place < counts[0] else "none"
        found.append(msgspec.structs.replace(s, recompute=again, offload=tuple(host)))
    return tuple(found)


def own_layers(problem: Problem, draft: PlanDraft) -> tuple[int, ...]:
    """Return how many layers each pipeline position has; one cut in two counts on both sides."""
    own = _layers(problem, _places(problem, draft))
    return tuple(len(own[s]) for s in range(1 + max(c.stage for c in draft.cells)))


def _layers(
    problem: Problem, places: Sequence[tuple[Segment, bool]]
) -> dict[int, list[tuple[int, int]]]:
    """(Virtual stage, layer) of the layers of every position, in the model's order."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for s, inside in places:
        key = (s.stage, problem.model.blocks[s.blocks[0]].layer)
        if inside and key not in found[s.cell]:
            found[s.cell].append(key)
    return found


def _places(problem: Problem, draft: PlanDraft) -> list[tuple[Segment, bool]]:
    """Segments of one layer, in the model's order, and whether it is one: not embedding or head."""
    n, blocks = problem.model.num_layers, problem.model.blocks
    cuts = draft.pipeline.cuts or (0, len(blocks))
    num_positions = 1 + max(c.stage for c in draft.cells)
    where = {v: v % num_positions for v in range(len(cuts) - 1)}
    if draft.pipeline.order:
        where = positions(explicit_order(draft.pipeline.order))
    stages = [
        Segment(stage=v, cell=where[v], blocks=ends)
        for v, ends in enumerate(itertools.pairwise(cuts))
    ]
    found = draft.offload.segments or cut_layers(problem.model, stages)
    return [(s, 0 <= blocks[s.blocks[0]].layer < n) for s in found]


def _check(problem: Problem, draft: PlanDraft, knobs: AutoHeteKnobs) -> None:
    _check_counts(problem, draft, knobs)
    if min(knobs.parameter_buffers, knobs.gradient_buffers) < 1:
        raise InputError("a ring has at least one buffer", key="offload", found="0", expected="1")
    if not 0 <= knobs.failure_rate <= 1:
        raise InputError(
            "a rate of failures is a share",
            key="offload.failure_rate",
            found=str(knobs.failure_rate),
            expected="0 to 1",
        )
    cells = _cells_away(problem, draft, knobs)
    if not cells:
        kinds = sorted({n.accelerator for n in problem.machine.nodes})
        raise InputError(
            "no cell is on these accelerators",
            key="offload.accelerators",
            found=" ".join(knobs.accelerators),
            expected=" ".join(kinds),
        )
    away = {s.cell for s in layer_segments(problem, draft, knobs) if s.offload}
    why = _refused(problem, draft, away, cells)
    fetches = knobs.parameters or any(p for _, p, _ in knobs.stages)
    if not why and fetches and draft.data.zero in WHOLE:
        why = "ZeRO-1 and 2 keep parameters whole on each rank; take stage 3 or the optimizer only"
    if not why and _skips(problem) and knobs.clipping == "none":
        others = " ".join(c for c in CLIPPING if c != "none")
        raise InputError(
            "fp16 skips a step whose gradients overflow, which no update may run ahead of",
            key="offload.clipping",
            found="none",
            expected=others,
        )
    if why:
        raise InputError(why, key="offload", expected="another plan, or nothing on the host")


def _check_counts(problem: Problem, draft: PlanDraft, knobs: AutoHeteKnobs) -> None:
    n = problem.model.num_layers
    whole = {f: getattr(knobs, f) for f in ("checkpointed", "parameters", "optimizer")}
    asked = [(f"offload.{field}", count, n) for field, count in whole.items()]
    most_away = max((o for _, _, o in knobs.stages), default=knobs.optimizer)
    if knobs.stages:
        own = own_layers(problem, draft)
        if len(knobs.stages) != len(own) or any(whole.values()):
            raise InputError(
                "integers by position stand for all positions, and instead of the model's",
                key="offload.stages",
                found=f"{len(knobs.stages)} positions, " + " ".join(map(str, whole.values())),
                expected=f"{len(own)} positions, 0 0 0",
            )
        asked = [
            (f"offload.stages[{s}]", count, own[s])
            for s, counts in enumerate(knobs.stages)
            for count in counts
        ]
    for key, count, most in [*asked, ("offload.nvme", knobs.nvme, most_away)]:
        if not 0 <= count <= most:
            raise InputError(
                "counts of layers lie between none and all",
                key=key,
                found=str(count),
                expected=f"0 to {most}",
            )


def _skips(problem: Problem) -> bool:
    return problem.job.dtype == "fp16"


def _refused(
    problem: Problem, draft: PlanDraft, away: Collection[int], cells: Sequence[CellKnobs]
) -> str:
    """Why the pass does not carry a draft, "" when it does.

    Args:
        problem, draft: see there. away: positions with something on the host. cells: that do that.
    """
    why = not_by_segment(problem, draft)
    if why:
        return why
    chips = {k for c in cells if c.stage in away for k in c.chips}
    if any(not n.pcie_rate and chips & set(range(*n.chips)) for n in problem.machine.nodes):
        return "a node has no link to host memory"
    return ""


def _tables(knobs: AutoHeteKnobs) -> dict[str, Table]:
    if knobs.clipping != "speculate":
        return {}
    rate = knobs.failure_rate
    values = {"rollback": [2 * rate], "forward": [1.0, 1.0 + rate]}
    return {SPECULATION: Table(origin="file", values=values)}


OFFLOAD = register(AutoHete())
