"""What a layer costs on each rank, and how long each resource works, read off a few priced plans.

The bounds of ``strategies.offload.bounds`` have no formulas of their own: everything in them is
the price of an op, nobody in its way, or a sum of prices along a rank's list of ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.pricing import price
from sim.engine.simulate import lay_out
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs, own_layers

__all__ = ["Triple", "Units", "knobs_with", "plan_with", "units_of"]

Floats = NDArray[np.float64]
Triple = tuple[int, int, int]
"""Layers of a position (checkpointed, with parameters, with optimizer on the host)."""
PASSES = ("F", "B", "I", "W")
OUTER = ("", "embed", "head")


class Units(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's work, in seconds; of a layer where not said otherwise, the least of all layers.

    Args:
        layers: of its position. microbatches: of its replica.
        forward, backward: of one microbatch; of a split backward the part that goes on.
        again: more in the backward when the forward is repeated. update: on the chip.
        before, between: rows of four, compute, host, d2h, h2d: busy in a step with nothing on the
            host; and what each layer adds whose optimizer, or (third row) parameters, leave.
        gradient, host, up: copy of a gradient, update, copy of what it updated.
        down, fetch: copies of parameters that live on the host.
        fetches: number in a step, by layers that live there.
        windows: by layer, compute from its first forward to its last backward, no layer repeated.
        tail: what an update on the chip adds from the first layer's forward to its own update.
        whole: compute from the first forward to the last backward that goes on.
        trip, inner: a microbatch there and back through the position; without the embedding.
        sent: what it sends on, and back. outer: updates on the chip of embedding and head.
    """

    layers: int
    microbatches: int
    forward: float
    backward: float
    again: float
    update: float
    before: tuple[float, ...]
    leaving: tuple[tuple[float, ...], tuple[float, ...]]
    gradient: float
    host: float
    up: float
    down: float
    fetch: float
    fetches: tuple[int, ...]
    windows: tuple[float, ...]
    tail: float
    whole: float
    trip: float
    inner: float
    sent: tuple[float, ...]
    outer: float


class _Row(msgspec.Struct, frozen=True):
    kind: str
    label: str
    mb: int
    stream: str
    seconds: float


Rows = list[_Row]


def knobs_with(base: AutoHeteKnobs, choice: Sequence[Triple]) -> AutoHeteKnobs:
    """Return the knobs with one triple per position; of one position the model's integers."""
    if len(choice) == 1:
        c, p, o = choice[0]
        return msgspec.structs.replace(base, checkpointed=c, parameters=p, optimizer=o, stages=())
    return msgspec.structs.replace(
        base, checkpointed=0, parameters=0, optimizer=0, stages=tuple(choice)
    )


def plan_with(
    problem: Problem, start: PlanDraft, base: AutoHeteKnobs, choice: Sequence[Triple]
) -> Plan:
    """Return the lowered plan of a choice."""
    knobs = knobs_with(base, choice)
    return lower(problem, compose(problem, [("offload", knobs)], start=start))


def units_of(
    problem: Problem, start: PlanDraft, base: AutoHeteKnobs
) -> dict[tuple[int, int], tuple[Units, ...]]:
    """Return the different units of the ranks of every (position, replica).

    Raises:
        InputError: the draft cannot be offloaded, has several chunks, or layers that differ; or
            there is something on NVMe.
    """
    if start.pipeline.chunks > 1:
        raise InputError(
            "integers by position are planned for one chunk each",
            key="pipeline.chunks",
            found=str(start.pipeline.chunks),
            expected="1; set the integers for several",
        )
    if base.nvme:
        raise InputError(
            "three integers are planned without NVMe",
            key="offload.nvme",
            found=str(base.nvme),
            expected="0; set the integers beside it",
        )
    own = own_layers(problem, start)
    kinds: list[Callable[[int], Triple]] = [
        lambda n: (0, 0, 0),
        lambda n: (n, 0, 0),
        lambda n: (0, 0, n),
    ]
    plans = [plan_with(problem, start, base, [kind(n) for n in own]) for kind in kinds]
    rows = [_rows(plan, problem) for plan in plans]
    try:
        away = plan_with(problem, start, base, [(0, n, 0) for n in own])
    except InputError:
        # Parameters cannot leave here: only the other two integers are left.
        fetched = None
    else:
        fetched = _rows(away, problem)
    found = {}
    for cell in plans[0].placement.cells:
        n = own[cell.stage]
        m = plans[0].placement.microbatches[cell.replica]
        ranks = [
            _units(n, m, [x[r] for x in rows], None if fetched is None else fetched[r])
            for r in cell.ranks
        ]
        found[cell.stage, cell.replica] = tuple(dict.fromkeys(ranks))
    return found


