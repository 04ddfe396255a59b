"""Settings -> predicted step time and memory, simulated once per distinct plan.

A step of many microbatches is a ramp and a periodic part: two short steps are simulated, and the
rest follows from their difference (in max-plus the time is affine once the pipeline is full).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from sim.cost.ledger import Ledger, peak_memory
from sim.engine.simulate import simulate
from sim.errors import HetlabError
from sim.fidelity.amounts import Amounts, Sample, whole_step
from sim.fidelity.build import draft_of, microbatches_of, problem_of, with_batch
from sim.fidelity.settings import Settings
from sim.fidelity.skip import Skip
from sim.hardware.catalog import Catalog, bundled_catalog
from sim.hardware.machine import Machine
from sim.model.graph import Model
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.validate import validate
from sim.problem import Problem

__all__ = ["Predicted", "Predictor", "Rates", "jobs_at_once", "plan_key"]


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What is predicted of a run.

    Args:
        step_s: [s]. microbatches: of each replica in the whole step.
        ledgers: (stage, replica 0) -> memory. peaks: dtype -> [FLOP/s] summed over the chips.
        model: of the run. calibrated: every chip has measured efficiencies.
        least: the same with full recomputation, where the run does not say what it recomputes:
            what it needs at least.
        assumptions: in words. amounts: along the critical path, for fits;
            None on chips of several types.
    """

    step_s: float
    microbatches: int
    ledgers: dict[int, Ledger]
    peaks: dict[str, float]
    model: Model
    calibrated: bool
    assumptions: tuple[str, ...]
    amounts: Amounts | None = None
    least: dict[int, Ledger] = {}


def plan_key(s: Settings) -> str:
    """Return what decides a run's plan; runs of one key differ in their measurement only."""
    bare = msgspec.structs.replace(s, model="", precision="", stack="", filled=(), notes=())
    return msgspec.json.encode(bare, order="deterministic").decode()


def _first_replica(plan: Plan, problem: Problem) -> dict[int, Ledger]:
    """Stage -> memory of the first replica's cell."""
    return {stage: x for (stage, r), x in peak_memory(plan, problem).items() if r == 0}


_MACHINES: dict[bytes, Machine] = {}
_MACHINES_KEPT = 32


def _same(machine: Machine) -> Machine:
    """The equal machine that this process saw before: what is known of it is then used again."""
    if len(_MACHINES) >= _MACHINES_KEPT:
        _MACHINES.clear()
    return _MACHINES.setdefault(msgspec.json.encode(machine), machine)


def jobs_at_once() -> int:
    """Return how many plans to predict at once: the processors this process may use, at most 8."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 8)


class Rates(Protocol):
    """What a calibration says of a run."""

    def numbers(self, s: Settings) -> dict[str, Any]:
        """Return numbers of the run's accelerators by profile name, as a cluster says them."""

    def step(self, s: Settings, amounts: Amounts) -> float:
        """Return the step time of these amounts at those numbers [s]."""

    def known(self, s: Settings) -> bool:
        """Return whether the calibration saw the run's chips at its precision."""


