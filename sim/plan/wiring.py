"""Who talks to whom: for each rank, the peers of its transfers and the members of its groups."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from sim.errors import PlanError
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.plan.placement import Boundary, Cell, Placement, derive_groups, pieces

__all__ = ["DEFAULT_ROLE", "End", "Wiring", "wire"]

DEFAULT_ROLE = {
    "REDUCE_GRAD": "dp",
    "UNSHARD": "dp",
    "UNSHARD_B": "dp",
    "BARRIER": "world",
    "ALL_TO_ALL": "ep",
    "MOVE_EXPERT": "ep",
    "REDUCE_EXPERT": "ep",
}
"""Group role of a collective that names none; every other kind uses the tensor-parallel group."""

ROLES = ("tp", "cp", "dp", "local", "ep", "edp", "local_edp", "embed", "world")
"""Roles of groups, see sim.plan.placement.Group."""


class End(msgspec.Struct, frozen=True):
    """One end of a transfer.

    Args:
        what: direction and edge, equal at both ends ("F", boundary index) or (kind, label).
        src, dst: ranks. share: (numerator, denominator) of the tensor this piece carries.
    """

    what: tuple[str, object]
    src: int
    dst: int
    share: tuple[int, int] = (1, 1)


class Wiring:
    """Resolved peers and groups of a placement.

    Attributes:
        groups: distinct member tuples, in creation order. roles: roles of each group.
        shards: (numerator, denominator) of the stage's parameters that a group reduces.
        of_rank: (rank, role) -> group indices, in shard order.
        cell_of: rank -> cell, None for extra ranks.
        hosted: pipeline position -> virtual stages.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.groups: list[tuple[int, ...]] = []
        self.roles: list[set[str]] = []
        self.shards: list[tuple[int, int]] = []
        self.of_rank: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.cell_of: dict[int, Cell] = {r: c for c in placement.cells for r in c.ranks}
        self.hosted: dict[int, frozenset[int]] = {}
        self._position = {s.stage: s.cell for s in placement.segments}
        for stage, position in self._position.items():
            self.hosted[position] = self.hosted.get(position, frozenset()) | {stage}
        for cell in placement.cells:
            if not placement.segments:
                self.hosted.setdefault(cell.stage, frozenset({cell.stage}))
                self._position.setdefault(cell.stage, cell.stage)
        self._cells = {(c.stage, c.replica): c for c in placement.cells}
        self._pieces: dict[tuple[int, int, int, int], dict[int, list[End]]] = {}
        self._by_end: dict[tuple[str, int, str], tuple[int, Boundary]] = {}
        for i, b in enumerate(placement.boundaries):
            self._by_end["src", b.src, b.name] = (i, b)
            self._by_end["dst", b.dst, b.name] = (i, b)
        self._add_groups(placement)

    def _add_groups(self, placement: Placement) -> None:
        seen: dict[tuple[int, ...], int] = {}
        for group in derive_groups(placement):
            if group.ranks not in seen:
                seen[group.ranks] = len(self.groups)
                self.groups.append(group.ranks)
                self.roles.append(set())
                self.shards.append((1, group.shards))
            index = seen[group.ranks]
            self.roles[index].add(group.role)
            for rank in dict.fromkeys(group.ranks):
                self.of_rank[rank, group.role].append(index)

    def stages(self, rank: int) -> frozenset[int]:
        """Virtual stages hosted by the rank's cell."""
        cell = self.cell_of.get(rank)
        return self.hosted.get(cell.stage, frozenset()) if cell else frozenset()

    def stage_of(self, op: Op, rank: int) -> int:
        """The op's virtual stage, or the only one its rank hosts."""
        if op.stage >= 0:
            return op.stage
        hosted = self.stages(rank)
        return next(iter(hosted)) if len(hosted) == 1 else -1

    def group_indices(self, op: Op, rank: int) -> list[int]:
        """Groups in which the rank takes part in this collective; [] when it would be alone.

        Raises:
            PlanError: the role is unknown.
        """
        role = op.group or DEFAULT_ROLE.get(op.kind, "tp")
        if role not in ROLES:
            raise PlanError(
                f"unknown group role of {op.name}", found=role, expected=" ".join(ROLES)
            )
        return self.of_rank.get((rank, role), [])

    def ends(self, op: Op, rank: int) -> list[End]:
        """Pieces of this transfer at this rank, in piece order.

        Raises:
            PlanError: the op names no boundary of the placement.
        """
        sending = op.kind.startswith(("SEND", "PU"))
        if op.peer >= 0:
            src, dst = (rank, op.peer) if sending else (op.peer, rank)
            return [End((op.kind.split("_")[-1], op.label), src, dst)]
        direction = op.kind[-1]
        stage = self.stage_of(op, rank)
        side = "src" if (direction == "F") == sending else "dst"
        hit = self._by_end.get((side, stage, op.label))
        cell = self.cell_of.get(rank)
        if hit is None or cell is None:
            raise PlanError(
                f"{op.name} of rank {rank} has no boundary to follow",
                found=f"{side} stage {stage}",
                expected="a boundary of the placement or an explicit peer",
            )
        index, boundary = hit
        ends = self._table(index, boundary, direction, cell.replica)
        return ends.get(rank, [])

    def _table(
        self, index: int, boundary: Boundary, direction: str, replica: int
    ) -> dict[int, list[End]]:
        key = (index, replica, 0 if direction == "F" else 1, 0)
        if key not in self._pieces:
            src = self._cells[self._position[boundary.src], replica]
            dst = self._cells[self._position[boundary.dst], replica]
            if direction == "B":
                src, dst = dst, src
            table: dict[int, list[End]] = defaultdict(list)
            for piece in pieces(src, dst, self.placement.whole_boundaries):
                end = End(
                    (direction, index), piece.src, piece.dst, (piece.stop - piece.start, piece.of)
                )
                table[piece.src].append(end)
                table[piece.dst].append(end)
            self._pieces[key] = table
        return self._pieces[key]


def wire(placement: Placement) -> Wiring:
    """Resolve the peers and groups of a placement.

    Raises:
        PlanError: the groups cannot be formed (see sim.plan.placement.derive_groups).
    """
    return Wiring(placement)


def is_transfer(op: Op) -> bool:
    """True for ops on a directed rank pair."""
    return (op.stream or KINDS[op.kind].stream) == "pair"


def is_collective(op: Op) -> bool:
    """True for ops on a member list."""
    return (op.stream or KINDS[op.kind].stream) == "group"
