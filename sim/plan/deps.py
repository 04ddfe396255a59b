"""Dependencies of one program: the implied ones filled in, every name resolved to list positions.

The rules are those of the plan format: RECV -> F or B; a segment's F -> its B, I; I -> W;
producer -> SEND; a segment's last W or B -> REDUCE_GRAD -> OPT -> its first F one step later.
With a microbatch's number UNSHARD -> its F, UNSHARD_B -> its B and I, its W or B -> REDUCE_GRAD.
A written dependency replaces the implied ones of that op.
"""

from __future__ import annotations

import difflib
from collections import defaultdict

from sim.errors import PlanError
from sim.plan.flat import Flat
from sim.plan.kinds import KINDS
from sim.plan.op import Dep, Op

__all__ = ["EXPERTS", "experts_label", "of_experts", "resolve", "segment_of"]

EXPERTS = "experts"
"""Label of REDUCE_GRAD and UNSHARD of a stage's routed experts, apart from its other parameters;
behind a slash of a segment's."""


def experts_label(segment: str) -> str:
    """Return the label of what belongs to a segment's routed experts; "" is the whole stage.

    >>> experts_label("l3"), experts_label("")
    ('l3/experts', 'experts')
    """
    return f"{segment}/{EXPERTS}" if segment else EXPERTS


def of_experts(label: str) -> bool:
    """Whether a label stands for routed experts."""
    return label == EXPERTS or label.endswith(f"/{EXPERTS}")


def segment_of(label: str) -> str:
    """Return the segment that a label belongs to, "" for a whole stage.

    >>> segment_of("l3/experts"), segment_of("l3"), segment_of("experts")
    ('l3', 'l3', '')
    """
    return "" if label == EXPERTS else label.partition("/")[0]


class _Names:
    """Positions of ops by (kind, stage, mb, part, label), built once per program."""

    def __init__(self, ops: list[Op], hosted: frozenset[int]) -> None:
        self.by_name: dict[str, list[int]] = defaultdict(list)
        self.by_key: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self.by_stage: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.first_f: dict[tuple[int, str], int] = {}
        self.sole = next(iter(hosted)) if len(hosted) == 1 else -1
        self.ops = ops
        wanted = {dep.name for op in ops for dep in op.deps or ()}
        named = {kind for kind in KINDS if any(kind in name for name in wanted)}
        for i, op in enumerate(ops):
            stage = self.stage(op)
            if op.kind in named:
                for name in self.names(op):
                    self.by_name[name].append(i)
            self.by_key[op.kind, stage, op.mb, op.part].append(i)
            self.by_stage[op.kind, stage].append(i)
            if op.kind == "F":
                self.first_f.setdefault((stage, op.label), i)

    def stage(self, op: Op) -> int:
        return op.stage if op.stage >= 0 else self.sole

    def names(self, op: Op) -> list[str]:
        """The op's name, with and without the stage where the rank hosts only one."""
        name = op.name
        if self.sole >= 0 and op.stage < 0:
            return [name, f"{self.sole}{name}"]
        if op.stage == self.sole >= 0:
            return [name, name[len(str(op.stage)) :]]
        return [name]

    def at(self, i: int, kind: str, stage: int, mb: int, part: int) -> list[int]:
        """Positions of such ops before the i-th: of the part, or else of the whole microbatch."""
        hits = _before(self.by_key.get((kind, stage, mb, part)), i)
        if not hits and part >= 0:
            hits = _before(self.by_key.get((kind, stage, mb, -1)), i)
        return hits


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
            known = [name for other in names.ops for name in names.names(other)]
            near = difflib.get_close_matches(dep.name, known, n=1)
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
    found: list[int] = []
    if kind == "F":
        above = names.at(i, "F", stage - 1, op.mb, op.part) if stage - 1 in hosted else []
        found = _arrivals(i, op, ops, names, "F") or _last(above)
        found = found + _last(names.at(i, "F", stage, op.mb, op.part))
        found += _gathered(i, op, ops, names, "UNSHARD")
        return [(j, 0) for j in found] + _updates(i, op, ops, names)
    if kind in ("B", "I", "R", "W"):
        found = _backward(i, op, ops, names, hosted)
    elif kind in ("SEND_F", "SEND_B"):
        coded = names.at(i, "ENCODE", stage, op.mb, op.part)
        found = _last([j for j in coded if ops[j].label == op.label])
        for maker in ("F",) if kind == "SEND_F" else ("I", "B"):
            found = found or _last(names.at(i, maker, stage, op.mb, op.part))
    elif kind == "ALL_GATHER" and op.label in ("f", "b"):
        found = names.at(i, f"RECV_{op.label.upper()}", stage, op.mb, op.part)
    elif kind == "DECODE":
        for way in "FB":
            arrived = names.at(i, f"RECV_{way}", stage, op.mb, op.part)
            found = _last([j for j in arrived if ops[j].label == op.label]) or found
    elif kind == "REDUCE_GRAD":
        found = _gradient(i, op, ops, names)
    elif kind == "OPT":
        found = _of_segment(i, op, ops, names, "REDUCE_GRAD") or _gradient(i, op, ops, names)
    return [(j, 0) for j in found]