class Predictor:
    """Predicts plans and keeps what it worked out.

    A plan on one type of chip is simulated once, at the numbers of its profiles; a calibration then
    prices what lies on its critical path. On several types it is simulated at the calibrated ones.

    Args:
        catalog: where profiles lie; None means the bundled ones.
        rates: a calibration; None for the numbers of the profiles.
    """

    def __init__(
        self,
        catalog: Catalog | None = None,
        rates: Rates | None = None,
    ) -> None:
        self.catalog = catalog or bundled_catalog()
        self.rates = rates
        self._kept: dict[tuple[str, ...], Predicted | str] = {}

    def prefetch(
        self, settings: Sequence[Settings], jobs: int, tick: Callable[[int], None] | None = None
    ) -> None:
        """Predict many plans, on several processes.

        Args:
            settings: of the runs. jobs: processes. tick: called with 1 after each plan.
        """
        todo = {self._key(s): s for s in settings}
        todo = {k: s for k, s in todo.items() if k not in self._kept}
        # The same chips in a row, so that a process meets its machine again; deep pipelines first.
        todo = dict(sorted(todo.items(), key=lambda x: (-x[1].pp * x[1].vpp, x[1].chips)))
        if jobs > 1 and len(todo) > jobs:
            from joblib import Parallel, delayed

            # Sent as one that keeps nothing: tasks are pickled while results come in.
            bare = Predictor(self.catalog, self.rates)
            work = (delayed(bare._try)(s) for s in todo.values())
            results = Parallel(n_jobs=jobs, return_as="generator")(work)
        else:
            results = (self._try(s) for s in todo.values())
        for key, found in zip(todo, results, strict=True):
            self._kept[key] = found
            if tick is not None:
                tick(1)

    def _key(self, s: Settings) -> tuple[str, ...]:
        return (plan_key(s), s.stack if self.rates is not None and len(s.chips) > 1 else "")

    def _try(self, s: Settings) -> Predicted | str:
        try:
            return self._predict(s)
        except Skip as why:
            return str(why)
        except HetlabError as error:
            return f"the plan is refused: {error}"

    def predict(self, s: Settings) -> Predicted:
        """Return the prediction for a run.

        Raises:
            Skip: the plan cannot be built; says why.
        """
        key = self._key(s)
        if key not in self._kept:
            self._kept[key] = self._try(s)
        found = self._kept[key]
        if isinstance(found, str):
            raise Skip(found)
        if self.rates is None:
            return found
        known = self.rates.known(s)
        if found.amounts is None:
            return msgspec.structs.replace(found, calibrated=known)
        step = self.rates.step(s, found.amounts)
        return msgspec.structs.replace(found, step_s=step, calibrated=known)

    def samples(self, s: Settings) -> tuple[Sample, ...]:
        """Simulate the short steps of a run: one if the whole step is short, else two."""
        whole = microbatches_of(s)
        first, more = (s.pp, s.pp) if s.vpp > 1 else (2 * s.pp, 4 if s.pp > 1 else 1)
        second = first + more
        counts = (whole,) if whole <= second or len(s.chips) > 1 else (first, second)
        changes = None
        if self.rates is not None and len(s.chips) > 1:
            changes = self.rates.numbers(s)
        problem = problem_of(s, self.catalog, counts[0], changes)
        problem = msgspec.structs.replace(problem, machine=_same(problem.machine))
        return tuple(self._sample(s, problem, count) for count in counts)

    def _sample(self, s: Settings, problem: Problem, microbatches: int) -> Sample:
        problem = with_batch(problem, microbatches * s.mbs * s.dp)
        plan = lower(problem, draft_of(s, problem, microbatches))
        validate(plan)
        return Sample(
            microbatches=microbatches,
            run=simulate(plan, problem, overlap=False),
            problem=problem,
        )

    def _predict(self, s: Settings) -> Predicted:
        samples = self.samples(s)
        whole, last = microbatches_of(s), samples[-1]
        step = last.run.makespan
        if len(samples) > 1:
            rise = step - samples[0].run.makespan
            each = rise / (last.microbatches - samples[0].microbatches)
            step += each * (whole - last.microbatches)
        machine, plan = last.problem.machine, last.run.layout.plan
        peaks: dict[str, float] = {}
        for node in machine.nodes:
            for dtype, peak in machine.accelerators[node.accelerator].peak_flops_per_s.items():
                peaks[dtype] = peaks.get(dtype, 0.0) + peak * (node.chips[1] - node.chips[0])
        least: dict[int, Ledger] = {}
        if any(column == "recompute" for column, _, _ in s.filled):
            again = msgspec.structs.replace(s, recompute="full")
            draft = draft_of(again, last.problem, last.microbatches)
            least = _first_replica(lower(last.problem, draft), last.problem)
        return Predicted(
            step_s=step,
            microbatches=whole,
            ledgers=_first_replica(plan, last.problem),
            least=least,
            peaks=peaks,
            model=last.problem.model,
            calibrated=all(a.calibrated for a in machine.accelerators.values()),
            assumptions=(*last.problem.assumptions, *last.run.prices.assumptions),
            amounts=whole_step(samples, whole) if len(s.chips) == 1 else None,
        )
