"""The documents that ``--json`` prints; the tables for people show the same records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from sim.cost.ledger import Ledger
from sim.engine.simulate import Run
from sim.model.graph import Model
from sim.plan.placement import Cell
from sim.plan.plan import Plan
from sim.report.basis import Basis
from sim.report.delays import Delays
from sim.report.host import HostUse
from sim.report.late import LateUse
from sim.report.links import LinkLoad
from sim.report.metrics import Metrics

__all__ = [
    "CellRow", "Header", "PlanDocument", "SearchFacts", "SimulateDocument",
    "StageRow", "plan_document", "simulate_document", "stages_of",
]  # fmt: skip


class CellRow(msgspec.Struct, frozen=True, kw_only=True):
    """Equal cells of a stage.

    Args:
        accelerator: profile name. replicas: how many such cells. num_chips: of all of them.
        tp, cp: sizes. microbatches: of each replica, per step. recompute: what is not kept.
        peak_memory_bytes, memory_bytes: [B] predicted and physical, None when not worked out.
        verdict: "fits", "at risk", "does not fit" or "unknown"; host memory that does not fit is a
            verdict as well. host_fits: False where host memory does not.
    """

    accelerator: str
    replicas: int
    num_chips: int
    tp: int
    cp: int
    microbatches: int
    recompute: str
    peak_memory_bytes: float | None
    memory_bytes: float | None
    verdict: str
    host_fits: bool = True


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline position.

    Args:
        index: position. layers: number of layers, those of all its chunks. blocks: (first, last)
            block indices of each chunk. cells: runs of equal cells.
    """

    index: int
    layers: int
    blocks: tuple[tuple[int, int], ...]
    cells: tuple[CellRow, ...]


class SearchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a search did.

    Args:
        space: number of candidates. evaluated, pruned: of them. wall_s: [s].
    """

    space: int
    evaluated: int
    pruned: int
    wall_s: float


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What every output carries.

    Args:
        schema: name and version of the document. version: of hetlab. plan, plan_hash: of the plan.
        spec_hash: of cluster, model and job. seed: of the run.
        exact: True when the plan computes the same update as one chip with the whole batch would
            (up to rounding); it says nothing about how exact the predicted times are.
        reason: how the update differs when it is not exact, or "".
        assumptions: what was assumed on the way, in words.
    """

    schema: str
    version: str
    plan: str
    plan_hash: str
    spec_hash: str
    seed: int
    exact: bool
    reason: str
    assumptions: tuple[str, ...]


class PlanDocument(Header, frozen=True, kw_only=True):
    """Answer of ``hetlab plan``.

    Args:
        num_chips: that hold a rank. dtype, peak_flops_per_s: [FLOP/s] what MFU is relative to, None
            where the chips are not known.
        schedule: order of the passes, "" when the plan spells its programs out. microbatch:
            [sequences] of one pass. zero: ZeRO stage (0 to 3).
        unused: accelerator type -> chips of the cluster without a rank. uncalibrated: types in use
            whose times are estimates because no run was used to calibrate them.
        metrics: predicted. stages: the placement. search: None when nothing was searched.
        host: None when the plan does not use the nodes' host side.
    """

    num_chips: int
    dtype: str
    peak_flops_per_s: float | None
    schedule: str
    microbatch: int
    zero: int
    unused: dict[str, int]
    uncalibrated: tuple[str, ...]
    metrics: Metrics
    stages: tuple[StageRow, ...]
    search: SearchFacts | None = None
    host: HostUse | None = None


class SimulateDocument(PlanDocument, frozen=True, kw_only=True):
    """Answer of ``hetlab simulate``.

    Args:
        steps: simulated. events: the kernel processed. cpu_s: [s]. folded: True when ranks that
            behave alike ran as one. num_ranks, num_classes: before and after folding.
        per_link: links that carried bytes, busiest first.
        delays: of late updates, None where none is late. late: of late amounts, likewise.
    """

    steps: int
    events: int
    cpu_s: float
    folded: bool
    num_ranks: int
    num_classes: int
    per_link: tuple[LinkLoad, ...]
    delays: Delays | None = None
    late: LateUse | None = None


def stages_of(
    plan: Plan,
    model: Model | None = None,
    memory: Mapping[tuple[int, int], Ledger] | None = None,
    host: HostUse | None = None,
) -> tuple[StageRow, ...]:
    """The placement as rows, runs of equal cells folded.

    A layer counts for the stage that holds its first block, so that the counts add up to the
    model's.

    Args:
        plan: the plan. model: for layers; without it they count as 0.
        memory: (stage, replica) -> ledger. host: whose memory may be short.
    """
    placement = plan.placement
    short = host.short if host else ()
    opens = _first_blocks(model)
    known = memory or {}
    rows = []
    for stage in range(placement.num_stages):
        blocks = tuple(s.blocks for s in placement.stages if s.cell == stage)
        runs: dict[CellRow, int] = {}
        for cell in placement.cells:
            if cell.stage == stage:
                m = placement.microbatches[cell.replica] if placement.microbatches else 0
                at = (stage, cell.replica)
                row = _cell_row(cell, m, known.get(at), at not in short)
                runs[row] = runs.get(row, 0) + 1
        cells = tuple(
            msgspec.structs.replace(row, replicas=n, num_chips=row.num_chips * n)
            for row, n in runs.items()
        )
        layers = sum(opens[a:b].count(True) for a, b in blocks)
        rows.append(StageRow(index=stage, layers=layers, blocks=blocks, cells=cells))
    return tuple(rows)


