"""One call from a plan to its run: programs, graph, prices, engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from time import process_time

import msgspec
from numpy.typing import ArrayLike

from sim.cost.prices import Prices
from sim.cost.pricing import group_keys, price
from sim.engine.checks import check_span
from sim.engine.duplex import Duplex
from sim.engine.execute import Execution, Outcome
from sim.engine.faults import ChipLoss, Fault, LinkChange, apply_faults, faulty
from sim.engine.messages import Handled, MessagePrice, Messages
from sim.engine.overlap import Overlap
from sim.errors import PlanError, SimulationError
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
        seed: that generated tables were made from.
    """

    plan: Plan
    programs: tuple[Program, ...]
    wiring: Wiring
    graph: OpGraph
    tables: Resolved
    steps: int
    seed: int = 0

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
    seed: int = 0,
) -> Layout:
    """Build programs, wiring and op graph of a plan.

    Args:
        plan: the plan. steps: number of steps.
        fold: run one rank per class of equal ranks.
        rank_keys: per rank, what else must be equal for two ranks to fold (accelerator, faults).
        path, link_key: links between two ranks and what a link is, for folding.
        blocking: ranks on which compute blocks the issuer.
        wiring: of the placement, when it is there already. seed: of generated tables.

    Raises:
        PlanError: the plan's programs are not well formed.
    """
    programs, wiring = expand(plan), wiring or wire(plan.placement)
    flats = [flatten(p) for p in programs]
    tables = resolve_tables(plan.tables, steps, seed)
    classes = None
    if fold:
        classes = fold_plan(plan, programs, wiring, tables, rank_keys, path, link_key, flats)
    graph = build_graph(programs, wiring, steps, classes, plan.buffers, blocking, flats)
    return Layout(
        plan=plan, programs=programs, wiring=wiring, graph=graph, tables=tables, steps=steps,
        seed=seed,
    )  # fmt: skip


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
        layout: from lay_out. price: prices its nodes.
        message_price: of ops in ``on`` blocks, where the prices do not hold them.
        prepare: called on the execution before it starts (faults, overlap).
        until: [s] where to stop, None to run to the end.

    Raises:
        SimulationError: ops wait for one another in a circle.
        PlanError: the plan has ``on`` blocks and no message prices.
    """
    began = process_time()
    prices = price(layout)
    answers = prices.answers
    if message_price is None and answers:
        message_price = lambda op, rank, sender: answers[op, rank, sender]  # noqa: E731
    if layout.graph.handlers and message_price is None:
        raise PlanError("a plan with on blocks needs prices of the messages", key="programs")
    run = Execution(layout.graph, prices)
    messages = (
        Messages(run, message_price, layout.wiring)
        if message_price and layout.graph.handlers
        else None
    )
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
    seed: int = 0,
    until: float | None = None,
) -> Run:
    """Simulate a plan on the cluster of its problem.

    Args:
        plan: a validated plan. problem: None reads the one the plan carries.
        steps: number of steps. fold: one actor per class of equal ranks.
        contention: transfers share links; False prices each as if alone.
        overlap: compute and communication slow each other by the chips' profiled factors.
        faults: stragglers, link changes, lost chips.
        seed: of generated tables; the same plan and seed give the same run, bit by bit.
        until: [s] when the run stops, for plans whose ranks serve messages; None ends it after
            ``steps`` steps of every rank.

    Raises:
        SimulationError: ops wait in a circle, or a lost chip stops the run; says how far it came.
            A worker that only sends messages may be lost: the others go on.
        InputError: a fault, a late amount or the run's length is wrong, or the plan carries no
            problem.
    """
    began = process_time()
    check_span(steps, until)
    problem = problem or problem_from_documents(plan.problem)
    setting = _Setting(plan, problem, steps, fold, contention, overlap, tuple(faults), seed)
    layout, prices = setting.settled()
    run = run_layout(layout, lambda _: prices, prepare=setting.prepare, until=until)
    if run.outcome.unfinished and until is None and not _others_end(run, faults):
        raise SimulationError(_how_far(run, faults))
    return msgspec.structs.replace(run, cpu_s=process_time() - began)


class _Setting:
    """A plan on its machine: what laying out, pricing and running need of both."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        steps: int,
        fold: bool,
        contention: bool,
        overlap: bool,
        faults: tuple[Fault, ...],
        seed: int,
    ) -> None:
        self.plan, self.problem, self.steps, self.fold = plan, problem, steps, fold
        self.contention, self.overlap, self.faults, self.seed = contention, overlap, faults, seed
        machine, n = problem.machine, plan.placement.num_ranks
        self.chips = plan.placement.chips or tuple(range(n))
        types = [x.accelerator for x in machine.nodes for _ in range(*x.chips)]
        self.kinds = [machine.accelerators[types[c]] for c in self.chips]
        self.changed = {f.link: f for f in faults if isinstance(f, LinkChange)}
        self.wiring = wire(plan.placement)

    def settled(self) -> tuple[Layout, Prices]:
        """Layout and prices in which all ranks of a class behave alike."""
        suffers = faulty(self.faults, len(self.chips))
        near: Sequence[Hashable] = [()] * len(self.chips)
        if self.fold:
            near = group_keys(self.problem.machine, self.wiring, self.chips)
        keys: list[Hashable] = [
            (kind.name, *rest) for kind, *rest in zip(self.kinds, suffers, near, strict=True)
        ]
        layout = self._layout(keys)
        prices = self._price(layout)
        while self.fold and prices.rank_keys:
            # Collectives load links of equal ranks unequally: these ranks are not equal after all.
            layout = self._layout(list(zip(layout.graph.classes, prices.rank_keys, strict=True)))
            prices = self._price(layout)
        return layout, prices

    def _layout(self, rank_keys: Sequence[Hashable]) -> Layout:
        machine, chips = self.problem.machine, self.chips
        return lay_out(
            self.plan,
            steps=self.steps,
            fold=self.fold,
            rank_keys=rank_keys,
            path=lambda a, b: path(machine, chips[a], chips[b]).links,
            link_key=self._link_key,
            blocking=frozenset(r for r, k in enumerate(self.kinds) if not k.async_compute),
            wiring=self.wiring,
            seed=self.seed,
        )

    def _link_key(self, index: int) -> Hashable:
        link = self.problem.machine.links[index]
        return link.rate, link.latency, link.curve, link.flow_cap, self.changed.get(link.name)

    def _price(self, layout: Layout) -> Prices:
        return price(
            layout.graph,
            layout.wiring,
            self.plan,
            self.problem,
            contention=self.contention,
            late=layout.late,
            watched=frozenset(self.changed),
        )

    def prepare(self, run: Execution) -> None:
        """Faults, slow-down of copies both ways and of overlap, before the run starts."""
        if self.faults:
            apply_faults(run, self.faults)
        if run.prices.slows:
            Duplex(run)
        if self.overlap:
            kinds = [self.kinds[a.rank] for a in run.graph.actors]
            Overlap(run, {i: (k.compute_slowdown, k.comm_slowdown) for i, k in enumerate(kinds)})


