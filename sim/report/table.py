"""The answers of ``hetlab plan`` and ``hetlab simulate`` for people."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.report.assumed import fold_assumptions
from sim.report.delays import delay_texts
from sim.report.document import CellRow, Header, PlanDocument, SimulateDocument, StageRow
from sim.report.grids import NARROW, Tight, columned, grid
from sim.report.host import HostUse, memory_texts, short_text, stream_texts
from sim.report.late import late_texts
from sim.report.links import LinkLoad
from sim.report.metrics import Metrics
from sim.report.rows import time_unit
from sim.units import format_quantity

__all__ = ["Tight", "headline", "print_plan", "print_simulation", "print_tail", "seconds"]

_STYLES = {"fits": "green", "at risk": "yellow", "does not fit": "bold red", "unknown": "dim"}
LINKS_SHOWN = 8


def seconds(value: float) -> str:
    """Print a duration with four digits and its unit."""
    unit, scale = time_unit(value)
    return f"{value * scale:.4g} {unit}"


def headline(document: PlanDocument) -> list[tuple[str, str]]:
    """The first answers as (name, text)."""
    m = document.metrics
    basis = "unknown peak"
    if document.peak_flops_per_s is not None:
        peak = format_quantity(document.peak_flops_per_s, "FLOP/s", 3)
        basis = f"{peak} (dense {document.dtype}, {document.num_chips} chips)"
    found = [] if document.exact else [("inexact", document.reason)]
    short = short_text(document.host) if document.host else ""
    if short:
        found.append(("host memory", short))
    found += _short_cells(document.stages)
    if document.uncalibrated:
        names = ", ".join(document.uncalibrated)
        found.append(("uncalibrated", f"no run was used to calibrate {names}: times are estimates"))
    found.append(("step time", seconds(m.step_time_s)))
    if m.step_p95_s > 1.001 * m.step_p50_s:
        spread = f"{seconds(m.step_p50_s)} median, {seconds(m.step_p95_s)} 95th percentile"
        found.append(("step spread", spread))
    if m.unsettled:
        what = "step" if m.unsettled == 1 else f"{m.unsettled} steps"
        found.append(("left out", f"of step time and spread: the first {what}, not settled yet"))
    return [
        *found,
        ("throughput", f"{_number(m.tokens_per_s)} tokens/s, {_number(m.tgs)} per chip"),
        *(
            [("MFU", "unknown: no FLOPs or no peak")]
            if m.mfu is None or m.hfu is None
            else [
                ("MFU", f"{_percent(m.mfu)} of {basis}"),
                ("HFU", f"{_percent(m.hfu)} with recomputation counted"),
            ]
        ),
        ("bubble", f"{_percent(m.bubble_fraction)} of compute time is idle"),
        *_exposed(m),
        ("cost", _cost(m.cost_per_mtoken)),
        ("settings", _settings(document)),
        *([("not used", _counts(document.unused))] if document.unused else []),
    ]


def _short_cells(stages: tuple[StageRow, ...]) -> list[tuple[str, str]]:
    """The cell that is short of most memory, if any does not fit."""
    short = [
        ((c.peak_memory_bytes or 0.0) - (c.memory_bytes or 0.0), s.index, c.accelerator)
        for s in stages
        for c in s.cells
        if c.verdict == "does not fit" and c.host_fits
    ]
    if not short:
        return []
    nbytes, stage, accelerator = max(short)
    where = f"stage {stage}" + (f" on {accelerator}" if accelerator else "")
    size = format_quantity(nbytes, "bytes", 3)
    return [("memory", f"{where} is short of {size}; hetlab explain names the cheapest change")]


def _exposed(m: Metrics) -> list[tuple[str, str]]:
    """Mean and largest: of few ranks that wait on the critical path a mean shows little."""
    mean = f"{seconds(m.exposed_comm_s)} a step, mean over chips" + _by_group(m.exposed_by_group)
    most = f"at most {seconds(m.exposed_comm_max_s)}, on rank {m.exposed_comm_max_rank}"
    uneven = m.exposed_comm_max_s > 1.001 * m.exposed_comm_s
    return [("exposed comm.", mean), *([("", most)] if uneven else [])]


def _settings(document: PlanDocument) -> str:
    schedule = f"schedule {document.schedule}, " if document.schedule else ""
    return f"{schedule}microbatch {document.microbatch}, ZeRO {document.zero}"


def _counts(chips: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in chips.items())


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _by_group(parts: Mapping[str, float]) -> str:
    """The parts, largest first, when there are several."""
    largest = sorted(parts.items(), key=lambda p: (-p[1], p[0]))
    if len(largest) < 2:
        return f", all {largest[0][0]}" if largest else ""
    return ": " + ", ".join(f"{name} {seconds(value)}" for name, value in largest)


def _cost(per_mtoken: float | None) -> str:
    return "no prices known" if per_mtoken is None else f"{per_mtoken:.4g} USD per million tokens"


def print_plan(console: Console, document: PlanDocument) -> None:
    """Print headline, stages, search and assumptions."""
    _print_head(console, document)
    _print_stages(console, document)
    _print_host(console, document.host)
    if document.search is not None:
        s = document.search
        console.print(
            f"search: {s.space:,} candidates, {s.pruned:,} pruned, {s.evaluated:,} evaluated "
            f"in {seconds(s.wall_s)}"
        )
    print_tail(console, document)


def print_simulation(console: Console, document: SimulateDocument) -> None:
    """Print headline, stages, busiest links, engine facts and assumptions."""
    _print_head(console, document)
    _print_stages(console, document)
    _print_host(console, document.host)
    if document.per_link:
        console.print(Tight(_links(document.per_link, console.width)))
        console.print()
    texts = delay_texts(document.delays) if document.delays is not None else []
    texts += late_texts(document.late) if document.late is not None else []
    if texts:
        rows = grid()
        for name, text in texts:
            rows.add_row(name, text)
        console.print(Tight(rows))
        console.print()
    classes = f"{document.num_ranks} rank{'s' * (document.num_ranks != 1)}"
    if document.folded:
        classes += f" as {document.num_classes} class{'es' * (document.num_classes != 1)}"
    console.print(
        f"simulated: {document.steps} step{'s' * (document.steps != 1)}, {classes}, "
        f"{document.events:,} events, {seconds(document.cpu_s)} of processor time"
    )
    print_tail(console, document)


def _print_head(console: Console, document: PlanDocument) -> None:
    if document.plan:
        console.print(Text(document.plan, style="bold"))
    table = grid()
    for name, text in headline(document):
        table.add_row(name, text)
    console.print(Tight(table))
    console.print()


def _print_stages(console: Console, document: PlanDocument) -> None:
    console.print(Tight(_stages(document.stages, console.width)))
    legend = "dp: replicas; tp: chips that split a layer; m: microbatches per replica"
    if re.search(r"(?<!dp )\b\d+ x tp\d", document.plan):
        legend += "\nN x tpT in the plan's name: N stages of T chips each"
    console.print(Tight(Text(legend, style="dim")))
    console.print()


def _print_host(console: Console, host: HostUse | None) -> None:
    """Host memory of each class of nodes, and what the host's streams do in a step."""
    if host is None:
        return
    if host.memory:
        names = ("optimizer", "gradients", "parameters", "staging", "capacity")
        columns = [("host memory", "left"), *((n, "right") for n in names), ("verdict", "left")]
        table = columned(columns, console.width)
        for row in host.memory:
            table.add_row(*memory_texts(row), Text(row.verdict, style=_STYLES[row.verdict]))
        console.print(Tight(table))
    rows = grid()
    for texts in stream_texts(host):
        rows.add_row(*texts)
    console.print(Tight(rows))
    legend = "bytes and seconds are of a step and a chip; exposed: while the chip computes nothing"
    console.print(Tight(Text(legend, style="dim")))
    console.print()


