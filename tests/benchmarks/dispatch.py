"""What the runtime itself costs: a step whose handlers return at once.

``.venv/bin/python -m tests.benchmarks.dispatch`` prints milliseconds: of issuing alone, and of two
processes that send each other one number per transfer over gloo.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from real_runtime.issue import Begun, Issuer
from real_runtime.program import Node, rank_program
from real_runtime.record import Recorder
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Plan
from sim.plan.wiring import wire

STAGES, MICROBATCHES, REPEATS = 2, 8, 7


def pipeline() -> Plan:
    """Two stages, 8 microbatches, 1F1B, one rank each."""
    return Plan(
        name="dispatch",
        placement=Placement(
            cells=tuple(Cell(stage=s, replica=0, ranks=(s,)) for s in range(STAGES)),
            segments=tuple(Segment(stage=s, cell=s) for s in range(STAGES)),
            boundaries=tuple(Boundary(src=s, dst=s + 1) for s in range(STAGES - 1)),
            microbatches=(MICROBATCHES,),
        ),
        lowering=standard_calls("1f1b", 1, False, False, (), ()),
    )


class _NoGroups:
    """The issuer asks for groups only to name who is gone."""


def issuers() -> list[Issuer]:
    """One issuer per rank; nothing is computed or sent."""
    plan = pipeline()
    wiring = wire(plan.placement)

    def begin(_: Any) -> Begun:
        return (), lambda: None

    found = []
    for rank in range(STAGES):
        program = rank_program(plan, rank, wiring)
        issuer = Issuer(program, _NoGroups(), plan.buffers, Recorder(REPEATS))  # type: ignore[arg-type]
        issuer.compute = {n.op.kind: lambda _: None for n in program.nodes if not n.on_wire}
        issuer.communicate = {n.op.kind: begin for n in program.nodes if n.on_wire}
        found.append(issuer)
    return found


def step_seconds(issuer: Issuer) -> float:
    """Median of seven steps [s], one before them left out."""
    issuer.issue(0)
    seconds = []
    for step in range(1, REPEATS + 1):
        begin = time.perf_counter()
        issuer.issue(step)
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[REPEATS // 2]


def wired(rank: int, port: int) -> None:
    """One of two processes: transfers carry one number, BARRIER is a sum."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, STAGES, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=STAGES)
    issuer = issuers()[rank]
    number = torch.zeros(1)

    def transfer(node: Node) -> Begun:
        move = dist.isend if node.op.kind.startswith("SEND") else dist.irecv
        return [move(torch.zeros(1), node.peer, tag=node.op.mb)], lambda: None

    def barrier(_: Node) -> Begun:
        return [dist.all_reduce(number, async_op=True)], lambda: None

    kinds = {n.op.kind for n in issuer.nodes if n.on_wire}
    issuer.communicate = {k: barrier if k == "BARRIER" else transfer for k in kinds}
    seconds, began = step_seconds(issuer), time.process_time()
    for step in range(REPEATS):
        issuer.issue(step)
    busy = (time.process_time() - began) / REPEATS
    if rank == 0:
        print(
            f"two processes over gloo: {seconds * 1e3:.3f} ms a step, median of {REPEATS}; "
            f"{busy * 1e3:.3f} ms of processor time each"
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    for issuer in issuers():
        ops = len(issuer.nodes)
        print(
            f"rank {issuer.program.rank}: {step_seconds(issuer) * 1e3:.3f} ms a step of {ops} ops, "
            f"median of {REPEATS}"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    torch.multiprocessing.spawn(wired, (port,), STAGES)


if __name__ == "__main__":
    main()
