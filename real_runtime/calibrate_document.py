"""Numbers of a cluster document that a calibration may scale. Imports no torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sim.hardware.catalog import bundled_catalog
from sim.units import Dimension, parse_quantity

__all__ = ["Scale", "merged", "scaled", "scales"]

OF_CHIP = (
    "gemm_efficiency", "attention_efficiency", "memory_efficiency", "optimizer_efficiency",
    "kernel_overhead",
)  # fmt: skip
OF_LINK: tuple[tuple[str, Dimension], ...] = (("rate", "bytes/s"), ("latency", "seconds"))
LEAST_LATENCY = "1e-06 s"
"""Where a latency that is 0 begins: a factor cannot move 0."""
_UNITS = {"rate": "B/s", "latency": "s", "kernel_overhead": "s", "memory_bandwidth": "B/s"}


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """One number, and how to find it.

    Args:
        name: for people, e.g. "CPU gemm_efficiency". place: keys from the document's top to the
            mapping that holds it. key: in that mapping. value: [SI] before.
        largest: factor that gives a document which may be.
    """

    name: str
    place: tuple[str | int, ...]
    key: str
    value: float
    largest: float = math.inf


def merged(cluster: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which what the document overrides about accelerators is their profiles'.

    Args:
        cluster: a normalised document that holds the profiles it uses, as ``Problem`` carries it.
    """
    found = copy.deepcopy(cluster)
    changes = found.pop("accelerators", {})
    for chip in found["profiles"]["accelerators"]:
        changed = changes.get(chip["name"], {})
        peaks = chip["peaks"] | changed.get("peaks", {})
        chip |= changed | {"peaks": peaks}
    return found


def scales(cluster: dict[str, Any]) -> tuple[Scale, ...]:
    """Return every number that may be scaled.

    Of chips their efficiencies and their overhead, of links their rate and latency.

    Args:
        cluster: from ``merged``.
    """
    found = []
    known = set(bundled_catalog().names("accelerators"))
    for i, chip in enumerate(cluster["profiles"]["accelerators"]):
        # The peak of a chip of the catalogue is its maker's; attention raises none.
        fixed = {"attention_efficiency"}
        if Path(chip["name"]).name in known:
            fixed.add("gemm_efficiency")
        of_chip = ("profiles", "accelerators", i)
        for key in OF_CHIP:
            dimension: Dimension = "seconds" if key == "kernel_overhead" else "fraction"
            value = _value(chip.get(key, 0.0), dimension)
            if value > 0:
                name = f"{chip['name']} {key}"
                largest = 1 / value if key in fixed else math.inf
                found.append(Scale(name=name, place=of_chip, key=key, value=value, largest=largest))
    for name, place, link in _links(cluster):
        for key, dimension in OF_LINK:
            if key in link or (key == "latency" and "rate" in link):
                value = _value(link.get(key, 0.0), dimension) or _value(LEAST_LATENCY, dimension)
                found.append(Scale(name=f"{name} {key}", place=place, key=key, value=value))
    return tuple(found)


def _links(
    cluster: dict[str, Any],
) -> Iterator[tuple[str, tuple[str | int, ...], dict[str, Any]]]:
    """(Name, place, mapping) of every link profile and link written where it is used."""
    profiles = cluster["profiles"]
    for i, link in enumerate(profiles.get("links", ())):
        yield f"link {link['name']}", ("profiles", "links", i), link
    holders: list[tuple[str, tuple[str | int, ...], dict[str, Any]]] = [
        (f"node {node['name']}", ("profiles", "nodes", i), node)
        for i, node in enumerate(profiles.get("nodes", ()))
    ]
    for s, site in enumerate(cluster["sites"]):
        holders.append((f"site {site['name']}", ("sites", s), site))
        for n, nodes in enumerate(site["nodes"]):
            label = nodes.get("name") or nodes.get("profile") or f"nodes {n}"
            holders.append((f"{label}", ("sites", s, "nodes", n), nodes))
    for name, place, holder in holders:
        for role in ("fabric", "nics"):
            if isinstance(holder.get(role), dict):
                yield f"{name} {role}", (*place, role), holder[role]
    for i, link in enumerate(cluster.get("links", ())):
        yield "link " + " - ".join(link["between"]), ("links", i), link


def scaled(
    cluster: dict[str, Any], which: Sequence[Scale], factors: Sequence[float], source: Sequence[str]
) -> dict[str, Any]:
    """Return a copy of the document with numbers multiplied.

    An efficiency that would pass 1 stays there, and the peaks (for memory the bandwidth) take the
    rest: they were too low.

    Args:
        cluster: from ``merged``. which: numbers. factors: of each, at most its ``largest``.
        source: of each, in words.
    """
    found = copy.deepcopy(cluster)
    for scale, factor, words in zip(which, factors, source, strict=True):
        holder = _at(found, scale.place)
        value = scale.value * factor
        if scale.key.endswith("efficiency") and value > 1:
            _raise_peak(holder, scale.key, value, words)
            value = 1.0
        holder[scale.key] = _stated(value, _UNITS.get(scale.key, ""), words)
    return found


def _at(document: dict[str, Any], place: Sequence[str | int]) -> Any:
    at: Any = document
    for key in place:
        at = at[key]
    return at


def _raise_peak(chip: dict[str, Any], key: str, excess: float, words: str) -> None:
    if key == "memory_efficiency":
        rate = _value(chip["memory_bandwidth"], "bytes/s")
        chip["memory_bandwidth"] = _stated(rate * excess, "B/s", words)
        if "optimizer_efficiency" in chip:
            share = _value(chip["optimizer_efficiency"], "fraction")
            chip["optimizer_efficiency"] = _stated(share / excess, "", words)
    elif key == "optimizer_efficiency":
        rate = _value(chip["memory_bandwidth"], "bytes/s")
        share = _value(chip["memory_efficiency"], "fraction")
        chip["memory_bandwidth"] = _stated(rate * excess, "B/s", words)
        chip["memory_efficiency"] = _stated(share / excess, "", words)
    elif key == "gemm_efficiency":
        for dtype, peak in chip["peaks"].items():
            chip["peaks"][dtype] = _stated(_value(peak, "FLOP/s") * excess, "FLOP/s", words)


def _stated(value: float, unit: str, words: str) -> dict[str, Any]:
    written = f"{value!r} {unit}" if unit else value
    return {"value": written, "source": words, "confidence": "medium", "evidence": "derived"}


def _value(number: Any, dimension: Dimension) -> float:
    return parse_quantity(number["value"] if isinstance(number, dict) else number, dimension)
