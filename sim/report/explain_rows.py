"""A critical path in few rows: runs of equal ops joined, patterns that repeat folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sim.engine.simulate import Run
from sim.plan.op import Op
from sim.report.explain_parts import Parts, in_order
from sim.report.explain_path import Interval
from sim.report.wires import WireTexts

__all__ = ["PathRow", "joined_rows", "path_rows"]

LONGEST_PATTERN = 12


class PathRow(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbours on a critical path.

    Args:
        where: classes of ranks, "a -> b" for transfers, role and size for collectives.
        ops: kinds in order, those of one turn where the row is a pattern. turns: of the pattern.
        count: ops of the row. first, last: their names. start_s: [s] when the first begins.
        seconds: [s] of the path. share: of it. parts: of ``seconds`` [s].
    """

    where: str
    ops: str
    turns: int
    count: int
    first: str
    last: str
    start_s: float
    seconds: float
    share: float
    parts: Parts


class _Piece(NamedTuple):
    key: tuple[str, str]
    ops: int
    first: str
    last: str
    start: float
    end: float
    parts: Parts


def path_rows(
    run: Run,
    path: Sequence[Interval],
    parts: Sequence[Parts],
    of_actor: Sequence[int],
    labels: Sequence[str],
) -> tuple[PathRow, ...]:
    """Return the rows of a path, in order of time.

    Args:
        run: simulated. path: of it. parts: of each interval [s].
        of_actor: class of each actor. labels: of the classes.
    """
    words = _Words(run, of_actor, labels)
    pieces: list[_Piece] = []
    for interval, mine in zip(path, parts, strict=True):
        where, kind, name = words.of(interval)
        piece = _Piece((where, kind), 1, name, name, interval.start, interval.end, mine)
        if pieces and pieces[-1].key == piece.key:
            piece = _joined([pieces.pop(), piece])
        pieces.append(piece)
    whole = path[-1].end - path[0].start if path else 0.0
    rows = []
    at = 0
    while at < len(pieces):
        length, turns = _pattern([p.key for p in pieces], at)
        rows.append(_row(pieces[at : at + length * turns], length, turns, whole))
        at += length * turns
    return tuple(rows)


def joined_rows(rows: Sequence[PathRow]) -> PathRow:
    """Return one row for rows of the same place and ops, which need not be neighbours."""
    names = in_order([n for r in rows for n in r.parts])
    return msgspec.structs.replace(
        rows[0],
        turns=sum(r.turns for r in rows),
        count=sum(r.count for r in rows),
        last=rows[-1].last,
        seconds=sum(r.seconds for r in rows),
        share=sum(r.share for r in rows),
        parts={n: sum(r.parts.get(n, 0.0) for r in rows) for n in names},
    )


def _row(pieces: list[_Piece], length: int, turns: int, whole: float) -> PathRow:
    all_of_it, keys = _joined(pieces), [p.key for p in pieces[:length]]
    seconds = sum(p.end - p.start for p in pieces)
    return PathRow(
        where=", ".join(dict.fromkeys(where for where, _ in keys)),
        ops=" ".join(kind for _, kind in keys),
        turns=turns,
        count=all_of_it.ops,
        first=all_of_it.first,
        last=all_of_it.last,
        start_s=all_of_it.start,
        seconds=seconds,
        share=seconds / whole if whole else 0.0,
        parts=all_of_it.parts,
    )


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    first, last = pieces[0], pieces[-1]
    parts = {n: sum(p.parts.get(n, 0.0) for p in pieces) for p in pieces for n in p.parts}
    return _Piece(
        first.key, sum(p.ops for p in pieces), first.first, last.last, first.start, last.end,
        {n: parts[n] for n in in_order(tuple(parts))},
    )  # fmt: skip


def _pattern(keys: Sequence[object], at: int) -> tuple[int, int]:
    """(length, turns) of the pattern from here on that repeats over the most pieces."""
    best = (1, 1)
    for length in range(2, LONGEST_PATTERN + 1):
        one, turns = keys[at : at + length], 1
        while keys[at + turns * length : at + (turns + 1) * length] == one:
            turns += 1
        if turns > 1 and turns * length > best[0] * best[1]:
            best = (length, turns)
    return best


class _Words:
    """Where an interval runs, its kind and its op's name."""

    def __init__(self, run: Run, of_actor: Sequence[int], labels: Sequence[str]) -> None:
        self.run, self.graph = run, run.layout.graph
        self.of_actor, self.labels = of_actor, labels
        self.wires = WireTexts(self.graph)
        self.actor_of_class = {
            self.graph.classes[a.rank]: i for i, a in enumerate(self.graph.actors)
        }
        self.actor_of = {a.rank: i for i, a in enumerate(self.graph.actors)}

    def of(self, interval: Interval) -> tuple[str, str, str]:
        """(where, kind, name)."""
        if interval.node >= 0:
            op = self.graph.ops[interval.node]
            return self._where(interval.node, op), op.kind, self._name(op, interval.node)
        if interval.handled >= 0:
            h = self.run.handled[interval.handled]
            who = self._label(self.actor_of[h.rank])
            if h.op.kind.startswith("SEND"):
                who = _arrow(who, self._label(self.actor_of[h.sender]))
            return who, h.op.kind, f"{h.op.name}#{h.index}"
        return "", "nothing", ""

    def _label(self, actor: int) -> str:
        return self.labels[self.of_actor[actor]]

    def _where(self, node: int, op: Op) -> str:
        own, w = self._label(int(self.graph.actor[node])), int(self.graph.wire[node])
        if w < 0:
            return own
        wire = self.graph.wires[w]
        if wire.end is not None:
            return _arrow(*(self._label(self.actor_of_class[c]) for c in wire.classes))
        if op.kind == "BARRIER":
            return "all ranks"
        role = self.wires.group[w].partition(" ")[0]
        members = dict.fromkeys(self.of_actor[self.actor_of_class[c]] for c in wire.classes)
        names = [self.labels[c] for c in sorted(members)]
        if len(names) > 1:
            names = [names[0], *(n.removeprefix("stage ") for n in names[1:])]
        more = f" and {len(names) - 2} more" if len(names) > 3 else ""
        return f"{role} of {len(wire.group)}, " + ", ".join(names[:2] if more else names) + more

    def _name(self, op: Op, node: int) -> str:
        step = int(self.graph.step[node])
        return op.name + (f" of step {step}" if self.run.layout.steps > 1 and step >= 0 else "")


def _arrow(src: str, dst: str) -> str:
    """From one class to another, what both are said once.

    >>> _arrow("stage 0", "stage 1"), _arrow("stage 0 T4", "rank 3")
    ('stage 0 -> 1', 'stage 0 T4 -> rank 3')
    """
    word = src.partition(" ")[0] + " "
    return f"{src} -> {dst.removeprefix(word)}"
