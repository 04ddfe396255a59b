"""Dependencies of one program: the implied ones filled in, every name resolved to list positions.

The rules are those of the plan format: RECV -> F or B; a segment's F -> its B, I; I -> W;
producer -> SEND; a segment's last W or B -> REDUCE_GRAD -> OPT -> its first F one step later.
A written dependency replaces the implied ones of that op.
"""

from __future__ import annotations

import difflib
from collections import defaultdict

from sim.errors import PlanError
from sim.plan.kinds import KINDS
from sim.plan.op import Dep, Op
from sim.plan.program import Block, Program

__all__ = ["EXPERTS", "Flat", "flatten", "resolve"]

EXPERTS = "experts"
"""Label of REDUCE_GRAD and UNSHARD of a stage's routed experts, apart from its other parameters."""

Path = tuple[int, ...]


class Flat:
    """A program as flat lists; repeats are named by an id.

    Attributes:
        ops: static ops in list order, those of ``on`` blocks left out.
        paths: ids of the repeats around each op, outermost first.
        counts: repeat id -> count (STEPS for the run's steps).
        layout: the blocks as ("op", position) and ("repeat", id, layout) for unrolling.
        handlers: ``on`` blocks, message kind -> ops.
        same: first position of the op's name, for names that stand in several blocks.
    """

    __slots__ = ("counts", "handlers", "layout", "ops", "paths", "same")

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.paths: list[Path] = []
        self.counts: list[int] = []
        self.layout: list[tuple[object, ...]] = []
        self.handlers: dict[str, tuple[Op, ...]] = {}
        self.same: list[int] = []


def flatten(program: Program) -> Flat:
    """Lay a program out.

    Raises:
        PlanError: an ``on`` block is nested or given twice for one message.
    """
    flat = Flat()

    def visit(block: Block, path: Path, layout: list[tuple[object, ...]]) -> None:
        if block.form == "on":
            if path or block.message in flat.handlers:
                raise PlanError(
                    "an on block stands alone, once per message", found=f"on({block.message})"
                )
            flat.handlers[block.message] = tuple(i for i in block.items if isinstance(i, Op))
            return
        inner = layout
        if block.form == "repeat":
            flat.counts.append(block.count)
            path = (*path, len(flat.counts) - 1)
            inner = []
            layout.append(("repeat", path[-1], inner))
        for item in block.items:
            if isinstance(item, Op):
                inner.append(("op", len(flat.ops)))
                flat.ops.append(item)
                flat.paths.append(path)
            else:
                visit(item, path, inner)

    for block in program.blocks:
        visit(block, (), flat.layout)
    first: dict[tuple[object, ...], int] = {}
    flat.same = [
        first.setdefault((op.stage, op.kind, op.mb, op.part, op.label), i)
        for i, op in enumerate(flat.ops)
    ]
    return flat


class _Names:
    """Positions of ops by (kind, stage, mb, part, label), built once per program."""

    def __init__(self, ops: list[Op], hosted: frozenset[int]) -> None:
        self.by_name: dict[str, list[int]] = defaultdict(list)
        self.by_key: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self.by_stage: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.first_f: dict[tuple[int, str], int] = {}
        self.sole = next(iter(hosted)) if len(hosted) == 1 else -1
        written = any(op.deps for op in ops)
        for i, op in enumerate(ops):
            stage = self.stage(op)
            if written:
                name = op.name
                self.by_name[name].append(i)
                if stage >= 0 and op.stage < 0:
                    self.by_name[f"{stage}{name}"].append(i)
                elif op.stage == self.sole >= 0:
                    self.by_name[name[len(str(op.stage)) :]].append(i)
            self.by_key[op.kind, stage, op.mb, op.part].append(i)
            self.by_stage[op.kind, stage].append(i)
            if op.kind == "F":
                self.first_f.setdefault((stage, op.label), i)

    def stage(self, op: Op) -> int:
        return op.stage if op.stage >= 0 else self.sole


def resolve(flat: Flat, hosted: frozenset[int] = frozenset()) -> list[list[tuple[int, int]]]:
    """Dependencies of every static op as (position, distance), positions in list order.

    Args:
        flat: the program.
        hosted: virtual stages of the cell, so that a stage may be left out when there is one.

    Raises:
        PlanError: a dependency names no op of the program, or one that does not come before.
    """
    ops = flat.ops
    names = _Names(ops, hosted)
    last_compute: dict[tuple[int, int, int, str], int] = {}
    found: list[list[tuple[int, int]]] = []
    for i, op in enumerate(ops):
        deps = (
            _implied(i, op, ops, names, hosted) if op.deps is None else _written(i, op, flat, names)
        )
        found.append(deps)
        if (
            op.deps is None
            and KINDS[op.kind].cost == "collective"
            and not deps
            and op.kind != "BARRIER"
        ):
            key = (names.stage(op), op.mb, op.part, op.label)
            if key in last_compute:
                found[-1] = [(last_compute[key], 0)]
        if KINDS[op.kind].stream == "compute":
            last_compute[names.stage(op), op.mb, op.part, op.label] = i
    return found


def _written(i: int, op: Op, flat: Flat, names: _Names) -> list[tuple[int, int]]:
    found = []
    for dep in op.deps or ():
        hits = names.by_name.get(dep.name)
        if not hits:
            near = difflib.get_close_matches(dep.name, names.by_name, n=1)
            raise PlanError(
                f"{op.name} depends on {dep.name}, which is not an op of its rank",
                found=dep.name,
                expected=near[0] if near else "an op of the same program",
            )
        found += _pick(i, op, dep, hits, flat)
    return found


