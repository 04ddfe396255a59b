"""``--fail-if``: conditions on metrics, read before the work and checked after it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from sim.errors import InputError, ThresholdError, UsageError
from sim.units import Dimension, parse_quantity

if TYPE_CHECKING:
    from sim.report.metrics import Metrics

__all__ = ["Threshold", "fail_if", "numbers_of", "read_thresholds"]

_CONDITION = re.compile(r"\s*(?P<key>\w[\w .-]*?)\s*(?P<op><=|>=|<|>)\s*(?P<value>\S.*?)\s*\Z")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}
_LABELS = {
    "throughput": "tokens_per_s",
    "bubble": "bubble_fraction",
    "cost": "cost_per_mtoken",
}
"""What tables call a metric -> its name, where they differ by more than the unit."""
_FRACTIONS = ("mfu", "hfu", "bubble_fraction")


class Threshold(msgspec.Struct, frozen=True):
    """One condition. Args: text as typed, metric's name, operator, limit in SI."""

    text: str
    metric: str
    operator: str
    limit: float


def read_thresholds(conditions: Sequence[str]) -> tuple[Threshold, ...]:
    """Read conditions before anything is worked out.

    Args:
        conditions: "METRIC OP VALUE", e.g. "step_time>2s" or "mfu<60%"; METRIC is a name of the
            JSON document, with or without its "_s", or what the table calls it.

    Raises:
        UsageError: a condition is malformed, names no metric, or has a value of the wrong unit.
    """
    from sim.report.metrics import Metrics

    kinds = (float, int, float | None)
    names = [f.name for f in msgspec.structs.fields(Metrics) if f.type in kinds]
    found = []
    for text in conditions:
        match = _CONDITION.match(text)
        if match is None:
            raise UsageError(f"--fail-if {text}: expected METRIC<VALUE, e.g. step_time>2s")
        key = re.sub(r"[\s.-]+", "_", match["key"].strip(" .").lower())
        metric = next((n for n in (key, key + "_s", _LABELS.get(key)) if n in names), None)
        if metric is None:
            known = " ".join(sorted(names))
            raise UsageError(f"--fail-if {text}: no metric {match['key']}; one of {known}")
        found.append(Threshold(text, metric, match["op"], _limit(text, metric, match["value"])))
    return tuple(found)


def _limit(text: str, metric: str, value: str) -> float:
    dimension: Dimension = "fraction" if metric in _FRACTIONS else "count"
    if metric.endswith("_s") and not metric.endswith("_per_s"):
        dimension = "seconds"
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return parse_quantity(value, dimension)
    except InputError as error:
        raise UsageError(f"--fail-if {text}: {error}") from None


def fail_if(conditions: Sequence[str], metrics: Mapping[str, float]) -> None:
    """Refuse a result that meets one of the conditions.

    Args:
        conditions: see ``read_thresholds``. metrics: name -> value in SI, those that are known.

    Raises:
        UsageError: a condition is wrong, or its metric unknown for this plan.
        ThresholdError: one holds.
    """
    for t in read_thresholds(conditions):
        if t.metric not in metrics:
            raise UsageError(f"--fail-if {t.text}: {t.metric} is unknown for this plan")
        if _COMPARE[t.operator](metrics[t.metric], t.limit):
            raise ThresholdError(f"{t.metric} is {metrics[t.metric]:.6g}: --fail-if {t.text} holds")


def numbers_of(metrics: Metrics) -> dict[str, float]:
    """The metrics that are numbers, by name."""
    values = msgspec.to_builtins(metrics)
    return {k: v for k, v in values.items() if isinstance(v, int | float)}
