"""The reference plan: 1,024 chips of four kinds, PP16 x DP8 x TP8, 96 layers, 128 microbatches.

Stated prices: per half layer 1.0 / 1.25 / 1.5 / 1.1 ms of compute forward and twice that backward,
plus a tensor-parallel collective; transfers inside a kind have a private link, those between kinds
share one trunk of all replicas, gradient rings share the network cards.
"""

from __future__ import annotations

import numpy as np

from sim.cost.prices import FlowSpec, Prices
from sim.engine.simulate import Layout
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Plan

PP, DP, TP, LAYERS, MICROBATCHES = 16, 8, 8, 96, 128
LAYERS_PER_STAGE = LAYERS // PP
KIND = [s * 4 // PP for s in range(PP)]
HALF_LAYER_S = (1.0e-3, 1.25e-3, 1.5e-3, 1.1e-3)
COLLECTIVE_S = (0.2e-3, 0.3e-3, 0.25e-3, 0.4e-3)
ACTIVATION_B = 4096 * 2 * 10240.0
NIC_B_PER_S = 8 * 50e9
TRUNK_B_PER_S = DP * 2 * 50e9
GRADIENT_B = 100e9 / PP / TP * 2 * TP
MAKESPAN_S = 8.491877439


def reference_plan(ranks_per_cell: int = 1) -> Plan:
    """The plan; one rank per cell stands for its tensor-parallel group."""
    cells = tuple(
        Cell(
            stage=s,
            replica=r,
            ranks=tuple(range((s * DP + r) * ranks_per_cell, (s * DP + r + 1) * ranks_per_cell)),
            tp=ranks_per_cell,
            accelerator=f"kind{KIND[s]}",
        )
        for s in range(PP)
        for r in range(DP)
    )
    return Plan(
        name="reference",
        barrier=False,
        buffers=MICROBATCHES,
        placement=Placement(
            cells=cells,
            segments=tuple(Segment(stage=s, cell=s) for s in range(PP)),
            boundaries=tuple(Boundary(src=s, dst=s + 1) for s in range(PP - 1)),
            microbatches=(MICROBATCHES,) * DP,
        ),
        lowering=standard_calls("1f1b", 1, False, False, (), ()),
    )


def reference_prices(layout: Layout) -> Prices:
    """Prices of the reference plan, folded (one actor per stage) or not (one per cell)."""
    graph = layout.graph
    folded = len(graph.actors) == PP
    rates: dict[object, float] = {}
    flows: dict[int, tuple[FlowSpec, ...]] = {}
    seconds = np.zeros(graph.num_nodes)

    def link(name: object, rate: float) -> int:
        rates.setdefault(name, rate)
        return list(rates).index(name)

    for node, op in enumerate(graph.ops):
        kind = KIND[op.stage]
        wire = graph.wires[graph.wire[node]] if graph.wire[node] >= 0 else None
        if op.kind in ("F", "B"):
            passes = 2 if op.kind == "B" else 1
            half = passes * HALF_LAYER_S[kind] + COLLECTIVE_S[kind]
            seconds[node] = LAYERS_PER_STAGE * 2 * half
        elif op.kind in ("SEND_F", "SEND_B"):
            peer = KIND[op.stage + (1 if op.kind == "SEND_F" else -1)]
            if peer == kind:
                seconds[node] = ACTIVATION_B / NIC_B_PER_S
                continue
            trunk = link((op.kind, min(kind, peer)), TRUNK_B_PER_S)
            assert wire is not None and wire.end is not None
            path = (
                ((trunk, DP),)
                if folded
                else (
                    (link(("out", wire.end.src), NIC_B_PER_S), 1),
                    (trunk, 1),
                    (link(("in", wire.end.dst), NIC_B_PER_S), 1),
                )
            )
            flows[node] = (FlowSpec(path, ACTIVATION_B),)
        elif op.kind == "REDUCE_GRAD":
            assert wire is not None
            pairs = list(zip(wire.group, (*wire.group[1:], wire.group[0]), strict=True))
            flows[node] = tuple(
                FlowSpec(
                    (
                        (link(("out", a), NIC_B_PER_S), 1),
                        (link(("in", a if folded else b), NIC_B_PER_S), 1),
                    ),
                    2 * (DP - 1) / DP * GRADIENT_B,
                )
                for a, b in (pairs[:1] if folded else pairs)
            )
    return Prices(
        seconds=seconds,
        flows=flows,
        link_rates=tuple(rates.values()),
        link_names=tuple(map(str, rates)),
    )