def _pick(i: int, op: Op, dep: Dep, hits: list[int], flat: Flat) -> list[tuple[int, int]]:
    """Several ops of one name (prologue, body, epilogue): every legal one is offered, unroll picks.

    In one repeat the target must have been listed before: in an earlier turn of the repeat, or
    earlier in the same turn. ``carried`` shifts both ends by whole turns.
    """

    def before(h: int) -> bool:
        if flat.paths[h] != flat.paths[i]:
            shared = flat.paths[h][:1] == flat.paths[i][:1] != ()
            return dep.distance > 0 if shared and h > i else h < i and (shared or not dep.distance)
        turns = op.carried + dep.distance - flat.ops[h].carried
        return turns > 0 or (turns == 0 and h < i)

    legal = [h for h in hits if before(h)]
    if not legal:
        raise PlanError(
            f"{op.name} depends on {dep.name}, which comes later in the list",
            found=dep.name,
            expected="an earlier op, or a distance @1",
        )
    return [(h, dep.distance) for h in legal]


def _implied(
    i: int, op: Op, ops: list[Op], names: _Names, hosted: frozenset[int]
) -> list[tuple[int, int]]:
    kind, stage = op.kind, names.stage(op)
    key = names.by_key

    def at(kind_: str, stage_: int = stage, mb: int = op.mb) -> list[int]:
        hits = [j for j in key.get((kind_, stage_, mb, op.part), ()) if j < i]
        if not hits and op.part >= 0:
            hits = [j for j in key.get((kind_, stage_, mb, -1), ()) if j < i]
        return hits

    def same(hits: list[int]) -> list[int]:
        return [j for j in hits if ops[j].label == op.label] or hits

    found: list[int] = []
    if kind == "F":
        found = _arrivals(at, "RECV_F", "f", ops) or _last(
            at("F", stage - 1) if stage - 1 in hosted else []
        )
        found += _last(at("F")) + _last(_of_segment(i, op, ops, names, "UNSHARD"))
        return [(j, 0) for j in found] + _updates(i, op, ops, names)
    if kind in ("B", "I", "R"):
        found = _last(same(at("F"))) + _last(same(at("R")))
        if kind != "R":
            arrived = _arrivals(at, "RECV_B", "b", ops)
            local = at("I", stage + 1) or at("B", stage + 1) if stage + 1 in hosted else []
            found += arrived or _last(local)
            found += _last([j for j in at("B") + at("I") if j != i])
    elif kind == "W":
        found = _last(same(at("I")))
    elif kind == "SEND_F":
        found = _last([j for j in at("ENCODE") if ops[j].label == op.label]) or _last(at("F"))
    elif kind == "SEND_B":
        found = _last([j for j in at("ENCODE") if ops[j].label == op.label]) or _last(
            at("I") or at("B")
        )
    elif kind == "ALL_GATHER" and op.label in ("f", "b"):
        found = at(f"RECV_{op.label.upper()}")
    elif kind == "DECODE":
        found = [j for j in at("RECV_F") + at("RECV_B") if ops[j].label == op.label][-1:]
    elif kind == "REDUCE_GRAD":
        found = _gradient(i, op, ops, names)
    elif kind == "OPT":
        found = _of_segment(i, op, ops, names, "REDUCE_GRAD") or _gradient(i, op, ops, names)
    return [(j, 0) for j in found]


def _gradient(i: int, op: Op, ops: list[Op], names: _Names) -> list[int]:
    """The op that completes a segment's gradient: its last W, or its last B."""
    return _last(_of_segment(i, op, ops, names, "W") or _of_segment(i, op, ops, names, "B"))


def _last(hits: list[int]) -> list[int]:
    return hits[-1:]


def _arrivals(at, recv: str, gather: str, ops: list[Op]) -> list[int]:  # type: ignore[no-untyped-def]
    """What stands for an arrived tensor: the gathers behind the RECVs, decoders, or the RECVs."""
    received: list[int] = at(recv)
    if not received:
        return []
    gathered: list[int] = [j for j in at("ALL_GATHER") if ops[j].label == gather]
    if gathered:
        return gathered
    decoded = {
        ops[j].label: j for j in at("DECODE") if any(ops[k].label == ops[j].label for k in received)
    }
    return [decoded.get(ops[j].label, j) for j in received]


def _of_segment(i: int, op: Op, ops: list[Op], names: _Names, kind: str) -> list[int]:
    hits = names.by_stage.get((kind, names.stage(op)), [])
    return [j for j in hits if j < i and (not op.label or ops[j].label in ("", op.label))]


def _updates(i: int, op: Op, ops: list[Op], names: _Names) -> list[tuple[int, int]]:
    """A segment's first F waits for its update of the step before."""
    stage = names.stage(op)
    if names.first_f[stage, op.label] != i:
        return []
    later = {
        ops[j].label: j
        for kind in ("OPT", "UNSHARD")
        for j in names.by_stage.get((kind, stage), ())
        if j > i and ops[j].label in ("", EXPERTS, op.label)
    }
    whole = [later.pop(EXPERTS)] if EXPERTS in later else []
    return [(j, 1) for j in [*([max(later.values())] if later else []), *whole]]
