"""Memory on the chips and in the hosts as forms of the integers, read off ledgers of plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sim.cost.ledger import knobs_of, peak_memory
from sim.cost.offload import host_ledgers
from sim.plan.draft import PlanDraft
from sim.problem import Problem
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.forms import CHECKPOINTED as C
from strategies.offload.forms import OPTIMIZER as S
from strategies.offload.forms import PARAMETERS as P
from strategies.offload.forms import Form, total
from strategies.offload.units import Triple, plan_with

__all__ = ["limits_on_chip", "limits_on_host"]


def limits_on_chip(
    problem: Problem, start: PlanDraft, base: AutoHeteKnobs, sizes: Sequence[Triple]
) -> Iterator[tuple[Form, float]]:
    """Yield (memory, limit) [B] of every cell.

    Activations follow c, parameters p, optimizer and gradients o, each by a table.

    Args:
        problem, start, base: as of ``bounds_of``. sizes: values of each integer by position.
    """

    def peaks(axis: int, count: int) -> dict[tuple[int, int], tuple[float, float]]:
        choice = [[0, 0, 0] for _ in sizes]
        for s, size in enumerate(sizes):
            choice[s][axis] = min(count, size[axis] - 1)
        plan = plan_with(problem, start, base, [(c, p, o) for c, p, o in choice])
        ledgers = peak_memory(plan, problem)
        return {at: (x.peak_bytes, x.limit_bytes) for at, x in ledgers.items()}

    none = peaks(C, 0)
    tables = {(at, axis): [0.0] for at in none for axis in (C, P, S)}
    for axis in (C, P, S):
        for count in range(1, max(size[axis] for size in sizes)):
            for at, (nbytes, _) in peaks(axis, count).items():
                if count < sizes[at[0]][axis]:
                    tables[at, axis].append(nbytes - none[at][0])
    seen = set()
    for at, (nbytes, limit) in none.items():
        mine = tuple(tuple(tables[at, axis]) for axis in (C, P, S))
        key = (at[0], nbytes, limit, mine)
        if key not in seen:
            counts = {(at[0], axis): np.array(mine[axis]) for axis in (C, P, S)}
            yield Form(const=nbytes, counts=counts), limit
        seen.add(key)


def limits_on_host(
    problem: Problem, start: PlanDraft, base: AutoHeteKnobs, sizes: Sequence[Triple]
) -> Iterator[tuple[Form, float]]:
    """Yield (memory, capacity) [B] of every node whose capacity is known.

    States and gradients follow o, parameters the layers with either on the host.

    Args:
        problem, start, base: as of ``bounds_of``. sizes: values of each integer by position.
    """
    nothing = [(0, 0, 0)] * len(sizes)
    plan = plan_with(problem, start, base, nothing)
    none = host_ledgers(plan, problem, knobs_of)
    forms = {node: [Form(const=x.peak_bytes)] for node, x in none.items()}
    capacity = {node: x.capacity_bytes for node, x in none.items()}
    for s, size in enumerate(sizes):
        n = size[S] - 1
        if not n:
            continue
        choice = [*nothing[:s], (0, size[P] - 1, n), *nothing[s + 1 :]]
        found = host_ledgers(plan_with(problem, start, base, choice), problem, knobs_of)
        for node, x in found.items():
            before = none[node].terms if node in none else dict.fromkeys(x.terms, 0.0)
            each = {name: (x.terms[name] - before[name]) / n for name in x.terms}
            k, p = np.arange(n + 1.0), np.arange(float(size[P]))
            form = Form(
                counts={
                    (s, S): (each["optimizer"] + each["gradients"]) * k,
                    (s, P): each["parameters"] * p,
                },
                extra={2 * s: each["parameters"]},
            )
            forms.setdefault(node, []).append(form)
            capacity[node] = x.capacity_bytes
    for node, mine in sorted(forms.items()):
        if capacity[node] > 0:
            yield total(mine), capacity[node]
