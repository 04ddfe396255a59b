"""Probed numbers as profile documents, each with where it comes from. Imports no torch.

The folder is a catalogue (``sim.hardware.catalog``): ``accelerators``, ``links``, ``nodes`` and
``clusters``, one file each. The cluster's file holds all of them and is complete alone.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec

from real_runtime.probe.fit import Chip, Number, Round, Wire
from real_runtime.probe.records import Facts, ProbeSettings, Record, select, spread
from sim.errors import UsageError
from sim.hardware.build import build_machine
from sim.hardware.catalog import bundled_catalog
from sim.interop.files import write_whole, yaml_text
from sim.spec.cluster import ClusterDoc
from sim.spec.load import Source, validate
from sim.spec.profiles import AcceleratorDoc, LinkDoc, NodeDoc

__all__ = ["Documents", "check_name", "documents_of", "write_profiles"]


class Documents(msgspec.Struct, frozen=True, kw_only=True):
    """Profile documents as plain data; ``cluster`` holds the other three."""

    accelerator: dict[str, Any]
    link: dict[str, Any]
    node: dict[str, Any]
    cluster: dict[str, Any]


class _Writer:
    """Numbers with their origin, all measured in one probe."""

    def __init__(self, facts: Facts, date: str) -> None:
        self.source = (
            f"measured by hetlab probe on {date}, torch {facts.torch}, threads {facts.threads}"
        )

    def stated(self, n: Number, unit: str, scale: float = 1.0) -> dict[str, Any]:
        said = "infinite" if math.isinf(n.spread) else f"{n.spread:.1%}"
        return {
            "value": _quantity(n.value * scale, unit),
            "source": f"{self.source}; {n.how}; spread {said} of {n.count}",
        }

    def known(self, value: float, unit: str, how: str) -> dict[str, Any]:
        return {"value": _quantity(value, unit), "source": f"{self.source}; {how}"}


def _quantity(value: float, unit: str) -> str | float:
    return f"{value!r} {unit}" if unit else value


def documents_of(
    name: str,
    facts: Facts,
    chip: Chip,
    wire: Wire | None,
    records: list[Record],
    settings: ProbeSettings,
    date: str,
) -> Documents:
    """Return the profiles of a probed machine.

    Args:
        name: of the cluster, and head of the other names. facts, records, settings: of the probe.
        chip, wire: fitted; wire None for one rank alone. date: of the probe, as 2026-01-31.

    Raises:
        InputError: a number is none that a profile may hold.
    """
    w = _Writer(facts, date)
    about = {"source": w.source, "confidence": "medium", "evidence": "found", "date": date}
    accelerator = {"name": f"{name}-{_chip_name(facts)}"} | about | _accelerator(w, facts, chip)
    link = {"name": f"{name}-link", "kind": "fabric"} | about | (_link(w, wire) if wire else {})
    node: dict[str, Any] = (
        {"name": f"{name}-node"}
        | about
        | {
            "accelerator": accelerator["name"],
            "chips": settings.ranks,
            "host_memory": w.known(facts.host_memory, "B", "as the system says"),
        }
    )
    if wire is not None:
        node["fabric"] = link["name"]
    pcie = _pcie(w, records)
    if pcie:
        node["pcie"] = pcie
    profiles = {"accelerators": [accelerator], "links": [link] if wire else [], "nodes": [node]}
    cluster = {
        "name": name,
        "profiles": {k: v for k, v in profiles.items() if v},
        "sites": [{"name": "here", "nodes": [{"profile": node["name"], "count": 1}]}],
        "notes": [
            w.source,
            f"{settings.ranks} ranks measured at once; spreads are quartile distances over medians",
        ],
    }
    for kind, data in ((AcceleratorDoc, accelerator), (NodeDoc, node)):
        validate(kind, Source(data, name))
    if wire is not None:
        validate(LinkDoc, Source(link, name))
    build_machine(validate(ClusterDoc, Source(cluster, name)), bundled_catalog())
    return Documents(accelerator=accelerator, link=link if wire else {}, node=node, cluster=cluster)


def check_name(name: str) -> None:
    """Refuse a name that cannot be a file's.

    Raises:
        UsageError: it is empty, or holds more than letters, digits, "-" and "_".
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UsageError(f"--name {name!r}: letters, digits, - and _ only")


