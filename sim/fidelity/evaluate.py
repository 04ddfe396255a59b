"""Runs against predictions, one record each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from sim.cost.ledger import Ledger
from sim.fidelity.convert import TIME_LIKE, memory_of, predicted_value, step_of
from sim.fidelity.predict import Predicted, Predictor, plan_key
from sim.fidelity.runs import MeasuredRun
from sim.fidelity.settings import Settings, settings_of
from sim.fidelity.skip import Skip

__all__ = ["Compared", "Pair", "compare"]

_CORE = frozenset({"tp", "pp", "dp", "mbs", "gbs", "seq", "precision"})
"""Columns without which a run counts as incomplete."""


class Pair(msgspec.Struct, frozen=True):
    """Args: measured, predicted: of one metric, in its own unit."""

    measured: float
    predicted: float


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One run, compared.

    Args:
        run: measured. why: it was not built, "" when it was.
        settings, predicted: None when it was not built. key: equal for runs of one plan.
        metrics: time-like metric -> pair. step: (measured, predicted) step time [s], or None.
        memory: (measured, predicted) peak [B], or None.
        ran: False where the file says it failed, None where it says nothing of the kind.
        stated_oom: the failure is stated to be memory.
    """

    run: MeasuredRun
    why: str = ""
    settings: Settings | None = None
    predicted: Predicted | None = None
    key: str = ""
    metrics: dict[str, Pair] = {}
    step: Pair | None = None
    memory: Pair | None = None
    ran: bool | None = None
    stated_oom: bool = False

    @property
    def complete(self) -> bool:
        """Whether no rule filled what decides the plan most."""
        return self.settings is not None and _CORE.isdisjoint(c for c, _, _ in self.settings.filled)

    @property
    def scored(self) -> bool:
        """Whether it counts: neither flagged nor recalled."""
        return not (self.run.flagged or self.run.remembered)

    @property
    def margin(self) -> float:
        """Share of the capacity that is left on the fullest cell; negative when short."""
        return min(x.margin_bytes / x.capacity_bytes for x in self._judged.values())

    @property
    def _judged(self) -> dict[int, Ledger]:
        """Ledgers that say whether it fits; what an unstated recomputation may spare counts."""
        assert self.predicted is not None
        return self.predicted.least or self.predicted.ledgers

    @property
    def verdict(self) -> str:
        """The worst memory verdict over the cells."""
        order = ("fits", "at risk", "does not fit")
        return max((x.verdict for x in self._judged.values()), key=order.index)


def compare(
    runs: Sequence[MeasuredRun],
    predictor: Predictor,
    jobs: int = 1,
    tick: Callable[[int], None] | None = None,
) -> tuple[Compared, ...]:
    """Predict every run and pair what was measured with it.

    Args:
        runs: measured. predictor: of plans. jobs: processes. tick: called with 1 after each plan.
    """
    known = []
    for run in runs:
        with contextlib.suppress(Skip):
            known.append(settings_of(run))
    predictor.prefetch(known, jobs, tick)
    return tuple(_compare(run, predictor) for run in runs)


def _compare(run: MeasuredRun, predictor: Predictor) -> Compared:
    try:
        settings = settings_of(run)
        predicted = predictor.predict(settings)
    except Skip as why:
        return Compared(run=run, why=str(why))
    metrics: dict[str, Pair] = {}
    steps: dict[str, float] = {}
    for value in run.values:
        try:
            steps[value.metric] = step_of(run, value, settings, predicted)
        except Skip:
            continue
        theirs = predicted_value(run, value, settings, predicted)
        metrics[value.metric] = Pair(value.value, theirs)
    first = next((m for m in TIME_LIKE if m in steps), None)
    peaks = memory_of(run, predicted)
    flags = {v.metric: v.value for v in run.values}
    told = flags.get("fits_in_memory", flags.get("ran_without_failure"))
    ran = bool(told) if told is not None else (True if metrics or peaks else None)
    return Compared(
        run=run,
        settings=settings,
        predicted=predicted,
        key=plan_key(settings),
        metrics=metrics,
        step=Pair(steps[first], predicted.step_s) if first else None,
        memory=Pair(*peaks) if peaks else None,
        ran=ran,
        stated_oom=flags.get("fits_in_memory") == 0.0,
    )