def _backward(i: int, op: Op, ops: list[Op], names: _Names, hosted: frozenset[int]) -> list[int]:
    """What a B, I, R or W waits for on its rank."""
    stage, mb, part = names.stage(op), op.mb, op.part

    def same(kind: str) -> list[int]:
        hits = names.at(i, kind, stage, mb, part)
        return _last([j for j in hits if ops[j].label == op.label] or hits)

    if op.kind == "W":
        return same("I")
    found = same("F") + same("R") + _gathered(i, op, ops, names, "UNSHARD_B")
    if op.kind == "R":
        return found
    arrived = _arrivals(i, op, ops, names, "B")
    if not arrived and stage + 1 in hosted:
        arrived = _last(
            names.at(i, "I", stage + 1, mb, part) or names.at(i, "B", stage + 1, mb, part)
        )
    found += arrived
    return found + _last(names.at(i, "B", stage, mb, part) + names.at(i, "I", stage, mb, part))


def _before(positions: list[int] | None, i: int) -> list[int]:
    """Those of some rising positions that come before the i-th."""
    if not positions or positions[-1] < i:
        return positions or []
    return [j for j in positions if j < i]


def _gradient(i: int, op: Op, ops: list[Op], names: _Names) -> list[int]:
    """The op that completes a segment's gradient, or a microbatch's part of it: the last W or B."""
    if op.kind == "REDUCE_GRAD" and op.mb >= 0:
        where = (names.stage(op), op.mb, op.part)
        hits = names.at(i, "W", *where) or names.at(i, "B", *where)
        own = segment_of(op.label)
        return _last([j for j in hits if not own or segment_of(ops[j].label) == own])
    return _last(_of_segment(i, op, ops, names, "W") or _of_segment(i, op, ops, names, "B"))


def _last(hits: list[int]) -> list[int]:
    return hits[-1:]


def _arrivals(i: int, op: Op, ops: list[Op], names: _Names, way: str) -> list[int]:
    """What stands for an arrived tensor: the gathers behind the RECVs, decoders, or the RECVs."""
    where = (names.stage(op), op.mb, op.part)
    received = names.at(i, f"RECV_{way}", *where)
    if not received:
        return []
    gathered = [j for j in names.at(i, "ALL_GATHER", *where) if ops[j].label == way.lower()]
    if gathered:
        return gathered
    decoded = {ops[j].label: j for j in names.at(i, "DECODE", *where)}
    return [decoded.get(ops[j].label, j) for j in received]


def _of_segment(i: int, op: Op, ops: list[Op], names: _Names, kind: str) -> list[int]:
    hits, own = names.by_stage.get((kind, names.stage(op)), []), segment_of(op.label)
    return [j for j in hits if j < i and (not own or segment_of(ops[j].label) in ("", own))]


def _gathered(i: int, op: Op, ops: list[Op], names: _Names, kind: str) -> list[int]:
    """The gather of the op's segment: for its microbatch, or for the whole step."""
    stage = names.stage(op)
    hits = names.at(i, kind, stage, op.mb, -1) or names.at(i, kind, stage, -1, -1)
    own = segment_of(op.label)
    mine = [j for j in hits if not own or segment_of(ops[j].label) in ("", own)]
    return list({ops[j].label: j for j in mine}.values())


def _updates(i: int, op: Op, ops: list[Op], names: _Names) -> list[tuple[int, int]]:
    """A segment's first F waits for its update of the step before."""
    stage = names.stage(op)
    if names.first_f[stage, op.label] != i:
        return []
    later = {
        ops[j].label: j
        for kind in ("OPT", "UNSHARD")
        for j in names.by_stage.get((kind, stage), ())
        if j > i
        and segment_of(ops[j].label) in ("", segment_of(op.label))
        and (kind == "OPT" or ops[j].mb < 0)
    }
    experts = [later.pop(label) for label in list(later) if of_experts(label)]
    return [(j, 1) for j in [*([max(later.values())] if later else []), *experts]]
