"""How parameters reach a pass: updated ones of the step before, and fetches from the host."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from sim.plan.op import Dep, Op
from strategies.lowering.cut import Cut
from strategies.lowering.kinds import FETCH_B, FETCH_F

__all__ = ["add_fetches", "wait_for_updates"]


def wait_for_updates(cut: Cut) -> None:
    """Let the next step's first forward of a segment wait for its updated parameters."""
    arrivals = {(op.stage, op.label): op for op in cut.ops if op.kind == "H2D"}
    for op in cut.ops:
        arrival = arrivals.pop((op.stage, op.label), None) if op.kind == "F" else None
        if arrival is not None:
            cut.extra[op.name].append(Dep(arrival.name, 1))
    if cut.settings.whole:
        first = next(op for op in cut.ops if op.kind == "F")
        cut.extra[first.name] += _ended(cut)


def _ended(cut: Cut) -> list[Dep]:
    """What ends a step."""
    kinds = ("OPT", "H2D", "D2H", "HOST", "UNSHARD")
    return [Dep(op.name, 1) for op in cut.ops if op.kind in kinds]


def add_fetches(cut: Cut) -> None:
    """Fetch parameters that live on the host, each as early as a buffer may be free.

    Consecutive uses of one segment share a fetch: the last block's forward and backward.
    """
    away = {
        (s.stage, s.name): s
        for mine in cut.segments.values()
        for s in mine
        if "parameters" in s.offload
    }
    holds: list[list[int]] = []
    for i, op in enumerate(cut.ops):
        if op.kind not in ("F", "B", "I") or (op.stage, op.label) not in away:
            continue
        last = cut.ops[holds[-1][-1]] if holds else None
        if last and (last.stage, last.label) == (op.stage, op.label):
            holds[-1].append(i)
        else:
            holds.append([i])
    slots = cut.plan.placement.parameter_buffers
    listed: dict[int, list[Op]] = defaultdict(list)
    for k, uses in enumerate(holds):
        op = cut.ops[uses[0]]
        s = away[op.stage, op.label]
        kind = FETCH_F.name if op.kind == "F" else FETCH_B.name
        source = "OPT" if "optimizer" in s.offload else "D2H"
        # The ring goes round: the first slots were left in a step before.
        steps, before = divmod(k - slots, len(holds))
        deps = [
            Dep(cut.op(source, s).name, 1),
            Dep(cut.ops[holds[before][-1]].name, -steps),
            *(_ended(cut) if cut.settings.whole and k < slots else ()),
        ]
        fetch = cut.op(kind, s, mb=op.mb, priority=cut.key(s, kind))
        fetch = msgspec.structs.replace(fetch, deps=tuple(dict.fromkeys(deps)))
        for use in uses:
            cut.extra[cut.ops[use].name].append(Dep(fetch.name))
        listed[holds[k - slots][-1] if k >= slots else -1].append(fetch)
    ops = list(listed[-1])
    for i, op in enumerate(cut.ops):
        ops += [op, *listed[i]]
    cut.ops = ops
