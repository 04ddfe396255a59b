"""Balancers on routing that is calibrated to a public trace: how full the fullest rank is.

Expert-parallel groups of four A100 inside a node, as in LAER-MoE's artifact; every group lends by
itself. Costs are the constants of its repository (commit 2704237): 1.64 us a token for the MLP of a
Mixtral-8x7B, 216.27 GB/s inside a node; backward is twice forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from strategies.expert.balancers import get_balancer
from strategies.expert.layer_cost import LayerCosts, MeanBandwidth, PerToken
from strategies.expert.routing import LoadRatio, Routing, load_ratio
from strategies.expert.routing_calibrate import (
    LAER_E8K2,
    LAER_E16K4,
    Calibration,
    calibrate,
    compared,
)
from strategies.expert.routing_synthetic import drawn
from strategies.expert.step_times import Balancing, StepCosts, step_times

WIDTH, INNER = 4096, 14336
RATE = 216.27e9


class Fullness(msgspec.Struct, frozen=True, kw_only=True):
    """How full the fullest rank is over the mean: static, and with copies planned a step before.

    Args:
        balancer, budget: which, and copies per device.
        static, lent: of all ranks, in all steps but the first. group: lent, within each group.
        copies: mean of the copies that a device holds.
    """

    balancer: str
    budget: int
    static: LoadRatio
    lent: LoadRatio
    group: LoadRatio
    copies: float


def layer_costs() -> LayerCosts:
    """Costs of a layer of Mixtral-8x7B in bf16."""
    expert = 3.0 * WIDTH * INNER * 2.0
    return LayerCosts(
        token_bytes=2.0 * WIDTH,
        experts=PerToken(forward=1.64e-6, backward=3.28e-6),
        links=MeanBandwidth(exchange=((1e18, RATE),), trans=RATE, agg=RATE),
        param_bytes=expert,
        gradient_bytes=expert,
    )


def fullness(
    calibration: Calibration,
    balancer: str,
    budget: int,
    *,
    layers: int = 0,
    steps: int = 0,
    seed: int = 1,
) -> Fullness:
    """Balance a run of the calibrated generator.

    Args:
        calibration: of a trace. balancer, budget: see ``Fullness``.
        layers, steps: how many; 0 takes all of the trace. seed: not that of the calibration.
    """
    target = calibration.target
    routing = drawn(
        steps=steps or target.steps,
        layers=layers or target.layers,
        experts=target.experts,
        sources=target.devices * target.groups,
        tokens=target.tokens,
        seed=seed,
        popularity=calibration.popularity,
    )
    costs = StepCosts(layers=(layer_costs(),) * routing.counts.shape[1])
    how = Balancing(balancer=get_balancer(balancer), budget=budget)
    own = [
        step_times(Routing(np.ascontiguousarray(part)), costs, how)
        for part in np.split(routing.counts, target.groups, axis=3)
    ]
    one = costs.layers[0].param_bytes + costs.layers[0].gradient_bytes
    return Fullness(
        balancer=balancer,
        budget=budget,
        static=load_ratio(np.concatenate([x.static_loads[1:] for x in own], axis=2)),
        lent=load_ratio(np.concatenate([x.loads[1:] for x in own], axis=2)),
        group=load_ratio(np.stack([x.loads[1:] for x in own])),
        copies=float(np.mean([x.copy_bytes[1:] for x in own])) / one / len(costs.layers),
    )


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
        lines.append("  (Pro-Prophet lends nothing where devices differ by less than 3 means)")
        for name in ("pro-prophet", "eplb", "spread"):
            for budget in budgets:
                x = fullness(found, name, budget, layers=layers)
                lines.append(
                    f"  {name:11} {budget} copies at most: fullest of "
                    f"{target.devices * target.groups} ranks / mean {x.static.mean:.2f} "
                    f"(p95 {x.static.p95:.2f}) -> {x.lent.mean:.3f} (p95 {x.lent.p95:.3f}); "
                    f"of a group's {target.devices} {x.group.mean:.3f}"
                )
    return lines
