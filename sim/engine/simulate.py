"""One call from a plan to its run: programs, graph, prices, engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from time import process_time

import msgspec

from sim.cost.prices import Prices
from sim.engine.execute import Execution, Outcome
from sim.engine.messages import Handled, MessagePrice, Messages
from sim.plan.fold import fold_plan
from sim.plan.graph import OpGraph, build_graph
from sim.plan.passes import expand
from sim.plan.plan import Plan
from sim.plan.program import Program
from sim.plan.tables import Resolved, resolve_tables
from sim.plan.wiring import Wiring, wire

__all__ = ["Layout", "PriceOf", "Run", "lay_out", "run_layout"]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A plan laid out for a number of steps, not yet priced.

    Args:
        plan, programs, wiring, graph: see there. tables: late amounts. steps: number of steps.
    """

    plan: Plan
    programs: tuple[Program, ...]
    wiring: Wiring
    graph: OpGraph
    tables: Resolved
    steps: int

    def late(self, node: int) -> object:
        """The node's resolved late amount, or None when its amounts are all static."""
        ref = self.graph.ops[node].ref
        return None if ref is None else self.tables.value(ref, int(self.graph.step[node]))


PriceOf = Callable[[Layout], Prices]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation leaves behind.

    Args:
        layout, prices, outcome: of the run. handled: instances of ``on`` blocks.
        cpu_s: [s] of processor time, layout and pricing included.
    """

    layout: Layout
    prices: Prices
    outcome: Outcome
    handled: tuple[Handled, ...] = ()
    cpu_s: float = 0.0

    @property
    def makespan(self) -> float:
        """[s] end of the last op."""
        return self.outcome.makespan


def lay_out(
    plan: Plan,
    *,
    steps: int = 1,
    fold: bool = True,
    rank_keys: Sequence[Hashable] | None = None,
    path: Callable[[int, int], Sequence[int]] | None = None,
    link_key: Callable[[int], Hashable] | None = None,
    blocking: frozenset[int] = frozenset(),
) -> Layout:
    """Build programs, wiring and op graph of a plan.

    Args:
        plan: the plan. steps: number of steps.
        fold: run one rank per class of equal ranks.
        rank_keys: per rank, what else must be equal for two ranks to fold (accelerator, faults).
        path, link_key: links between two ranks and what a link is, for folding.
        blocking: ranks on which compute blocks the issuer.

    Raises:
        PlanError: the plan's programs are not well formed.
    """
    programs, wiring = expand(plan), wire(plan.placement)
    tables = resolve_tables(plan.tables, steps)
    classes = None
    if fold:
        classes = fold_plan(plan, programs, wiring, tables, rank_keys, path, link_key)
    graph = build_graph(programs, wiring, steps, classes, plan.buffers, blocking)
    return Layout(
        plan=plan, programs=programs, wiring=wiring, graph=graph, tables=tables, steps=steps
    )


def run_layout(
    layout: Layout,
    price: PriceOf,
    *,
    message_price: MessagePrice | None = None,
    prepare: Callable[[Execution], None] | None = None,
    until: float | None = None,
) -> Run:
    """Price a layout and run it.

    Args:
        layout: from lay_out. price: prices its nodes. message_price: of ops in ``on`` blocks.
        prepare: called on the execution before it starts (faults, overlap).
        until: [s] where to stop, None to run to the end.

    Raises:
        SimulationError: ops wait for one another in a circle.
        PlanError: the plan has ``on`` blocks and no message prices.
    """
    began = process_time()
    prices = price(layout)
    run = Execution(layout.graph, prices)
    messages = Messages(run, message_price) if message_price and layout.graph.handlers else None
    if prepare:
        prepare(run)
    outcome = run.run(until)
    handled = messages.handled() if messages else ()
    return Run(
        layout=layout, prices=prices, outcome=outcome, handled=handled, cpu_s=process_time() - began
    )
