"""What no profile can truthfully say: sparse peaks, numbers outside their class, invented origins.

Limits are wide on purpose: they are there for slips of a unit or of a factor of two, not for taste.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from sim.errors import InputError
from sim.hardware.catalog import Catalog
from sim.spec.cluster import ClusterDoc
from sim.spec.origins import Origin, missing_sources, tags
from sim.spec.profiles import AcceleratorDoc, CurvePoint, LinkDoc, NodeDoc, ProcessorDoc
from sim.units import Dimension, format_quantity

__all__ = ["implausible"]

Profile = AcceleratorDoc | LinkDoc | ProcessorDoc | NodeDoc | ClusterDoc

_CLASSES: tuple[tuple[str, float], ...] = (
    (r"pcie3_x16", 15.76e9),
    (r"pcie4_x16", 31.51e9),
    (r"pcie5_x16", 63.02e9),
    (r"pcie6_x16", 126.1e9),
    (r"nvlink1", 80e9),
    (r"nvlink2", 150e9),
    (r"nvlink3", 300e9),
    (r"nvlink4", 450e9),
    (r"nvlink5", 900e9),
)
"""Start of a link's name -> what a chip's links of that generation carry one way [B/s]."""
_KIND_RATE = {"fabric": 4e12, "pcie": 256e9, "nic": 200e9, "wan": 12.5e12, "uplink": 1e15}
_KIND_LATENCY = {"fabric": 100e-6, "pcie": 100e-6, "nic": 10e-3, "uplink": 10e-3, "wan": 1.0}
_WIDTHS = (("fp32",), ("tf32",), ("bf16", "fp16"), ("fp8",))
"""Dtypes of falling width; a narrower one is never slower on tensor cores."""
_STEP = {"fp8": 2.2, "int8": 4.5}
"""Most that a dtype's dense peak is of the 16-bit one; twice that is the figure with sparsity."""
_SPARSE = 1.9
_NOISE = 0.98
"""Measured curves may say of a larger message that it took this share of a smaller one's time."""


def implausible(doc: Profile, catalog: Catalog, sources: bool = True) -> list[InputError]:
    """Find what a profile cannot mean; the errors name keys, not files.

    Args:
        doc: a document that is valid by itself. catalog: where the profiles it names lie.
        sources: every number needs one.
    """
    found: list[InputError] = []
    if isinstance(doc, Origin):
        found += [*(_missing(doc) if sources else ()), *_origins(doc)]
    if isinstance(doc, AcceleratorDoc):
        found += [*_accelerator(doc), *_sparse(doc, catalog)]
    elif isinstance(doc, LinkDoc):
        found += _link(doc)
    elif isinstance(doc, ProcessorDoc):
        found += _processor(doc)
    elif isinstance(doc, NodeDoc):
        found += _node(doc, catalog)
    return found


def _missing(doc: Origin) -> Iterator[InputError]:
    for key in missing_sources(doc):
        yield InputError(
            "a number without source or confidence",
            key=key,
            expected="source and confidence on the number or on the document",
        )


def _origins(doc: Origin) -> Iterator[InputError]:
    """Origins that contradict themselves."""
    for key, tag in tags(doc).items():
        guess = tag.evidence in ("remembered", "assumed", "stand-in")
        if tag.evidence == "found" and tag.source.startswith(("recalled", "hetlab's own")):
            yield InputError(
                "called found, but its source was not read",
                key=key,
                found=tag.source,
                expected="evidence: remembered or assumed",
            )
        if guess and tag.confidence == "high":
            yield InputError(
                f"{tag.evidence} with high confidence", key=key, expected="medium or low"
            )


def _within(
    key: str, value: float | None, low: float, high: float, dimension: Dimension
) -> Iterator[InputError]:
    if value is not None and not low <= value <= high:
        low_text, high_text = format_quantity(low, dimension), format_quantity(high, dimension)
        yield InputError(
            "an impossible value",
            key=key,
            found=format_quantity(value, dimension),
            expected=f"{low_text} to {high_text}",
        )


def _accelerator(doc: AcceleratorDoc) -> Iterator[InputError]:
    memory, rate = doc.memory.value, doc.memory_bandwidth.value
    slips = [
        *_within("memory", memory, 1e9, 4e12, "bytes"),
        *_within("memory_bandwidth", rate, 1e9, 50e12, "bytes/s"),
    ]
    yield from slips
    if not slips and not 1e-3 <= memory / rate <= 10.0:
        yield InputError(
            "memory and its bandwidth do not belong together",
            key="memory_bandwidth",
            found=f"the whole memory is read in {format_quantity(memory / rate, 'seconds')}",
            expected="1 ms to 10 s",
        )
    for dtype, peak in doc.peaks.items():
        yield from _within(f"peaks.{dtype}", peak.value, 1e9, 1e17, "FLOP/s")
    wider = ("", 0.0)
    for dtypes in _WIDTHS:
        peaks = {d: doc.peaks[d].value for d in dtypes if d in doc.peaks}
        if not peaks:
            continue
        name, best = max(peaks.items(), key=lambda item: item[1])
        if best < wider[1]:
            yield InputError(
                f"slower than the wider {wider[0]}",
                key=f"peaks.{name}",
                found=format_quantity(best, "FLOP/s"),
                expected=f"at least {format_quantity(wider[1], 'FLOP/s')}",
            )
        wider = (name, best)
    yield from _within("power", doc.power.value if doc.power else None, 1.0, 20e3, "W")
    yield from _within("price", doc.price.value if doc.price else None, 0.0, 200 / 3600, "USD/s")


