"""Measured spans: the same table as the engine's, joined from what every rank saw.

Times are seconds since the run began. A transfer is one row: it starts when its sender posts it and
ends when the first of the two ends knows that it is over, because torch does not say when an
unwaited transfer ended. So measured ends of transfers are upper bounds.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Any

import numpy as np
import torch.distributed as dist

from real_runtime.program import Node, RankProgram
from sim.plan.plan import Plan
from sim.plan.wiring import DEFAULT_ROLE, Wiring
from sim.report.spans import FLOATS, INTEGERS, TEXTS, Spans
from sim.report.wires import compact_ranks, encode

__all__ = ["Recorder", "join"]

Row = dict[str, Any]


class Recorder:
    """Keeps the spans of a rank's last steps.

    Args:
        kept: steps. exact: wait for the device after every op, so that compute has true ends.
    """

    def __init__(self, kept: int, exact: bool = True) -> None:
        self.exact = exact
        self.steps: deque[tuple[int, list[float], list[float], list[float]]] = deque(maxlen=kept)
        self.zero = time.monotonic()

    def align(self, world: dist.ProcessGroup | None) -> None:
        """Agree on the zero of time: one clock on one host, else the end of a barrier."""
        if world is None:
            self.zero = time.monotonic()
            return
        said: list[Any] = [None] * dist.get_world_size(world)
        dist.all_gather_object(said, (socket.gethostname(), time.monotonic()), group=world)
        self.zero = said[0][1] if len({host for host, _ in said}) == 1 else time.monotonic()

    def step(self, number: int, start: list[float], end: list[float], ready: list[float]) -> None:
        """Keep a step's times."""
        self.steps.append((number, start, end, ready))

    def rows(self, plan: Plan, program: RankProgram, wiring: Wiring, itemsize: int) -> list[Row]:
        """Rows of this rank; ``key`` joins the two ends of a transfer."""
        found = []
        # As in the engine's table, a member list is called by the first op that uses it.
        first: dict[tuple[object, ...], Node] = {}
        for node in program.nodes:
            if node.group >= 0:
                first.setdefault(node.wire, node)
        fixed = [_row(plan, program, wiring, n, first, itemsize) for n in program.nodes]
        for number, start, end, ready in self.steps:
            for i, node in enumerate(program.nodes):
                row = dict(fixed[i])
                row |= {
                    "step": number,
                    "start_s": start[i] - self.zero,
                    "end_s": end[i] - self.zero,
                    "ready_s": ready[i] - self.zero,
                }
                if node.piece is not None:
                    row["key"] = (number, *row["key"])
                found.append(row)
        return found


def _row(
    plan: Plan,
    program: RankProgram,
    wiring: Wiring,
    node: Node,
    first: dict[tuple[object, ...], Node],
    itemsize: int,
) -> Row:
    op, cell = node.op, wiring.cell_of[program.rank]
    row: Row = {
        "source": "measured", "rank": program.rank, "weight": 1, "peer": -1, "stream": node.stream,
        "op": node.name, "kind": op.kind, "stage": op.stage, "segment": op.label,
        "microbatch": op.mb, "part": op.part, "group": "", "nbytes": 0.0, "flops": 0.0,
        "version": -1,
    }  # fmt: skip
    channel = f" channel {op.channel}" if op.channel else ""
    if node.piece is not None:
        p, math = node.piece, plan.mathematics
        tokens = math.sequence_length * math.microbatch
        elements = plan.placement.boundaries[0].elements
        row["peer"], row["stream"] = p.dst, f"{p.src}->{p.dst}{channel}"
        row["nbytes"] = float(tokens * elements * itemsize * (p.stop - p.start) // p.of)
        forward = op.kind.endswith("F")
        sending = op.kind.startswith("SEND")
        source = op.stage if sending else op.stage - (1 if forward else -1)
        row["key"] = (p.src, p.dst, forward, source, op.mb, p.start, op.channel)
    elif node.group >= 0:
        roles = wiring.roles[node.group]
        user = first[node.wire].op
        named = user.group or DEFAULT_ROLE.get(user.kind, "tp")
        role = named if named in roles else "+".join(sorted(roles))
        row["group"] = f"{role} {compact_ranks(wiring.groups[node.group])}"
        row["stream"] = row["group"] + channel
    else:
        amount = plan.amounts.get(f"{op.stage}F")
        if amount is not None:
            share = {"F": 1.0, "R": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}.get(op.kind, 0.0)
            row["flops"] = share * amount.flops / cell.tp
    return row


def join(rows: list[Row], run: str) -> Spans:
    """One table of all ranks' rows, sorted by start and rank.

    Args:
        rows: of every rank. run: its name.
    """
    arrived = {r["key"]: r for r in rows if "key" in r and r["kind"].startswith("RECV")}
    joined = []
    for row in rows:
        if row["kind"].startswith("RECV"):
            continue
        if "key" in row and row["key"] in arrived:
            end = min(row["end_s"], arrived[row["key"]]["end_s"])
            row = row | {"end_s": max(end, row["start_s"])}
        joined.append(row | {"run": run})
    joined.sort(key=lambda r: (r["start_s"], r["rank"]))
    columns: dict[str, Any] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name in TEXTS:
        columns[name], names[name] = encode([r[name] for r in joined])
    for name in INTEGERS:
        columns[name] = np.array([r[name] for r in joined], np.int64)
    for name in FLOATS:
        columns[name] = np.array([r[name] for r in joined], np.float64)
    return Spans(columns, names)
