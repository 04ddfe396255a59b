"""Placement: cells, segments and boundaries, and the groups and pieces derived from them.

A cell (stage, replica) is an ordered list of ranks with its own accelerator type, tp and cp.
All replicas have the same stages and segments. Nothing here knows programs or time.
"""

from __future__ import annotations

import itertools
from typing import Literal

import msgspec

from sim.errors import PlanError

__all__ = [
    "Boundary",
    "Cell",
    "Group",
    "Piece",
    "Placement",
    "Segment",
    "derive_groups",
    "is_mesh",
    "pieces",
    "print_grid",
]

Recompute = Literal["none", "selective", "full"]
CellOffload = Literal["", "none"]


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranks that run one pipeline position of one replica.

    Args:
        stage: pipeline position (0-based). replica: data-parallel replica.
        ranks: members; tensor-parallel index varies fastest, then context-parallel.
        accelerator: profile name. tp, cp: sizes; len(ranks) == tp * cp.
        recompute: what F keeps.
        offload: what the host keeps: what its segments say (""), or nothing whatever they say
            ("none"); such a cell may also recompute nothing where they do.
    """

    stage: int
    replica: int
    ranks: tuple[int, ...]
    accelerator: str = ""
    tp: int = 1
    cp: int = 1
    recompute: Recompute = "none"
    offload: CellOffload = ""


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of blocks that is scheduled as one.

    Args:
        name: label in programs; "" when a virtual stage is one segment.
        stage: virtual stage. cell: pipeline position that hosts it.
        blocks: (first, last + 1) indices into the model's blocks.
        recompute: what F keeps of it; "" as its cell says.
        offload: what lives in host memory: "parameters", "optimizer" (with the update), or both.
            "nvme" beside "optimizer": on NVMe instead, and passes through host memory.
    """

    name: str = ""
    stage: int
    cell: int
    blocks: tuple[int, int] = (0, 0)
    recompute: Recompute | Literal[""] = ""
    offload: tuple[Literal["parameters", "optimizer", "nvme"], ...] = ()


