"""A world that runs plans with the runtime's issuer and handlers that sleep.

A transfer takes its seconds from when both ends have begun it and its wire is free, a collective
from when all members have: what the simulator says of them. The ends tell each other when they
began, on the machine's one monotonic clock.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from real_runtime.groups import Groups
from real_runtime.issue import Begun, Issuer
from real_runtime.program import Node, rank_program
from real_runtime.record import Recorder, join
from sim.plan.plan import Plan
from sim.plan.wiring import wire

Seconds = dict[tuple[int, str, int], float]
"""(rank, "program:index", receiving rank or -1) -> [s]; a transfer's stand with its sender."""
Case = tuple[str, Plan, Seconds, float]
"""(name, plan, seconds of every op, simulated makespan [s])"""
ATTEMPTS, CLOSE = 3, 0.05
"""Runs of a case until its makespan is this close to the simulated one."""


def sleep_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)  # the op


class Lasting:
    """A transfer or collective of stated length.

    Args:
        works: that bring what the others said. heard: when each began [s], and the length [s].
        before: what its wire carried before.
    """

    def __init__(self, works: list[Any], heard: list[torch.Tensor], before: Lasting | None) -> None:
        self.works, self.heard, self.before = works, heard, before
        self.end = 0.0

    def over(self) -> float:
        """When it ends [s]."""
        if not self.end:
            for work in self.works:
                work.wait()
            free = self.before.over() if self.before else 0.0
            self.before = None
            both = torch.stack(self.heard).view(-1, 2)
            self.end = max(float(both[:, 0].max()), free) + float(both[:, 1].max())
        return self.end

    def wait(self) -> None:
        sleep_until(self.over())


class Sleeper:
    """Handlers of one rank. Args: rank, groups, and the seconds of its ops."""

    def __init__(self, rank: int, groups: Groups, seconds: Seconds) -> None:
        self.rank, self.groups, self.seconds = rank, groups, seconds
        self.last: dict[tuple[object, ...], Lasting] = {}
        self.count: dict[tuple[object, ...], int] = {}

    def compute(self, node: Node) -> None:
        sleep_until(time.monotonic() + self.seconds[self.rank, node.name, -1])

    def transfer(self, node: Node) -> Begun:
        assert node.piece is not None
        wire_, sending = node.wire, node.op.kind.startswith("SEND")
        number = self.count[wire_] = self.count.get(wire_, -1) + 1
        length = self.seconds[self.rank, node.name, node.peer] if sending else 0.0
        mine = torch.tensor([time.monotonic(), length], dtype=torch.float64)
        theirs = torch.zeros(2, dtype=torch.float64)
        # Messages along the wire have even numbers, those against it odd ones.
        tags = 2 * number + (not sending), 2 * number + sending
        works = [
            dist.isend(mine, node.peer, tag=tags[0]),
            dist.irecv(theirs, node.peer, tag=tags[1]),
        ]
        return self._begun(wire_, works, [mine, theirs])

    def collective(self, node: Node) -> Begun:
        group = self.groups.handle(node.group)
        length = self.seconds[self.rank, node.name, -1]
        mine = torch.tensor([time.monotonic(), length], dtype=torch.float64)
        every = torch.zeros(2 * dist.get_world_size(group), dtype=torch.float64)
        work = dist.all_gather_single(every, mine, group=group, async_op=True)
        return self._begun(node.wire, [work], [every])

    def _begun(self, wire_: tuple[object, ...], works: list[Any], heard: list[Any]) -> Begun:
        lasting = self.last[wire_] = Lasting(works, heard, self.last.get(wire_))
        return [lasting], lambda: None


def run_once(plan: Plan, seconds: Seconds, rank: int) -> tuple[float, list[Any]]:
    """One step of a plan; returns the makespan [s] and, on rank 0, every rank's rows."""
    wiring = wire(plan.placement)
    groups = Groups(plan, wiring, rank, 60.0)
    begin = torch.tensor([time.monotonic() + 0.1], dtype=torch.float64)
    dist.broadcast(begin, 0)
    end, rows = 0.0, []
    if rank in wiring.cell_of:
        program, recorder = rank_program(plan, rank, wiring), Recorder(1)
        sleeper = Sleeper(rank, groups, seconds)
        issuer = Issuer(program, groups, plan.buffers, recorder)
        local = {n.op.kind for n in program.nodes if not n.on_wire}
        issuer.compute = dict.fromkeys(local, sleeper.compute)
        issuer.communicate = {
            n.op.kind: sleeper.transfer if n.piece is not None else sleeper.collective
            for n in program.nodes
            if n.on_wire
        }
        recorder.zero = float(begin)
        sleep_until(float(begin))
        issuer.issue(0)
        end = time.monotonic() - float(begin)
        rows = recorder.rows(plan, program, wiring, 4)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (end, rows))
    groups.close()
    return max(e for e, _ in everyone), [row for _, part in everyone for row in part]


def main(folder: str, rank: int, size: int, port: int) -> None:
    """Entry of one process: run every case, each until it comes close or three times."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for name, plan, seconds, makespan in pickle.loads((Path(folder) / "cases.pickle").read_bytes()):
        tries: list[tuple[float, list[Any]]] = []
        while len(tries) < ATTEMPTS and (not tries or abs(tries[-1][0] / makespan - 1) > CLOSE):
            tries.append(run_once(plan, seconds, rank))
        best = min(tries, key=lambda t: abs(t[0] / makespan - 1))
        found[name] = [t[0] for t in tries], join(best[1], name), os.getloadavg()[0]
    if rank == 0:
        (Path(folder) / "found.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # as the worker does
