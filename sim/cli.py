"""The root command. Other packages add theirs through the entry-point group ``hetlab.commands``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from sim import commands, doctor, export_command, import_command
from sim.cli_output import logger, set_up_logging, stderr_console
from sim.errors import HetlabError
from sim.settings import read_settings

__all__ = ["build_app", "load_plugins", "main"]

EXIT_UNEXPECTED = 1


def load_plugins(app: typer.Typer, group: str) -> tuple[str, ...]:
    """Let every entry point of a group add its commands to an app.

    Args:
        app: the app the commands are added to. group: entry-point group; each entry is a callable
            that takes the app.

    Returns:
        One message per entry that could not be loaded: a broken plug-in must not take the whole
        command down, and ``hetlab doctor`` reports it.
    """
    broken = []
    for entry in sorted(metadata.entry_points(group=group), key=lambda e: e.name):
        try:
            entry.load()(app)
        except Exception as error:  # noqa: BLE001 - anything can go wrong in a plug-in's import
            broken.append(f"{group}: {entry.name} ({entry.value}): {type(error).__name__}: {error}")
    return tuple(broken)


def build_app() -> typer.Typer:
    """Return the root app with the commands of all installed packages."""
    app = typer.Typer(
        name="hetlab",
        help="Plan, simulate and run training on mixed accelerators.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    commands.register(app)
    export_command.register(app)
    import_command.register(app)
    doctor_app = typer.Typer(add_completion=False)
    broken = load_plugins(app, "hetlab.commands") + load_plugins(doctor_app, "hetlab.doctor")
    doctor.register(doctor_app, broken)
    app.add_typer(doctor_app, name="doctor")
    return app


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code the error class names.

    Args:
        argv: arguments after the program name; None means those of this process.
    """
    set_up_logging(logging.DEBUG if read_settings().debug else logging.INFO)
    try:
        build_app()(args=None if argv is None else list(argv), prog_name="hetlab")
    except HetlabError as error:
        _report(f"hetlab: {error}")
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last place that can turn it into one message
        _report(f"hetlab: unexpected {type(error).__name__}: {error} (--debug shows where)")
        sys.exit(EXIT_UNEXPECTED)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hetlab {metadata.version('hetlab')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")] = False,
) -> None:
    if debug:
        logger.setLevel(logging.DEBUG)


def _report(message: str) -> None:
    # Debug is a property of the logger, so that it needs no state beside the parser's.
    if logger.isEnabledFor(logging.DEBUG):
        logger.exception("traceback")
    stderr_console().print(message, markup=False, highlight=False, soft_wrap=True)