def _others_end(run: Run, faults: Sequence[Fault]) -> bool:
    """Whether all that never ends belongs to replicas of lost chips, which no other waits for.

    One worker at least ends: without any there is nothing to go on.
    """
    graph, cell_of = run.layout.graph, run.layout.wiring.cell_of
    lost = {f.rank for f in faults if isinstance(f, ChipLoss)}
    gone = {cell_of[r].replica for r in lost if r in cell_of}
    stuck = {graph.actors[graph.actor[k]].rank for k in run.outcome.unfinished}
    if not graph.handlers or not all(
        r in lost or (r in cell_of and cell_of[r].replica in gone) for r in stuck
    ):
        return False
    servers = {graph.actors[a].rank for a in graph.handlers}
    workers = {a.rank for a in graph.actors} - servers

    def worker(rank: int) -> tuple[bool, int]:
        return (True, cell_of[rank].replica) if rank in cell_of else (False, rank)

    return bool({worker(r) for r in workers} - {worker(r) for r in stuck})


def _how_far(run: Run, faults: Sequence[Fault]) -> str:
    graph, outcome = run.layout.graph, run.outcome
    left = min(int(graph.step[k]) for k in outcome.unfinished)
    lost = [f"rank {f.rank} at {f.at:g} s" for f in faults if isinstance(f, ChipLoss)]
    why = "lost " + ", ".join(lost) if lost else "a link that is down holds its flows"
    return (
        f"the run stops after {left} of {run.layout.steps} steps at {outcome.makespan:g} s: {why}; "
        f"{graph.label(outcome.unfinished[0])} never ends"
    )
