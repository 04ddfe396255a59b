"""How commands speak: one result on stdout, everything else on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sim.errors import InputError, UsageError
from sim.settings import read_settings

__all__ = [
    "JsonOption",
    "check_folder",
    "check_output",
    "emit",
    "emit_text",
    "logger",
    "progress",
    "set_up_logging",
    "stderr_console",
    "stdout_console",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]

logger = logging.getLogger("hetlab")


class _ResultConsole(Console):
    """Goes on working when the reader of the output has gone: files are still to be written."""

    def on_broken_pipe(self) -> None:
        _discard_stdout()


def _discard_stdout() -> None:
    """Send what is still to be printed nowhere, as after ``| head -1``."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def stdout_console() -> Console:
    """Return a console for results."""
    return _ResultConsole(
        file=sys.stdout, no_color=not read_settings().color, soft_wrap=False, emoji=False
    )


def stderr_console() -> Console:
    """Return a console for logs, progress and errors."""
    return Console(file=sys.stderr, no_color=not read_settings().color, emoji=False)


def emit(document: object, table_fn: Callable[[Console], None], as_json: bool) -> None:
    """Print a command's result once, as JSON or as tables.

    Args:
        document: the whole result; plain data or msgspec structs. NaN and infinities print as null.
        table_fn: prints the same for people on the console it is given.
        as_json: True prints ``document`` and calls nothing else.
    """
    if as_json:
        emit_text(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        table_fn(stdout_console())


def emit_text(text: str) -> None:
    """Print a text result (a file sent to ``-``, a grid) unchanged, with one final newline."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def check_output(
    path: Path | None, option: str, endings: Sequence[str] = (), what: str = "picture"
) -> None:
    """Refuse a file that could not be written, before the work that leads to it.

    Args:
        path: None and "-" always pass. option: that named it. endings: allowed, () for all.
        what: it is to be.

    Raises:
        UsageError: another ending. InputError: its folder is missing or read-only, or it is one.
    """
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise InputError(f"{option} names a folder", file=str(path), expected="a file")
    if endings and not path.name.lower().endswith(tuple(endings)):
        known = " ".join(endings)
        raise UsageError(f"{option} {path}: unknown {what} format; the name ends in one of {known}")
    if not path.parent.is_dir():
        raise InputError(f"{option}: no folder {path.parent} to write to", file=str(path))
    _check_writable(path.parent, option)


def check_folder(path: Path, option: str) -> None:
    """Refuse a folder that could not be made, before the work that leads to it.

    Raises:
        InputError: it is a file, lies in one, or may not be written to.
    """
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise InputError(f"{option}: {existing} is a file", file=str(path), expected="a folder")
    _check_writable(existing, option)


def _check_writable(folder: Path, option: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{option}: may not write there", file=str(folder))


def set_up_logging(level: int = logging.INFO) -> None:
    """Send the package's log records to stderr from ``level`` upwards."""
    handler = RichHandler(
        console=stderr_console(), show_path=False, show_time=False, show_level=True, markup=False
    )
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr while the body runs; silent when stderr is no terminal.

    Args:
        description: what is being done. total: how many units of work, None when unknown.

    Yields:
        A function to call with the number of units just finished.
    """
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    if total is not None:
        columns.insert(2, MofNCompleteColumn())
    console = stderr_console()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)
