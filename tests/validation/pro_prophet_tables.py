"""Pro-Prophet's tables beside ours: run with ``python -m tests.validation.pro_prophet_tables``.

Speedups over static expert parallelism, which the paper runs as DeepSpeed-MoE, for its models and
clusters. One number per (model, k) is fitted, how uneven the experts are, and only to FasterMoE on
4 HPNV nodes; Pro-Prophet's and our columns, and everything on other clusters, are predictions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from strategies.expert.routing import load_ratio, statistics
from tests.validation.pro_prophet_cases import (
    BALANCING_SHARE,
    BRIDGE_3090,
    CLUSTERS,
    HPNV4,
    HPWNV4,
    HPWNV8,
    LPWNV2,
    MODELS,
    NOMINAL,
    PORT_2080,
    PORT_3090,
    RANGES,
    REASONS,
    Cluster,
)
from tests.validation.pro_prophet_cells import HIGH, LOW, Cell, cells, fits, inside
from tests.validation.pro_prophet_runs import (
    CONCENTRATION,
    LAYER_STEPS,
    NAMES,
    PHI,
    PLAN_S,
    STEP,
    STRICT,
    costs_of,
    fitted,
    routing_of,
    run,
    speedup,
)
from tests.validation.pro_prophet_trace import trace_lines

FASTER = 1.03


def setting_lines(exponents: dict[tuple[str, int], float]) -> list[str]:
    """What the generator is set to, and how uneven that is."""
    lines = [
        f"generator: AR(1) {PHI} with steps of {STEP} in log share, Dirichlet {CONCENTRATION:g},",
        "  Zipf exponent by model and k, from FasterMoE on 4 HPNV nodes alone:",
        "  model k  Zipf   top 3  bottom 3  fullest/mean   (published: > 50 %, < 5 %)",
    ]
    for (model, k), zipf in exponents.items():
        s = statistics(routing_of(HPNV4, model, k, zipf), HPNV4.devices)
        lines.append(
            f"  {model:5} {k}  {zipf:.3f}  {s.top3:.2f}   {s.bottom3:.3f}     {s.load.mean:.2f}"
        )
    return lines


def cell_lines(found: Iterable[Cell]) -> list[str]:
    """One line per cell, the printed number behind ours, and their ratio."""
    lines = [
        "                   FasterMoE          Pro-Prophet        PP/FM        spread  over PP",
    ]
    for c in found:
        head = f"{c.cluster.name:8} k={c.k} {c.model:3}"
        gain = f"{c.spread:5.2f}   {c.spread / c.pro_prophet:.3f}"
        ours = (c.fastermoe, c.pro_prophet, c.pro_prophet / c.fastermoe)
        if c.printed is None:
            text = "   ".join(f"{x:.2f}           " for x in ours[:2]) + f"   {ours[2]:.2f}       "
        else:
            fast, prophet = c.printed
            text = " ".join(
                f"{mine:.2f} / {theirs:.2f} {_mark(mine / theirs)}  "
                for mine, theirs in zip(ours, (fast, prophet, prophet / fast), strict=True)
            )
        lines.append(f"{head} {text} {gain}")
    return lines


def _mark(ratio: float) -> str:
    return f"{ratio:.2f}" + (" " if LOW <= ratio <= HIGH else "!")


def summary_lines(found: Sequence[Cell]) -> list[str]:
    """How many printed cells are met, and how ours stands to Pro-Prophet's."""
    printed = [c for c in found if c.printed]
    good, total = inside(printed, ("FasterMoE", "Pro-Prophet"))
    predicted = [c for c in printed if c.cluster.name != HPNV4.name]
    free = [inside(printed, ("Pro-Prophet",)), inside(predicted, ("FasterMoE",))]
    with_ratio = inside(printed, ("FasterMoE", "Pro-Prophet", "PP/FM"))
    gains = np.array([c.spread / c.pro_prophet for c in found])
    lines = [
        f"printed cells within {LOW} to {HIGH}: {good} of {total}; without the fitted column "
        f"{sum(a for a, _ in free)} of {sum(b for _, b in free)}; "
        f"with PP/FM {with_ratio[0]} of {with_ratio[1]}",
        f"spread slower than Pro-Prophet in {int((gains < 1).sum())} of {gains.size} cells, "
        f">= 3 % faster in {int((gains >= FASTER).sum())}; "
        f"smallest {gains.min():.3f}, median {np.median(gains):.3f}, largest {gains.max():.3f}",
    ]
    for c in printed:
        lines += [
            f"  outside: {c.cluster.name} k={c.k} {c.model} {name}: {ratio:.2f}; {_reason(c)}"
            for name, ratio in c.ratios.items()
            if not LOW <= ratio <= HIGH
        ]
    for k, (over_static, over_fast, mean) in RANGES.items():
        some = [c for c in found if c.k == k and c.cluster in (HPWNV4, HPWNV8)]
        if some:
            ours = [c.pro_prophet for c in some]
            rates = [c.pro_prophet / c.fastermoe for c in some]
            lines.append(
                f"HPWNV k={k}: Pro-Prophet {min(ours):.2f} to {max(ours):.2f} "
                f"(published {over_static[0]} to {over_static[1]}), over FasterMoE "
                f"{min(rates):.2f} to {max(rates):.2f}, mean {np.mean(rates):.2f} "
                f"(published {'up' if k == 1 else over_fast[0]} to {over_fast[1]}"
                f"{f', mean {mean}' if mean else ''})"
            )
    return lines


