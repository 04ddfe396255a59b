"""A calibration for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from real_runtime.calibrate import WIDEST, Calibration

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_calibration"]


def print_calibration(console: Console, c: Calibration) -> None:
    """Print every number before and after, and the errors of ops and steps."""
    lines = [f"{'':<44}{'before':>12}{'after':>12}{'factor':>10}"]
    for x in c.changes:
        after = (
            f"{x.after:>12.4g}{x.factor:>10.3f} +- {x.error:.1%}" if x.decided else "  not decided"
        )
        lines.append(f"{x.name:<44}{x.before:>12.4g}{after}")
    if any(x.after > 1 for x in c.changes if x.name.endswith("efficiency")):
        lines.append("an efficiency above 1: in the file it is 1, and the peak takes the rest")
    bound = ", ".join(x.name for x in c.changes if x.bound and x.decided)
    if bound:
        lines.append(f"as large as the cluster's file may say: {bound}")
    decided = [x for x in c.changes if x.decided]
    far = ", ".join(x.name for x in decided if abs(math.log(x.factor)) > 0.999 * WIDEST)
    if far:
        lines.append(f"at the end of the factors that are tried, so no fit: {far}")
    lines += [
        "",
        f"{'kind':<16}{'median error before':>20}{'after':>9}   of {c.ops} ops, {c.steps} steps",
    ]
    for kind, (old, new) in c.kinds.items():
        worse = "   worse" if kind in c.worse else ""
        lines.append(f"{kind:<16}{old:>20.1%}{new:>9.1%}{worse}")
    lines.append(f"{'all':<16}{c.error_before:>20.1%}{c.error_after:>9.1%}")
    lines.append("")
    for took, old, new in c.step_times_s:
        lines.append(
            f"step time {took * 1e3:,.1f} ms: before {old * 1e3:,.1f} ms ({old / took - 1:+.1%}), "
            f"after {new * 1e3:,.1f} ms ({new / took - 1:+.1%})"
        )
    lines.append("these runs were fitted; judge the profile on others")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