def _sparse(doc: AcceleratorDoc, catalog: Catalog) -> Iterator[InputError]:
    """Peaks that are twice what the chip's other peaks, or a bundled chip of its name, allow."""
    half = max((doc.peaks[d].value for d in ("bf16", "fp16") if d in doc.peaks), default=0.0)
    for dtype, step in _STEP.items():
        peak = doc.peaks.get(dtype)  # type: ignore[call-overload]
        if half and peak is not None and peak.value > step * half:
            yield _sparse_error(dtype, peak.value, step * half, "at most")
    stem = doc.name.lower()
    alike = [n for n in catalog.names("accelerators") if n.lower().startswith(stem + "-")]
    for dtype, peak in doc.peaks.items():
        others = [
            other.peaks[dtype].value
            for other in map(catalog.accelerator, alike)
            if dtype in other.peaks
        ]
        if others and peak.value >= _SPARSE * max(others):
            yield _sparse_error(dtype, peak.value, max(others), "about")


def _sparse_error(dtype: str, found: float, dense: float, word: str) -> InputError:
    return InputError(
        "this peak counts structured sparsity; peaks are dense peaks",
        key=f"peaks.{dtype}",
        found=format_quantity(found, "FLOP/s"),
        expected=f"{word} {format_quantity(dense, 'FLOP/s')}",
    )


def _link(doc: LinkDoc) -> Iterator[InputError]:
    kind = doc.kind or "nic"
    rate = doc.rate.value
    yield from _within("rate", rate, 1e3, _KIND_RATE[kind], "bytes/s")
    limit, name = _class_rate(doc.name)
    if rate > limit:
        yield InputError(
            f"more than a link of its class ({name}) carries one way",
            key="rate",
            found=format_quantity(rate, "bytes/s"),
            expected=f"at most {format_quantity(limit, 'bytes/s')}; rates are per direction",
        )
    latencies = {"latency": doc.latency} | {
        f"collectives.{k}.latency": r.latency for k, r in doc.collectives.items()
    }
    for key, latency in latencies.items():
        if latency is not None:
            yield from _within(key, latency.value, 0.0, _KIND_LATENCY[kind], "seconds")
    if doc.flow_cap is not None and doc.flow_cap.value > rate:
        yield InputError(
            "one flow gets more than the link has",
            key="flow_cap",
            found=format_quantity(doc.flow_cap.value, "bytes/s"),
            expected=f"at most {format_quantity(rate, 'bytes/s')}",
        )
    yield from _within("price", doc.price.value if doc.price else None, 0.0, 1e-9, "USD/B")
    curves = {"curve": doc.curve} | {
        f"collectives.{k}.curve": r.curve for k, r in doc.collectives.items()
    }
    for key, curve in curves.items():
        yield from _curve(key, curve)


def _class_rate(name: str) -> tuple[float, str]:
    """What the class that a link's name starts or ends with carries [B/s], and the class."""
    for pattern, limit in _CLASSES:
        if re.match(rf"{pattern}(_|$)", name):
            return limit, pattern
    bits = re.search(r"_(\d+)g$", name)
    if bits:
        return float(bits[1]) * 1e9 / 8, f"{bits[1]} Gb/s"
    return float("inf"), ""


def _curve(key: str, curve: Sequence[CurvePoint]) -> Iterator[InputError]:
    for before, after in pairwise(curve):
        if after.size / after.fraction < _NOISE * before.size / before.fraction:
            yield InputError(
                "a larger message takes less time",
                key=key,
                found=f"{format_quantity(before.size, 'bytes')} at {before.fraction:.4g}, "
                f"{format_quantity(after.size, 'bytes')} at {after.fraction:.4g}",
                expected="size / fraction that does not fall",
            )


def _processor(doc: ProcessorDoc) -> Iterator[InputError]:
    yield from _within("cores", float(doc.cores), 1, 1024, "count")
    yield from _within("memory_bandwidth", doc.memory_bandwidth.value, 1e9, 5e12, "bytes/s")
    yield from _within("flops", doc.flops.value, 1e9, 1e14, "FLOP/s")
    yield from _within("power", doc.power.value if doc.power else None, 1.0, 2e3, "W")


def _node(doc: NodeDoc, catalog: Catalog) -> Iterator[InputError]:
    yield from _within("chips", float(doc.chips), 1, 10_000, "count")
    memory = doc.host_memory.value if doc.host_memory else None
    yield from _within("host_memory", memory, 1e9, 1e15, "bytes")
    if doc.pcie is not None:
        yield from _within("pcie.rate", doc.pcie.rate.value, 1e8, 500e9, "bytes/s")
    if doc.nics is not None:
        yield from _within("nics.count", float(doc.nics.count), 0, 4 * doc.chips, "count")
    named: list[tuple[str, Callable[[str], object], str]] = [
        ("accelerator", catalog.accelerator, doc.accelerator)
    ]
    for port, use in (("fabric", doc.fabric), ("nics", doc.nics)):
        if use is not None and use.profile:
            named.append((f"{port}.profile", catalog.link, use.profile))
    if doc.processors is not None:
        named.append(("processors.profile", catalog.host, doc.processors.profile))
    for key, find, name in named:
        try:
            find(name)
        except InputError as error:
            yield InputError(error.message, key=key, found=name, expected=error.expected)
    if doc.nics is not None and doc.nics.nonaffine_rate is not None:
        whole = doc.nics.rate or (
            catalog.link(doc.nics.profile).rate
            if doc.nics.profile in catalog.names("links")
            else None
        )
        if whole is not None and doc.nics.nonaffine_rate.value > whole.value:
            yield InputError(
                "a flow through another chip's NIC gets more than the NIC has",
                key="nics.nonaffine_rate",
                found=format_quantity(doc.nics.nonaffine_rate.value, "bytes/s"),
                expected=f"at most {format_quantity(whole.value, 'bytes/s')}",
            )
