"""Everything worth saying about one simulation, from one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sim.cost.ledger import Ledger, peak_memory
from sim.cost.money import egress
from sim.cost.occupancy import memory_over_time
from sim.engine.simulate import Run
from sim.model.graph import Model
from sim.plan.plan import Plan
from sim.plan.program import forwards
from sim.problem import Problem
from sim.report.basis import Basis, basis_of
from sim.report.delays import Delays, fixed_delays, settled_delays
from sim.report.document import (
    PlanDocument,
    SearchFacts,
    SimulateDocument,
    plan_document,
    simulate_document,
)
from sim.report.gantt import save_gantt
from sim.report.host import HostUse, host_use
from sim.report.late import LateUse, late_use
from sim.report.links import LinkLoad, bytes_per_update, link_loads, link_use
from sim.report.metrics import Metrics, metrics_of, pace_of_run
from sim.report.record import recorded
from sim.report.rows import time_unit
from sim.report.spans import Spans
from sim.report.text_gantt import text_gantt
from sim.report.trace import Counter, trace_of_run

__all__ = ["Report", "report_of"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation, measured.

    Args:
        run, problem: what was simulated; None for a plan without a problem.
        spans, metrics, links, basis: of it.
        memory: (stage, replica) -> ledger of the cell. host: None when the plan uses no host side.
        delays: of updates that are late, None for other plans. late: of late amounts, likewise.
        seed: of the run's generated tables.
    """

    run: Run
    problem: Problem | None
    spans: Spans
    basis: Basis
    metrics: Metrics
    links: tuple[LinkLoad, ...]
    memory: Mapping[tuple[int, int], Ledger] = {}
    host: HostUse | None = None
    delays: Delays | None = None
    late: LateUse | None = None
    seed: int = 0

    def __repr__(self) -> str:
        """One line: plan, step time, MFU."""
        m, plan = self.metrics, self.run.layout.plan
        unit, scale = time_unit(m.step_time_s)
        mfu = "" if m.mfu is None else f", MFU {100 * m.mfu:.1f} %"
        return (
            f"Report({plan.name or plan.hash}: {m.step_time_s * scale:.4g} {unit} a step, "
            f"{m.tokens_per_s:,.4g} tokens/s{mfu})"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What plan, problem and prices rest on, each once."""
        of_problem = self.problem.assumptions if self.problem else ()
        texts = (*self.run.layout.plan.assumptions, *of_problem, *self.run.prices.assumptions)
        return tuple(dict.fromkeys(texts))

    @property
    def _model(self) -> Model | None:
        return self.problem.model if self.problem else None

    def text(self, width: int = 80) -> str:
        """Return the timeline as text of this width [characters]."""
        return text_gantt(self.spans, self.run.layout.plan.placement, width=width)

    def save_gantt(self, path: str | Path) -> Path:
        """Write the pipeline picture; the ending chooses the format."""
        return save_gantt(self.run, path, spans=self.spans)

    def save_trace(self, path: str | Path) -> Path:
        """Write the Chrome trace; compressed when the name ends in ".gz".

        It shows memory over time where the plan says which blocks its stages hold.
        """
        layout, outcome = self.run.layout, self.run.outcome
        counters = []
        if self.problem is not None and self.basis.model_flops_per_step is not None:
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
            self.run.layout.plan, self.basis, self.metrics, model=self._model,
            memory=self.memory, search=search, host=self.host, seed=self.seed,
            assumptions=self.assumptions,
        )  # fmt: skip

    def simulate_document(self) -> SimulateDocument:
        """Return what ``hetlab simulate --json`` prints."""
        return simulate_document(
            self.run, self.basis, self.metrics, self.links, model=self._model,
            memory=self.memory, host=self.host, delays=self.delays, late=self.late,
            seed=self.seed, assumptions=self.assumptions,
        )  # fmt: skip


def report_of(
    run: Run,
    problem: Problem | None = None,
    *,
    memory: Mapping[tuple[int, int], Ledger] | None = None,
) -> Report:
    """Measure a simulation.

    Where ranks serve messages a step is one update, with the tokens behind it, and all rates are of
    the time in which every worker writes; where workers take steps of their own it is a round.

    Args:
        run: from sim.engine.simulate.
        problem: what was planned for; without it (stated times) FLOPs, peaks, prices and memory are
            unknown.
        memory: (stage, replica) -> ledger of the cell; None works it out for plans with a schedule.

    Raises:
        InputError: a chip cannot compute in the plan's dtype.
        SimulationError: the run is empty, or its rate exceeds the chips' peak.
    """
    plan = run.layout.plan
    spans, inside = recorded(run)
    nbytes, busy = link_use(run)
    links = link_loads(run.prices.link_names, nbytes.tolist(), busy.tolist(), run.makespan)
    machine, model = (problem.machine, problem.model) if problem else (None, None)
    delays = settled_delays(run)
    if delays and delays.stop > delays.start and _above_peak(run, problem, delays):
        delays = settled_delays(run, whole=True)
    pace = pace_of_run(run, spans, delays)
    crossed = bytes_per_update(run, delays) if delays else dict(enumerate(nbytes.tolist()))
    steps = 1 if delays else run.layout.steps
    basis = basis_of(
        plan,
        machine,
        model,
        egress_per_step=egress(machine, crossed) / steps if machine else 0.0,
        tokens_per_step=_tokens_of_update(plan, delays) if delays else _tokens_of_round(run),
    )
    metrics = metrics_of(
        spans, basis, barrier=plan.barrier, inner_comm_s=inside, pace=pace, delays=delays
    )
    if memory is None:
        scheduled = any(call.name == "schedule" for call in plan.lowering)
        memory = peak_memory(plan, problem) if problem and scheduled else {}
    return Report(
        run=run, problem=problem, spans=spans, basis=basis, metrics=metrics, links=links,
        memory=memory, host=host_use(plan, problem, spans, pace), seed=run.layout.seed,
        delays=delays or fixed_delays(run, pace.step_time_s), late=late_use(run, spans),
    )  # fmt: skip


def _tokens_of_round(run: Run) -> float | None:
    """Tokens of a step that repeats its forwards (local SGD), None for others."""
    plan, times = run.layout.plan, max(map(forwards, run.layout.programs), default=1)
    maths = plan.mathematics
    whole = sum(plan.placement.microbatches) * maths.microbatch * maths.sequence_length
    return float(times * whole) if times > 1 else None


def _tokens_of_update(plan: Plan, delays: Delays) -> float:
    return delays.samples_per_s * plan.mathematics.sequence_length / delays.updates_per_s


def _above_peak(run: Run, problem: Problem | None, delays: Delays) -> bool:
    """Whether so short a window makes a rate that no chip has; that of the whole run has not."""
    if problem is None:
        return False
    plan = run.layout.plan
    basis = basis_of(
        plan, problem.machine, problem.model, tokens_per_step=_tokens_of_update(plan, delays)
    )
    flops, peak = basis.hardware_flops_per_step, basis.peak_flops_per_s
    return bool(flops and peak and flops * delays.updates_per_s > peak)
