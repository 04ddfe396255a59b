"""What one rank does in a step: op instances, what each waits for, and its wires."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from real_runtime.errors import UnsupportedPlanError
from sim.plan.deps import resolve
from sim.plan.flat import flatten
from sim.plan.op import Op
from sim.plan.passes import expand
from sim.plan.placement import Piece, pieces
from sim.plan.plan import Plan
from sim.plan.program import STEPS, Program
from sim.plan.unroll import LOCAL_STREAMS, unroll
from sim.plan.wiring import Wiring, is_transfer, wire

__all__ = ["Node", "RankProgram", "check_form", "rank_program", "refused"]


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One op instance of a step.

    Args:
        op: with its stage filled in. name: "program:index" as in the span table.
        deps: positions of the instances it waits for.
        stream: rank-local stream, or "pair" or "group".
        piece: of a transfer, else None. peer: its other rank, -1 for none.
        group: index of a collective's group, -1 for none. number: of the group among the rank's
            groups of that role.
        consumer: position of the first instance that depends on it, -1 for none.
    """

    op: Op
    name: str
    deps: tuple[int, ...]
    stream: str
    piece: Piece | None = None
    peer: int = -1
    group: int = -1
    number: int = 0
    consumer: int = -1

    @property
    def on_wire(self) -> bool:
        """Whether it is a transfer or a collective."""
        return self.piece is not None or self.group >= 0

    @property
    def wire(self) -> tuple[object, ...]:
        """What it shares its order with: a directed pair, or a member list."""
        if self.piece is not None:
            return ("pair", self.piece.src, self.piece.dst, self.op.channel)
        return ("group", self.group, self.op.channel)


class RankProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's step.

    Args:
        rank: whose. nodes: in list order. index: of its program among the plan's.
    """

    rank: int
    nodes: tuple[Node, ...]
    index: int


def check_form(program: Program) -> None:
    """Refuse what is not one plain step repeated, whatever its handlers do.

    Raises:
        UnsupportedPlanError: prologue, epilogue, nested repeats, ``on`` blocks, late amounts,
            versions, streams of an op's own or ops carried over from the step before.
    """
    if len(program.blocks) != 1 or program.blocks[0].form != "repeat":
        forms = " ".join(b.form for b in program.blocks)
        raise refused("program of several blocks", forms, "one repeat(steps)")
    block = program.blocks[0]
    if block.count != STEPS:
        raise refused("repeat", f"repeat({block.count})", "repeat(steps)")
    for item in block.items:
        if not isinstance(item, Op):
            raise refused("nested block", item.form, "ops only")
        for what, wrong in (
            ("op carried over a step", item.carried),
            ("late amount", item.ref),
            ("version", item.reads or item.writes),
            ("stream of an op's own", item.stream),
        ):
            if wrong:
                raise refused(what, item.name, "a plan without")


def refused(what: str, found: str, expected: str) -> UnsupportedPlanError:
    """Return the error of something in a program that this runtime does not run."""
    return UnsupportedPlanError(
        f"the runtime does not run this {what}", key="programs", found=found, expected=expected
    )


def rank_program(plan: Plan, rank: int, wiring: Wiring | None = None) -> RankProgram:
    """Lay out one rank's step.

    Raises:
        PlanError: the plan's programs are malformed. UnsupportedPlanError: see ``check_form``.
    """
    wiring = wiring or wire(plan.placement)
    programs = expand(plan)
    index = next(i for i, p in enumerate(programs) if rank in p.ranks)
    check_form(programs[index])
    flat = flatten(programs[index])
    deps = resolve(flat, wiring.stages(rank))
    ends = [_pieces(plan, wiring, op, rank) if is_transfer(op) else [] for op in flat.ops]
    groups = [
        wiring.group_indices(op, rank) if stream == "group" else []
        for op, stream in zip(flat.ops, flat.streams, strict=True)
    ]
    counts = [
        1 if stream in LOCAL_STREAMS else len(ends[i] or groups[i])
        for i, stream in enumerate(flat.streams)
    ]
    layout = unroll(flat, deps, counts, 1)
    before: dict[int, list[int]] = defaultdict(list)
    for src, dst in zip(layout.dep_src.tolist(), layout.dep_dst.tolist(), strict=True):
        before[dst].append(src)
    nodes = []
    for n, (static, piece) in enumerate(
        zip(layout.static.tolist(), layout.piece.tolist(), strict=True)
    ):
        op = flat.ops[static]
        if op.stage < 0 and op.kind != "BARRIER":
            op = msgspec.structs.replace(op, stage=wiring.stage_of(op, rank))
        mine = ends[static][piece] if ends[static] else None
        nodes.append(
            Node(
                op=op,
                name=f"{index}:{static}",
                deps=tuple(sorted(set(before[n]))),
                stream=flat.streams[static],
                piece=mine,
                peer=-1 if mine is None else mine.src + mine.dst - rank,
                group=groups[static][piece] if groups[static] else -1,
                number=piece,
                consumer=int(layout.consumer[n]),
            )
        )
    return RankProgram(rank=rank, nodes=tuple(nodes), index=index)


def _pieces(plan: Plan, wiring: Wiring, op: Op, rank: int) -> list[Piece]:
    """Pieces of a boundary transfer that begin or end at the rank, in piece order."""
    if op.peer >= 0 or op.kind not in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        return [Piece(e.src, e.dst, 0, 1, 1) for e in wiring.ends(op, rank)]
    placement, sending = plan.placement, op.kind.startswith("SEND")
    forward = op.kind.endswith("F")
    stage = wiring.stage_of(op, rank)
    mine = wiring.cell_of[rank]
    position = {s.stage: s.cell for s in placement.segments}
    side = "src" if forward == sending else "dst"
    boundary = next(
        b for b in placement.boundaries if getattr(b, side) == stage and b.name == op.label
    )
    other = placement.cell(position[boundary.dst if side == "src" else boundary.src], mine.replica)
    producer, consumer = (mine, other) if sending else (other, mine)
    found = pieces(producer, consumer, placement.whole_boundaries)
    return [p for p in found if (p.src if sending else p.dst) == rank]
