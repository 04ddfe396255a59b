"""``hetlab doctor ops`` for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from real_runtime.ops.records import OpResult, OpsDocument

__all__ = ["print_ops"]


def print_ops(console: Console, found: OpsDocument) -> None:
    """Print what was found."""
    console.print(f"torch {found.torch} against {found.reference}, seed {found.seed}")
    table = Table(
        "operator", "device", "dtype", "", "mean rel. error", "worst, of tolerance", box=None
    )
    for r in found.results:
        state = "ok" if r.ok else "OFF"
        error = "-" if r.mean_relative_error is None else f"{r.mean_relative_error:.1e}"
        table.add_row(r.op, r.device, r.dtype, state, error, r.problem or _worst(r))
    console.print(table)
    stood = [r for r in found.results if r.fallback]
    if stood:
        console.print("missing, so something stood in (hetlab run has no such fallback):")
    for r in stood:
        way = "fp32" if r.fallback == "cast" else "the processor"
        console.print(f"  - {r.op} in {r.dtype} on {r.device}: {way}")
    for a in found.alignment:
        error = "not finite" if a.mean_relative_error is None else f"{a.mean_relative_error:.2%}"
        console.print(
            f"losses of {a.steps} steps, {a.device}:{a.dtype} against {a.against}: mean relative "
            f"error {error}, limit {a.limit:.2%}: {'ok' if a.ok else 'OFF'}"
        )
    for line in found.skipped:
        console.print(f"not checked: {line}")


def _worst(r: OpResult) -> str:
    w = r.worst
    assert w is not None
    share = "not finite" if w.allowed_share is None else f"{w.allowed_share:.0%}"
    where = f"{w.tensor}[{', '.join(map(str, w.index))}]"
    if r.ok:
        return f"{share} {where}"
    found, reference = ("not finite" if v is None else f"{v:.6g}" for v in (w.found, w.reference))
    return f"{share} {where}: {found}, reference {reference}"
