"""Tables on a console: narrow ones stand closer together, and nothing pads their lines."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table

__all__ = ["NARROW", "Tight", "columned", "grid"]

NARROW = 100
"""Below this many columns tables stand closer together."""


class Tight:
    """What is printed, without the blanks that pad its lines."""

    def __init__(self, what: RenderableType) -> None:
        self.what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self.what, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            yield from line[:-1]
            if line:
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()


def grid() -> Table:
    """A table without headings, its first column dim."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    return table


def columned(columns: Iterable[tuple[str, str]], width: int) -> Table:
    """A table of (heading, "left" or "right") columns; readable without colour, never cut off."""
    narrow = width < NARROW
    table = Table(
        box=None if narrow else box.SIMPLE_HEAD, pad_edge=False, show_edge=False,
        padding=(0, 1 if narrow else 2, 0, 0), header_style="bold",
    )  # fmt: skip
    for heading, justify in columns:
        side: JustifyMethod = "right" if justify == "right" else "left"
        folds = heading.startswith(("accel", "host"))
        table.add_column(heading, justify=side, no_wrap=not folds, overflow="fold")
    return table
