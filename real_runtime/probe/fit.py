"""From measured times to the numbers of the cost model. Imports no torch.

Products: ``t = dispatch + max(2 m n k (1 + d/m)(1 + d/n)(1 + d/k) / rate, bytes / memory rate)``,
least squares of the logarithms over the dtype's rate and one ``d`` (sim.cost.compute). Links: the
shortest message gives the latency, the best size the rate, every size a point of the curve.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from real_runtime.errors import RunError
from real_runtime.probe.layers import corrected
from real_runtime.probe.records import Record, select, spread
from sim.hardware.machine import Accelerator
from sim.interop.link_records import Transfer, alone_curve, member_transfer

__all__ = ["Chip", "Number", "Round", "Wire", "fit_chip", "fit_wire"]

Floats = NDArray[np.float64]
FEWEST = 4
"""Shapes of a dtype that its rate is fitted to at least."""


class Number(msgspec.Struct, frozen=True):
    """A fitted number.

    Args:
        value: in SI. spread: quartile distance over the median, of the measurement or of the fit's
            residuals. count: measurements behind it. how: in words.
    """

    value: float
    spread: float
    count: int
    how: str


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator's numbers, see sim.hardware.machine.Accelerator.

    Args:
        dispatch: [s] of a kernel that does nothing; no number of a profile, for reports.
    """

    peaks: dict[str, Number]
    gemm_efficiency: Number
    gemm_half: Number
    attention_efficiency: Number
    memory_bandwidth: Number
    memory_efficiency: Number
    optimizer_efficiency: Number
    kernel_overhead: Number
    compute_slowdown: Number | None
    comm_slowdown: Number | None
    dispatch: Number


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One message at all sizes.

    Args:
        latency: [s] one way. curve: ((nbytes [B], share of the link's rate), ...).
        curve_spread: largest of the points' spreads.
    """

    latency: Number
    curve: tuple[tuple[float, float], ...]
    curve_spread: float


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """A link's numbers.

    Args:
        rate: [B/s], the best of transfers and collectives. transfer: a message alone.
        collectives: name -> one message of it between neighbours of a ring.
    """

    rate: Number
    transfer: Round
    collectives: dict[str, Round]


def fit_chip(records: Sequence[Record]) -> Chip:
    """Return the numbers of an accelerator.

    The rate of a dtype is that of a product of endless size; the peak is the largest of it and of
    the best shape measured, in all dtypes by the same factor, since a profile has one efficiency.
    Whole layers then correct what single kernels gave (real_runtime.probe.layers).

    Raises:
        RunError: a measurement is missing.
    """
    bandwidth = _bandwidth(records)
    dispatch = _only(records, "dispatch")
    rates, half, residual, best = _products(records, bandwidth.value, dispatch.value)
    share = min(1.0, *(rates[d] / best[d] for d in rates))
    n = len(select(records, "gemm"))
    peaks = {
        dtype: Number(rate / share, residual, n, "fitted to products of several shapes")
        for dtype, rate in rates.items()
    }
    cores = select(records, "attention")
    core_rates = [r.sizes["flops"] / r.median / peaks[r.name].value for r in cores]
    compute, comm = _slowdowns(records)
    chip = Chip(
        peaks=peaks,
        gemm_efficiency=Number(share, residual, n, "fitted with the peaks"),
        gemm_half=Number(half, residual, n, "fitted to products of several shapes"),
        attention_efficiency=_middle(core_rates, "share of the peak, middle over sizes"),
        memory_bandwidth=bandwidth,
        memory_efficiency=_reached(records, "norm", bandwidth.value),
        optimizer_efficiency=_reached(records, "adamw", bandwidth.value),
        kernel_overhead=_overhead(records),
        compute_slowdown=compute,
        comm_slowdown=comm,
        dispatch=dispatch,
    )
    return _in_layers(chip, records)


def _in_layers(chip: Chip, records: Sequence[Record]) -> Chip:
    """The same chip with what whole layers say of some of its numbers; shares stay below 1."""
    alone = Accelerator(
        name="", memory_bytes=1.0, memory_bytes_per_s=chip.memory_bandwidth.value,
        peak_flops_per_s={dtype: peak.value for dtype, peak in chip.peaks.items()},
        gemm_efficiency=chip.gemm_efficiency.value, gemm_half=chip.gemm_half.value,
        attention_efficiency=chip.attention_efficiency.value,
        memory_efficiency=chip.memory_efficiency.value,
        kernel_overhead_s=chip.kernel_overhead.value,
    )  # fmt: skip
    c = corrected(alone, records)
    if not c.count:
        return chip
    gemm, memory = alone.gemm_efficiency * c.gemm, alone.memory_efficiency * c.memory
    core = alone.attention_efficiency * c.attention
    peak, rate = max(gemm, core, 1.0), max(memory, 1.0)

    def of(before: Number, value: float, factor: float) -> Number:
        how = f"{before.how}; {factor:.3g} times that in whole layers"
        return Number(value, c.residual, c.count, how)

    bandwidth = chip.memory_bandwidth
    if rate > 1.0:
        bandwidth = of(bandwidth, bandwidth.value * rate, rate)
    return msgspec.structs.replace(
        chip,
        peaks={
            dtype: of(n, n.value * peak, peak) if peak > 1.0 else n
            for dtype, n in chip.peaks.items()
        },
        gemm_efficiency=of(chip.gemm_efficiency, gemm / peak, c.gemm),
        attention_efficiency=of(chip.attention_efficiency, core / peak, c.attention),
        memory_bandwidth=bandwidth,
        memory_efficiency=of(chip.memory_efficiency, memory / rate, c.memory),
        optimizer_efficiency=msgspec.structs.replace(
            chip.optimizer_efficiency, value=chip.optimizer_efficiency.value / rate
        ),
        kernel_overhead=of(
            chip.kernel_overhead, chip.kernel_overhead.value * c.overhead, c.overhead
        ),
    )


def fit_wire(records: Sequence[Record], ranks: int) -> Wire:
    """Return the numbers of the link between two ranks, transfers and each collective apart.

    Args:
        records: of the probe. ranks: that took part in its collectives.

    Raises:
        RunError: fewer than two sizes were measured.
    """
    pings = sorted(select(records, "ping"), key=lambda r: r.sizes["nbytes"])
    if len(pings) < 2:
        raise RunError("the probe measured fewer than two sizes of transfers")
    series = {"": [Transfer(nbytes=r.sizes["nbytes"], seconds=r.median) for r in pings]}
    of: dict[str, list[Record]] = {"": pings}
    for r in sorted(select(records, "collective"), key=lambda r: r.sizes["nbytes"]):
        of.setdefault(r.name, []).append(r)
        message = member_transfer(r.name, ranks, r.sizes["nbytes"], r.median)
        series.setdefault(r.name, []).append(message)
    fits = {
        name: alone_curve([t.nbytes for t in line], [t.seconds for t in line])
        for name, line in series.items()
        if len(line) > 1
    }
    best = max(fits, key=lambda name: fits[name][1])
    rate = fits[best][1]
    size = max(fits[best][2], key=lambda point: point[1])[0]
    rounds = {}
    for name, (latency, own, points) in fits.items():
        spreads = [spread(r) for r in of[name]]
        rounds[name] = Round(
            latency=Number(latency, spreads[0], of[name][0].repeats, "one way, the shortest"),
            curve=tuple((nbytes, share * own / rate) for nbytes, share in points),
            curve_spread=max(spreads),
        )
    typical = float(np.median([spread(r) for r in of[best]]))
    return Wire(
        rate=Number(rate, typical, pings[0].repeats, f"{best or 'transfer'} of {size:g} B"),
        transfer=rounds.pop(""),
        collectives=rounds,
    )


def _only(records: Sequence[Record], what: str, name: str | None = None) -> Number:
    found = select(records, what, name)
    if not found:
        raise RunError(f"the probe measured no {what}")
    r = found[0]
    return Number(r.median, spread(r), r.repeats, r.name)


def _middle(values: Sequence[float], how: str) -> Number:
    if not values:
        raise RunError(f"the probe measured nothing for: {how}")
    low, middle, high = np.percentile(values, (25, 50, 75)).tolist()
    return Number(min(middle, 1.0), (high - low) / middle, len(values), how)


def _bandwidth(records: Sequence[Record]) -> Number:
    """The copy of the largest tensors: what lies beyond the caches."""
    copies = select(records, "copy")
    if not copies:
        raise RunError("the probe measured no copy")
    r = max(copies, key=lambda r: r.sizes["nbytes"])
    return Number(r.sizes["nbytes"] / r.median, spread(r), r.repeats, "copy of large tensors")


def _reached(records: Sequence[Record], name: str, bandwidth: float) -> Number:
    """Counted traffic over time, middle over sizes."""
    found = [r.sizes["nbytes"] / r.median / bandwidth for r in select(records, "elementwise", name)]
    return _middle(found, f"counted traffic of {name} over its time, middle over sizes")


def _overhead(records: Sequence[Record]) -> Number:
    blocks = select(records, "block", "both")
    if not blocks:
        raise RunError("the probe measured no block")
    r = blocks[0]
    return Number(
        r.median / r.sizes["passes"], spread(r), r.repeats, "per pass of a block without work"
    )


def _slowdowns(records: Sequence[Record]) -> tuple[Number | None, Number | None]:
    of = {r.name: r for r in select(records, "overlap")}
    found: list[Number | None] = []
    for name, other in (("compute", "comm"), ("comm", "compute")):
        if name not in of:
            found.append(None)
            continue
        alone, beside = of[name], of[f"{name} beside {other}"]
        factor = max(beside.median / alone.median, 1.0)
        found.append(
            Number(factor, max(spread(alone), spread(beside)), alone.repeats, f"beside {other}")
        )
    return found[0], found[1]


def _products(
    records: Sequence[Record], memory_rate: float, dispatch: float
) -> tuple[dict[str, float], float, float, dict[str, float]]:
    """Rate of each dtype, ``d``, quartile distance of the residuals, best rate of each dtype."""
    from scipy.optimize import least_squares

    gemms = select(records, "gemm")
    names = [r.name.partition(" ")[0] for r in gemms]
    dtypes = list(dict.fromkeys(names))
    if not dtypes or min(names.count(d) for d in dtypes) < FEWEST:
        raise RunError("the probe measured too few products")
    code = np.array([dtypes.index(name) for name in names])
    m, n, k, size = (np.array([r.sizes[x] for r in gemms]) for x in ("m", "n", "k", "element"))
    weight = np.array([8.0 if "weight" in r.name else r.sizes["element"] for r in gemms])
    flops = 2.0 * m * n * k
    memory_s = ((m * k + m * n) * size + k * n * weight) / memory_rate
    took = np.array([r.median for r in gemms])
    rate = flops / took
    best = {d: float(rate[code == i].max()) for i, d in enumerate(dtypes)}

    def residuals(x: Floats) -> Floats:
        d = np.exp(x[-1])
        shape = (1 + d / m) * (1 + d / n) * (1 + d / k)
        compute_s = flops * shape / np.exp(x[code])
        model: Floats = np.log(dispatch + np.maximum(compute_s, memory_s)) - np.log(took)
        return model

    start = np.array([*(np.log(best[d]) for d in dtypes), np.log(8.0)])
    low = np.array([*(np.log(best[d] / 4) for d in dtypes), np.log(0.01)])
    high = np.array([*(np.log(best[d] * 16) for d in dtypes), np.log(1000.0)])
    found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    quartiles = np.percentile(residuals(found.x), (25, 75))
    rates = {d: float(np.exp(found.x[i])) for i, d in enumerate(dtypes)}
    return rates, float(np.exp(found.x[-1])), float(quartiles[1] - quartiles[0]), best
