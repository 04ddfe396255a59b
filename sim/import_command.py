"""The command ``hetlab import-links``: what other tools measured, as profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli_output import JsonOption, check_output, emit, logger
from sim.errors import InputError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from sim.interop.link_records import Transfer

__all__ = ["register"]

FORMATS = ("nccl-tests", "perftest", "topo", "kineto")
KINDS = ("fabric", "pcie", "nic", "uplink", "wan")


def register(app: typer.Typer) -> None:
    """Add ``import-links``."""
    app.command("import-links")(_import_links)


def _import_links(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Output of the tool, as it was printed.")
    ],
    form: Annotated[str, typer.Option("--format", help=" | ".join(FORMATS))],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Profile to write, NAME.yaml; it is named NAME.")
    ],
    kind: Annotated[str, typer.Option(help="Of the link: " + " ".join(KINDS) + ".")] = "nic",
    collective: Annotated[
        str, typer.Option(help="nccl-tests: what was measured, where the output does not say it.")
    ] = "",
    unit: Annotated[
        str, typer.Option(help="perftest JSON: unit of its bandwidths, Gb or MiB (a second).")
    ] = "",
    accelerator: Annotated[str, typer.Option(help="topo: profile of the node's chips.")] = "",
    fabric: Annotated[str, typer.Option(help="topo: profile of the link between chips.")] = "",
    nic: Annotated[str, typer.Option(help="topo: profile of the NICs.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Write a link profile (topo: a node profile) from what another tool measured."""
    from sim.interop.files import write_whole, yaml_text
    from sim.spec.load import Source, validate
    from sim.spec.profiles import LinkDoc, NodeDoc

    if form not in FORMATS:
        raise UsageError(f"--format {form}: expected one of " + ", ".join(FORMATS))
    if kind not in KINDS:
        raise UsageError(f"--kind {kind}: expected one of " + ", ".join(KINDS))
    if output.suffix != ".yaml":
        raise UsageError(f"--output {output}: a profile's file ends in .yaml")
    check_output(output, "--output")
    if form == "topo":
        document = _node(files, output.stem, accelerator, fabric, nic)
        validate(NodeDoc, Source(document, str(output)))
    else:
        document = _link(files, form, output.stem, kind, collective, unit)
        validate(LinkDoc, Source(document, str(output)))
    write_whole(output, yaml_text(document))
    emit(document, lambda console: _print(console, document), as_json)
    logger.info("profile: %s", output)


def _read(file: Path) -> bytes:
    from sim.interop.link_records import MAX_FILE

    try:
        if file.stat().st_size > MAX_FILE:
            raise InputError("the file is too long", str(file), expected=f"at most {MAX_FILE} B")
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", str(file)) from None


def _located(error: InputError, file: Path) -> InputError:
    """The same error with the file's name."""
    return InputError(error.message, str(file), error.line, error.key, error.found, error.expected)


def _link(
    files: list[Path], form: str, name: str, kind: str, collective: str, unit: str
) -> dict[str, Any]:
    from sim.interop.link_records import link_document

    transfers: list[Transfer] = []
    for file in files:
        try:
            transfers += _transfers(_read(file), form, collective, unit)
        except InputError as error:
            raise _located(error, file) from None
    named = ", ".join(file.name for file in files)
    return link_document(name, transfers, f"{form} output {named}", kind=kind)


def _transfers(data: bytes, form: str, collective: str, unit: str) -> tuple[Transfer, ...]:
    from sim.interop.kineto import kineto_transfers, read_kineto
    from sim.interop.link_records import unpacked
    from sim.interop.nccl_tests import nccl_transfers, read_nccl
    from sim.interop.perftest import read_perftest

    text = unpacked(data)
    if form == "nccl-tests":
        return nccl_transfers(read_nccl(text, collective))
    if form == "perftest":
        return read_perftest(text, unit)
    return kineto_transfers(read_kineto(text))


def _node(files: list[Path], name: str, accelerator: str, fabric: str, nic: str) -> dict[str, Any]:
    from sim.interop.link_records import unpacked
    from sim.interop.nvidia_topo import node_document, read_topology

    if len(files) != 1:
        raise UsageError("--format topo: one matrix, of one node")
    if not accelerator:
        raise UsageError("--format topo: name the chips' profile with --accelerator")
    try:
        topology = read_topology(unpacked(_read(files[0])))
        source = f"nvidia-smi topo -m, {files[0].name}"
        return node_document(name, topology, accelerator, fabric, nic, source)
    except InputError as error:
        raise _located(error, files[0]) from None


def _print(console: Console, document: dict[str, Any]) -> None:
    """Print a profile in short."""
    lines = [f"{document['name']}: {document['source']}"]
    if "rate" in document:
        lines.append(f"rate {float(document['rate'].split()[0]) / 1e9:.4g} GB/s")
        if "latency" in document:
            seconds = float(document["latency"]["value"].split()[0])
            lines.append(f"latency {seconds * 1e6:.4g} us a port")
        for point in document["curve"]:
            lines.append(f"{point['size']:>14}  {point['fraction']:.4f} of the rate")
    else:
        lines.append(f"{document['chips']} x {document['accelerator']}")
        if "nics" in document:
            lines.append(f"NIC of each chip: {document['nics']['affinity']}")
    lines += document.get("notes", [])
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
