"""Where a step's time goes: parts of every op, of every class of ranks, and of a critical path.

Parts, of which every instant of a rank has exactly one, or shares of several that add up to one:

    forward, backward   F; B, I and W, without what follows
    recompute           R, and the recomputation inside B or I
    optimizer           OPT and APPLY, on the chip or on its host
    other compute       what else a compute stream does (LOOKUP, ENCODE, DECODE ...)
    slow-down           compute beyond what it takes alone: communication runs on its chip
    exposed ROLE        collectives of a group ("tp", "dp" ...), transfers between stages ("pp") and
                        messages ("ps"), as long as they take alone on their links; instants with
                        several count in equal parts. Boxed collectives of a pass count whole
    host copies         D2H, H2D and NVMe, likewise, while no communication runs
    host work           what else the host does meanwhile
    contention WHAT     transfers (by role) and the host's work beyond what they take alone: others
                        use their links, or compute runs on their chips
    end of step         BARRIER, with what a step costs besides
    bubble              nothing runs for the rank: it waits for others
    unexplained         of a path only: no op was running (behind a lost chip)

What overlaps compute is in no part: the chip computes then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.host import HOST_STREAMS
from sim.cost.work import PASSES, Work
from sim.engine.handled import Handled
from sim.engine.simulate import Run
from sim.plan.kinds import MESSAGES
from sim.plan.op import Op
from sim.plan.unroll import LOCAL_STREAMS, stream_of
from sim.problem import Problem
from sim.report.explain_path import Interval
from sim.report.wires import WireTexts

__all__ = [
    "BARRIER", "BUBBLE", "COMPUTE", "CONTENTION", "EXPOSED", "OpParts", "Parts", "Window",
    "contention_of", "in_order", "parts_of_path",
]  # fmt: skip

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Parts = dict[str, float]
"""Part -> [s] of a step."""

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"
OTHER, SLOW, COPIES, HOST = "other compute", "slow-down", "host copies", "host work"
BARRIER, BUBBLE, UNKNOWN = "end of step", "bubble", "unexplained"
EXPOSED, CONTENTION = "exposed ", "contention "
COMPUTE = (FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER, SLOW)
_LAST = (COPIES, HOST, BARRIER, BUBBLE, UNKNOWN)
_OF_KIND = {
    "F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": BACKWARD, "R": RECOMPUTE,
    "OPT": OPTIMIZER, "APPLY": OPTIMIZER, "BARRIER": BARRIER,
}  # fmt: skip


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The time that is explained.

    Args:
        start, stop: [s]. steps: that pass in it (updates, where ranks serve messages).
        text: what a step is here.
    """

    start: float
    stop: float
    steps: float
    text: str = ""

    @property
    def step_time_s(self) -> float:
        """[s] of a step."""
        return (self.stop - self.start) / self.steps


