"""One call from a plan to its run: programs, graph, prices, engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from time import process_time

import msgspec
from numpy.typing import ArrayLike

from sim.cost.prices import Prices
from sim.cost.pricing import group_keys, price
from sim.engine.execute import Execution, Outcome
from sim.engine.faults import ChipLoss, Fault, LinkChange, apply_faults, faulty
from sim.engine.messages import Handled, MessagePrice, Messages
from sim.engine.overlap import Overlap
from sim.errors import SimulationError
from sim.hardware.route import path
from sim.plan.flat import flatten
from sim.plan.fold import fold_plan
from sim.plan.graph import OpGraph, build_graph
from sim.plan.passes import expand
from sim.plan.plan import Plan
from sim.plan.program import Program
from sim.plan.tables import Resolved, resolve_tables
from sim.plan.wiring import Wiring, wire
from sim.problem import Problem, problem_from_documents

__all__ = ["Layout", "PriceOf", "Run", "lay_out", "run_layout", "simulate"]


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

    def late(self, node: int) -> ArrayLike | None:
        """The node's resolved late amount, or None when its amounts are all static."""
        ref = self.graph.ops[node].ref
        if ref is None:
            return None
        value: ArrayLike = self.tables.value(ref, int(self.graph.step[node]))
        return value


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
    wiring: Wiring | None = None,
) -> Layout:
    """Build programs, wiring and op graph of a plan.

    Args:
        plan: the plan. steps: number of steps.
        fold: run one rank per class of equal ranks.
        rank_keys: per rank, what else must be equal for two ranks to fold (accelerator, faults).
        path, link_key: links between two ranks and what a link is, for folding.
        blocking: ranks on which compute blocks the issuer.
        wiring: of the placement, when it is there already.

    Raises:
        PlanError: the plan's programs are not well formed.
    """
    programs, wiring = expand(plan), wiring or wire(plan.placement)
    flats = [flatten(p) for p in programs]
    tables = resolve_tables(plan.tables, steps)
    classes = None
    if fold:
        classes = fold_plan(plan, programs, wiring, tables, rank_keys, path, link_key, flats)
    graph = build_graph(programs, wiring, steps, classes, plan.buffers, blocking, flats)
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


def simulate(
    plan: Plan,
    problem: Problem | None = None,
    *,
    steps: int = 1,
    fold: bool = True,
    contention: bool = True,
    overlap: bool = True,
    faults: Sequence[Fault] = (),
) -> Run:
    """Simulate a plan on the cluster of its problem.

    Args:
        plan: a validated plan. problem: None reads the one the plan carries.
        steps: number of steps. fold: one actor per class of equal ranks.
        contention: transfers share links; False prices each as if alone.
        overlap: compute and communication slow each other by the chips' profiled factors.
        faults: stragglers, link changes, lost chips.

    Raises:
        SimulationError: ops wait in a circle, or a lost chip stops the run; says how far it came.
        InputError: a fault or a late amount is wrong, or the plan carries no problem.
    """
    began = process_time()
    problem = problem or problem_from_documents(plan.problem)
    machine, chips = problem.machine, plan.placement.chips
    n = plan.placement.num_ranks
    chip_of = chips or tuple(range(n))
    types = [
        a for node in machine.nodes for a in [node.accelerator] * (node.chips[1] - node.chips[0])
    ]
    kinds = [machine.accelerators[types[c]] for c in chip_of]
    changed = {f.link: f for f in faults if isinstance(f, LinkChange)}

    def link_key(index: int) -> Hashable:
        link = machine.links[index]
        return link.rate, link.latency, link.curve, link.flow_cap, changed.get(link.name)

    suffers = faulty(faults, n)
    wiring = wire(plan.placement)
    near = group_keys(machine, wiring, chip_of) if fold else [()] * n
    keys: list[Hashable] = [(kinds[r].name, suffers[r], near[r]) for r in range(n)]

    def layout_of(rank_keys: Sequence[Hashable]) -> Layout:
        return lay_out(
            plan,
            steps=steps,
            fold=fold,
            rank_keys=rank_keys,
            path=lambda a, b: path(machine, chip_of[a], chip_of[b]).links,
            link_key=link_key,
            blocking=frozenset(r for r in range(n) if not kinds[r].async_compute),
            wiring=wiring,
        )

    def prepare(run: Execution) -> None:
        if faults:
            apply_faults(run, faults)
        if overlap:
            actors = enumerate(layout.graph.actors)
            Overlap(
                run,
                {
                    i: (kinds[a.rank].compute_slowdown, kinds[a.rank].comm_slowdown)
                    for i, a in actors
                },
            )

    def price_of(lay: Layout) -> Prices:
        return price(
            lay.graph,
            lay.wiring,
            plan,
            problem,
            contention=contention,
            late=lay.late,
            watched=frozenset(changed),
        )

    layout = layout_of(keys)
    prices = price_of(layout)
    while fold and prices.rank_keys:
        # Collectives load links of equal ranks unequally: these ranks are not equal after all.
        keys = list(zip(layout.graph.classes, prices.rank_keys, strict=True))
        layout = layout_of(keys)
        prices = price_of(layout)
    run = run_layout(layout, lambda _: prices, prepare=prepare)
    if run.outcome.unfinished:
        raise SimulationError(_how_far(run, faults))
    return msgspec.structs.replace(run, cpu_s=process_time() - began)


def _how_far(run: Run, faults: Sequence[Fault]) -> str:
    graph, outcome = run.layout.graph, run.outcome
    left = min(int(graph.step[k]) for k in outcome.unfinished)
    lost = [f"rank {f.rank} at {f.at:g} s" for f in faults if isinstance(f, ChipLoss)]
    why = "lost " + ", ".join(lost) if lost else "a link that is down holds its flows"
    return (
        f"the run stops after {left} of {run.layout.steps} steps at {outcome.makespan:g} s: {why}; "
        f"{graph.label(outcome.unfinished[0])} never ends"
    )
