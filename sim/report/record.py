"""From a run's op graph and times to the span table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.prices import Prices
from sim.engine.execute import Outcome
from sim.engine.messages import Handled
from sim.engine.simulate import Run
from sim.plan.deps import flatten
from sim.plan.graph import OpGraph, Wire
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.plan.program import Program
from sim.plan.unroll import LOCAL_STREAMS, stream_of
from sim.plan.wiring import DEFAULT_ROLE, Wiring
from sim.report.spans import Spans, concatenate

__all__ = ["compact_ranks", "spans_of", "spans_of_run"]

Ints = NDArray[np.int64]


def spans_of(
    graph: OpGraph,
    outcome: Outcome,
    prices: Prices,
    *,
    programs: Sequence[Program] = (),
    wiring: Wiring | None = None,
    handled: Sequence[Handled] = (),
    run: str = "",
    source: str = "simulated",
) -> Spans:
    """Build the span table of a run, sorted by start, rank and node.

    Ops that never ended (a lost chip) have no row.

    Args:
        graph: the op graph. outcome: its times. prices: amounts of its nodes.
        programs: those the graph was built from, so that ``op`` is "program:index"; without them
            ``op`` is the op's name.
        wiring: fills the stage of ops that leave it out.
        handled: op instances of ``on`` blocks; their step is -1, their microbatch counts arrivals.
        run: name of the run. source: see ``Spans``.
    """
    nodes, actors = _rows(graph, outcome)
    rank = np.array([a.rank for a in graph.actors], np.int64)[actors]
    order = np.lexsort((nodes, rank, outcome.start[nodes]))
    nodes, actors, rank = nodes[order], actors[order], rank[order]
    static, ops = _static(graph, nodes, actors)
    of_wire = _WireTexts(graph)
    columns: dict[str, NDArray[Any]] = {
        "rank": rank,
        "weight": of_wire.weights(nodes, actors),
        "peer": of_wire.peers(nodes),
        "step": graph.step[nodes],
        "ready_s": outcome.ready[nodes],
        "start_s": outcome.start[nodes],
        "end_s": outcome.end[nodes],
        "nbytes": _amounts(prices.nbytes, nodes),
        "flops": _amounts(prices.flops, nodes),
        "version": np.full(len(nodes), -1, np.int64),
    }
    names: dict[str, tuple[str, ...]] = {"run": (run,), "source": (source,)}
    columns["run"] = columns["source"] = np.zeros(len(nodes), np.int32)
    hosted = [(op, _stage(op, graph.actors[a].rank, wiring)) for op, a in ops]
    columns["stage"] = np.array([s for _, s in hosted], np.int64)[static]
    columns["microbatch"] = np.array([op.mb for op, _ in ops], np.int64)[static]
    columns["part"] = np.array([op.part for op, _ in ops], np.int64)[static]
    positions = _Positions(programs)
    for name, texts in (
        ("kind", [op.kind for op, _ in ops]),
        ("segment", [op.label for op, _ in ops]),
        ("op", [positions.text(op, graph.actors[a].program) for op, a in ops]),
    ):
        codes, names[name] = _encode(texts)
        columns[name] = codes[static]
    columns["stream"], names["stream"] = of_wire.streams(nodes, actors)
    columns["group"], names["group"] = of_wire.groups(nodes)
    spans = Spans(columns, names)
    if handled:
        spans = concatenate([spans, _handled_rows(graph, handled, run, source)])
        spans = spans.take(np.lexsort((spans.columns["rank"], spans.columns["start_s"])))
    return spans


def spans_of_run(run: Run, name: str = "") -> Spans:
    """Build the span table of a simulation.

    Args:
        run: from sim.engine.simulate. name: of the run; the plan's name by default.
    """
    layout = run.layout
    return spans_of(
        layout.graph, run.outcome, run.prices, programs=layout.programs, wiring=layout.wiring,
        handled=run.handled, run=name or layout.plan.name,
    )  # fmt: skip


def _handled_rows(graph: OpGraph, handled: Sequence[Handled], run: str, source: str) -> Spans:
    done = [h for h in handled if np.isfinite(h.end)]
    actor = {a.rank: a for a in graph.actors}
    n = len(done)
    columns: dict[str, NDArray[Any]] = {
        "rank": np.array([h.rank for h in done], np.int64),
        "weight": np.ones(n, np.int64),
        "peer": np.array([h.sender if _is_pair(h.op) else -1 for h in done], np.int64),
        "step": np.full(n, -1, np.int64),
        "stage": np.array([h.op.stage for h in done], np.int64),
        "microbatch": np.array([h.index for h in done], np.int64),
        "part": np.array([h.op.part for h in done], np.int64),
        "version": np.array([h.version for h in done], np.int64),
        "ready_s": np.array([h.ready for h in done], np.float64),
        "start_s": np.array([h.start for h in done], np.float64),
        "end_s": np.array([h.end for h in done], np.float64),
        "nbytes": np.zeros(n),
        "flops": np.zeros(n),
    }
    names: dict[str, tuple[str, ...]] = {}
    for name, texts in (
        ("run", [run] * n),
        ("source", [source] * n),
        ("kind", [h.op.kind for h in done]),
        ("segment", [h.op.label for h in done]),
        ("op", [f"{actor[h.rank].program}:{h.op.name}#{h.index}" for h in done]),
        ("group", [""] * n),
        ("stream", [f"{h.rank}->{h.sender}" if _is_pair(h.op) else stream_of(h.op) for h in done]),
    ):
        columns[name], names[name] = _encode(texts)
    return Spans(columns, names)


def _is_pair(op: Op) -> bool:
    return stream_of(op) not in LOCAL_STREAMS


def _rows(graph: OpGraph, outcome: Outcome) -> tuple[Ints, Ints]:
    """(node, actor) of each row: the node's own actor, and the others of a collective."""
    nodes, actors = [np.arange(graph.num_nodes)], [graph.actor]
    for w, wire in enumerate(graph.wires):
        if wire.kind == "group" and len(wire.actors) > 1:
            mine = np.flatnonzero(graph.wire == w)
            for actor in sorted(wire.actors):
                others = mine[graph.actor[mine] != actor]
                nodes.append(others)
                actors.append(np.full(len(others), actor, np.int64))
    node, actor_of = np.concatenate(nodes), np.concatenate(actors)
    ended = np.isfinite(outcome.end[node])
    return node[ended], actor_of[ended]