def in_order(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of parts in the order of the module's table."""
    late = sorted(n for n in names if n.startswith(CONTENTION))
    roles = sorted(n for n in names if n.startswith(EXPOSED))
    order = {n: i for i, n in enumerate((*COMPUTE, *roles, *_LAST[:2], *late, *_LAST[2:]))}
    return tuple(sorted(dict.fromkeys(names), key=order.__getitem__))


def contention_of(part: str) -> str:
    """Return the part that holds the contention of another one.

    >>> contention_of("exposed dp"), contention_of("host copies")
    ('contention dp', 'contention host copies')
    """
    return CONTENTION + part.removeprefix(EXPOSED)


class OpParts:
    """Parts of every op of a run.

    Args:
        run: simulated. problem: what was planned for; without it recomputation inside B, whose time
            is then stated whole, counts as backward.

    Attributes:
        names: parts. shares: of each node's time by part, shape (P, N), adding up to 1.
    """

    def __init__(self, run: Run, problem: Problem | None) -> None:
        self.run, self.graph = run, run.layout.graph
        graph, outcome = self.graph, run.outcome
        ended = np.isfinite(outcome.end)
        self.took = np.zeros(graph.num_nodes)
        self.took[ended] = outcome.end[ended] - outcome.start[ended]
        self.rounding = 1e-12 * outcome.makespan
        self.group = [text.partition(" ")[0] for text in WireTexts(graph).group]
        self.again = _Recomputation(run, problem)
        self._rows: dict[str, Floats] = {}
        alone = self._alone()
        inner = run.prices.inner_comm_s
        for node, op in enumerate(graph.ops):
            self._node(node, op, float(alone[node]), inner)
        self.names = in_order(tuple(self._rows))
        self.shares = np.array([self._rows[n] for n in self.names]).reshape(-1, graph.num_nodes)

    def part_of(self, node: int) -> str:
        """The part that a node's own work is in."""
        op, wire = self.graph.ops[node], int(self.graph.wire[node])
        if op.kind in _OF_KIND:
            return _OF_KIND[op.kind]
        if wire >= 0:
            role = "ps" if op.kind in MESSAGES else self.group[wire] or "pp"
            return EXPOSED + role
        stream = stream_of(op)
        if stream in HOST_STREAMS:
            return HOST if stream == "host" else COPIES
        return OTHER

    def stream(self, node: int) -> str:
        """What it runs on: "compute", "host" (the host side), "wire" or "barrier"."""
        op = self.graph.ops[node]
        if op.kind == "BARRIER":
            return "barrier"
        if self.graph.wire[node] >= 0:
            return "wire"
        return "compute" if stream_of(op) == "compute" else "host"

    def of_handled(self, handled: Handled) -> str:
        """The part that an instance of an ``on`` block is in."""
        op = handled.op
        if op.kind in _OF_KIND:
            return _OF_KIND[op.kind]
        return HOST if stream_of(op) in LOCAL_STREAMS else EXPOSED + "ps"

    def _add(self, name: str, node: int, share: float) -> None:
        if share:
            if name not in self._rows:
                self._rows[name] = np.zeros(self.graph.num_nodes)
            self._rows[name][node] += share

    def _node(self, node: int, op: Op, alone: float, inner: Mapping[str, Floats]) -> None:
        took, own = self.took[node], self.part_of(node)
        # A message to a server lasts until it is answered, so it has no time of its own.
        as_alone = took - alone <= 1e-9 * took + self.rounding or op.kind in MESSAGES
        kept = 1.0 if as_alone else alone / took
        on_chip = self.stream(node) == "compute"
        self._add(SLOW if on_chip else contention_of(own), node, 1.0 - kept)
        if not on_chip or not alone:
            self._add(own, node, kept)
            return
        boxed = {role: float(row[node]) / alone for role, row in inner.items() if row[node]}
        for role, share in boxed.items():
            self._add(EXPOSED + role, node, kept * share)
        left = kept * max(0.0, 1.0 - sum(boxed.values()))
        again = self.again.share(op, int(self.graph.actor[node]))
        self._add(RECOMPUTE, node, left * again)
        self._add(own, node, left * (1.0 - again))

    def _alone(self) -> Floats:
        """[s] of each node when nothing else uses its links or its chip."""
        prices = self.run.prices
        found: Floats = prices.seconds.astype(np.float64).copy()
        for node, flows in prices.flows.items():
            slowest = 0.0
            for flow in flows:
                rate = min([flow.cap, *(prices.link_rates[x] for x, _ in flow.links)])
                slowest = max(slowest, flow.nbytes / rate)
            found[node] += slowest
        for node, (fixed, own) in prices.alone.items():
            found[node] = fixed + own
        return found


class _Recomputation:
    """Share of a backward's own time that the recomputation inside it takes."""

    def __init__(self, run: Run, problem: Problem | None) -> None:
        layout = run.layout
        self.graph, self.known = layout.graph, {}
        inside = any(op.recompute for op in layout.graph.ops)
        self.work = None
        if inside and problem is not None:
            self.work = Work(layout.graph, layout.wiring, layout.plan, problem)

    known: dict[tuple[Op, int], float]

    def share(self, op: Op, actor: int) -> float:
        """0..1, of the time without boxed collectives."""
        if self.work is None or op.recompute != "inner" or op.kind not in PASSES:
            return 0.0
        key = (msgspec.structs.replace(op, mb=-1, deps=None), actor)
        if key not in self.known:
            rank = self.graph.actors[actor].rank
            whole = self.work.compute(op, rank)
            bare = self.work.compute(msgspec.structs.replace(op, recompute=""), rank)
            own, less = (e.seconds - sum(e.comm) for e in (whole, bare))
            self.known[key] = max(0.0, 1.0 - less / own) if own > 0 else 0.0
        return self.known[key]


def parts_of_path(
    parts: OpParts, path: Sequence[Interval], window: Window
) -> tuple[Parts, list[Parts]]:
    """Return the parts of a critical path, and of each of its intervals [s], per step.

    Args:
        parts: of the run. path: of the window. window: see there.
    """
    rows: list[Parts] = []
    total: Parts = {}
    for interval in path:
        seconds = (interval.end - interval.start) / window.steps
        row: Parts = {}
        if interval.node >= 0:
            shares = parts.shares[:, interval.node]
            row = {parts.names[p]: seconds * float(shares[p]) for p in np.flatnonzero(shares)}
        elif interval.handled >= 0:
            row = {parts.of_handled(parts.run.handled[interval.handled]): seconds}
        else:
            row = {UNKNOWN: seconds}
        rows.append(row)
        for name, value in row.items():
            total[name] = total.get(name, 0.0) + value
    return total, rows
