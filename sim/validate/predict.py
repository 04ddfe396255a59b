"""Settings -> predicted step time and memory, simulated once per distinct plan.

A step of many microbatches is a ramp and a periodic part: two short steps are simulated, and the
rest follows from their difference (in max-plus the time is affine once the pipeline is full).
"""

from __future__ import annotations

from typing import Any

import msgspec

from sim.cost.ledger import Ledger, peak_memory
from sim.engine.simulate import Run, simulate
from sim.errors import HetlabError
from sim.hardware.catalog import Catalog, bundled_catalog
from sim.model.graph import Model
from sim.plan.lower import lower
from sim.plan.validate import validate
from sim.problem import Problem
from sim.validate.build import draft_of, microbatches_of, problem_of
from sim.validate.settings import Settings
from sim.validate.skip import Skip

__all__ = ["Predicted", "Predictor", "Sample", "plan_key"]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated step. Args: microbatches: of each replica. run, problem: of it."""

    microbatches: int
    run: Run
    problem: Problem


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What is predicted of a run.

    Args:
        step_s: [s]. microbatches: of each replica in the whole step.
        ledgers: (stage, replica 0) -> memory. peaks: dtype -> [FLOP/s] summed over the chips.
        model: of the run. calibrated: every chip has measured efficiencies.
        assumptions: in words.
    """

    step_s: float
    microbatches: int
    ledgers: dict[int, Ledger]
    peaks: dict[str, float]
    model: Model
    calibrated: bool
    assumptions: tuple[str, ...]


def plan_key(s: Settings) -> str:
    """Return what decides a run's plan; runs of one key differ in their measurement only."""
    bare = msgspec.structs.replace(s, model="", precision="", stack="", filled=(), notes=())
    return msgspec.json.encode(bare, order="deterministic").decode()


class Predictor:
    """Predicts plans and keeps what it worked out.

    Args:
        catalog: where profiles lie; None means the bundled ones.
        changes: stack -> accelerator name -> numbers that the stack changes.
    """

    def __init__(
        self,
        catalog: Catalog | None = None,
        changes: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.catalog = catalog or bundled_catalog()
        self.changes = changes or {}
        self._kept: dict[tuple[str, str], Predicted | str] = {}

    def predict(self, s: Settings) -> Predicted:
        """Return the prediction for a run.

        Raises:
            Skip: the plan cannot be built; says why.
        """
        key = (plan_key(s), s.stack if s.stack in self.changes else "")
        if key not in self._kept:
            try:
                self._kept[key] = self._predict(s)
            except Skip as why:
                self._kept[key] = str(why)
            except HetlabError as error:
                self._kept[key] = f"the plan is refused: {error}"
        found = self._kept[key]
        if isinstance(found, str):
            raise Skip(found)
        return found

    def samples(self, s: Settings) -> tuple[Sample, ...]:
        """Simulate the short steps of a run: one if the whole step is short, else two."""
        whole = microbatches_of(s)
        first = 2 * s.pp if s.pp > 1 else 2
        second = first + (s.pp if s.pp > 1 else 1)
        counts = (whole,) if whole <= second or len(s.chips) > 1 else (first, second)
        return tuple(self._sample(s, count) for count in counts)

    def _sample(self, s: Settings, microbatches: int) -> Sample:
        problem = problem_of(s, self.catalog, microbatches, self.changes.get(s.stack))
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
        return Predicted(
            step_s=step,
            microbatches=whole,
            ledgers={k[0]: v for k, v in peak_memory(plan, last.problem).items() if k[1] == 0},
            peaks=peaks,
            model=last.problem.model,
            calibrated=all(a.calibrated for a in machine.accelerators.values()),
            assumptions=(*last.problem.assumptions, *last.run.prices.assumptions),
        )