def _chip_name(facts: Facts) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", facts.chip or facts.device)


def _accelerator(w: _Writer, facts: Facts, chip: Chip) -> dict[str, Any]:
    found: dict[str, Any] = {
        "vendor": facts.vendor,
        "memory": w.known(facts.memory, "B", "its own, or its share of the host's"),
        "memory_bandwidth": w.stated(chip.memory_bandwidth, "B/s"),
        "peaks": {d: w.stated(n, "FLOP/s") for d, n in chip.peaks.items()},
        "gemm_efficiency": w.stated(chip.gemm_efficiency, ""),
        "gemm_half": w.stated(chip.gemm_half, ""),
        "attention_efficiency": w.stated(chip.attention_efficiency, ""),
        "memory_efficiency": w.stated(chip.memory_efficiency, ""),
        "optimizer_efficiency": w.stated(chip.optimizer_efficiency, ""),
        "kernel_overhead": w.stated(chip.kernel_overhead, "s"),
        "async_compute": facts.device != "cpu",
        "context": w.known(facts.context, "B", "taken before any tensor"),
        "calibrated": True,
        "notes": [f"a kernel without work takes {chip.dispatch.value * 1e6:.3g} us"],
    }
    if chip.compute_slowdown is not None:
        found["compute_slowdown"] = w.stated(chip.compute_slowdown, "")
    if chip.comm_slowdown is not None:
        found["comm_slowdown"] = w.stated(chip.comm_slowdown, "")
    return found


def _link(w: _Writer, wire: Wire) -> dict[str, Any]:
    found = {"rate": w.stated(wire.rate, "B/s")} | _round(w, wire.transfer)
    rounds = wire.collectives
    if rounds:
        found["collectives"] = {name: _round(w, r) for name, r in rounds.items()}
    origins = {"curve": wire.transfer} | {
        f"collectives.{name}.curve": r for name, r in rounds.items()
    }
    spread_of = "largest spread of a point"
    found["origins"] = {
        key: {"source": f"{w.source}; {spread_of} {r.curve_spread:.1%}"}
        for key, r in origins.items()
    }
    return found


def _round(w: _Writer, r: Round) -> dict[str, Any]:
    return {
        # A message crosses two ports, the sender's and the receiver's, and each adds its latency.
        "latency": w.stated(r.latency, "s", 0.5),
        "curve": [{"size": f"{size:.0f} B", "fraction": share} for size, share in r.curve],
    }


def _pcie(w: _Writer, records: list[Record]) -> dict[str, Any]:
    copies = {r.name: r for r in select(records, "host_copy")}
    if not copies:
        return {}
    rates = {name: r.sizes["nbytes"] / r.median for name, r in copies.items()}
    pinned = [n for n in copies if n.endswith("pinned")]
    slowest = min(pinned, key=lambda n: rates[n])
    pageable = min(rates[n] for n in copies if n not in pinned) / rates[slowest]
    r = copies[slowest]
    return {
        "rate": w.stated(Number(rates[slowest], spread(r), r.repeats, slowest), "B/s"),
        "pageable": w.known(min(pageable, 1.0), "", "slower direction over the pinned rate"),
    }


def write_profiles(folder: Path, d: Documents) -> list[Path]:
    """Write the documents, each beside its target first, then renamed.

    Returns:
        The files, the cluster's last.

    Raises:
        InputError: a file cannot be written.
    """
    written = []
    kinds = (
        ("accelerators", d.accelerator), ("links", d.link), ("nodes", d.node),
        ("clusters", d.cluster),
    )  # fmt: skip
    for kind, data in kinds:
        if data:
            file = folder / kind / f"{data['name']}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            written.append(write_whole(file, yaml_text(data)))
    return written