def _first_blocks(model: Model | None) -> list[bool]:
    if model is None:
        return []
    layers = [b.layer if 0 <= b.layer < model.num_layers else -1 for b in model.blocks]
    return [n >= 0 and n not in layers[:i] for i, n in enumerate(layers)]


def _cell_row(cell: Cell, microbatches: int, memory: Ledger | None, host_fits: bool) -> CellRow:
    verdict = memory.verdict if memory else "unknown"
    return CellRow(
        accelerator=cell.accelerator, replicas=1, num_chips=len(cell.ranks), tp=cell.tp, cp=cell.cp,
        microbatches=microbatches, recompute=cell.recompute,
        peak_memory_bytes=memory.peak_bytes if memory else None,
        memory_bytes=memory.capacity_bytes if memory else None,
        verdict=verdict if host_fits else "does not fit", host_fits=host_fits,
    )  # fmt: skip


def _common(
    schema: str,
    plan: Plan,
    basis: Basis,
    metrics: Metrics,
    stages: tuple[StageRow, ...],
    seed: int,
    assumptions: Sequence[str],
) -> dict[str, Any]:
    try:
        installed = version("hetlab")
    except PackageNotFoundError:  # run from a checkout that was never installed
        installed = plan.version
    return {
        "schema": schema, "version": installed, "plan": plan.name, "plan_hash": plan.hash,
        "spec_hash": plan.problem_hash, "seed": seed, "exact": plan.exact, "reason": plan.reason,
        "assumptions": tuple(dict.fromkeys((*plan.assumptions, *assumptions))),
        "num_chips": basis.num_chips, "dtype": basis.dtype,
        "peak_flops_per_s": basis.peak_flops_per_s, "metrics": metrics, "stages": stages,
        "schedule": _schedule(plan), "microbatch": plan.mathematics.microbatch,
        "zero": plan.mathematics.zero, "unused": basis.unused, "uncalibrated": basis.uncalibrated,
    }  # fmt: skip


def _schedule(plan: Plan) -> str:
    """The schedule's name with what varies it, "" without one."""
    calls = {call.name: call.args for call in plan.lowering}
    if "schedule" not in calls:
        return ""
    args = calls["schedule"]
    name = "written out" if args.get("order") else str(args.get("name", ""))
    if args.get("chunks", 1) > 1:
        name += f" of {args['chunks']} chunks"
    return name + (" with split backward" if "split_backward" in calls else "")


def plan_document(
    plan: Plan,
    basis: Basis,
    metrics: Metrics,
    *,
    model: Model | None = None,
    memory: Mapping[tuple[int, int], Ledger] | None = None,
    search: SearchFacts | None = None,
    host: HostUse | None = None,
    seed: int = 0,
    assumptions: Sequence[str] = (),
) -> PlanDocument:
    """Answer of ``hetlab plan``.

    Args:
        plan: found. basis, metrics: of its simulation. model: for layers.
        memory: (stage, replica) -> ledger. search: what was searched. host: its host side.
        seed: used. assumptions: besides the plan's.
    """
    stages = stages_of(plan, model, memory, host)
    common = _common("hetlab.plan/1", plan, basis, metrics, stages, seed, assumptions)
    return PlanDocument(**common, search=search, host=host)


def simulate_document(
    run: Run,
    basis: Basis,
    metrics: Metrics,
    links: tuple[LinkLoad, ...],
    *,
    model: Model | None = None,
    memory: Mapping[tuple[int, int], Ledger] | None = None,
    host: HostUse | None = None,
    delays: Delays | None = None,
    late: LateUse | None = None,
    seed: int = 0,
    assumptions: Sequence[str] = (),
) -> SimulateDocument:
    """Answer of ``hetlab simulate``.

    Args:
        run: the simulation. basis, metrics, links: of it. model: for layers.
        memory: (stage, replica) -> ledger. host: its host side.
        delays: of late updates. late: of late amounts. seed: used.
        assumptions: besides the plan's.
    """
    plan, graph = run.layout.plan, run.layout.graph
    stages = stages_of(plan, model, memory, host)
    ranks = sum(len(actor.ranks) for actor in graph.actors)
    return SimulateDocument(
        **_common("hetlab.simulate/1", plan, basis, metrics, stages, seed, assumptions),
        steps=run.layout.steps, events=run.outcome.events, cpu_s=run.cpu_s,
        folded=len(graph.actors) < ranks, num_ranks=ranks, num_classes=len(graph.actors),
        per_link=links, host=host, delays=delays, late=late,
    )  # fmt: skip
