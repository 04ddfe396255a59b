"""Fit rates to measured step times: few physical numbers with priors, and offsets shrunk to zero.

The log of each predicted step time is a sum over the amounts of its critical path, each divided by
a rate. Numbers are shared by all runs; on top, efficiency has an offset per accelerator and
precision, per software stack, per stack and kind of model, and per accelerator, precision and
source, each with a prior at zero. None belongs to a model or a run. Weighted least squares in logs
with a robust loss; derivatives are exact, so the fit is reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.compute import TILE
from sim.fidelity.amounts import Amounts
from sim.fidelity.robust import slope, soft

__all__ = ["PRIORS", "Case", "Fitted", "Number", "fit", "predict"]

Floats = NDArray[np.float64]


class Number(msgspec.Struct, frozen=True):
    """A shared number. Args: name. prior: best guess. spread: of its log. meaning: in words."""

    name: str
    prior: float
    spread: float
    meaning: str


PRIORS = (
    Number("gemm_half", 96.0, 0.7, "size at which a dimension of a product costs half"),
    Number("gemm_growth", 1.65, 0.3, "e to the power by which that size grows with the peak"),
    Number("head_half", 32.0, 0.7, "width of a head at which an attention core costs double"),
    Number("keys_half", 400.0, 0.7, "sequence length at which an attention core costs double"),
    Number("attention_efficiency", 0.45, 0.4, "share of the peak of a fused attention core"),
    Number("plain_attention", 0.45, 0.4, "share of the peak of an attention core that is not"),
    Number("memory_efficiency", 0.7, 0.3, "share of the memory bandwidth of elementwise work"),
    Number("kernel_overhead", 15e-6, 0.8, "[s] per block and pass"),
    Number("routing_overhead", 60e-6, 1.0, "[s] more per pass of an MoE block"),
    Number("misaligned", 0.8, 0.2, "share of the rate kept where no tile divides"),
    Number("step_overhead", 20e-3, 1.2, "[s] per step"),
    Number("optimizer_efficiency", 0.5, 0.5, "share of the memory bandwidth of the update"),
    Number("tp_cost", 1.2, 0.5, "tensor-parallel collectives over what the links say"),
    Number("ep_cost", 0.5, 0.7, "expert exchanges over what the links say"),
    Number("cp_cost", 0.6, 0.7, "context-parallel gathers over what the links say"),
    Number("sync_cost", 0.8, 0.6, "sums and gathers over replicas over what the links say"),
    Number("fp8", 0.7, 0.3, "efficiency of 8-bit products over that of 16-bit ones"),
    Number("fp4", 1.2, 0.3, "speed of 4-bit products over that of 8-bit ones"),
)
"""What every run shares. ``gemm_efficiency`` is ``BEST`` times the offsets' factor."""
BEST = 0.75
LEVELS: dict[str, tuple[str, float]] = {
    "chip": ("gemm", 0.15),
    "place": ("compute", 0.15),
    "stack": ("compute", 0.15),
    "kind": ("compute", 0.10),
    "axis": ("compute", 0.10),
    "core": ("core", 0.3),
    "traffic": ("traffic", 0.3),
    "launch": ("launch", 0.8),
    "tp": ("tp", 0.4),
    "ep": ("ep", 0.4),
    "sync": ("sync", 0.7),
}
"""Level -> what its log offsets act on, and their prior spread."""
FAR = 6.0
"""Spreads from its prior that no number or offset goes beyond, so that no step overflows."""
REFERENCE = 312e12
"""[FLOP/s] 16-bit peak at which ``gemm_half`` is that of the fit; it grows with the peak, since a
larger chip needs more tiles to be full."""
NOISE = 0.05
"""Spread of the logs that the robust loss starts at."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run to fit or predict.

    Args:
        amounts: of its step. measured: [s], 0 to predict only. weight: of its residual.
        plain: its attention is not fused. fp8, fp4: its products have 8 bits or fewer, or 4.
        levels: level -> name of the group it belongs to.
    """

    amounts: Amounts
    measured: float = 0.0
    weight: float = 1.0
    plain: bool = False
    fp8: bool = False
    fp4: bool = False
    levels: dict[str, str] = {}


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a fit.

    Args:
        numbers: shared. offsets: "level:name" -> log factor on the time of compute.
    """

    numbers: dict[str, float]
    offsets: dict[str, float]


class _Table:
    """Cases as arrays, fields as in Amounts; products of all of them in one table."""

    core: Floats
    core_heads: Floats
    core_keys: Floats
    traffic: Floats
    launches: Floats
    routed: Floats
    tp: Floats
    ep: Floats
    cp: Floats
    transfers: Floats
    sync: Floats
    optimizer: Floats
    steps: Floats
    rest: Floats
    core_peak: Floats
    memory: Floats

    def __init__(self, cases: Sequence[Case]) -> None:
        self.n = len(cases)
        rows = [c.amounts.gemms for c in cases]
        self.at = np.repeat(np.arange(self.n), [len(r) for r in rows])
        self.m, self.n_, self.k, self.count, weight, other, self.peak = np.concatenate(rows).T
        self.flops = 2.0 * self.m * self.n_ * self.k
        self.moved = (self.m * self.k + self.m * self.n_) * other + self.k * self.n_ * weight
        self.odd = (self.n_ % TILE > 0) | (self.k % TILE > 0)
        self.narrow = np.array([c.fp8 for c in cases])[self.at]
        self.tiny = np.array([c.fp4 for c in cases])[self.at]
        self.plain = np.array([c.plain for c in cases])
        for name in Amounts.__struct_fields__[1:]:
            setattr(self, name, np.array([getattr(c.amounts, name) for c in cases]))
        self.measured = np.array([c.measured for c in cases])
        self.weight = np.array([c.weight for c in cases])

    def sum(self, values: Floats) -> Floats:
        return np.asarray(np.bincount(self.at, values, minlength=self.n), np.float64)


def _times(
    t: _Table, x: dict[str, float], factors: dict[str, Floats]
) -> tuple[Floats, dict[str, Floats]]:
    """Step times [s], and their derivative by the log of each number and factor."""
    factor, launch = factors["compute"], factors["launch"]
    size = np.log(t.core_peak / REFERENCE)
    d = (x["gemm_half"] * np.exp(np.log(x["gemm_growth"]) * size))[t.at]
    best = (
        BEST
        * np.where(t.odd, x["misaligned"], 1.0)
        * np.where(t.narrow, x["fp8"], 1.0)
        * np.where(t.tiny, x["fp4"], 1.0)
    )
    lost = (1 + d / t.m) * (1 + d / t.n_) * (1 + d / t.k)
    busy = t.flops * lost / (t.peak * best)
    memory = t.memory * x["memory_efficiency"] / factors["traffic"]
    slow = t.moved / memory[t.at]
    bound = slow > busy
    gemm = factors["gemm"][t.at]
    products = t.count * np.where(bound, slow, busy) * gemm
    active = np.where(bound, 0.0, products)
    grows = d / (t.m + d) + d / (t.n_ + d) + d / (t.k + d)
    core = np.where(t.plain, x["plain_attention"], x["attention_efficiency"])
    core = factors["core"] / (t.core_peak * core)
    by_head = core * x["head_half"] * t.core_heads
    by_keys = core * x["keys_half"] * t.core_keys
    core = core * t.core + by_head + by_keys
    traffic = t.traffic / memory
    floor = t.sum(np.where(bound, products, 0.0))
    compute = (t.sum(products) + core + traffic) * factor
    parts = {
        "kernel_overhead": (t.launches + t.routed) * x["kernel_overhead"] * launch,
        "routing_overhead": t.routed * x["routing_overhead"] * launch,
        "step_overhead": t.steps * x["step_overhead"],
        "tp_cost": t.tp * x["tp_cost"] * factors["tp"],
        "ep_cost": t.ep * x["ep_cost"] * factors["ep"],
        "cp_cost": t.cp * x["cp_cost"],
        "sync_cost": t.sync * x["sync_cost"] * factors["sync"],
    }
    update = t.optimizer / (t.memory * x["optimizer_efficiency"])
    total = compute + sum(parts.values()) + update + t.transfers + t.rest
    slopes = parts | {
        "gemm_half": t.sum(active * grows) * factor,
        "gemm_growth": t.sum(active * grows) * factor * size,
        "head_half": by_head * factor,
        "keys_half": by_keys * factor,
        "misaligned": -t.sum(active * t.odd) * factor,
        "fp8": -t.sum(active * t.narrow) * factor,
        "fp4": -t.sum(active * t.tiny) * factor,
        "attention_efficiency": -np.where(t.plain, 0.0, core) * factor,
        "plain_attention": -np.where(t.plain, core, 0.0) * factor,
        "memory_efficiency": -(floor + traffic) * factor,
        "optimizer_efficiency": -update,
        "compute": compute,
        "core": core * factor,
        "traffic": (floor + traffic) * factor,
        "gemm": t.sum(products) * factor,
        "tp": parts["tp_cost"],
        "ep": parts["ep_cost"],
        "sync": parts["sync_cost"],
        "launch": parts["kernel_overhead"] + parts["routing_overhead"],
    }
    return np.asarray(total), slopes


def _names(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Groups of all levels that occur."""
    found = {(level, c.levels[level]): None for level in LEVELS for c in cases}
    return list(found)


