"""Fold ranks that behave alike into classes, by colour refinement over ranks, pairs and links.

Two ranks are equal when program, accelerator, amounts and faults are equal, when their peers are
equal, and when the links between them are equal and equally loaded. The stable colouring is an
equitable partition, so a deterministic engine that starts equal stays equal: one actor per class
with a weight gives the same times as all its members.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from sim.plan.deps import flatten
from sim.plan.op import Op, Ref
from sim.plan.plan import Plan
from sim.plan.program import Program
from sim.plan.tables import Resolved
from sim.plan.wiring import Wiring, is_collective, is_transfer

__all__ = ["fold_plan", "fold_ranks", "relations"]

LinkPath = Callable[[int, int], Sequence[int]]


Pair = tuple[Hashable, int, int]
Members = tuple[Hashable, tuple[int, ...]]


def relations(
    wiring: Wiring, programs: Sequence[Sequence[Op]], ranks: Sequence[Sequence[int]]
) -> tuple[list[Pair], list[Members]]:
    """All (what, src, dst) transfer pieces and all (what, members) groups that the programs use.

    Args:
        wiring: peers and groups. programs: static ops per program. ranks: ranks of each program.
    """
    found: dict[Pair, None] = {}
    used_roles: set[int] = set()
    for ops, members in zip(programs, ranks, strict=True):
        kinds: dict[tuple[Hashable, ...], Op] = {}
        for op in ops:
            if is_transfer(op):
                kinds[op.kind, op.stage, op.label, op.peer, op.channel] = op
            elif is_collective(op):
                kinds[op.kind, op.group] = op
        for op in kinds.values():
            for rank in members:
                if is_transfer(op):
                    for end in wiring.ends(op, rank):
                        found[(end.what, end.share), end.src, end.dst] = None
                else:
                    used_roles.update(wiring.group_indices(op, rank))
    groups: list[Members] = [
        ((tuple(sorted(wiring.roles[i])), len(wiring.groups[i])), wiring.groups[i])
        for i in sorted(used_roles)
    ]
    return list(found), groups


def fold_ranks(
    keys: Sequence[Hashable],
    pairs: Sequence[Pair],
    groups: Sequence[Members] = (),
    path: LinkPath | None = None,
    link_key: Callable[[int], Hashable] | None = None,
) -> list[int]:
    """Class of each rank; classes are numbered by their smallest rank.

    Args:
        keys: per rank, everything that must be equal by itself (program, accelerator, faults ...).
        pairs, groups: from ``relations``.
        path: links between two ranks, or None to ignore links. link_key: what a link is by itself.
    """
    colour = _renumber(keys)
    routes = [tuple(path(a, b)) if path else () for _, a, b in pairs]
    links = sorted({x for r in routes for x in r})
    link_colour = dict(
        zip(links, _renumber([link_key(x) if link_key else 0 for x in links]), strict=True)
    )
    what = _renumber([p[0] for p in pairs])
    role = _renumber([g[0] for g in groups])
    counts = (-1, -1)
    while True:
        new_counts = (len(set(colour)), len(set(link_colour.values())))
        if new_counts == counts:
            return colour
        counts = new_counts
        seen: dict[int, list[Hashable]] = defaultdict(list)
        load: dict[int, list[Hashable]] = defaultdict(list)
        for (_, a, b), w, route in zip(pairs, what, routes, strict=True):
            pair = (w, colour[a], colour[b], tuple(link_colour[x] for x in route))
            seen[a].append((0, pair))
            seen[b].append((1, pair))
            for x in route:
                load[x].append(pair)
        for n, (_, members) in zip(role, groups, strict=True):
            inside = (n, tuple(sorted(colour[r] for r in members)))
            for r in members:
                seen[r].append((2, inside))
        colour = _renumber([(c, tuple(sorted(seen[r]))) for r, c in enumerate(colour)])  # type: ignore[type-var]
        fresh = _renumber([(link_colour[x], tuple(sorted(load[x]))) for x in links])  # type: ignore[type-var]
        link_colour = dict(zip(links, fresh, strict=True))


def _renumber(keys: Sequence[Hashable]) -> list[int]:
    """Small integers for equal keys, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(k, len(numbers)) for k in keys]


def fold_plan(
    plan: Plan,
    programs: tuple[Program, ...],
    wiring: Wiring,
    tables: Resolved,
    rank_keys: Sequence[Hashable] | None = None,
    path: LinkPath | None = None,
    link_key: Callable[[int], Hashable] | None = None,
) -> list[int]:
    """Classes of a plan's ranks.

    Args:
        plan, programs, wiring, tables: of the run.
        rank_keys: per rank, what else must be equal (accelerator, faults). path, link_key: see
            fold_ranks.
    """
    flats = [flatten(p) for p in programs]
    program_of = {r: i for i, p in enumerate(programs) for r in p.ranks}
    n = 1 + max(program_of, default=-1)
    keys: list[Hashable] = []
    for rank in range(n):
        cell = wiring.cell_of.get(rank)
        index = program_of.get(rank, -1)
        what = (cell.accelerator, cell.tp, cell.cp, cell.offload) if cell else (rank,)
        own = (
            _own_amounts(rank, flats[index].ops, tables, wiring)
            if index >= 0 and plan.tables
            else ()
        )
        handler = (rank,) if index >= 0 and flats[index].handlers else ()
        keys.append((index, what, own, handler, rank_keys[rank] if rank_keys else None))
    pairs, groups = relations(wiring, [f.ops for f in flats], [p.ranks for p in programs])
    return fold_ranks(keys, pairs, groups, path, link_key)


def _own_amounts(
    rank: int, ops: list[Op], tables: Resolved, wiring: Wiring
) -> tuple[Hashable, ...]:
    """Position in the groups when some late amount differs between members."""
    refs: dict[Ref, None] = dict.fromkeys(op.ref for op in ops if op.ref is not None)
    for ref in refs:
        rows = [r.get(ref.key) for r in tables.rows.get(ref.table, [])] + [
            tables.initial.get(ref.table, {}).get(ref.key)
        ]
        if any(isinstance(v, list) and any(x != v[0] for x in v) for v in rows):
            return (rank,)
    return ()
