"""A self-contained HTML report: tables, and measured against predicted step time per source."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from sim.fidelity.evaluate import Compared
from sim.fidelity.reasons import worst
from sim.fidelity.scores import ErrorRow, error_rows
from sim.fidelity.summary import Basis, Summary, scored_rows
from sim.interop.files import write_whole

__all__ = ["write_report"]

_SIDE, _EDGE = 240, 34
_COLORS = {"dense": "#1f6fb4", "moe": "#d2691e", "heterogeneous": "#2e8b57"}
_STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:70em;color:#222}"
    "table{border-collapse:collapse;margin:.6em 0 1.6em}td,th{padding:.15em .7em;"
    "text-align:right;border-bottom:1px solid #ddd}td.t,th.t{text-align:left}"
    "figure{display:inline-block;margin:.5em}"
    "figcaption{font-size:12px;text-align:center}svg{background:#fafafa}"
)


def write_report(path: Path, rows: Sequence[Compared], summary: Summary, basis: Basis) -> None:
    """Write the report of a validation.

    Args:
        path: of the file. rows: compared runs. summary: of them. basis: of the predictions.

    Raises:
        InputError: the file cannot be written.
    """
    counted = [r for r in scored_rows(rows) if not r.why]
    timed = [r for r in counted if r.step is not None]
    by_source: dict[str, list[Compared]] = defaultdict(list)
    for row in timed:
        by_source[row.run.source].append(row)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>hetlab validate</title>",
        f"<style>{_STYLE}</style><h1>Predicted against measured</h1>",
        f"<p>{len(rows)} runs read, {len(counted)} that count were built, {len(timed)} give a step "
        "time. Errors are |predicted / measured - 1| of the step time. Flagged runs and values "
        "recalled from memory stand apart.</p>",
        f"<p>{html.escape(basis.text[0].upper() + basis.text[1:])}.</p>",
        _legend(),
        *(_figure(source, by_source[source]) for source in sorted(by_source)),
        "<h2>Errors</h2>", _table(summary.errors),
        "<h2>Complete runs only</h2>", _table(error_rows([r for r in counted if r.complete])),
        "<h2>Flagged runs</h2>", _table(error_rows([r for r in rows if r.run.flagged])),
        "<h2>Recalled from memory</h2>", _table(error_rows([r for r in rows if r.run.remembered])),
        "<h2>Memory</h2>", _memory(summary),
        "<h2>Worst runs</h2>", _worst(counted),
        "<h2>Filled by rule</h2>", _rules(counted),
        "<h2>Not built</h2>", _skipped(summary),
        "</html>",
    ]  # fmt: skip
    write_whole(path, "\n".join(parts))


def _legend() -> str:
    dots = (f"<b style='color:{c}'>&#9679;</b> {name}" for name, c in _COLORS.items())
    return f"<p>Step time [s], logarithmic; the band is 10 %. {' '.join(dots)}</p>"


def _figure(source: str, rows: Sequence[Compared]) -> str:
    pairs = [(r, r.step) for r in rows if r.step is not None]
    values = [v for _, p in pairs for v in (p.measured, p.predicted)]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1

    def at(value: float) -> float:
        return _EDGE + (math.log10(value) - low) / (high - low) * (_SIDE - 2 * _EDGE)

    def line(factor: float, style: str) -> str:
        a, b = 10**low, 10**high
        ends = (at(a), _SIDE - at(a * factor), at(b), _SIDE - at(b * factor))
        x1, y1, x2, y2 = (f"{v:.1f}" for v in ends)
        return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' {style}/>"

    dots = [
        f"<circle cx='{at(p.measured):.1f}' cy='{_SIDE - at(p.predicted):.1f}' r='3' "
        f"fill='{_color(r)}' fill-opacity='.7'><title>{html.escape(r.run.run_id)}: measured "
        f"{p.measured:.4g} s, predicted {p.predicted:.4g} s</title></circle>"
        for r, p in pairs
    ]
    label = (
        f"<text x='{_SIDE / 2}' y='{_SIDE - 8}' font-size='11' text-anchor='middle'>measured "
        f"{10**low:.2g} to {10**high:.2g} s</text><text x='12' y='{_SIDE / 2}' font-size='11' "
        f"text-anchor='middle' transform='rotate(-90 12 {_SIDE / 2})'>predicted</text>"
    )
    lines = [line(1.0, "stroke='#444'")]
    lines += [line(f, "stroke='#bbb' stroke-dasharray='3 3'") for f in (1.1, 1 / 1.1)]
    row = next(e for e in error_rows(rows) if e.metric == "time_like" and e.source == source)
    return (
        f"<figure><svg width='{_SIDE}' height='{_SIDE}'>{''.join([*lines, *dots])}{label}</svg>"
        f"<figcaption>{html.escape(source)}: n {row.n}, {row.median_ape:.1%} / {row.p90_ape:.1%}"
        "</figcaption></figure>"
    )


def _color(row: Compared) -> str:
    assert row.settings is not None
    kind = "moe" if row.settings.moe else "dense"
    return _COLORS["heterogeneous" if row.run.heterogeneous else kind]


def _table(errors: Sequence[ErrorRow]) -> str:
    head = ("metric", "source", "subset", "n", "median", "90 %", "bias", "rank")
    lines = [
        (
            e.metric, e.source, e.subset, str(e.n), f"{e.median_ape:.1%}", f"{e.p90_ape:.1%}",
            f"{e.bias:+.1%}", "" if e.spearman is None else f"{e.spearman:.2f}",
        )
        for e in errors
    ]  # fmt: skip
    return _grid(head, lines, text=3)


def _grid(head: Sequence[str], lines: Sequence[Sequence[str]], text: int) -> str:
    def cells(values: Sequence[str], tag: str) -> str:
        found = (
            f"<{tag}{' class=t' if i < text else ''}>{html.escape(v)}</{tag}>"
            for i, v in enumerate(values)
        )
        return "<tr>" + "".join(found) + "</tr>"

    if not lines:
        return "<p>none</p>"
    return f"<table>{cells(head, 'th')}{''.join(cells(x, 'td') for x in lines)}</table>"


def _memory(summary: Summary) -> str:
    m = summary.memory
    share = ("" if v is None else f"{v:.1%}" for v in (m.median_ape, m.p90_ape, m.at_risk_share))
    median, p90, risk = share
    return _grid(
        ("peaks", "median", "90 %", "false fits", "false out of memory", "at risk", "no cause"),
        [
            (str(m.n), median, p90, str(m.false_fits), str(m.false_oom), risk,
             str(m.unscored_failures)),
        ],
        text=0,
    )  # fmt: skip


def _worst(rows: list[Compared]) -> str:
    lines = [(r.run.run_id, f"{error:+.0%}", reason) for r, error, reason in worst(rows)]
    return _grid(("run", "error", "reason"), lines, text=3)


def _rules(rows: Sequence[Compared]) -> str:
    count: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for row in rows:
        assert row.settings is not None
        for column, value, reason in row.settings.filled:
            value = "derived" if column == "dp" else value
            count[row.run.source, column, value, reason] += 1
    lines = [(*key, str(n)) for key, n in sorted(count.items())]
    return _grid(("source", "column", "filled with", "reason", "runs"), lines, text=4)


def _skipped(summary: Summary) -> str:
    return _grid(("run", "why"), [(s.run_id, s.why) for s in summary.skipped], text=2)
