"""Compared runs -> cases of a fit: amounts along their critical path and the groups they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sim.fidelity.amounts import Amounts
from sim.fidelity.fit import Case
from sim.fidelity.settings import Settings

__all__ = ["case_of", "levels_of", "precision_of", "weights_of"]


def precision_of(s: Settings) -> str:
    """Return a precision as far as efficiency depends on it: 8-bit recipes differ in scaling."""
    low = s.precision.lower()
    if "nvfp4" in low:
        return "nvfp4"
    if "mx" in low:
        return "mxfp8"
    return s.dtype


def levels_of(s: Settings, chips: str = "") -> dict[str, str]:
    """Return level -> group of a run.

    Args:
        s: settings of it. chips: name of one of its types; "" for its only one.
    """
    chips = chips or s.chips[0][0]
    kind = "moe" if s.moe else "dense"
    chip = f"{chips}/{precision_of(s)}"
    family = s.stack.split()[0]
    return {
        "chip": chip,
        "stack": s.stack,
        "kind": f"{s.stack}/{kind}",
        "place": f"{chip}/{family}",
        "axis": f"{family}/{'sharded' if s.zero >= 2 else 'whole'}",
        "core": f"{chips}/{family}",
        "traffic": f"{chips}/{family}/{kind}",
        "launch": f"{chips}/{family}",
        "tp": family,
        "ep": family,
        "sync": f"{family}/{'sharded' if s.zero >= 2 else 'whole'}",
    }


def case_of(s: Settings, amounts: Amounts, measured: float = 0.0, weight: float = 1.0) -> Case:
    """Return the case of a run. Args: s: settings. amounts: of its step. measured: [s]. weight."""
    return Case(
        amounts=amounts,
        measured=measured,
        weight=weight,
        plain=not s.flash,
        fp8=s.dtype == "fp8",
        fp4=precision_of(s) == "nvfp4",
        levels=levels_of(s),
    )


def weights_of(keys: Sequence[str]) -> list[float]:
    """Return a weight per run: copies of one plan count together as their square root."""
    count = Counter(keys)
    return [float(count[k] ** -0.25) for k in keys]
