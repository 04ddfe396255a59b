"""A comparison for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from real_runtime.compare import Comparison

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_comparison"]


def print_comparison(console: Console, c: Comparison, top: int) -> None:
    """Print step times, every kind, and the ``top`` ops that are off most."""
    for line in _lines(c, top):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(c: Comparison, top: int) -> list[str]:
    predicted, measured = c.predicted_step_time_s, c.measured_step_time_s
    lines = [
        f"step time      predicted {_ms(predicted)}, measured {_ms(measured)} (quartiles "
        f"{_ms(c.measured_step_low_s)} to {_ms(c.measured_step_high_s)}, {c.steps} steps): "
        f"{predicted / measured - 1:+.1%}",
        f"simulated on   {c.cluster}; ran on {c.ranks} x {c.device}, {c.dtype}",
        "",
        f"{'':<26}{'of a step, mean over ranks':^37}{'share of the step':^21}",
        f"{'kind':<18}{'ops':>6}{'predicted':>13}{'measured':>14}{'ratio':>9}"
        f"{'predicted':>13}{'measured':>10}",
    ]
    for k in c.kinds:
        ratio = f"{k.predicted_over_measured:.2f}" if k.predicted_over_measured else "-"
        lines.append(
            f"{k.kind:<18}{k.ops:>6}{_ms(k.predicted_s):>13}"
            f"{('<= ' if k.upper_bound else '') + _ms(k.measured_s):>14}{ratio:>9}"
            f"{k.predicted_share:>13.1%}{k.measured_share:>10.1%}"
        )
    if any(k.upper_bound for k in c.kinds):
        lines.append("<=: a transfer's end is known when a rank looks, so an upper bound")
    lines += ["", "off most:"]
    for r in c.ops[:top]:
        where = f"{r.rank}->{r.peer}" if r.peer >= 0 else f"rank {r.rank}" if r.rank >= 0 else ""
        lines.append(
            f"  {r.name:<22}{where:<10}predicted {_ms(r.predicted_s):>10}, measured "
            f"{_ms(r.measured_s):>10} ({_ms(r.measured_low_s)} to {_ms(r.measured_high_s)})"
        )
    for what, names in (("simulated", c.only_predicted), ("measured", c.only_measured)):
        if names:
            lines.append(f"only {what}: {', '.join(names[:8])}" + " ..." * (len(names) > 8))
    lines.append(f"plan {c.plan_hash}, seed {c.seed}, hetlab {c.version}")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.1f} ms"