def print_tail(console: Console, document: Header) -> None:
    """Print what was assumed, and what the answer is of."""
    assumed = fold_assumptions(document.assumptions)
    if assumed:
        console.print("assumed:")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        for text in assumed:
            table.add_row("  -", Text(text))
        console.print(Tight(table))
    console.print(
        Text(
            f"plan {document.plan_hash}, spec {document.spec_hash or 'none'}, "
            f"seed {document.seed}, hetlab {document.version or 'not installed'}",
            style="dim",
        )
    )


def _stages(stages: tuple[StageRow, ...], width: int) -> Table:
    """One line per run of equal cells; equal neighbouring stages share a line."""
    with_cp = any(c.cp > 1 for s in stages for c in s.cells)
    narrow = width < NARROW
    columns = [
        ("stage", "left"), ("layers", "right"),
        ("accel-\nerator" if narrow else "accelerator", "left"),
        ("chips", "right"), ("dp", "right"), ("tp", "right"),
        ("m", "right"), ("recompute", "left"),
        ("peak\nmemory", "right"), ("verdict", "left"),
    ]  # fmt: skip
    if with_cp:
        columns.insert(6, ("cp", "right"))
    table = columned(columns, width)
    for first, last, stage in _runs(stages):
        each = "" if first == last else " each"
        for i, cell in enumerate(stage.cells):
            row = [
                "" if i else str(first) if first == last else f"{first}-{last}",
                "" if i else f"{stage.layers}{each}",
                cell.accelerator or "chip", f"{cell.num_chips}{each}", str(cell.replicas),
                str(cell.tp), str(cell.microbatches), cell.recompute, _memory(cell),
            ]  # fmt: skip
            if with_cp:
                row.insert(6, str(cell.cp))
            verdict = cell.verdict if narrow else _verdict(cell)
            table.add_row(*row, Text(verdict, style=_STYLES.get(cell.verdict, "")))
    return table


