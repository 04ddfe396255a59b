"""An explanation for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.report.explain import CellMemory, Explanation
from sim.report.explain_diff import Difference
from sim.report.explain_inputs import KINDS, InputRow
from sim.report.explain_parts import BUBBLE, COMPUTE, CONTENTION, EXPOSED, Parts
from sim.report.explain_ranks import RankClass
from sim.report.explain_rows import PathRow, joined_rows
from sim.report.grids import Tight, columned, grid
from sim.report.table import print_tail, seconds
from sim.units import format_quantity

__all__ = ["print_difference", "print_explanation"]

PATH_ROWS = 24
TERMS, KEYS, NAMES, CHANGES = 5, 4, 4, 4
_COLUMN = dict.fromkeys(COMPUTE, 0) | {BUBBLE: 3}
LEAST = 5e-4
"""Share of a step below which a part has no row."""


def print_explanation(console: Console, found: Explanation) -> None:
    """Print parts, critical path, difference, memory, inputs and assumptions."""
    if found.plan:
        console.print(Text(found.plan, style="bold"))
    _print_rows(console, [("step time", f"{seconds(found.step_time_s)}; {found.step}")])
    console.print()
    _print_parts(console, found)
    _print_classes(console, found.classes, found.step_time_s)
    _print_path(console, found)
    if found.against is not None:
        _print_against(console, found, found.against)
    _print_memory(console, found)
    _print_inputs(console, found.inputs)
    print_tail(console, found)


def print_difference(console: Console, found: Explanation) -> None:
    """Print only what differs from the plan it is held against."""
    if found.plan:
        console.print(Text(found.plan, style="bold"))
    if found.against is not None:
        _print_against(console, found, found.against)
    print_tail(console, found)


def _print_parts(console: Console, found: Explanation) -> None:
    table = columned(
        [("where a step goes", "left"), ("mean of ranks", "right"), ("", "right"),
         ("critical path", "right"), ("", "right")],
        console.width,
    )  # fmt: skip
    whole = found.step_time_s
    names = list(dict.fromkeys((*found.parts, *found.path_parts)))
    for name in names:
        pair = (found.parts.get(name, 0.0), found.path_parts.get(name, 0.0))
        if max(pair) > LEAST * whole:
            table.add_row(name, *(t for v in pair for t in _time_and_share(v, whole)))
    sums = (sum(found.parts.values()), sum(found.path_parts.values()))
    table.add_row("sum", *(t for v in sums for t in _time_and_share(v, whole)))
    console.print(Tight(table))
    console.print()


def _time_and_share(value: float, whole: float) -> tuple[str, str]:
    return (seconds(value), f"{100 * value / whole:.1f} %") if value > 0 else ("-", "")


def _print_classes(console: Console, classes: Sequence[RankClass], whole: float) -> None:
    if len(classes) < 2:
        return
    columns = [("ranks", "left"), ("", "right")]
    columns += [(n, "right") for n in ("compute", "exposed", "contention", BUBBLE, "rest")]
    table = columned(columns, console.width)
    for row in classes:
        shares = [f"{100 * v / whole:.1f} %" for v in _few(row.parts)]
        table.add_row(row.label, f"{row.num_ranks} from {row.first_rank}", *shares)
    console.print(Tight(table))
    console.print()


def _few(parts: Parts) -> tuple[float, float, float, float, float]:
    """Compute with recomputation and optimizer, exposed communication, contention, bubble, rest."""
    found = [0.0] * 5
    for name, value in parts.items():
        place = 1 if name.startswith(EXPOSED) else 2 if name.startswith(CONTENTION) else 4
        found[_COLUMN.get(name, place)] += value
    return found[0], found[1], found[2], found[3], found[4]


def _print_path(console: Console, found: Explanation) -> None:
    late = any(_contention(row) for row in found.path)
    columns = [("path\nfrom", "right"), ("on", "left"), ("ops", "left"), ("takes", "right"),
               ("", "right")]  # fmt: skip
    columns += [("of it\ncontention", "right")] if late else []
    table = columned(columns, console.width)
    for column in table.columns[1:3]:
        column.no_wrap = False
    rows, left = _shown(found.path)
    for row in rows:
        texts: list[str | Text] = [
            seconds(row.start_s - found.start_s), Text(row.where), Text(_ops(row)),
            seconds(row.seconds), f"{100 * row.share:.1f} %",
        ]  # fmt: skip
        shared = _contention(row)
        table.add_row(*texts, *([seconds(shared) if shared else ""] if late else []))
    if left:
        rest = sum(r.seconds for r in found.path) - sum(r.seconds for r in rows)
        table.add_row("", f"and {left} shorter rows", "", seconds(rest))
    console.print(Tight(table))
    about = "the critical path: each op starts when the one before it on the path has ended"
    if len(found.path) > PATH_ROWS:
        about += f"; its {len(found.path)} rows by where and what, as of the first"
    if found.steps > 1:
        about += f"; {found.steps:.4g} steps"
    console.print(Tight(Text(about, style="dim")))
    console.print()


def _contention(row: PathRow) -> float:
    return sum(s for name, s in row.parts.items() if name.startswith(CONTENTION))


def _shown(path: Sequence[PathRow]) -> tuple[list[PathRow], int]:
    """Rows to print, and how many are left out: where all are too many, alike ones are joined."""
    if len(path) <= PATH_ROWS:
        return list(path), 0
    alike: dict[tuple[str, str], list[PathRow]] = {}
    for row in path:
        alike.setdefault((row.where, row.ops), []).append(row)
    found = sorted((joined_rows(rows) for rows in alike.values()), key=lambda r: -r.seconds)
    kept = sorted(found[:PATH_ROWS], key=lambda r: r.start_s)
    return kept, len(found) - len(kept)


def _ops(row: PathRow) -> str:
    if row.count == 1:
        return row.first
    several = " " in row.ops
    what = f"{row.turns} x ({row.ops})" if several else f"{row.count} x {row.ops}"
    return f"{what}: {row.first} to {row.last}"


def _print_against(console: Console, found: Explanation, against: Difference) -> None:
    faster = "slower" if against.difference_s > 0 else "faster"
    name = against.plan or against.plan_hash
    _print_rows(console, [
        ("against", f"{name}: {seconds(against.step_time_s)}"),
        ("this plan", f"{seconds(found.step_time_s)}, {seconds(abs(against.difference_s))} "
         f"{faster}" if against.difference_s else "equally fast"),
        *([("warning", against.note)] if against.note else []),
    ])  # fmt: skip
    console.print()
    columns = [("difference by part", "left"), ("this", "right"), ("other", "right"),
               ("mean of ranks", "right"), ("critical path", "right")]  # fmt: skip
    table = columned(columns, console.width)
    path = {row.part: row.difference_s for row in against.path_parts}
    least = LEAST * min(found.step_time_s, against.step_time_s)
    known = {row.part: row for row in against.parts}
    for part in dict.fromkeys((*known, *path)):
        row, on_path = known.get(part), path.get(part, 0.0)
        values = (row.this_s, row.other_s, row.difference_s) if row else (0.0, 0.0, 0.0)
        if max(abs(values[2]), abs(on_path)) > least:
            shown = [seconds(v) if v else "-" for v in values[:2]]
            changes = [_signed(v) if abs(v) > 1e-3 * least else "-" for v in (values[2], on_path)]
            table.add_row(part, *shown, *changes)
    sums = (sum(r.difference_s for r in against.parts), sum(path.values()))
    table.add_row(
        "sum", seconds(found.step_time_s), seconds(against.step_time_s), *map(_signed, sums)
    )
    console.print(Tight(table))
    console.print()
    _print_knobs(console, against)


def _print_knobs(console: Console, against: Difference) -> None:
    if not against.knobs:
        console.print("no knob differs")
        console.print()
        return
    table = columned(
        [("knob", "left"), ("this", "left"), ("other", "left"), ("by itself", "right")],
        console.width,
    )
    for column in table.columns[1:]:
        column.no_wrap = False
    for knob in against.knobs:
        alone = "-" if knob.alone_s is None else _signed(knob.alone_s)
        alone += " (does not fit)" if knob.alone_fits is False else ""
        table.add_row(knob.name, knob.this, knob.other, alone)
    console.print(Tight(table))
    legend = "by itself: what the other plan's step gains when only this knob changes; -: it cannot"
    console.print(Tight(Text(legend, style="dim")))
    console.print()


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}" if value else "0 s"


def _print_memory(console: Console, found: Explanation) -> None:
    rows = []
    if found.fullest is not None:
        rows.append(("fullest memory", _memory(found.fullest)))
        terms = [f"{n} {_size(b)}" for n, b in list(found.fullest.terms.items())[:TERMS]]
        rows.append(("", _more(terms, len(found.fullest.terms) - len(terms))))
    for cell in found.short:
        times = f", and {cell.cells - 1} like it" if cell.cells > 1 else ""
        text = f"{cell.label}{times}: short of {_size(cell.short_bytes)}"
        rows.append(("does not fit", text))
    if found.host_short:
        rows.append(("host memory", found.host_short))
    for i, change in enumerate(found.changes[:CHANGES]):
        gain = change.step_time_s - found.step_time_s
        text = f"{change.text}: {seconds(change.step_time_s)} a step ({_signed(gain)}), fullest "
        text += f"{100 * change.peak_share:.0f} %" + (", at risk" if change.at_risk else "")
        rows.append(("or" if i else "cheapest change", text))
    if found.short and not found.changes:
        worst = max(c.peak_bytes / c.capacity_bytes for c in found.short)
        text = "recomputation, smaller microbatches, ZeRO-1, optimizer states on hosts, also two "
        text += "of them, do not suffice: fewer layers on a chip (pp, tp, other cuts) or "
        rows.append(("cheapest change", f"{text}{worst:.3g} times the memory"))
    if rows:
        _print_rows(console, rows)
        console.print()


def _memory(cell: CellMemory) -> str:
    share = 100 * cell.peak_bytes / cell.capacity_bytes
    return (
        f"{cell.label}: {_size(cell.peak_bytes)} of {_size(cell.capacity_bytes)} "
        f"({share:.0f} %), {cell.verdict}"
    )


def _print_inputs(console: Console, inputs: Sequence[InputRow]) -> None:
    """One line for each kind of origin and each list of keys, profiles with equal ones joined."""
    rows: list[tuple[str, str]] = []
    for kind in KINDS:
        who: dict[tuple[str, ...], list[str]] = {}
        for row in inputs:
            keys: tuple[str, ...] = getattr(row, kind)
            if keys:
                stand_in = " (a stand-in)" if row.stands_in_for else ""
                who.setdefault(keys, []).append(row.name + stand_in)
        for i, (keys, names) in enumerate(who.items()):
            text = f"{_more(names[:NAMES], len(names) - NAMES)}: "
            text += _more(keys[:KEYS], len(keys) - KEYS)
            rows.append(("" if i else kind, text))
    if rows:
        console.print("inputs:")
        _print_rows(console, rows, indent=2)
        console.print()


def _more(texts: Iterable[str], left: int) -> str:
    return ", ".join(texts) + (f" and {left} more" if left > 0 else "")


def _size(nbytes: float) -> str:
    return format_quantity(nbytes, "bytes", 3)


def _print_rows(console: Console, rows: Iterable[tuple[str, str]], indent: int = 0) -> None:
    table: Table = grid()
    for name, text in rows:
        table.add_row(" " * indent + name, Text(text))
    console.print(Tight(table))
