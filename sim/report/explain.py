"""Why a step takes as long as it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sim.cost.ledger import Ledger
from sim.plan.placement import Cell
from sim.plan.tables import unsettled_steps
from sim.report.document import Header
from sim.report.explain_diff import Difference, difference
from sim.report.explain_fit import Change, changes_that_fit
from sim.report.explain_inputs import InputRow, inputs_of
from sim.report.explain_parts import OpParts, Parts, Window, in_order, parts_of_path
from sim.report.explain_path import critical_path
from sim.report.explain_ranks import RankClass, class_numbers, mean_parts, rank_classes
from sim.report.explain_rows import PathRow, path_rows
from sim.report.host import short_text
from sim.report.metrics import finishes_of, pace_of
from sim.report.report import Report

__all__ = ["CellMemory", "Explanation", "cell_memory", "explain", "window_of"]


class CellMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one cell.

    Args:
        label: stage, replica and accelerator. stage, replica: see Cell. cells: equal ones.
        peak_bytes, capacity_bytes: [B]. short_bytes: [B] above the capacity, 0 where it fits.
        verdict: see Ledger. terms: name -> [B], the largest first.
    """

    label: str
    stage: int
    replica: int
    cells: int
    peak_bytes: float
    capacity_bytes: float
    short_bytes: float
    verdict: str
    terms: dict[str, float]


class Explanation(Header, frozen=True, kw_only=True):
    """Answer of ``hetlab explain``.

    Args:
        step_time_s: [s]. step: what a step is. steps: that the explained time holds.
        start_s, stop_s: [s] of that time in the run.
        parts: part (sim.report.explain_parts) -> [s] of a step, the mean over ranks.
        path_parts: the same of the critical path. Both add up to the step time.
        classes: ranks of equal cells, with parts of their own. path: the critical path.
        fullest: the cell whose memory is fullest, None where none is worked out.
        short: cells that do not fit, one of each kind. host_short: what of the host does not fit.
        changes: after which all cells fit, the quickest first; () where they do, or none was found.
        inputs: where the numbers come from; () without a problem.
        against: another plan, None without one.
    """

    step_time_s: float
    step: str
    steps: float
    start_s: float
    stop_s: float
    parts: Parts
    path_parts: Parts
    classes: tuple[RankClass, ...]
    path: tuple[PathRow, ...]
    fullest: CellMemory | None = None
    short: tuple[CellMemory, ...] = ()
    host_short: str = ""
    changes: tuple[Change, ...] = ()
    inputs: tuple[InputRow, ...] = ()
    against: Difference | None = None


def explain(report: Report, other: Report | None = None) -> Explanation:
    """Explain the step time of a simulation.

    Args:
        report: of ``simulate_settled``, or of any run that ends by itself.
        other: of a plan that it is held against.

    Raises:
        SimulationError: the run is empty.
    """
    found = _explained(report)
    if other is None:
        return found
    base = _explained(other)
    return msgspec.structs.replace(
        found,
        against=difference(
            (report, found.parts, found.path_parts), (other, base.parts, base.path_parts)
        ),
    )


def _explained(report: Report) -> Explanation:
    run, plan = report.run, report.run.layout.plan
    window = window_of(report)
    parts = OpParts(run, report.problem)
    of_actor, labels = class_numbers(run)
    path = critical_path(run, window.start, window.stop, of_actor)
    path_total, path_each = parts_of_path(parts, path, window)
    scaled = [{n: s * window.steps for n, s in row.items()} for row in path_each]
    classes = rank_classes(run, parts, window)
    head = report.plan_document()
    short = [c for c in cell_memory(plan.placement.cells, report.memory) if c.short_bytes > 0]
    return Explanation(
        **{name: getattr(head, name) for name in Header.__struct_fields__ if name != "schema"},
        schema="hetlab.explain/1",
        step_time_s=window.step_time_s,
        step=window.text,
        steps=window.steps,
        start_s=window.start,
        stop_s=window.stop,
        parts=mean_parts(classes),
        path_parts={n: path_total[n] for n in in_order(tuple(path_total))},
        classes=classes,
        path=path_rows(run, path, scaled, of_actor, labels),
        fullest=max(
            cell_memory(plan.placement.cells, report.memory),
            key=lambda c: c.peak_bytes / c.capacity_bytes,
            default=None,
        ),
        short=tuple(short),
        changes=changes_that_fit(plan, report.problem) if short and report.problem else (),
        host_short=short_text(report.host) if report.host else "",
        inputs=inputs_of(plan, report.problem) if report.problem else (),
    )


def window_of(report: Report) -> Window:
    """Return the time behind a report's step time, and what a step is there."""
    plan, delays = report.run.layout.plan, report.delays
    if delays is not None and delays.unit == "updates":
        return Window(
            start=delays.start,
            stop=delays.stop,
            steps=delays.updates_per_s * (delays.stop - delays.start),
            text="one update of the parameters, of whichever worker"
            + (", while every worker writes" if delays.start else ", of the whole run"),
        )
    what = "a round of local steps" if plan.placement.workers else "a step"
    begin, finish = finishes_of(report.spans, barrier=plan.barrier)
    warm = unsettled_steps(plan.tables) if plan.barrier else None
    pace = pace_of(report.spans, barrier=plan.barrier, warm_up=warm)
    n = len(finish)
    if plan.barrier:
        warm, text = pace.warm_up, f"{what} ends when all ranks have finished it"
        text += f"; mean of {n - warm}" * (n > 1) + ", the first left out" * (warm > 0)
        start = float(finish[warm - 1]) if warm else begin
        return Window(start=start, stop=float(finish[-1]), steps=n - warm, text=text)
    if n < 3:
        text = f"{what}; mean of {n}, filling the pipeline included" if n > 1 else what
        return Window(start=begin, stop=float(finish[-1]), steps=n, text=text)
    first, last = pace.warm_up, n - 2
    return Window(
        start=float(finish[first]),
        stop=float(finish[last]),
        steps=last - first,
        text=f"{what}; steps overlap, so from the end of step {first} to that of step {last}",
    )


def cell_memory(
    cells: Sequence[Cell], memory: Mapping[tuple[int, int], Ledger]
) -> tuple[CellMemory, ...]:
    """Return the memory of cells, one of each kind, in order of stage.

    Args:
        cells: of a placement. memory: (stage, replica) -> ledger.
    """
    found: dict[tuple[object, ...], CellMemory] = {}
    for cell in cells:
        ledger = memory.get((cell.stage, cell.replica))
        if ledger is None:
            continue
        key = (cell.stage, cell.accelerator, ledger.capacity_bytes, *ledger.terms.values())
        if key in found:
            found[key] = msgspec.structs.replace(found[key], cells=found[key].cells + 1)
            continue
        terms = sorted(ledger.terms.items(), key=lambda item: -item[1])
        where = f"stage {cell.stage}, replica {cell.replica}"
        found[key] = CellMemory(
            label=where + (f" on {cell.accelerator}" if cell.accelerator else ""),
            stage=cell.stage,
            replica=cell.replica,
            cells=1,
            peak_bytes=ledger.peak_bytes,
            capacity_bytes=ledger.capacity_bytes,
            short_bytes=max(0.0, -ledger.margin_bytes),
            verdict=ledger.verdict,
            terms={name: nbytes for name, nbytes in terms if nbytes},
        )
    return tuple(found.values())
