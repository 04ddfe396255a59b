"""Profiles and what a cluster file changes in them -> plain numbers with their origin.

A number comes from the first of: the cluster file, the profile, ``defaults.yaml``.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from sim.errors import InputError
from sim.hardware.catalog import Catalog
from sim.hardware.host import copy_rate, host_side
from sim.hardware.machine import Accelerator, Curve, HostSide, Rounds
from sim.spec.fields import Stated
from sim.spec.origins import Origin, tags
from sim.spec.profiles import (
    AcceleratorNumbers,
    LinkDoc,
    LinkUse,
    NicsDoc,
    NodeNumbers,
    ProcessorsDoc,
)

__all__ = ["LinkSpec", "NodeSpec", "resolve_accelerator", "resolve_link", "resolve_node"]

_GUESSES = ("assumed", "stand-in")
_FIELDS = {
    "memory": "memory_bytes",
    "memory_bandwidth": "memory_bytes_per_s",
    "gemm_efficiency": "gemm_efficiency",
    "gemm_half": "gemm_half",
    "attention_efficiency": "attention_efficiency",
    "head_half": "head_half",
    "keys_half": "keys_half",
    "memory_efficiency": "memory_efficiency",
    "optimizer_efficiency": "optimizer_efficiency",
    "kernel_overhead": "kernel_overhead_s",
    "routing_overhead": "routing_overhead_s",
    "step_overhead": "step_overhead_s",
    "misaligned": "misaligned",
    "tp_cost": "tp_cost",
    "ep_cost": "ep_cost",
    "cp_cost": "cp_cost",
    "sync_cost": "sync_cost",
    "compute_slowdown": "compute_slowdown",
    "comm_slowdown": "comm_slowdown",
    "context": "context_bytes",
    "allocator_gap": "allocator_gap",
    "price": "price_per_s",
}
"""Document key -> field of Accelerator."""
_POSITIVE = (
    "memory",
    "memory_bandwidth",
    "gemm_efficiency",
    "attention_efficiency",
    "memory_efficiency",
)


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A link type as used: fields as in sim.hardware.machine.Link.

    Args:
        half_duplex: both directions share the rate. guesses: what was assumed, in words.
    """

    rate: float
    latency: float = 0.0
    curve: Curve = ()
    flow_cap: float = 0.0
    price_per_byte: float = 0.0
    kind: str = ""
    collectives: Rounds = {}
    half_duplex: bool = False
    guesses: tuple[str, ...] = ()


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A node type as used: fields as in sim.hardware.machine.Node.

    Args:
        fabric: None in a node of one chip without one. nic: None in a node without NICs.
    """

    profile: str
    accelerator: str
    chips: int
    fabric: LinkSpec | None
    nic: LinkSpec | None
    nics: int
    chip_nic: tuple[int, ...]
    nonaffine_rate: float
    host_memory_bytes: float
    pcie_rate: float
    host: HostSide
    guesses: tuple[str, ...]


def resolve_accelerator(
    name: str, changes: AcceleratorNumbers | None, catalog: Catalog
) -> tuple[Accelerator, tuple[str, ...]]:
    """Return an accelerator type and what was assumed about it.

    Args:
        name: profile name. changes: numbers of the cluster file that win over the profile's.
        catalog: where profiles lie.

    Raises:
        InputError: unknown profile, or a number that must be positive is 0.
    """
    doc, defaults = catalog.accelerator(name), catalog.defaults()
    layers = ((changes, "cluster file"), (doc, doc.source), (defaults, defaults.source))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    assumed: list[str] = []
    for key, field in _FIELDS.items():
        for layer, origin in layers:
            number = getattr(layer, key) if layer is not None else None
            if number is not None:
                values[field] = number.value
                sources[field] = _origin(number, layer, origin)
                if _evidence(number, layer) in _GUESSES:
                    assumed.append(key)
                break
        if key in _POSITIVE and not values.get(field):
            raise InputError(f"{name}: must be positive", key=key, found="0")
    peaks = doc.peaks | ((changes.peaks or {}) if changes is not None else {})
    peaks.pop("int8", None)  # for people: no job computes in it
    for dtype, peak in peaks.items():
        if not peak.value:
            raise InputError(f"{name}: must be positive", key=f"peaks.{dtype}", found="0")
        changed = changes is not None and changes.peaks is not None and dtype in changes.peaks
        layer, origin = layers[0] if changed else layers[1]
        if _evidence(peak, layer) in _GUESSES:
            assumed.append(f"peaks.{dtype}")
        sources[f"peak_flops_per_s.{dtype}"] = _origin(peak, layer, origin)
    for flag in ("async_compute", "calibrated"):
        given = [v for layer, _ in layers if layer and (v := getattr(layer, flag)) is not None]
        values[flag] = bool(given[0])
    accelerator = Accelerator(
        name=name,
        vendor=doc.vendor,
        peak_flops_per_s={dtype: peak.value for dtype, peak in peaks.items()},
        sources=sources,
        **values,
    )
    return accelerator, (f"{name}: assumed {', '.join(assumed)}",) if assumed else ()


def resolve_link(
    use: LinkUse, role: str, catalog: Catalog, where: str, label: str = ""
) -> LinkSpec:
    """Return the numbers of a link as a node, site or cluster uses it.

    Args:
        use: profile name, numbers, or both. role: kind when neither names one.
        catalog: where profiles lie. where: key for messages. label: what people call it.

    Raises:
        InputError: unknown profile; a rate or cap that is not positive.
    """
    base: LinkDoc | None = catalog.link(use.profile) if use.profile else None
    found: dict[str, float] = {}
    guesses: list[str] = []
    for key in ("rate", "latency", "flow_cap", "price"):
        for layer in (use, base):
            number: Stated | None = getattr(layer, key) if layer is not None else None
            if number is not None:
                found[key] = number.value
                if _evidence(number, layer) in _GUESSES:
                    guesses.append(key)
                break
    for key in ("rate", "flow_cap"):
        if found.get(key) == 0.0:
            raise InputError(
                "must be positive", key=f"{where}.{key}", found="0", expected="a rate above 0"
            )
    points = use.curve or (base.curve if base is not None else ())
    if base is not None and points is base.curve and points:
        guesses += ["curve"] * (tags(base)["curve"].evidence in _GUESSES)
    rounds = use.collectives or (base.collectives if base is not None else {})
    kinds = [d.kind for d in (use, base) if d is not None and d.kind is not None]
    duplex = [d.duplex for d in (use, base) if d is not None and d.duplex is not None]
    name = label or use.profile or where
    return LinkSpec(
        rate=found["rate"],
        latency=found.get("latency", 0.0),
        curve=tuple((p.size, p.fraction) for p in points),
        flow_cap=found.get("flow_cap", 0.0),
        collectives={
            kind: (r.latency.value, tuple((p.size, p.fraction) for p in r.curve))
            for kind, r in rounds.items()
        },
        price_per_byte=found.get("price", 0.0),
        kind=kinds[0] if kinds else role,
        half_duplex=bool(duplex) and duplex[0] == "half",
        guesses=(f"link {name}: assumed {', '.join(guesses)}",) if guesses else (),
    )


def resolve_node(use: NodeNumbers, profile: str, catalog: Catalog, where: str) -> NodeSpec:
    """Return a node type as the cluster uses it.

    Args:
        use: numbers of the cluster file, which win over the profile's. profile: name or "".
        catalog: where profiles lie. where: key for messages.

    Raises:
        InputError: unknown profile; several chips without a fabric; an affinity of wrong length.
    """
    base = catalog.node(profile) if profile else None
    layers: list[NodeNumbers] = [use] if base is None else [use, base]

    def first(key: str) -> Any:
        return next((v for layer in layers if (v := getattr(layer, key)) is not None), None)

    chips: int = first("chips")
    fabric, nics = first("fabric"), first("nics")
    if fabric is None and chips > 1:
        raise InputError(
            f"{chips} chips and no link between them",
            key=f"{where}.fabric",
            expected="fabric: NAME of a link profile, or its numbers",
        )
    port = resolve_link(fabric, "fabric", catalog, f"{where}.fabric") if fabric else None
    with_nics = nics is not None and nics.count > 0
    nic = resolve_link(nics, "nic", catalog, f"{where}.nics") if with_nics else None
    memory, pcie = first("host_memory"), first("pcie")
    guesses = [*(port.guesses if port else ()), *(nic.guesses if nic else ())]
    if base is not None and base.stands_in_for:
        guesses.append(f"node {profile} stands in for {base.stands_in_for}")
    if base is not None:
        # Guesses inside fabric and NIC references were collected with the links above.
        own = [k for k, tag in tags(base).items() if tag.evidence in _GUESSES]
        if own:
            guesses.append(f"node {profile}: assumed {', '.join(own)}")
    return NodeSpec(
        profile=profile or f"{chips} x {first('accelerator')}",
        accelerator=first("accelerator"),
        chips=chips,
        fabric=port,
        nic=nic,
        nics=nics.count if with_nics else 0,
        chip_nic=_affinity(nics, chips, where) if with_nics else (),
        nonaffine_rate=nics.nonaffine_rate.value if with_nics and nics.nonaffine_rate else 0.0,
        host_memory_bytes=memory.value if memory is not None else 0.0,
        pcie_rate=copy_rate(pcie),
        host=host_side(pcie, first("host"), first("nvme"), _nominal(first("processors"), catalog)),
        guesses=tuple(guesses),
    )


def _nominal(processors: ProcessorsDoc | None, catalog: Catalog) -> tuple[float, float]:
    """Memory bandwidth [B/s] and peak [FLOP/s] of a node's processors, inf if it names none."""
    if processors is None:
        return math.inf, math.inf
    one = catalog.host(processors.profile)
    return one.memory_bandwidth.value * processors.sockets, one.flops.value * processors.sockets


def _affinity(nics: NicsDoc, chips: int, where: str) -> tuple[int, ...]:
    """NIC of each chip: as written, else contiguous runs of chips share a NIC."""
    if not nics.affinity:
        return tuple(chip * nics.count // chips for chip in range(chips))
    if len(nics.affinity) != chips:
        raise InputError(
            "affinity names the NIC of each chip",
            key=f"{where}.nics.affinity",
            found=f"{len(nics.affinity)} entries",
            expected=f"{chips} entries",
        )
    return nics.affinity


def _evidence(number: Stated, layer: Any) -> str:
    inherited = layer.evidence if isinstance(layer, Origin) else None
    return number.evidence or inherited or "found"


def _origin(number: Stated, layer: Any, origin: str) -> str:
    """One line saying where a number comes from."""
    confidence = number.confidence or (layer.confidence if isinstance(layer, Origin) else None)
    return f"{number.source or origin} [{_evidence(number, layer)}, {confidence or 'unstated'}]"
