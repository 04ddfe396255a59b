"""What a run's chips column names -> a cluster document with nodes like those it ran on."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sim.fidelity.skip import Skip
from sim.hardware.catalog import Catalog

__all__ = ["HOMES", "Home", "chips_of", "cluster_of"]

_PART = re.compile(r"^(?P<name>[A-Za-z0-9][\w .-]*?)(?:\([^)]*\))? x (?P<count>\d+)\b(?P<rest>.*)$")


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """Where chips of one type usually live.

    Args:
        profile: accelerator profile. domain: most chips that one fabric joins, 0 for all.
        fabric: [GB/s] per chip and direction inside it. nics: network cards of a full domain.
        nic: [GB/s] of one card. cores: devices that a run's degrees count per chip.
    """

    profile: str
    domain: int = 8
    fabric: float = 31.0
    nics: int = 8
    nic: float = 50.0
    cores: int = 1


def _home(profile: str, domain: int, fabric: float, nics: int, nic: float, cores: int = 1) -> Home:
    return Home(profile=profile, domain=domain, fabric=fabric, nics=nics, nic=nic, cores=cores)


HOMES: dict[str, Home] = {
    "H100": _home("H100-SXM5-80GB", 8, 450, 8, 50),
    "H100-96GB": _home("H100-96GB-HBM2e", 8, 450, 8, 50),
    "H200": _home("H200-SXM", 8, 450, 8, 50),
    "H800": _home("H800-SXM5-80GB", 8, 200, 8, 50),
    "H800-80GB": _home("H800-SXM5-80GB", 8, 200, 8, 50),
    "A100-80GB": _home("A100-SXM4-80GB", 8, 300, 8, 25),
    "A100-80GB-SXM": _home("A100-SXM4-80GB", 8, 300, 8, 25),
    "A100-40GB-SXM": _home("A100-SXM4-40GB", 8, 300, 8, 25),
    "A800-80GB": _home("A800-SXM4-80GB", 8, 200, 8, 25),
    "B200": _home("B200-SXM", 8, 900, 8, 50),
    "B300": _home("B300-SXM", 8, 900, 8, 100),
    "GB200": _home("GB200-NVL72", 64, 900, 64, 50),
    "GB300": _home("GB300-NVL72", 64, 900, 64, 100),
    "GH200-96GB": _home("GH200-96GB", 4, 150, 4, 25),
    "V100-16GB": _home("V100-SXM2-16GB", 4, 21.25, 1, 1.25),
    "V100": _home("V100-SXM2-16GB", 4, 21.25, 1, 1.25),
    "T4": _home("T4", 4, 6.25, 1, 6.25),
    "RTX3090": _home("RTX-3090", 8, 31, 1, 1.25),
    "RTX4090": _home("RTX-4090", 8, 31, 1, 1.25),
    "RTX3080Ti": _home("RTX-3080-Ti", 8, 31, 1, 1.25),
    "RTX2080Ti": _home("RTX-2080-Ti", 8, 15.75, 1, 1.25),
    "TitanRTX": _home("Titan-RTX", 8, 15.75, 1, 1.25),
    "MI300X": _home("MI300X", 8, 448, 8, 50),
    "TPU-v5p": _home("TPU-v5p", 0, 300, 1, 50),
    "TPU-v6e": _home("TPU-v6e", 0, 180, 1, 50),
    "TPU-v7x": _home("TPU-v7x", 0, 600, 1, 50),
    "Trainium1": _home("Trainium1", 16, 192, 8, 12.5, 2),
    "Iluvatar BI150": _home("BI-V150", 8, 31, 1, 25),
    "Kunlunxin R300": _home("R300", 8, 100, 1, 25),
    "MetaX C500": _home("C500", 8, 100, 1, 25),
}
"""Name in the chips column -> home. Rates are those of the makers' tables, cards those of the usual
node; V100 and T4 are the cloud nodes of the AMP trials with the rates entered in its scripts. A
rack of 72 is taken as 64, since runs use multiples of that; a TPU slice is one fabric."""


def chips_of(text: str) -> tuple[tuple[str, int], ...]:
    """Return (name, count) of each part of a chips column.

    >>> chips_of("V100-16GB x 12 (3 x p3.8xlarge) + T4 x 4 (1 x g4dn.12xlarge)")
    (('V100-16GB', 12), ('T4', 4))

    Raises:
        Skip: the column gives no type or no count.
    """
    found = []
    for part in text.split(" + "):
        match = _PART.match(part.strip())
        if match is None:
            raise Skip(f"chips are not given as type x count: {text or 'empty'}")
        found.append((match["name"].strip(), int(match["count"])))
    return tuple(found)


def cluster_of(chips: tuple[tuple[str, int], ...], catalog: Catalog) -> dict[str, Any]:
    """Return a cluster document for chips.

    Args:
        chips: (name, count) in rank order. catalog: where profiles lie.

    Raises:
        Skip: a type has no home here, or no profile in the catalogue.
    """
    nodes: list[dict[str, Any]] = []
    own: list[dict[str, Any]] = []
    for name, count in chips:
        home = HOMES.get(name)
        if home is None:
            raise Skip(f"no profile of {name}")
        profile = _profile(home.profile, catalog)
        if home.cores > 1:
            own.append(_core(profile, home.cores, catalog))
            profile = own[-1]["name"]
        devices, domain = count * home.cores, (home.domain or count) * home.cores
        inside = next(n for n in range(min(domain, devices), 0, -1) if devices % n == 0)
        cards = max(1, home.nics * inside // domain)
        node: dict[str, Any] = {
            "accelerator": profile,
            "chips": inside,
            "count": devices // inside,
            "fabric": {"rate": f"{home.fabric / home.cores} GB/s", "latency": "2 us"},
        }
        if devices > inside or len(chips) > 1:
            node["nics"] = {"count": cards, "rate": f"{home.nic} GB/s", "latency": "5 us"}
        nodes.append(node)
    document: dict[str, Any] = {
        "name": " + ".join(f"{n} x {name}" for name, n in chips),
        "sites": [{"name": "site", "nodes": nodes}],
    }
    if own:
        document["profiles"] = {"accelerators": own}
    return document


def _profile(name: str, catalog: Catalog) -> str:
    """A profile's name, when the catalogue has it."""
    if name not in catalog.names("accelerators"):
        raise Skip(f"no profile of {name}")
    return name


def _core(profile: str, cores: int, catalog: Catalog) -> dict[str, Any]:
    """A profile of one core of a chip: its share of everything."""
    whole = catalog.accelerator(profile)
    doc = whole.model_dump(mode="json", exclude_defaults=True, exclude={"price", "origins"})
    doc["memory"] = f"{whole.memory.value / cores} B"
    doc["memory_bandwidth"] = f"{whole.memory_bandwidth.value / cores} B/s"
    doc["peaks"] = {dtype: f"{peak.value / cores} FLOP/s" for dtype, peak in whole.peaks.items()}
    return {**doc, "name": f"{profile} core"}
