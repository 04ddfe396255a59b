"""Everything worth saying about one simulation, from one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sim.cost.ledger import Ledger, peak_memory
from sim.cost.money import egress
from sim.cost.occupancy import memory_over_time
from sim.engine.simulate import Run
from sim.problem import Problem
from sim.report.basis import Basis, basis_of
from sim.report.document import (
    PlanDocument,
    SearchFacts,
    SimulateDocument,
    plan_document,
    simulate_document,
)
from sim.report.gantt import save_gantt
from sim.report.links import LinkLoad, link_loads, link_use
from sim.report.metrics import Metrics, metrics_of
from sim.report.record import spans_of_run
from sim.report.rows import time_unit
from sim.report.spans import Spans
from sim.report.text_gantt import text_gantt
from sim.report.trace import Counter, trace_of_run

__all__ = ["Report", "report_of"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation, measured.

    Args:
        run, problem: what was simulated. spans, metrics, links, basis: of it.
        memory: (stage, replica) -> ledger of the cell. seed: used.
    """

    run: Run
    problem: Problem
    spans: Spans
    basis: Basis
    metrics: Metrics
    links: tuple[LinkLoad, ...]
    memory: Mapping[tuple[int, int], Ledger] = {}
    seed: int = 0

    def __repr__(self) -> str:
        """One line: plan, step time, MFU."""
        m, plan = self.metrics, self.run.layout.plan
        unit, scale = time_unit(m.step_time_s)
        return (
            f"Report({plan.name or plan.hash}: {m.step_time_s * scale:.4g} {unit} a step, "
            f"{m.tokens_per_s:,.0f} tokens/s, MFU {100 * m.mfu:.1f} %)"
        )

    def text(self, width: int = 80) -> str:
        """Return the timeline as text of this width [characters]."""
        return text_gantt(self.spans, self.run.layout.plan.placement, width=width)

    def save_gantt(self, path: str | Path) -> Path:
        """Write the pipeline picture; the ending chooses the format."""
        return save_gantt(self.run, path, spans=self.spans)

    def save_trace(self, path: str | Path) -> Path:
        """Write the Chrome trace with memory over time; compressed when the name ends in ".gz"."""
        layout, outcome = self.run.layout, self.run.outcome
        ledgers = memory_over_time(
            layout.graph, layout.wiring, layout.plan, self.problem, outcome.start, outcome.end
        )
        counters = [
            Counter(name="memory [B]", rank=actor.rank, times_s=times, values=values)
            for actor, (times, values) in zip(layout.graph.actors, ledgers, strict=True)
        ]
        return trace_of_run(self.run, path, spans=self.spans, counters=counters)

    def plan_document(self, search: SearchFacts | None = None) -> PlanDocument:
        """Return what ``hetlab plan --json`` prints."""
        return plan_document(
            self.run.layout.plan, self.basis, self.metrics, model=self.problem.model,
            memory=self.memory, search=search, seed=self.seed,
        )  # fmt: skip

    def simulate_document(self) -> SimulateDocument:
        """Return what ``hetlab simulate --json`` prints."""
        return simulate_document(
            self.run, self.basis, self.metrics, self.links, model=self.problem.model,
            memory=self.memory, seed=self.seed,
        )  # fmt: skip


def report_of(
    run: Run,
    problem: Problem,
    *,
    memory: Mapping[tuple[int, int], Ledger] | None = None,
    seed: int = 0,
) -> Report:
    """Measure a simulation.

    Args:
        run: from sim.engine.simulate. problem: what was planned for.
        memory: (stage, replica) -> ledger of the cell; None works it out. seed: used.

    Raises:
        PlanError: the plan names no schedule that says how many microbatches are in flight, and
            ``memory`` is not given.
        InputError: a chip cannot compute in the plan's dtype.
        SimulationError: the run is empty, or its rate exceeds the chips' peak.
    """
    plan = run.layout.plan
    spans = spans_of_run(run)
    nbytes, busy = link_use(run)
    links = link_loads(run.prices.link_names, nbytes.tolist(), busy.tolist(), run.makespan)
    paid = egress(problem.machine, nbytes.tolist()) / run.layout.steps
    basis = basis_of(plan, problem.machine, problem.model, egress_per_step=paid)
    metrics = metrics_of(spans, basis, barrier=plan.barrier)
    return Report(
        run=run, problem=problem, spans=spans, basis=basis, metrics=metrics, links=links,
        memory=peak_memory(plan, problem) if memory is None else memory, seed=seed,
    )  # fmt: skip