def fit(cases: Sequence[Case], priors: Sequence[Number] = PRIORS) -> Fitted:
    """Fit the shared numbers and the offsets.

    Args:
        cases: with measured times; none leaves the priors. priors: of the shared numbers.
    """
    from scipy.optimize import least_squares

    if not cases:
        return Fitted(numbers={p.name: p.prior for p in priors}, offsets={})
    table, groups = _Table(cases), _names(cases)
    member = np.zeros((len(cases), len(groups)))
    for g, (level, name) in enumerate(groups):
        member[:, g] = [c.levels[level] == name for c in cases]
    spread = np.array([p.spread for p in priors] + [LEVELS[level][1] for level, _ in groups])
    first = np.array([np.log(p.prior) for p in priors] + [0.0] * len(groups))
    at = len(priors)
    kind = _kinds([level for level, _ in groups])
    weight = table.weight / NOISE

    def parts(z: Floats) -> tuple[Floats, dict[str, Floats]]:
        x = {p.name: float(np.exp(v)) for p, v in zip(priors, z[:at], strict=True)}
        return _times(table, x, _factors(member @ (z[at:, None] * kind)))

    def residual(z: Floats) -> Floats:
        total, _ = parts(z)
        data = weight * np.log(total / table.measured)
        # The loss is robust for runs and square for priors: rescale these so that it is.
        return np.concatenate([soft(data), (z - first) / spread])

    def jacobian(z: Floats) -> Floats:
        total, slopes = parts(z)
        data = weight * np.log(total / table.measured)
        columns = [slopes[p.name] / total for p in priors]
        each = np.column_stack([slopes[k] / total for k in _FACTORS])
        own = np.column_stack([*columns, member * (each @ kind.T)])
        own = own * (weight * slope(data))[:, None]
        return np.concatenate([own, np.diag(1.0 / spread)])

    found = least_squares(
        residual, first, jacobian, bounds=(first - FAR * spread, first + FAR * spread),
        ftol=1e-5, max_nfev=100,
    )  # fmt: skip
    return Fitted(
        numbers={p.name: float(np.exp(v)) for p, v in zip(priors, found.x[:at], strict=True)},
        offsets={
            f"{level}:{name}": float(v)
            for (level, name), v in zip(groups, found.x[at:], strict=True)
        },
    )


_FACTORS = ("compute", "gemm", "core", "traffic", "launch", "tp", "ep", "sync")


def _kinds(levels: Sequence[str]) -> Floats:
    """Which factor each offset acts on, shape (groups, factors)."""
    acts = [_FACTORS.index(LEVELS[level][0]) for level in levels]
    return np.eye(len(_FACTORS))[acts]


def _factors(logs: Floats) -> dict[str, Floats]:
    return dict(zip(_FACTORS, np.exp(logs).T, strict=True))


def predict(fitted: Fitted, cases: Sequence[Case]) -> Floats:
    """Return the step times of cases [s]; an unknown group has no offset."""
    if not cases:
        return np.zeros(0)
    kind = _kinds(list(LEVELS))
    logs = [
        [fitted.offsets.get(f"{level}:{c.levels[level]}", 0.0) for level in LEVELS] for c in cases
    ]
    return _times(_Table(cases), fitted.numbers, _factors(np.array(logs) @ kind))[0]
