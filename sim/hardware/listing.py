"""Profiles as rows for people: what there is, and every number of one with where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from sim.hardware.catalog import Catalog, ProfileKind
from sim.spec.cluster import ClusterDoc
from sim.spec.fields import Confidence
from sim.spec.origins import Origin, tags
from sim.spec.profiles import AcceleratorDoc, LinkDoc, LinkUse, NodeDoc
from sim.units import Dimension, format_quantity

__all__ = [
    "COLUMNS",
    "LEVELS",
    "Column",
    "Number",
    "ProfileRow",
    "numbers_of",
    "profile",
    "rows_of",
]

Value = float | int | str | None
LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")


class Column(msgspec.Struct, frozen=True):
    """One column of a list: its heading, and what its values in SI are divided by (0 for text)."""

    heading: str
    unit: float = 0.0


COLUMNS: dict[str, dict[str, Column]] = {
    "accelerators": {
        "vendor": Column("vendor"),
        "memory": Column("GB", 1e9),
        "memory_bandwidth": Column("GB/s", 1e9),
        "peak": Column("TFLOP/s", 1e12),
        "of": Column("in"),
        "power": Column("W", 1),
        "price": Column("USD/h", 1 / 3600),
    },
    "links": {
        "kind": Column("kind"),
        "rate": Column("GB/s", 1e9),
        "flow_cap": Column("one flow", 1e9),
        "latency": Column("us", 1e-6),
        "price": Column("USD/GB", 1e-9),
        "curves": Column("curves", 1),
    },
    "hosts": {
        "vendor": Column("vendor"),
        "cores": Column("cores", 1),
        "memory_bandwidth": Column("GB/s", 1e9),
        "flops": Column("TFLOP/s", 1e12),
        "power": Column("W", 1),
    },
    "nodes": {
        "chips": Column("chips", 1),
        "accelerator": Column("of"),
        "inside": Column("GB/s in", 1e9),
        "nics": Column("NICs", 1),
        "nic": Column("GB/s", 1e9),
        "host_memory": Column("host GB", 1e9),
    },
    "clusters": {
        "sites": Column("sites", 1),
        "nodes": Column("nodes", 1),
        "chips": Column("chips", 1),
        "accelerators": Column("of"),
    },
    "models": {
        "family": Column("family"),
        "params": Column("1e9 params", 1e9),
        "active": Column("multiplied", 1e9),
        "layers": Column("layers", 1),
        "hidden": Column("hidden", 1),
    },
}
"""Kind -> fact -> column."""
_MAIN: dict[ProfileKind, tuple[str, ...]] = {
    "accelerators": ("memory", "memory_bandwidth", "peaks.bf16", "peaks.fp16"),
    "links": ("rate",),
    "hosts": ("memory_bandwidth", "flops"),
    "nodes": ("chips", "fabric.profile", "nics.count", "nics.profile"),
}
"""Numbers whose least confidence a list shows."""

_UNITS: dict[str, Dimension] = {
    "B": "bytes",
    "B/s": "bytes/s",
    "s": "seconds",
    "FLOP/s": "FLOP/s",
    "USD/s": "USD/s",
    "USD/B": "USD/B",
    "W": "W",
}


class ProfileRow(msgspec.Struct, frozen=True):
    """One profile of a list.

    Args:
        kind, name: which. facts: column of ``COLUMNS`` -> value in SI, None where not stated.
        confidence: the lowest of its main numbers, "" for a cluster. evidence: of all numbers.
        stands_in_for: see sim.spec.origins.Origin.
    """

    kind: str
    name: str
    facts: dict[str, Value]
    confidence: str = ""
    evidence: tuple[str, ...] = ()
    stands_in_for: str = ""


class Number(msgspec.Struct, frozen=True):
    """One number of a profile: key, value in SI, the same for people, and its origin."""

    key: str
    value: Any
    text: str
    source: str
    confidence: str
    evidence: str


def profile(kind: ProfileKind, name: str, catalog: Catalog) -> Any:
    """Return a document of the catalogue. Raises InputError: unknown name, wrong file."""
    get: dict[ProfileKind, Callable[[str], Any]] = {
        "accelerators": catalog.accelerator,
        "links": catalog.link,
        "hosts": catalog.host,
        "nodes": catalog.node,
        "clusters": catalog.cluster,
    }
    return get[kind](name)


def rows_of(kind: ProfileKind, catalog: Catalog) -> list[ProfileRow]:
    """Return one row per profile of a kind, by name. Raises InputError: a file is wrong."""
    return [_row(kind, profile(kind, name, catalog), catalog) for name in catalog.names(kind)]


def _row(kind: ProfileKind, doc: Any, catalog: Catalog) -> ProfileRow:
    facts: dict[str, Value]
    if isinstance(doc, AcceleratorDoc):
        facts = _accelerator(doc)
    elif isinstance(doc, NodeDoc):
        facts = _node(doc, catalog)
    elif isinstance(doc, ClusterDoc):
        return ProfileRow(kind, doc.name, _cluster(doc, catalog))
    else:
        facts = {column: _plain(getattr(doc, column, None)) for column in COLUMNS[kind]}
    if isinstance(doc, LinkDoc):
        facts["curves"] = bool(doc.curve) + len(doc.collectives)
    origins = tags(doc)
    main = [tag for key, tag in origins.items() if key in _MAIN[kind]] or [*origins.values()]
    levels = [LEVELS.index(tag.confidence) for tag in main if tag.confidence]
    return ProfileRow(
        kind,
        doc.name,
        facts,
        LEVELS[min(levels)] if levels else "",
        tuple(sorted({tag.evidence or "found" for tag in origins.values()})),
        doc.stands_in_for,
    )


def _plain(number: Any) -> Value:
    """The value of a number with an origin; anything else as it is."""
    value: Value = getattr(number, "value", number)
    return value


def _accelerator(doc: AcceleratorDoc) -> dict[str, Value]:
    """Facts of a chip; its peak is that of the 16-bit dtype, else of the widest it has."""
    order = ("bf16", "fp16", "tf32", "fp32", "fp8", "int8")
    best = next(d for d in order if d in doc.peaks)
    return {
        "vendor": doc.vendor,
        "memory": doc.memory.value,
        "memory_bandwidth": doc.memory_bandwidth.value,
        "peak": doc.peaks[best].value,
        "of": best,
        "power": _plain(doc.power),
        "price": _plain(doc.price),
    }


def _rate(use: LinkUse | None, catalog: Catalog) -> Value:
    if use is None:
        return None
    return use.rate.value if use.rate is not None else catalog.link(use.profile).rate.value


def _node(doc: NodeDoc, catalog: Catalog) -> dict[str, Value]:
    return {
        "chips": doc.chips,
        "accelerator": doc.accelerator,
        "fabric": doc.fabric.profile if doc.fabric is not None else None,
        "inside": _rate(doc.fabric, catalog),
        "nics": doc.nics.count if doc.nics is not None else 0,
        "nic": _rate(doc.nics, catalog),
        "host_memory": _plain(doc.host_memory),
    }


def _cluster(doc: ClusterDoc, catalog: Catalog) -> dict[str, Value]:
    known = catalog.extended(doc.profiles)
    nodes, chips = 0, 0
    names: dict[str, None] = {}
    for use in (n for site in doc.sites for n in site.nodes):
        base = known.node(use.profile) if use.profile else None
        nodes += use.count
        chips += use.count * (use.chips or (base.chips if base is not None else 1))
        names[use.accelerator or (base.accelerator if base is not None else "")] = None
    return {
        "sites": len(doc.sites),
        "nodes": nodes,
        "chips": chips,
        "accelerators": ", ".join(names),
    }


def numbers_of(doc: Origin) -> list[Number]:
    """Return every number, count, curve and profile name of a document with its origin."""
    written = doc.model_dump(mode="json")
    found = []
    for key, tag in tags(doc).items():
        value, text = _value(_at(written, key))
        found.append(
            Number(key, value, text, tag.source, tag.confidence or "", tag.evidence or "found")
        )
    return found


def _at(written: Any, key: str) -> Any:
    for part in key.split("."):
        written = written[part]
    return written


def _value(written: Any) -> tuple[Any, str]:
    """A value as written to JSON -> in SI, and for people."""
    if isinstance(written, dict):
        written = written["value"]
    if isinstance(written, list):
        points = _points(written)
        short = [points[0], f"... {len(points)} points ...", points[-1]]
        return written, ", ".join(points) if len(points) < 4 else " ".join(short)
    if isinstance(written, str):
        number, _, unit = written.partition(" ")
        if unit in _UNITS:
            return float(number), _text(float(number), _UNITS[unit])
    return written, f"{written:g}" if isinstance(written, float) else str(written)


def _text(value: float, dimension: Dimension) -> str:
    """A quantity as data sheets print it: memory in GB unless it is a whole number of GiB."""
    if dimension == "bytes" and value >= 1e9 and value % 2**30:
        return f"{value / 1e9:g} GB"
    return format_quantity(value, dimension)


def _points(curve: Iterable[Any]) -> list[str]:
    texts = []
    for point in curve:
        if not isinstance(point, dict):
            texts.append(str(point))
            continue
        size = format_quantity(float(str(point["size"]).split(" ")[0]), "bytes", 3)
        texts.append(f"{size} {point['fraction']:.3g}")
    return texts
