"""Why a prediction may be off: what of a run is guessed or not modelled, in words."""

from __future__ import annotations

from sim.fidelity.evaluate import Compared

__all__ = ["reason_of", "worst"]


def reason_of(row: Compared) -> str:
    """Return the likeliest cause of a run's error, from its settings alone."""
    s, p = row.settings, row.predicted
    assert s is not None and p is not None
    causes = []
    if not row.complete:
        missing = ", ".join(f"{c} {v}" for c, v, _ in s.filled if c in _TELLING)
        causes.append(f"filled by rule: {missing}")
    if s.precision.lower() == "nvfp4":
        causes.append("4-bit products are costed as fp8")
    if s.moe and s.ep > 1:
        causes.append("no overlap of expert exchanges is stated")
    if row.run.source == "mbridge":
        causes.append("recomputed ops and CUDA graphs are not stated")
    causes += [n for n in s.notes if "layers from" in n or "heads" in n or "reaches" in n]
    if any("recalled" in n for n in s.notes):
        causes.append("recalled layer sizes")
    if row.run.heterogeneous:
        causes.append("links as entered in the source's scripts, not as measured")
    if not p.calibrated:
        causes.append("chip not calibrated")
    if s.seq >= 8192 and not causes:
        causes.append("attention core dominates")
    return "; ".join(causes) or "no setting is guessed: efficiency of the kernels"


_TELLING = ("tp", "pp", "dp", "mbs", "gbs", "seq", "precision", "ep", "recompute")


def worst(rows: list[Compared], count: int = 10) -> list[tuple[Compared, float, str]]:
    """Return the runs with the largest error: (run, signed error, reason)."""
    found = [
        (row, row.step.predicted / row.step.measured - 1.0, reason_of(row))
        for row in rows
        if row.step is not None and row.settings is not None and row.predicted is not None
    ]
    return sorted(found, key=lambda x: -abs(x[1]))[:count]
