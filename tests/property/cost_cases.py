"""Small machines, models and plans for the tests of sim.cost."""

from __future__ import annotations

from sim.cost.pricing import group_keys, price
from sim.engine.execute import Outcome, execute
from sim.engine.simulate import Layout, lay_out
from sim.hardware.machine import Accelerator, Link, Machine, Node
from sim.hardware.route import path
from sim.model.graph import Model
from sim.model.shape import Moe, Shape
from sim.model.transformer import build_model
from sim.plan.plan import Plan
from sim.plan.wiring import wire
from sim.problem import Problem
from sim.spec.job import Job

FABRIC, NIC = 100e9, 10e9
HOP_S = 5e-6


def machine(nodes: int, per_node: int, nics: int = 1, price_per_byte: float = 0.0) -> Machine:
    """Equal nodes on one switch; a link in and out per chip port and NIC."""
    links: list[Link] = []

    def both(name: str, rate: float, latency: float, kind: str) -> tuple[int, int]:
        for way in ("out", "in"):
            links.append(
                Link(
                    name=f"{name}/{way}",
                    rate=rate,
                    latency=latency / 2,
                    kind=kind,
                    price_per_byte=price_per_byte if kind == "nic" and way == "out" else 0.0,
                )
            )
        return len(links) - 2, len(links) - 1

    made = [
        Node(
            index=n,
            profile="node",
            site="here",
            island="here",
            accelerator="chip",
            chips=(n * per_node, (n + 1) * per_node),
            fabric_rate=FABRIC,
            nics=nics,
            nic_rate=NIC,
            pcie_rate=16e9,
            chip_nic=tuple(c * nics // per_node for c in range(per_node)),
            chip_links=tuple(both(f"n{n}/c{c}", FABRIC, 0.0, "fabric") for c in range(per_node)),
            nic_links=tuple(both(f"n{n}/nic{c}", NIC, HOP_S, "nic") for c in range(nics)),
        )
        for n in range(nodes)
    ]
    chip = Accelerator(
        name="chip",
        memory_bytes=80e9,
        memory_bytes_per_s=2e12,
        peak_flops_per_s={"bf16": 3e14},
        price_per_s=1e-3,
    )
    return Machine(
        name="test",
        accelerators={"chip": chip},
        nodes=tuple(made),
        links=tuple(links),
        routes={"here>here": ()},
    )


def small(layers: int = 4, moe: bool = False, tied: bool = False) -> Model:
    return build_model(
        Shape(
            name="small",
            family="llama",
            num_layers=layers,
            hidden=1024,
            heads=16,
            kv_heads=16,
            head_dim=64,
            v_head_dim=64,
            ffn=4096,
            gated=True,
            vocab=4096,
            max_seq=512,
            tied=tied,
            moe=Moe(num_experts=8, top_k=2, ffn=1024) if moe else None,
        )
    )


def problem(m: Machine, model: Model, batch: int = 8) -> Problem:
    job = Job(global_batch=batch, sequence_length=512)
    return Problem(machine=m, model=model, job=job, documents={}, hash="")


def layout(p: Problem, plan: Plan, fold: bool = False) -> Layout:
    m = p.machine
    wiring_keys = None
    if fold:
        wiring_keys = group_keys(m, wire(plan.placement), plan.placement.chips)
    return lay_out(
        plan,
        fold=fold,
        rank_keys=wiring_keys,
        path=lambda a, b: path(m, a, b).links,
        link_key=lambda x: m.links[x].rate,
    )


def run(p: Problem, plan: Plan, *, fold: bool = False, contention: bool = True) -> Outcome:
    lay = layout(p, plan, fold)
    return execute(
        lay.graph, price(lay.graph, lay.wiring, plan, p, contention=contention, late=lay.late)
    )


def by_kind(p: Problem, plan: Plan, contention: bool = False) -> dict[str, list[float]]:
    lay = layout(p, plan)
    prices = price(lay.graph, lay.wiring, plan, p, contention=contention, late=lay.late)
    found: dict[str, list[float]] = {}
    for op, seconds in zip(lay.graph.ops, prices.seconds, strict=True):
        found.setdefault(op.kind, []).append(float(seconds))
    return found
