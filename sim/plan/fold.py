"""Fold ranks that behave alike into classes, by colour refinement over ranks, pairs and links.

Two ranks are equal when program, accelerator, amounts and faults are equal, when their peers are
equal, and when the links between them are equal and equally loaded. The stable colouring is an
equitable partition, so a deterministic engine that starts equal stays equal: one actor per class
with a weight gives the same times as all its members.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from sim.plan.flat import Flat, flatten
from sim.plan.hashing import dense, mix, renumber, sum_at
from sim.plan.kinds import MESSAGES
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
        wiring: peers and groups. ranks: of each program.
        programs: static ops per program; those of one kind, stage, label, peer ... count once.
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
    colour = np.array(renumber(keys), np.int64)
    ends = np.array([(a, b) for _, a, b in pairs], np.int64).reshape(-1, 2).T
    what = mix(np.array(renumber(p[0] for p in pairs), np.int64), 1)
    routes = [tuple(path(a, b)) if path else () for _, a, b in pairs]
    on_pair = np.repeat(np.arange(len(routes)), np.array([len(r) for r in routes], np.int64))
    at = [k for r in routes for k in range(len(r))]
    used, on_link = np.unique(
        np.array([x for r in routes for x in r], np.int64), return_inverse=True
    )
    on_link = on_link.reshape(-1)
    place = mix(np.array(at, np.int64), 2)
    own = renumber(link_key(x) if link_key else 0 for x in used.tolist())
    link_own = mix(np.array(own, np.int64), 3)
    role = mix(np.array(renumber(g[0] for g in groups), np.int64), 4)
    sizes = np.array([len(g[1]) for g in groups], np.int64)
    in_group = np.repeat(np.arange(len(groups)), sizes)
    member = np.array([r for _, ranks in groups for r in ranks], np.int64)
    links, counts = link_own, (-1, -1)
    while True:
        ranks = mix(colour, 5)
        route = sum_at(on_pair, mix(links[on_link] ^ place, 6), len(pairs))
        pair = mix(what + mix(ranks[ends[0]], 7) + mix(ranks[ends[1]], 8) + route, 9)
        group = mix(role + sum_at(in_group, ranks[member], len(groups)), 10)
        seen = sum_at(ends[0], mix(pair, 11), len(colour)) + sum_at(
            ends[1], mix(pair, 12), len(colour)
        )
        seen += sum_at(member, group[in_group], len(colour))
        links = mix(link_own + sum_at(on_link, pair[on_pair], len(used)), 13)
        colour, ranks_found = dense(mix(ranks + seen, 14))
        found = (ranks_found, dense(links)[1])
        if found == counts:
            return renumber(colour.tolist())
        counts = found


def fold_plan(
    plan: Plan,
    programs: tuple[Program, ...],
    wiring: Wiring,
    tables: Resolved,
    rank_keys: Sequence[Hashable] | None = None,
    path: LinkPath | None = None,
    link_key: Callable[[int], Hashable] | None = None,
    flats: Sequence[Flat] | None = None,
) -> list[int]:
    """Classes of a plan's ranks.

    Args:
        plan, programs, wiring, tables: of the run.
        rank_keys: per rank, what else must be equal (accelerator, faults). path, link_key: see
            fold_ranks. flats: the programs laid out, when that has been done.
    """
    flats = [flatten(p) for p in programs] if flats is None else flats
    program_of = {r: i for i, p in enumerate(programs) for r in p.ranks}
    n = 1 + max(program_of, default=-1)
    keys: list[Hashable] = []
    uneven = [_uneven(f.ops, tables) if plan.tables else [] for f in flats]
    for rank in range(n):
        cell = wiring.cell_of.get(rank)
        index = program_of.get(rank, -1)
        what = (cell.accelerator, cell.tp, cell.cp, cell.offload) if cell else (rank,)
        own = _own_amounts(rank, uneven[index], wiring) if index >= 0 else ()
        # Whose message comes first decides what everybody reads: senders are never alike.
        talks = index >= 0 and any(op.kind in MESSAGES for op in flats[index].talkers)
        handler = (rank,) if talks or (index >= 0 and flats[index].handlers) else ()
        keys.append((index, what, own, handler, rank_keys[rank] if rank_keys else None))
    pairs, groups = relations(wiring, [f.talkers for f in flats], [p.ranks for p in programs])
    return fold_ranks(keys, pairs, groups, path, link_key)


def _uneven(ops: list[Op], tables: Resolved) -> list[Op]:
    """One op for each late amount, and role of its group, that differs between members."""
    found: dict[Hashable, Op] = {}
    differs: dict[Ref, bool] = {}
    for op in ops:
        if op.ref is None or (op.ref, op.group, op.kind) in found:
            continue
        if op.ref not in differs:
            differs[op.ref] = _differs(op.ref, tables)
        if differs[op.ref]:
            found[op.ref, op.group, op.kind] = op
    return list(found.values())


def _differs(ref: Ref, tables: Resolved) -> bool:
    rows = [r.get(ref.key) for r in tables.rows.get(ref.table, [])]
    rows.append(tables.initial.get(ref.table, {}).get(ref.key))
    return any(isinstance(v, list) and np.unique(np.asarray(v, float)).size > 1 for v in rows)


def _own_amounts(rank: int, uneven: list[Op], wiring: Wiring) -> tuple[Hashable, ...]:
    """Positions in the groups whose members some late amount tells apart.

    A compute op that names no group may mean any of its rank's: the rank is like no other.
    """
    found: dict[Hashable, None] = {}
    for op in uneven:
        if not op.group and not is_collective(op):
            return (rank,)
        indices = wiring.group_indices(op, rank)
        found[op.group, tuple(wiring.groups[g].index(rank) for g in indices)] = None
    return tuple(found)