def _reason(cell: Cell) -> str:
    return REASONS.get((cell.cluster.name, cell.k, cell.model), "we do not know why")


def period_lines(model: str, k: int, zipf: float, periods: Sequence[int] = (1, 2, 5)) -> list[str]:
    """What longer re-plan periods cost."""
    lines = [f"steps between searches, {HPNV4.name} {model} k={k}: mean step [ms], fullest/mean"]
    for name in ("pro-prophet", "spread"):
        runs = [run(HPNV4, model, k, zipf, name, period) for period in periods]
        text = ", ".join(
            f"{period}: {1e3 * float(x.seconds[1:].mean()):.1f} {load_ratio(x.loads[1:]).mean:.2f}"
            for period, x in zip(periods, runs, strict=True)
        )
        lines.append(f"  {name:11} {text}")
    return lines


def hot_lines(exponents: dict[tuple[str, int], float]) -> list[str]:
    """How an exponent that is kept makes more experts more uneven."""
    lines = ["share of the hottest expert under the same exponent: 8, 16 and 32 experts"]
    for (model, k), zipf in exponents.items():
        shares = [
            1.0 / float((np.arange(1, c.devices + 1) ** -zipf).sum())
            for c in (LPWNV2, HPNV4, HPWNV8)
        ]
        over = [
            f"{s:.2f} ({s * c.devices:.1f}x)"
            for s, c in zip(shares, (LPWNV2, HPNV4, HPWNV8), strict=True)
        ]
        lines.append(f"  {model:3} k={k} " + "  ".join(over))
    return lines


def strict_line(found: Sequence[Cell]) -> str:
    """Pro-Prophet without the released tolerance, beside ours and the printed numbers."""
    ours = [speedup(c.cluster, c.model, c.k, c.zipf, STRICT) for c in found]
    gains = np.array([c.spread / x for c, x in zip(found, ours, strict=True)])
    pairs = zip(found, ours, strict=True)
    ratios = [x / c.printed[1] for c, x in pairs if c.printed]
    good = sum(LOW <= r <= HIGH for r in ratios)
    return (
        f"{STRICT} (released 3): {good} of {len(ratios)} printed cells of Pro-Prophet within {LOW} "
        f"to {HIGH}, {min(ratios):.2f} to {max(ratios):.2f}; spread slower in "
        f"{int((gains < 1).sum())} of {gains.size}, >= 3 % faster in "
        f"{int((gains >= FASTER).sum())}; {gains.min():.3f} to {gains.max():.3f}"
    )


