"""Errors of compared runs: per metric, source and subset, and of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from sim.fidelity.evaluate import Compared, Pair

__all__ = ["ErrorRow", "MemoryRow", "error_rows", "memory_row", "statistics", "subsets_of"]

SUBSETS = ("all", "dense", "moe", "heterogeneous")
_GROUP = 3
"""Fewest runs of one model and chips whose order is scored."""


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one metric.

    Args:
        metric: name, or "time_like" for every time-like metric as a step time.
        source: family, or "all". subset: one of ``SUBSETS``. n: runs.
        median_ape, p90_ape: absolute error as a share of the measured value.
        bias: median of the signed error; above 0 the prediction is too high.
        spearman: rank correlation within groups of one source, model and chips, weighted by their
            runs; None without a group of three.
    """

    metric: str
    source: str
    subset: str
    n: int
    median_ape: float
    p90_ape: float
    bias: float
    spearman: float | None


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of memory.

    Args:
        n: peaks compared. median_ape, p90_ape: of them, None without any.
        false_fits: runs stated out of memory that "fit". false_oom: runs that ran and "do not fit".
        at_risk_share: share of the runs that ran which are "at risk".
        unscored_failures: runs that failed without a stated cause.
    """

    n: int
    median_ape: float | None
    p90_ape: float | None
    false_fits: int
    false_oom: int
    at_risk_share: float
    unscored_failures: int


def subsets_of(row: Compared) -> tuple[str, ...]:
    """Return the subsets a run belongs to."""
    assert row.settings is not None
    kind = "moe" if row.settings.moe else "dense"
    if row.run.heterogeneous:
        return ("all", "heterogeneous")
    return ("all", kind)


def error_rows(rows: Sequence[Compared]) -> list[ErrorRow]:
    """Return the errors of built runs, by metric, then source ("all" first), then subset."""
    pairs: dict[tuple[str, str, str], list[tuple[Compared, Pair]]] = defaultdict(list)
    for row in rows:
        if row.why:
            continue
        own = dict(row.metrics)
        if row.step is not None:
            own["time_like"] = row.step
        for metric, pair in own.items():
            for source in ("all", row.run.source):
                for subset in subsets_of(row):
                    pairs[metric, source, subset].append((row, pair))
    order = {"time_like": 0, "all": 0}
    keys = sorted(
        pairs,
        key=lambda k: (order.get(k[0], 1), k[0], order.get(k[1], 1), k[1], SUBSETS.index(k[2])),
    )
    return [
        _row(metric, source, subset, pairs[metric, source, subset])
        for metric, source, subset in keys
    ]


def _row(metric: str, source: str, subset: str, pairs: Sequence[tuple[Compared, Pair]]) -> ErrorRow:
    median, p90, bias = statistics([p for _, p in pairs])
    return ErrorRow(
        metric=metric, source=source, subset=subset, n=len(pairs), median_ape=median, p90_ape=p90,
        bias=bias, spearman=_ranks(pairs),
    )  # fmt: skip


def statistics(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """Return median and 90th percentile of the absolute error, and the median signed error."""
    signed = np.array([p.predicted / p.measured - 1.0 for p in pairs])
    size = np.abs(signed)
    return float(np.median(size)), float(np.percentile(size, 90)), float(np.median(signed))


def _ranks(pairs: Sequence[tuple[Compared, Pair]]) -> float | None:
    """Spearman within groups, weighted by their size; a group of equal values says nothing."""
    from scipy.stats import spearmanr

    groups: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    for row, pair in pairs:
        assert row.settings is not None
        groups[row.run.source, row.settings.model, row.run.text("chips")].append(pair)
    total, weight = 0.0, 0
    for members in groups.values():
        measured = [p.measured for p in members]
        predicted = [p.predicted for p in members]
        if len(members) < _GROUP or len(set(measured)) < 2 or len(set(predicted)) < 2:
            continue
        total += float(spearmanr(measured, predicted).statistic) * len(members)
        weight += len(members)
    return total / weight if weight else None


def memory_row(rows: Sequence[Compared]) -> MemoryRow:
    """Return the errors of memory of built runs."""
    built = [r for r in rows if not r.why]
    pairs = [r.memory for r in built if r.memory is not None]
    ran = [r for r in built if r.ran]
    median, p90, _ = statistics(pairs) if pairs else (None, None, None)
    return MemoryRow(
        n=len(pairs),
        median_ape=median,
        p90_ape=p90,
        false_fits=sum(r.stated_oom and r.verdict == "fits" for r in built),
        false_oom=sum(r.verdict == "does not fit" for r in ran),
        at_risk_share=sum(r.verdict == "at risk" for r in ran) / len(ran) if ran else 0.0,
        unscored_failures=sum(r.ran is False and not r.stated_oom for r in built),
    )
