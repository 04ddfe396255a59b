"""Plans that use the host side of ideal machines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sim.hardware.machine import HostSide, Machine
from sim.plan.placement import Cell, Placement, Segment
from sim.plan.plan import Amount, Mathematics, Plan, ProgramText
from sim.problem import Problem
from tests.validation.exercise import machine, model, problem

__all__ = ["offloaded", "with_host"]


def with_host(
    on: Machine, pcie_rate: float, host: HostSide | None = None, memory: float = 1e12
) -> Machine:
    """The machine with host links of this rate [B/s]."""
    nodes = tuple(
        msgspec.structs.replace(
            n, pcie_rate=pcie_rate, host=host or HostSide(), host_memory_bytes=memory
        )
        for n in on.nodes
    )
    return msgspec.structs.replace(on, nodes=nodes)


def offloaded(
    text: str,
    amounts: dict[str, Amount],
    *,
    chips: int = 1,
    nodes: int = 1,
    pcie_rate: float = 16e9,
    host: HostSide | None = None,
    params: int = 0,
    programs: Sequence[tuple[tuple[int, ...], str]] = (),
) -> tuple[Problem, Plan]:
    """Replicas on all chips, each with one measured layer and this program."""
    ranks = tuple(range(chips * nodes))
    given = problem(
        with_host(machine(nodes, chips), pcie_rate, host), model(1, params=params), len(ranks)
    )
    plan = Plan(
        name="offloaded",
        barrier=False,
        mathematics=Mathematics(global_batch=len(ranks)),
        placement=Placement(
            cells=tuple(Cell(stage=0, replica=r, ranks=(r,), accelerator="chip") for r in ranks),
            segments=(Segment(stage=0, cell=0, blocks=(0, 1)),),
            microbatches=(1,) * len(ranks),
        ),
        amounts=amounts,
        programs=tuple(ProgramText(r, t) for r, t in programs or [(ranks, text)]),
    )
    return given, plan
