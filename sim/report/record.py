"""From a run's op graph and times to the span table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.prices import Prices
from sim.engine.execute import Outcome
from sim.engine.messages import Handled
from sim.engine.simulate import Run
from sim.plan.flat import flatten
from sim.plan.graph import OpGraph
from sim.plan.op import Op
from sim.plan.program import Program
from sim.plan.unroll import LOCAL_STREAMS, stream_of
from sim.plan.wiring import Wiring
from sim.report.spans import Spans, concatenate
from sim.report.wires import WireTexts, encode

__all__ = ["recorded", "spans_of", "spans_of_run"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def spans_of(
    graph: OpGraph,
    outcome: Outcome,
    prices: Prices,
    *,
    programs: Sequence[Program] = (),
    wiring: Wiring | None = None,
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
        run: name of the run. source: see ``Spans``.
    """
    nodes, actors = _sorted_rows(graph, outcome)
    return _table(graph, outcome, prices, nodes, actors, programs, wiring, run, source)


def _table(
    graph: OpGraph,
    outcome: Outcome,
    prices: Prices,
    nodes: Ints,
    actors: Ints,
    programs: Sequence[Program],
    wiring: Wiring | None,
    run: str,
    source: str,
) -> Spans:
    static, ops = _static(graph, nodes, actors, programs)
    of_wire = WireTexts(graph)
    columns: dict[str, NDArray[Any]] = {
        "rank": np.array([a.rank for a in graph.actors], np.int64)[actors],
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
    hosted = [_stage(op, graph.actors[a].rank, wiring) for op, a, _ in ops]
    columns["stage"] = np.array(hosted, np.int64)[static]
    columns["microbatch"] = np.array([op.mb for op, _, _ in ops], np.int64)[static]
    columns["part"] = np.array([op.part for op, _, _ in ops], np.int64)[static]
    for name, texts in (
        ("kind", [op.kind for op, _, _ in ops]),
        ("segment", [op.label for op, _, _ in ops]),
        ("op", [text for _, _, text in ops]),
    ):
        codes, names[name] = encode(texts)
        columns[name] = codes[static]
    columns["stream"], names["stream"] = of_wire.streams(nodes, actors)
    columns["group"], names["group"] = of_wire.groups(nodes)
    return Spans(columns, names)


def spans_of_run(run: Run, name: str = "") -> Spans:
    """Build the span table of a simulation.

    Args:
        run: from sim.engine.simulate. name: of the run; the plan's name by default.
    """
    return recorded(run, name)[0]


def recorded(run: Run, name: str = "") -> tuple[Spans, dict[str, Floats]]:
    """Return the span table and, per row, what its op spends in collectives inside it.

    Instances of ``on`` blocks have step -1, and their microbatch counts arrivals.

    Args:
        run: from sim.engine.simulate. name: of the run; the plan's name by default.

    Returns:
        The table, and role of a group -> [s] per row, shape (S,).
    """
    layout, name = run.layout, name or run.layout.plan.name
    graph, outcome = layout.graph, run.outcome
    nodes, actors = _sorted_rows(graph, outcome)
    spans = _table(
        graph, outcome, run.prices, nodes, actors, layout.programs, layout.wiring, name, "simulated"
    )
    if run.handled:
        spans = concatenate([spans, _handled_rows(graph, run.handled, name, "simulated")])
        nodes = np.concatenate([nodes, np.full(len(spans) - len(nodes), -1, np.int64)])
        order = np.lexsort((spans.columns["rank"], spans.columns["start_s"]))
        spans, nodes = spans.take(order), nodes[order]
    inside = {
        role: np.where(nodes < 0, 0.0, seconds[nodes])
        for role, seconds in run.prices.inner_comm_s.items()
    }
    return spans, inside


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
        columns[name], names[name] = encode(texts)
    return Spans(columns, names)


def _is_pair(op: Op) -> bool:
    return stream_of(op) not in LOCAL_STREAMS


def _sorted_rows(graph: OpGraph, outcome: Outcome) -> tuple[Ints, Ints]:
    """``_rows`` by start, rank and node."""
    nodes, actors = _rows(graph, outcome)
    rank = np.array([a.rank for a in graph.actors], np.int64)[actors]
    order = np.lexsort((nodes, rank, outcome.start[nodes]))
    return nodes[order], actors[order]


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


def _static(
    graph: OpGraph, nodes: Ints, actors: Ints, programs: Sequence[Program]
) -> tuple[Ints, list[tuple[Op, int, str]]]:
    """Number of the static op of each row; of each number the op, one of its actors, its text."""
    program = np.array([a.program for a in graph.actors], np.int64)
    own, row = program[graph.actor[nodes]], program[actors]
    # A stage may be left out, and then it depends on the rank: keep actors apart.
    open_stage = np.array([op.stage < 0 for op in graph.ops], bool)
    apart = np.where(open_stage[nodes], actors, -1)
    keys = np.stack([own, graph.static[nodes], row, apart])
    _, first, static = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    names: dict[int, dict[Name, int]] = {}
    found = []
    for k in first.tolist():
        op, at = graph.ops[nodes[k]], int(row[k])
        index: int | None = int(graph.static[nodes[k]])
        if own[k] != at and at < len(programs):
            # A member of a collective with another program lists an op like the node's.
            if at not in names:
                ops = flatten(programs[at]).ops
                names[at] = {_name(ops[i]): i for i in reversed(range(len(ops)))}
            index = names[at].get(_name(op))
        named = index is None or at >= len(programs)
        found.append((op, int(actors[k]), op.name if named else f"{at}:{index}"))
    return static.reshape(-1), found


Name = tuple[str, int, int, str, str]


def _name(op: Op) -> Name:
    return op.kind, op.mb, op.part, op.label, op.group


def _stage(op: Op, rank: int, wiring: Wiring | None) -> int:
    if wiring is None or op.stage >= 0 or op.kind == "BARRIER":
        return op.stage
    return wiring.stage_of(op, rank)


def _amounts(values: NDArray[np.float64] | None, nodes: Ints) -> NDArray[np.float64]:
    return np.zeros(len(nodes)) if values is None else values[nodes].astype(np.float64)
