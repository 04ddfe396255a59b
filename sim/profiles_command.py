"""The commands ``hetlab profiles list | show | check``: the hardware hetlab knows, with sources."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from sim.cli_output import JsonOption, emit, logger
from sim.errors import InputError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from sim.hardware.catalog import Catalog, ProfileKind
    from sim.hardware.listing import Number, ProfileRow

__all__ = ["register"]

Folders = Annotated[
    list[Path] | None, typer.Option("--profiles", help="Folder of further hardware profiles.")
]


def register(app: typer.Typer) -> None:
    """Add ``profiles``."""
    group = typer.Typer(
        help="Show the hardware profiles: accelerators, links, hosts, nodes, clusters.",
        no_args_is_help=True,
        add_completion=False,
    )
    group.command("list")(_list)
    group.command("show")(_show)
    group.command("check")(_check)
    app.add_typer(group, name="profiles")


def _kinds(kind: str) -> tuple[ProfileKind, ...]:
    """The kinds meant by one word, "" for all; "accelerator" means "accelerators"."""
    from sim.hardware.catalog import ProfileKind

    kinds: tuple[ProfileKind, ...] = get_args(ProfileKind)
    if not kind:
        return kinds
    found = tuple(k for k in kinds if kind in (k, k[:-1]))
    if not found and kind not in ("model", "models"):
        raise UsageError(f"{kind}: expected one of " + ", ".join((*kinds, "models")))
    return found


def _models() -> list[ProfileRow]:
    """The bundled models: configs, and sizes as they were published."""
    from sim.hardware.catalog import bundled_directory
    from sim.hardware.listing import ProfileRow
    from sim.model.count import active_params, total_params
    from sim.model.load import load_model
    from sim.model.sizes import published, published_names
    from sim.spec.load import read_source

    folder = bundled_directory() / "models"
    origins = read_source(folder / "sources.yaml").data
    found = {file.stem: read_source(file).data for file in sorted(folder.glob("*.json"))}
    found |= {n: sizes.data for n in published_names() if (sizes := published(n)) is not None}
    rows = []
    for name, data in found.items():
        model = load_model(dict(data))
        origin = origins.get(name, {})
        evidence = "remembered" if str(data.get("source", "")).startswith("recalled") else "found"
        facts: dict[str, float | int | str | None] = {
            "family": model.family,
            "params": total_params(model),
            "active": active_params(model),
            "layers": model.num_layers,
            "hidden": model.hidden,
        }
        rows.append(
            ProfileRow(
                "models",
                name,
                facts,
                str(origin.get("confidence", "")),
                (str(origin.get("evidence", evidence)),),
            )
        )
    return rows


def _list(
    kind: Annotated[
        str,
        typer.Argument(help="accelerators, links, hosts, nodes, clusters, models; default: all."),
    ] = "",
    match: Annotated[str, typer.Option(help="Only names that contain this.")] = "",
    vendor: Annotated[str, typer.Option(help="Only this vendor.")] = "",
    accelerator: Annotated[
        str, typer.Option(help="Only nodes and clusters of accelerators whose name contains this.")
    ] = "",
    min_memory: Annotated[
        str, typer.Option(help="Only accelerators of at least this memory, e.g. '40 GB'.")
    ] = "",
    confidence: Annotated[
        str, typer.Option(help="Only profiles whose main numbers are at least: medium, high.")
    ] = "",
    profiles: Folders = None,
    as_json: JsonOption = False,
) -> None:
    """List profiles with their main numbers."""
    from sim.hardware.catalog import Catalog
    from sim.hardware.listing import LEVELS, rows_of
    from sim.units import parse_quantity

    if confidence and confidence not in LEVELS:
        raise UsageError(f"--confidence {confidence}: expected one of " + ", ".join(LEVELS))
    least = parse_quantity(min_memory, "bytes") if min_memory else 0.0
    catalog = Catalog(profiles or ())
    rows = [row for each in _kinds(kind) for row in rows_of(each, catalog)]
    rows += _models() if kind in ("", "model", "models") else []

    def wanted(row: ProfileRow) -> bool:
        facts = row.facts
        chips = str(facts.get("accelerator") or facts.get("accelerators") or "")
        memory = facts.get("memory")
        return (
            match.lower() in row.name.lower()
            and (not vendor or str(facts.get("vendor", "")).lower() == vendor.lower())
            and (not accelerator or accelerator.lower() in chips.lower())
            and (not least or (isinstance(memory, float) and memory >= least))
            and _at_least(row.confidence, confidence)
        )

    chosen = [row for row in rows if wanted(row)]
    emit({"profiles": chosen}, lambda console: _print_rows(console, chosen), as_json)


def _at_least(found: str, least: str) -> bool:
    from sim.hardware.listing import LEVELS

    order: tuple[str, ...] = LEVELS
    return not least or (found in order and order.index(found) >= order.index(least))


def _print_rows(console: Console, rows: list[ProfileRow]) -> None:
    from itertools import groupby

    from rich.table import Table

    from sim.hardware.listing import COLUMNS, Column

    def cell(value: Any, column: Column) -> str:
        if value is None or value == "":
            return "-"
        return f"{value / column.unit:.5g}" if column.unit else str(value)

    for kind, group in groupby(rows, key=lambda row: row.kind):
        columns: dict[str, Column] = dict(COLUMNS[kind])
        table = Table(title=kind, title_justify="left", box=None, pad_edge=False)
        table.add_column("name", no_wrap=True)
        for column in columns.values():
            side: Literal["left", "right"] = "right" if column.unit else "left"
            table.add_column(
                column.heading, justify=side, no_wrap=kind != "clusters", overflow="fold"
            )
        if kind != "clusters":
            table.add_column("confidence", no_wrap=True)
        for row in group:
            cells = [cell(row.facts.get(fact), column) for fact, column in columns.items()]
            last = [row.confidence or ", ".join(row.evidence)] if kind != "clusters" else []
            name = f"{row.name} *" if row.stands_in_for else row.name
            table.add_row(name, *cells, *last)
        console.print(table)
    if not rows:
        console.print("no such profile")
    if any(row.stands_in_for for row in rows):
        console.print("* stands in for a part that is not disclosed")


def _show(
    name: Annotated[str, typer.Argument(help="Name of a profile.")],
    kind: Annotated[
        str, typer.Option(help="accelerator, link, host, node, cluster; default: by name.")
    ] = "",
    profiles: Folders = None,
    as_json: JsonOption = False,
) -> None:
    """Show every number of a profile with its source and confidence."""
    from sim.hardware.build import build_machine
    from sim.hardware.catalog import Catalog
    from sim.hardware.describe import describe_machine
    from sim.hardware.listing import numbers_of, profile

    catalog = Catalog(profiles or ())
    where = _kind_of(name, _kinds(kind), catalog)
    doc = profile(where, name, catalog)
    head = {"kind": where, "name": name}
    if where == "clusters":
        machine = build_machine(doc, catalog)
        result = head | {
            "accelerators": list(machine.accelerators),
            "num_chips": machine.num_chips,
            "num_nodes": len(machine.nodes),
            "notes": list(doc.notes),
            "assumptions": list(machine.assumptions),
        }
        emit(result, lambda console: console.print(describe_machine(machine)), as_json)
        return
    rows = numbers_of(doc)
    result = head | {
        "vendor": getattr(doc, "vendor", ""),
        "stands_in_for": doc.stands_in_for,
        "notes": list(doc.notes),
        "numbers": rows,
    }

    emit(result, lambda console: _print_numbers(console, where, doc, rows), as_json)


def _print_numbers(console: Console, kind: str, doc: Any, rows: list[Number]) -> None:
    """Print the numbers of a profile, then the sources they refer to."""
    from rich.markup import escape
    from rich.table import Table

    sources = {source: n for n, source in enumerate(dict.fromkeys(r.source for r in rows), 1)}
    of = getattr(doc, "vendor", "") or getattr(doc, "accelerator", "")
    title = f"{kind[:-1]} {doc.name}" + (f" ({of})" if of else "")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("key", "value", "confidence", "evidence", "source"):
        table.add_column(column, no_wrap=column != "value", overflow="fold")
    for row in rows:
        number = f"[{sources[row.source]}]"
        table.add_row(row.key, row.text, row.confidence, row.evidence, escape(number))
    console.print(table)
    lines = [f"[{number}] {source}" for source, number in sources.items()]
    lines += [f"stands in for {doc.stands_in_for}"] if doc.stands_in_for else []
    lines += [f"note: {note}" for note in doc.notes]
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _kind_of(name: str, kinds: tuple[ProfileKind, ...], catalog: Catalog) -> ProfileKind:
    """The first kind that has this name; raises InputError with the nearest names."""
    import difflib

    names = {k: catalog.names(k) for k in kinds}
    for kind, known in names.items():
        if name in known:
            return kind
    every = {n.lower(): n for known in names.values() for n in known}
    close = [full for low, full in every.items() if name.lower() in low][:6]
    close += [every[low] for low in difflib.get_close_matches(name.lower(), every, n=3)]
    raise InputError(
        "no such profile",
        key="name",
        found=name,
        expected=" or ".join(dict.fromkeys(close)) or "a name of: hetlab profiles list",
    )


def _check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|FILE]...", help="Profiles to check; default: all."),
    ] = None,
    profiles: Folders = None,
    as_json: JsonOption = False,
) -> None:
    """Refuse sparse peaks, numbers without a source, and values that cannot be."""
    from sim.checks import check_profiles
    from sim.hardware.catalog import Catalog

    catalog = Catalog(profiles or ())
    found = check_profiles(names or [], catalog)
    wrong = [row for row in found if row.error]

    def show(console: Console) -> None:
        from collections import Counter

        kinds = Counter(row.kind for row in found if not row.error)
        sound = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "nothing"
        console.print(f"sound: {sound}", highlight=False)
        for row in wrong:
            console.print(f"[red]error[/] {row.file}", highlight=False)

    emit({"files": found}, show, as_json)
    for row in wrong:
        for problem in row.problems:
            logger.error("%s", problem.text)
    if wrong:
        raise typer.Exit(InputError.exit_code)
