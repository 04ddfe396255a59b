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
from strategies.expert.routing_calibrate import LAER_E8K2, LAER_E16K4, calibrate, compared
from tests.validation.pro_prophet_cases import (
    BALANCING_SHARE,
    BRIDGE_3090,
    CLUSTERS,
    HPNV4,
    HPWNV4,
    HPWNV8,
    LPWNV2,
    MODELS,
    PORT_2080,
    PORT_3090,
    PUBLISHED,
    RANGES,
    Cluster,
)
from tests.validation.pro_prophet_runs import (
    CONCENTRATION,
    LAYER_STEPS,
    NAMES,
    PHI,
    PLAN_S,
    STEP,
    costs_of,
    fitted,
    routing_of,
    run,
    speedup,
)
from tests.validation.pro_prophet_trace import fullness

LOW, HIGH, FASTER = 0.7, 1.4, 1.03


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a cluster: speedups over static, and of what was printed."""

    cluster: Cluster
    k: int
    model: str
    zipf: float
    fastermoe: float
    pro_prophet: float
    spread: float

    @property
    def printed(self) -> tuple[float, float] | None:
        """Of FasterMoE and Pro-Prophet."""
        return PUBLISHED.get((self.cluster.name, self.k, self.model))

    @property
    def ratios(self) -> dict[str, float]:
        """Ours over the printed: FasterMoE, Pro-Prophet, and the second over the first."""
        if self.printed is None:
            return {}
        fast, prophet = self.printed
        return {
            "FasterMoE": self.fastermoe / fast,
            "Pro-Prophet": self.pro_prophet / prophet,
            "PP/FM": self.pro_prophet / self.fastermoe / (prophet / fast),
        }


def fits(
    models: Iterable[str] = MODELS, ks: Iterable[int] = (1, 2)
) -> dict[tuple[str, int], float]:
    """(model, k) -> Zipf exponent."""
    return {(m, k): fitted(m, k) for k in ks for m in models}


def cells(exponents: dict[tuple[str, int], float], clusters: Iterable[Cluster]) -> list[Cell]:
    """All cells; the large model does not fit the small cluster and is not in the paper's table."""
    return [
        Cell(
            cluster=cluster,
            k=k,
            model=model,
            zipf=zipf,
            fastermoe=speedup(cluster, model, k, zipf, "fastermoe"),
            pro_prophet=speedup(cluster, model, k, zipf, "pro-prophet"),
            spread=speedup(cluster, model, k, zipf, "spread"),
        )
        for cluster in clusters
        for (model, k), zipf in exponents.items()
        if not (cluster is LPWNV2 and model == "L")
    ]


def inside(found: Sequence[Cell], names: Sequence[str]) -> tuple[int, int]:
    """How many ratios of printed cells lie within 0.7 to 1.4, of how many."""
    ratios = [c.ratios[n] for c in found if c.printed for n in names]
    return sum(LOW <= r <= HIGH for r in ratios), len(ratios)


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
    predicted = [c for c in printed if c.cluster is not HPNV4]
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
            f"  outside: {c.cluster.name} k={c.k} {c.model} {name}: {ratio:.2f}"
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


def trace_lines(budgets: Sequence[int] = (1, 2, 4), layers: int = 8) -> list[str]:
    """The generator calibrated to LAER-MoE's trace, and how even lending makes it."""
    lines = []
    for target in (LAER_E8K2, LAER_E16K4):
        found = calibrate(target)
        p = found.popularity
        lines.append(
            f"{target.name}: sigma {p.sigma:.3f}, phi {p.phi:.3f}, step {p.step:.3f}, "
            f"concentration {p.concentration:.0f}"
        )
        lines += [f"  {name:22} {want:.3f}  {got:.3f}" for name, want, got in compared(found)]
        for name in ("pro-prophet", "eplb", "spread"):
            for budget in budgets:
                x = fullness(found, name, budget, layers)
                lines.append(
                    f"  {name:11} {budget} copies at most: fullest of "
                    f"{target.devices * target.groups} ranks / mean {x.static.mean:.2f} "
                    f"(p95 {x.static.p95:.2f}) -> {x.lent.mean:.3f} (p95 {x.lent.p95:.3f}); "
                    f"of a group's {target.devices} {x.group.mean:.3f}"
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
    print("\n".join(share_lines(exponents)))
    print("\n".join(step_lines(exponents, HPNV4)), flush=True)
    print("\n".join(trace_lines()))
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()