def _static(graph: OpGraph, nodes: Ints, actors: Ints) -> tuple[Ints, list[tuple[Op, int]]]:
    """Number of the static (op, program) of each row, and those with one of their actors."""
    number: dict[tuple[int, int, int], int] = {}
    found: list[tuple[Op, int]] = []
    static = np.zeros(len(nodes), np.int64)
    program = [a.program for a in graph.actors]
    for i, (node, actor) in enumerate(zip(nodes.tolist(), actors.tolist(), strict=True)):
        op = graph.ops[node]
        # A stage may be left out, and then it depends on the rank: keep actors apart.
        key = (id(op), program[actor], actor if op.stage < 0 else -1)
        hit = number.get(key)
        if hit is None:
            hit = number[key] = len(found)
            found.append((op, actor))
        static[i] = hit
    return static, found


def _stage(op: Op, rank: int, wiring: Wiring | None) -> int:
    if wiring is None or op.stage >= 0 or op.kind == "BARRIER":
        return op.stage
    return wiring.stage_of(op, rank)


def _amounts(values: NDArray[np.float64] | None, nodes: Ints) -> NDArray[np.float64]:
    return np.zeros(len(nodes)) if values is None else values[nodes].astype(np.float64)


def _encode(texts: Sequence[str]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    number: dict[str, int] = {}
    codes = np.array([number.setdefault(t, len(number)) for t in texts], np.int32)
    return codes, tuple(number)


class _Positions:
    """Where each op stands in its program's flat list."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.by_identity: list[dict[int, int]] = []
        self.by_name: list[dict[tuple[str, int, int, str, str], int]] = []
        for program in programs:
            ops = flatten(program).ops
            same: dict[int, int] = {}
            like: dict[tuple[str, int, int, str, str], int] = {}
            for i, op in enumerate(ops):
                same.setdefault(id(op), i)
                like.setdefault((op.kind, op.mb, op.part, op.label, op.group), i)
            self.by_identity.append(same)
            self.by_name.append(like)

    def text(self, op: Op, program: int) -> str:
        """Return "program:index"; a collective's other members list an op like its node's."""
        if program >= len(self.by_name):
            return op.name
        hit = self.by_identity[program].get(id(op))
        if hit is None:
            hit = self.by_name[program].get((op.kind, op.mb, op.part, op.label, op.group))
        return op.name if hit is None else f"{program}:{hit}"


class _WireTexts:
    """Streams, groups, peers and weights of rows, worked out once per wire."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.members = np.array([len(a.ranks) for a in graph.actors], np.int64)
        actor_of_class = {graph.classes[a.rank]: a for a in graph.actors}
        first = {
            int(w): int(n) for w, n in zip(*np.unique(graph.wire, return_index=True), strict=True)
        }
        n = len(graph.wires)
        self.peer, self.count = np.full(n + 1, -1, np.int64), np.zeros(n + 1, np.int64)
        self.text, self.group = [""] * (n + 1), [""] * (n + 1)
        for w, wire in enumerate(graph.wires):
            if wire.end is not None:
                receiver = actor_of_class[wire.classes[1]]
                sender = actor_of_class[wire.classes[0]]
                self.peer[w] = receiver.rank
                # A boundary is cut in as many pieces as the larger side has ranks.
                self.count[w] = max(len(sender.ranks), len(receiver.ranks))
                self.text[w] = f"{wire.end.src}->{wire.end.dst}" + _channel(graph, first, w)
            else:
                self.group[w] = _group_text(wire, graph.ops[first[w]] if w in first else None)
                self.text[w] = self.group[w] + _channel(graph, first, w)

    def peers(self, nodes: Ints) -> Ints:
        return self.peer[self.graph.wire[nodes]]

    def weights(self, nodes: Ints, actors: Ints) -> Ints:
        count = self.count[self.graph.wire[nodes]]
        return np.where(count > 0, count, self.members[actors])

    def groups(self, nodes: Ints) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        codes, names = _encode(self.group)
        return codes[self.graph.wire[nodes]], names

    def streams(self, nodes: Ints, actors: Ints) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """The wire's text, or the name of the rank-local stream."""
        graph = self.graph
        local = [name if actor >= 0 else "" for actor, name in graph.stream_names]
        codes, names = _encode([*self.text, *local])
        wire = graph.wire[nodes]
        rows = np.where(wire >= 0, wire, len(self.text) + graph.stream[nodes])
        return codes[rows], names


def _channel(graph: OpGraph, first: Mapping[int, int], w: int) -> str:
    channel = graph.ops[first[w]].channel if w in first else 0
    return f" channel {channel}" if channel else ""


def _group_text(wire: Wire, op: Op | None) -> str:
    role = "+".join(sorted(wire.roles))
    if op is not None and KINDS[op.kind].stream == "group":
        named = op.group or DEFAULT_ROLE.get(op.kind, "tp")
        role = named if named in wire.roles else role
    return f"{role} {compact_ranks(wire.group)}"


def compact_ranks(ranks: Sequence[int]) -> str:
    """Write an ordered member list with runs of equal distance folded.

    >>> compact_ranks((0, 1, 2, 3, 8)), compact_ranks((0, 8, 16, 24)), compact_ranks((5, 3))
    ('0-3,8', '0-24/8', '5,3')
    """
    parts = []
    i = 0
    while i < len(ranks):
        j = i + 1
        gap = ranks[j] - ranks[i] if j < len(ranks) else 0
        while gap > 0 and j + 1 < len(ranks) and ranks[j + 1] - ranks[j] == gap:
            j += 1
        if gap > 0 and j - i >= 2:
            parts.append(f"{ranks[i]}-{ranks[j]}" + (f"/{gap}" if gap > 1 else ""))
            i = j + 1
        else:
            parts.append(str(ranks[i]))
            i += 1
    return ",".join(parts)