class Boundary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Edges of the model that cross from one virtual stage to another.

    Args:
        name: label of the transfer, "" on a chain. src, dst: virtual stages.
        elements: per token. gradient: False when nothing flows back.
    """

    name: str = ""
    src: int
    dst: int
    elements: int = 0
    gradient: bool = True


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where everything sits.

    Args:
        cells: in order of stage, then replica.
        segments: in order of virtual stage. boundaries: what crosses.
        chips: chip index in the machine of each rank; () means rank r sits on chip r.
        microbatches: of each replica.
        ep: expert-parallel size (a group of ep consecutive replicas of a stage, times tp).
        whole_boundaries: boundary tensors are sent whole to every receiving rank, not in pieces.
        extra_ranks: ranks outside any cell (a parameter server); as a process of its node one may
            sit beside a chip that a cell uses.
        parameter_buffers, gradient_buffers: of the largest segment, that a chip keeps for
            parameters and gradients on their way from and to the host or, under ZeRO, other ranks.
        nvme_buffers: of the largest segment on NVMe, that each rank keeps in host memory.
        late_updates: updates on the chip wait for the gradients of all segments.
        workers: replicas of each worker that takes steps of its own (local SGD), in order; () when
            all replicas step together.
    """

    cells: tuple[Cell, ...] = ()
    segments: tuple[Segment, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    chips: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()
    ep: int = 1
    whole_boundaries: bool = False
    extra_ranks: tuple[int, ...] = ()
    parameter_buffers: int = 2
    gradient_buffers: int = 2
    nvme_buffers: int = 2
    late_updates: bool = False
    workers: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[Segment, ...]:
        """One segment per virtual stage, its finer ones put together; in order of stage."""
        found: dict[int, Segment] = {}
        for s in self.segments:
            whole = found.get(s.stage)
            first, last = (whole or s).blocks
            blocks = (min(first, s.blocks[0]), max(last, s.blocks[1]))
            found[s.stage] = Segment(stage=s.stage, cell=s.cell, blocks=blocks)
        return tuple(found[stage] for stage in sorted(found))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return sum(len(c.ranks) for c in self.cells) + len(self.extra_ranks)

    @property
    def num_stages(self) -> int:
        """Number of pipeline positions."""
        return 1 + max((c.stage for c in self.cells), default=-1)

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel replicas."""
        return 1 + max((c.replica for c in self.cells), default=-1)

    def cell(self, stage: int, replica: int) -> Cell:
        """The cell at (stage, replica).

        Raises:
            KeyError: there is none.
        """
        index = stage * self.num_replicas + replica
        if index < len(self.cells) and (self.cells[index].stage, self.cells[index].replica) == (
            stage,
            replica,
        ):
            return self.cells[index]
        for cell in self.cells:
            if cell.stage == stage and cell.replica == replica:
                return cell
        raise KeyError((stage, replica))

    def segments_at(
        self, position: int, offload: CellOffload, recompute: Recompute
    ) -> tuple[Segment, ...]:
        """Segments of a position as a cell runs them that is set so.

        Args:
            position: of the cell. offload, recompute: of the cell.
        """
        found = []
        for s in self.segments:
            if s.cell != position:
                continue
            if offload == "none":
                again = "none" if recompute == "none" and s.recompute else s.recompute
                s = msgspec.structs.replace(s, offload=(), recompute=again)
            found.append(s)
        return tuple(found)

    def segments_of(self, cell: Cell) -> tuple[Segment, ...]:
        """Segments of a cell as it runs them."""
        return self.segments_at(cell.stage, cell.offload, cell.recompute)


class Group(msgspec.Struct, frozen=True):
    """A collective's members.

    Args:
        role: "tp", "cp", "dp" (gradients), "local" (gradients inside a worker), "ep" (tokens to
            experts), "edp" (gradients of experts), "local_edp" (inside a worker) or "world".
        ranks: ordered members.
        stage: pipeline position, -1 for the world.
        shard: (first, last + 1) of the fine shards this group reduces, of ``shards`` ("dp" and
            "local" only).
        shards: number of fine shards of the stage.
    """

    role: str
    ranks: tuple[int, ...]
    stage: int = -1
    shard: tuple[int, int] = (0, 1)
    shards: int = 1


class Piece(msgspec.Struct, frozen=True):
    """One piece of a boundary transfer.

    Args:
        src, dst: ranks. interval: byte interval as (start, stop) fractions of the tensor, exact
            as integers over ``of``.
    """

    src: int
    dst: int
    start: int
    stop: int
    of: int


def pieces(producer: Cell, consumer: Cell, whole: bool = False) -> tuple[Piece, ...]:
    """Cut one boundary tensor into max(t_s, t_r) equal pieces (topology-aware resharding).

    Piece p goes from the sender's rank floor(p * t_s / n) to the receiver's floor(p * t_r / n),
    so the tensor crosses the wire once and is fanned out inside the receiver (H2, specs section
    2.5). Context-parallel ranks are paired index by index and each pair cuts its own share.
    With ``whole`` every receiving rank is sent its whole share instead, and needs no gather.

    Raises:
        PlanError: context-parallel sizes differ.
    """
    if producer.cp != consumer.cp:
        raise PlanError(
            f"stages {producer.stage} and {consumer.stage} have different context parallelism",
            found=f"cp {producer.cp} and {consumer.cp}",
            expected="equal cp",
        )
    n = consumer.tp if whole else max(producer.tp, consumer.tp)
    found = []
    for c in range(producer.cp):
        for p in range(n):
            src = producer.ranks[c * producer.tp + p * producer.tp // n]
            dst = consumer.ranks[c * consumer.tp + p * consumer.tp // n]
            if whole:
                found.append(Piece(src, dst, c, c + 1, producer.cp))
            else:
                found.append(Piece(src, dst, c * n + p, c * n + p + 1, n * producer.cp))
    return tuple(found)


def derive_groups(placement: Placement) -> tuple[Group, ...]:
    """All groups, in the one global creation order: stage by stage tp, cp, ep, dp; then the world.

    Raises:
        PlanError: the tp sizes of a stage's replicas do not divide one another, or ep does not
            divide the number of replicas.
    """
    found: list[Group] = []
    for stage in range(placement.num_stages):
        cells = [c for c in placement.cells if c.stage == stage]
        for cell in cells:
            for c in range(cell.cp):
                if cell.tp > 1:
                    found.append(Group("tp", cell.ranks[c * cell.tp : (c + 1) * cell.tp], stage))
            if cell.cp > 1:
                found.extend(Group("cp", cell.ranks[t :: cell.tp], stage) for t in range(cell.tp))
        found.extend(_ep_groups(placement, stage, cells))
        found.extend(_dp_groups(stage, cells))
        for first, last in itertools.pairwise((0, *itertools.accumulate(placement.workers))):
            mine = [c for c in cells if first <= c.replica < last]
            found.extend(_dp_groups(stage, mine, "local"))
            if placement.ep > 1:
                found.extend(_expert_groups(placement.ep, stage, mine, "local_edp"))
    found.extend(_embed_groups(placement))
    everyone = tuple(r for c in placement.cells for r in c.ranks) + placement.extra_ranks
    if len(everyone) > 1:
        found.append(Group("world", tuple(sorted(everyone))))
    return tuple(found)


def _ep_groups(placement: Placement, stage: int, cells: list[Cell]) -> list[Group]:
    ep = placement.ep
    if ep == 1:
        return []
    if len(cells) % ep:
        raise PlanError(
            f"expert parallelism does not divide the replicas of stage {stage}",
            key="ep",
            found=str(ep),
            expected=f"a divisor of {len(cells)}",
        )
    if any(w % ep for w in placement.workers):
        raise PlanError(
            "experts are shared inside a worker that steps by itself",
            key="ep",
            found=f"{ep} for workers of {' and '.join(map(str, placement.workers))} replicas",
            expected="a divisor of every worker's replicas",
        )
    if len({(c.tp, c.cp) for c in cells}) > 1:
        raise PlanError(f"expert parallelism needs equal cells in stage {stage}", key="ep")
    m = placement.microbatches
    for first in range(0, len(m), ep):
        if len(set(m[first : first + ep])) > 1:
            raise PlanError(
                "replicas that share experts run equally many microbatches",
                key="placement.microbatches",
                found=" ".join(map(str, m[first : first + ep])),
                expected=f"equal numbers in every {ep} replicas",
            )
    found = [
        Group("ep", tuple(c.ranks[t] for c in cells[first : first + ep]), stage)
        for first in range(0, len(cells), ep)
        for t in range(len(cells[0].ranks))
    ]
    return found + _expert_groups(ep, stage, cells, "edp")


def _expert_groups(ep: int, stage: int, cells: list[Cell], role: str) -> list[Group]:
    """Ranks that hold the same experts: every ep-th cell, and their context-parallel ranks."""
    tp, cp = cells[0].tp, cells[0].cp
    if len(cells) <= ep and cp == 1:
        return []
    return [
        Group(role, tuple(c.ranks[k * tp + t] for c in cells[e::ep] for k in range(cp)), stage)
        for e in range(ep)
        for t in range(tp)
    ]


def _embed_groups(placement: Placement) -> list[Group]:
    """Owners of the same rows in the first and the last stage, for a parameter they share."""
    last = placement.num_stages - 1
    if last < 1:
        return []
    found = []
    for replica in range(placement.num_replicas):
        a, b = placement.cell(0, replica), placement.cell(last, replica)
        if a.cp == b.cp and max(a.tp, b.tp) % min(a.tp, b.tp) == 0:
            n = max(a.tp, b.tp)
            found += [
                Group(
                    "embed",
                    (a.ranks[k * a.tp + i * a.tp // n], b.ranks[k * b.tp + i * b.tp // n]),
                    -1,
                    (i, i + 1),
                    n,
                )
                for k in range(a.cp)
                for i in range(n)
            ]
    return found


def _dp_groups(stage: int, cells: list[Cell], role: str = "dp") -> list[Group]:
    """One group per shard interval: the one rank of every replica that owns it, cp included."""
    if not cells or (len(cells) == 1 and cells[0].cp == 1):
        return []
    sizes = sorted({c.tp for c in cells})
    for small, large in itertools.pairwise(sizes):
        if large % small:
            raise PlanError(
                f"tp sizes of the replicas of stage {stage} do not divide one another",
                key="tp",
                found=" and ".join(map(str, sizes)),
                expected="sizes that divide, e.g. 2 and 4",
            )
    n = sizes[-1]
    return [
        Group(
            role,
            tuple(c.ranks[k * c.tp + i * c.tp // n] for c in cells for k in range(c.cp)),
            stage,
            (i, i + 1),
            n,
        )
        for i in range(n)
    ]


def is_mesh(placement: Placement) -> bool:
    """True when all cells are equal, so that the plan prints as a mesh and becomes a DeviceMesh."""
    return len({(c.tp, c.cp, len(c.ranks)) for c in placement.cells}) == 1


def print_grid(placement: Placement) -> str:
    """The placement as text: one line per stage, runs of equal replicas folded."""
    lines = []
    if is_mesh(placement):
        c = placement.cells[0]
        axes = f"pp={placement.num_stages} dp={placement.num_replicas} cp={c.cp} tp={c.tp}"
        lines.append(f"mesh {axes}" + (f" ep={placement.ep}" if placement.ep > 1 else ""))
    for stage in range(placement.num_stages):
        runs: list[tuple[str, int]] = []
        for cell in placement.cells:
            if cell.stage != stage:
                continue
            text = f"{cell.accelerator or 'chip'} tp{cell.tp}"
            text += f" cp{cell.cp}" if cell.cp > 1 else ""
            text += f" {cell.recompute}" if cell.recompute != "none" else ""
            if runs and runs[-1][0] == text:
                runs[-1] = (text, runs[-1][1] + 1)
            else:
                runs.append((text, 1))
        lines.append(f"stage {stage}: " + " + ".join(f"{n} x {t}" if n > 1 else t for t, n in runs))
    return "\n".join(lines)
