"""What is installed, who owns the packages, and what is missing for what."""

from __future__ import annotations

import platform
import re
from importlib import metadata

import msgspec
import typer
from rich.console import Console
from rich.table import Table

import hardware_profiles
from sim.cli_output import JsonOption, emit
from sim.optional import EXTRAS, missing_modules

__all__ = ["PACKAGES", "Check", "Diagnosis", "diagnose", "package_owners", "register"]

PACKAGES = ("hardware_profiles", "real_runtime", "sim", "strategies")


class Check(msgspec.Struct, frozen=True):
    """One thing that must hold. Args: name, ok, detail: what was found."""

    name: str
    ok: bool
    detail: str


class ExtraState(msgspec.Struct, frozen=True):
    """Whether an optional dependency set is complete."""

    name: str
    present: bool
    missing: tuple[str, ...]
    needed_for: str


class Diagnosis(msgspec.Struct, frozen=True):
    """All that ``hetlab doctor`` reports.

    Args:
        version: of hetlab. python: interpreter version. libraries: core dependency -> version.
        owners: package -> distributions that install it. extras: optional parts.
        profiles: kind -> number of bundled profiles. checks: what must hold.
    """

    version: str
    python: str
    libraries: dict[str, str]
    owners: dict[str, tuple[str, ...]]
    extras: tuple[ExtraState, ...]
    profiles: dict[str, int]
    checks: tuple[Check, ...]


def package_owners() -> dict[str, tuple[str, ...]]:
    """Return for each of the four packages the distributions that install it.

    The names are generic, and a second distribution with a package of the same name would overwrite
    files silently; more than one owner is a broken environment.
    """
    found = metadata.packages_distributions()
    return {name: tuple(sorted(set(found.get(name, ())))) for name in PACKAGES}


def diagnose(broken_plugins: tuple[str, ...] = ()) -> Diagnosis:
    """Collect versions, owners, extras and profiles.

    Args:
        broken_plugins: messages of command plug-ins that could not be loaded.
    """
    owners = package_owners()
    profiles = {kind: _count_profiles(kind) for kind in hardware_profiles.KINDS}
    checks = [
        Check(f"package {name} has one owner", len(who) == 1, ", ".join(who) or "none")
        for name, who in owners.items()
    ]
    checks.append(
        Check("bundled profiles found", all(profiles.values()), f"{sum(profiles.values())} files")
    )
    checks.append(
        Check("command plug-ins load", not broken_plugins, "; ".join(broken_plugins) or "all")
    )
    extras = tuple(
        ExtraState(e.name, not missing_modules(e), missing_modules(e), e.needed_for) for e in EXTRAS
    )
    return Diagnosis(
        version=metadata.version("hetlab"),
        python=platform.python_version(),
        libraries=_core_versions(),
        owners=owners,
        extras=extras,
        profiles=profiles,
        checks=tuple(checks),
    )


def register(doctor_app: typer.Typer, broken_plugins: tuple[str, ...] = ()) -> None:
    """Make ``doctor_app`` run the diagnosis when it is called without a subcommand."""

    @doctor_app.callback(invoke_without_command=True)
    def doctor(ctx: typer.Context, as_json: JsonOption = False) -> None:
        """Say what is installed, what is missing and what each missing part is needed for."""
        if ctx.invoked_subcommand is not None:
            return
        result = diagnose(broken_plugins)
        emit(result, lambda console: _print(result, console), as_json)
        if not all(c.ok for c in result.checks):
            raise typer.Exit(1)


def _count_profiles(kind: str) -> int:
    suffix = ".json" if kind == "models" else ".yaml"
    return sum(f.name.endswith(suffix) for f in hardware_profiles.folder(kind).iterdir())


def _core_versions() -> dict[str, str]:
    versions = {}
    for line in metadata.requires("hetlab") or []:
        match = re.match(r"[A-Za-z0-9._-]+", line)
        if match and "extra ==" not in line:
            versions[match.group()] = metadata.version(match.group())
    return dict(sorted(versions.items()))


def _print(result: Diagnosis, console: Console) -> None:
    console.print(f"hetlab {result.version}, Python {result.python}")
    console.print(", ".join(f"{n} {v}" for n, v in result.libraries.items()), highlight=False)
    table = Table("check", "", "found", title="Checks", title_justify="left")
    for check in result.checks:
        table.add_row(check.name, "ok" if check.ok else "FAILED", check.detail)
    console.print(table)
    table = Table("extra", "", "needed for", title="Optional parts", title_justify="left")
    for extra in result.extras:
        state = "installed" if extra.present else f"missing {', '.join(extra.missing)}"
        table.add_row(extra.name, state, extra.needed_for)
    console.print(table)
    console.print("profiles: " + ", ".join(f"{n} {k}" for k, n in result.profiles.items()))