def _rows(plan: Plan, problem: Problem) -> dict[int, Rows]:
    """Ops of every rank in the order of its list, priced as if alone."""
    layout = lay_out(plan, fold=False)
    graph = layout.graph
    prices = price(graph, layout.wiring, plan, problem, contention=False, late=layout.late)
    found: dict[int, Rows] = {actor.rank: [] for actor in graph.actors}
    for node, seconds in enumerate(prices.seconds.tolist()):
        op, stream = graph.ops[node], graph.stream_names[graph.stream[node]][1]
        row = _Row(op.kind, op.label, op.mb, stream, seconds)
        found[graph.actors[graph.actor[node]].rank].append(row)
    return found


def _units(n: int, m: int, plans: Sequence[Rows], fetched: Rows | None) -> Units:
    none, kept, away = plans
    compute = [r for r in away if r.stream == "compute"]
    layers = list(dict.fromkeys(r.label for r in compute if r.label not in OUTER))
    _check_equal(compute, layers)
    on_way = ("B", "I")
    forward, backward = (_least(compute, layers, kinds) for kinds in (("F",), on_way))
    windows = [_window(compute, x, ("B", "W")) for x in layers]
    first = layers[0] if layers else ""
    updated = (
        _window([r for r in none if r.stream == "compute"], first, ("OPT",)) if layers else 0.0
    )
    busy = [_busy(rows) for rows in (none, kept, away, fetched or none)]
    per = max(n, 1)
    back = [k for k, r in enumerate(compute) if r.kind in on_way]
    front = next(k for k, r in enumerate(compute) if r.kind == "F")
    trip = [r for r in compute if r.mb == 0 and r.kind in ("F", *on_way)]
    return Units(
        layers=n,
        microbatches=m,
        forward=forward,
        backward=backward,
        again=max(0.0, busy[1][0] - busy[0][0]) / per / m,
        update=max(0.0, busy[0][0] - busy[2][0]) / per,
        before=tuple(busy[0]),
        leaving=(
            tuple(max(0.0, b - a) / per for a, b in zip(busy[0], busy[2], strict=True)),
            tuple(max(0.0, b - a) / per for a, b in zip(busy[0], busy[3], strict=True)),
        ),
        gradient=_least(away, layers, ("D2H",)),
        host=_least([r for r in away if r.stream == "host"], layers, ("OPT",)),
        up=_least(away, layers, ("H2D",)),
        down=_least(fetched or [], layers, ("D2H",)),
        fetch=min((r.seconds for r in fetched or [] if r.kind.startswith("FETCH")), default=0.0),
        fetches=_fetches(compute, layers) if fetched is not None else (0,),
        windows=tuple(windows),
        tail=max(0.0, updated - windows[0]) / per if layers else 0.0,
        whole=sum(r.seconds for r in compute[front : back[-1] + 1]),
        trip=sum(r.seconds for r in trip),
        inner=sum(r.seconds for r in trip if r.label != "embed"),
        sent=tuple(
            min((r.seconds for r in away if r.kind == kind), default=0.0)
            for kind in ("SEND_F", "SEND_B")
        ),
        outer=sum(r.seconds for r in compute if r.kind == "OPT"),
    )


def _check_equal(compute: Rows, layers: Sequence[str]) -> None:
    times = {x: [r.seconds for r in compute if r.label == x and r.kind in PASSES] for x in layers}
    least, most = (np.array([pick(t) for t in times.values()]) for pick in (min, max))
    if layers and (np.ptp(least) > 1e-6 * least.max() or np.ptp(most) > 1e-6 * most.max()):
        raise InputError(
            "three integers are planned for equal layers",
            key="model",
            found="layers that differ",
            expected="equal layers; set the integers for others",
        )


def _least(rows: Rows, layers: Sequence[str], kinds: Sequence[str]) -> float:
    """Least time of one op of these kinds of one of the layers; 0 without any."""
    times = (r.seconds for r in rows if r.kind in kinds and r.label in layers)
    return min(times, default=0.0)


def _window(compute: Rows, label: str, ends: Sequence[str]) -> float:
    """Compute from a layer's first forward to the last of its ops of these kinds."""
    mine = [k for k, r in enumerate(compute) if r.label == label]
    last = max((k for k in mine if compute[k].kind in ends), default=mine[0] - 1)
    return sum(r.seconds for r in compute[mine[0] : last + 1])


def _busy(rows: Rows) -> list[float]:
    streams = ("compute", "host", "d2h", "h2d")
    return [sum(r.seconds for r in rows if r.stream == s) for s in streams]


def _fetches(compute: Rows, layers: Sequence[str]) -> tuple[int, ...]:
    """Fetches in a step by number of layers on the host; uses in a row share one."""
    uses = [r.label for r in compute if r.kind in ("F", "B", "I") and r.label in layers]
    number = {label: k for k, label in enumerate(layers)}
    counts = [0]
    for p in range(1, len(layers) + 1):
        counts.append(sum(1 for _ in itertools.groupby(x for x in uses if number[x] < p)))
    return tuple(counts)