def _runs(stages: tuple[StageRow, ...]) -> list[tuple[int, int, StageRow]]:
    """(first, last, one of them) of neighbouring stages that would print the same line."""
    found: list[tuple[int, int, StageRow]] = []
    for stage in stages:
        if found and _shown(found[-1][2]) == _shown(stage):
            found[-1] = (found[-1][0], stage.index, stage)
        else:
            found.append((stage.index, stage.index, stage))
    return found


def _shown(stage: StageRow) -> tuple[object, ...]:
    own = ("accelerator", "replicas", "tp", "cp", "microbatches", "recompute")
    cells = [(*(getattr(c, n) for n in own), _verdict(c), _memory(c)) for c in stage.cells]
    return (stage.layers, *cells)


def _memory(cell: CellRow) -> str:
    known = cell.peak_memory_bytes is not None
    return format_quantity(cell.peak_memory_bytes or 0.0, "bytes", 3) if known else "-"


def _verdict(cell: CellRow) -> str:
    """The verdict and the share of the chip's memory, or that the host's does not suffice."""
    if not cell.host_fits:
        return "host does not fit"
    if cell.peak_memory_bytes is None or not cell.memory_bytes:
        return cell.verdict
    return f"{cell.verdict}, {100 * cell.peak_memory_bytes / cell.memory_bytes:.0f} %"


def _links(loads: tuple[LinkLoad, ...], width: int) -> Table:
    columns = [("busiest links", "left"), ("carried", "right"), ("busy", "right")]
    table = columned(columns, width)
    for load in loads[:LINKS_SHOWN]:
        size = format_quantity(load.nbytes, "bytes", 3)
        table.add_row(load.name, size, _percent(load.busy_fraction))
    if len(loads) > LINKS_SHOWN:
        table.add_row(f"and {len(loads) - LINKS_SHOWN} more", "", "")
    return table