def nominal_line() -> str:
    """How much hangs on the rate of the PCIe ports."""
    wide, small = (msgspec.structs.replace(c, port=NOMINAL) for c in (HPNV4, LPWNV2))
    exponents = {(m, k): fitted(m, k, wide) for k in (1, 2) for m in MODELS}
    found = cells(exponents, (wide, small), "none")
    good, total = inside(found, ("FasterMoE", "Pro-Prophet"))
    ratios = [r for c in found for r in c.ratios.values()]
    return (
        f"with ports of {NOMINAL} (PCIe 3.0 x16, nominal), fitted anew: {good} of {total} printed "
        f"cells within {LOW} to {HIGH}; ratios, PP/FM among them, {min(ratios):.2f} to "
        f"{max(ratios):.2f}"
    )


def step_lines(exponents: dict[tuple[str, int], float], cluster: Cluster) -> list[str]:
    """What steps are made of."""
    lines = [
        f"steps on {cluster.name} [ms], the first left out; copies are of the fullest device",
        "  model k balancer       p50    p95   a2a experts exposed plan fullest/mean RB  copies MB",
    ]
    for (model, k), zipf in exponents.items():
        for name in NAMES:
            x = run(cluster, model, k, zipf, name)
            parts = (x.exchange_s, x.expert_s, x.exposed_s, x.plan_s)
            a2a, experts, exposed, plan = (1e3 * float(p[1:].mean()) for p in parts)
            fullest = load_ratio(x.loads[1:]).mean
            p50, p95 = 1e3 * np.quantile(x.seconds[1:], (0.5, 0.95))
            lines.append(
                f"  {model:5} {k} {name:11} {p50:6.0f} {p95:6.0f} {a2a:5.0f} "
                f"{experts:5.0f}  {exposed:6.1f}  {plan:4.1f}    {fullest:5.2f}    "
                f"{float(np.median(x.rb)):5.1f}  {x.copy_bytes.max() / 1e6:6.0f}"
            )
        dense = costs_of(cluster, model, k, 0.0)
        lines.append(
            f"        dense: sum of gradients {1e3 * dense.sync_s:.0f}, "
            f"update {1e3 * dense.optimizer_s:.0f}"
        )
    return lines


def share_lines(exponents: dict[tuple[str, int], float]) -> list[str]:
    """What balancing costs FasterMoE, beside the published shares."""
    lines = ["share of a step that FasterMoE spends on search / transfers, 4 HPNV, k=1 (Table I)"]
    for model, (search, place, reduce) in BALANCING_SHARE.items():
        if (model, 1) in exponents:
            x = run(HPNV4, model, 1, exponents[model, 1], "fastermoe")
            lines.append(
                f"  {model:3} {100 * float((x.plan_s / x.seconds).mean()):4.1f} / "
                f"{100 * float((x.transfer_s / x.seconds).mean()):4.1f} %   published "
                f"{100 * search:.1f} / {100 * (place + reduce):.1f} %"
            )
    return lines


def main() -> None:
    """Print everything."""
    begun = time.time()
    print(
        f"RTX 3090 {PORT_3090} a port, {BRIDGE_3090} a bridge; RTX 2080 Ti {PORT_2080}; "
        f"NIC 100 Gb/s for four GPUs; FP32; {LAYER_STEPS} layers x steps a run, without the first"
    )
    print("search [ms]: " + ", ".join(f"{n} {1e3 * s:g}" for n, s in PLAN_S.items()), flush=True)
    exponents = fits()
    print("\n".join(setting_lines(exponents)), flush=True)
    found = cells(exponents, CLUSTERS)
    print("\n".join(cell_lines(found)))
    print("\n".join(summary_lines(found)), flush=True)
    print(strict_line(found))
    print(nominal_line(), flush=True)
    print("\n".join(hot_lines(exponents)))
    print("\n".join(share_lines(exponents)))
    print("\n".join(period_lines("DS", 1, exponents["DS", 1])), flush=True)
    print("\n".join(step_lines(exponents, HPNV4)), flush=True)
    print("\n".join(trace_lines()))
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()
