"""The commands. Other packages add theirs through the entry-point group ``hetlab.commands``."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Annotated

import typer

from sim import commands, doctor, export_command, import_command, profiles_command
from sim.cli_output import logger

__all__ = ["build_app", "load_plugins"]


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
    profiles_command.register(app)
    doctor_app = typer.Typer(add_completion=False)
    broken = load_plugins(app, "hetlab.commands") + load_plugins(doctor_app, "hetlab.doctor")
    doctor.register(doctor_app, broken)
    app.add_typer(doctor_app, name="doctor")
    return app


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
