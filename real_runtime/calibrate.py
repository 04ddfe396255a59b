"""Correct a cluster's numbers from measured ops. Imports no torch.

Least squares of log(predicted / measured) over the op durations of one or more runs, in the
logarithms of factors on efficiencies, overheads, link rates and latencies. Each kind of op weighs
as much as its share of the measured time, at least ``LEAST_WEIGHT``. Numbers that no op shows, or
whose factor comes out less certain than ``LARGEST_ERROR``, one after another, stay as they were. A
transfer's end is seen late, so the fastest of alike ones counts.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from real_runtime.calibrate_document import Scale, merged, scaled, scales
from real_runtime.compare import STEPS, Key, durations
from real_runtime.compare_run import RunFacts, moved
from sim.errors import InputError
from sim.hardware.build import build_machine
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.spec.cluster import ClusterDoc
from sim.spec.load import Source, validate

__all__ = ["Calibration", "Change", "calibrate"]

Floats = NDArray[np.float64]
LEAST_WEIGHT = 0.02
PULL = 1e-3
"""Residual of a factor of e: keeps the solution unique."""
LARGEST_ERROR = 1.0
"""Relative standard error up to which a factor is decided."""
SEEN, TRIED = 1e-3, float(np.log(4.0))
"""A number is seen when a factor of 4, up or down, moves the weighted logarithms by so much."""
SHORTEST = 1e-6
"""[s] Shorter ops are not compared."""
STEP = 1e-3
"""Of the numeric derivatives, in logarithms of factors."""
WIDEST = float(np.log(100.0))
"""Largest logarithm of a factor, up or down."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a number.

    Args:
        name: of it. before, after: [SI]. factor: their ratio. error: relative standard error of the
            factor, from the residuals. decided: by the runs; other numbers are kept.
        bound: the document allows no larger factor.
    """

    name: str
    before: float
    after: float
    factor: float
    error: float
    decided: bool
    bound: bool = False


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A corrected cluster.

    Args:
        cluster: its document. changes: of each number. ops, steps: compared.
        error_before, error_after: median of |predicted / measured - 1| over ops.
        kinds: kind -> (error before, error after), likewise.
        step_times_s: per run (measured, predicted before, predicted after) [s].
    """

    cluster: dict[str, Any]
    changes: tuple[Change, ...]
    ops: int
    steps: int
    error_before: float
    error_after: float
    kinds: dict[str, tuple[float, float]]
    step_times_s: tuple[tuple[float, float, float], ...]

    @property
    def worse(self) -> dict[str, tuple[float, float]]:
        """The kinds whose error grew, by more than a thousandth; a fit of all may do that."""
        return {kind: both for kind, both in self.kinds.items() if both[1] > both[0] + 1e-3}


class _Case:
    """One run: its plan on the cluster, and what each of its ops took."""

    def __init__(self, plan: Plan, run: RunFacts, cluster: dict[str, Any]) -> None:
        self.plan, self.problem = moved(plan, cluster)
        self.run = run
        took, about = durations(run.spans)
        self.members = {key: about[key][3] for key in took}
        self.took = {
            # The end of a transfer is an upper bound, so its fast steps are nearest to the truth.
            key: float(np.percentile(times, 10 if key.peer >= 0 else 50))
            for key, times in took.items()
        }

    def predict(self, problem: Problem) -> tuple[dict[Key, float], float]:
        """Durations [s] of the ops, and the step time [s]."""
        from sim.engine.simulate import simulate
        from sim.report.metrics import pace_of
        from sim.report.record import spans_of_run

        steps = 1 if self.plan.barrier else STEPS
        spans = spans_of_run(
            simulate(self.plan, problem, steps=steps, fold=False, seed=self.run.seed)
        )
        found = {key: float(np.median(times)) for key, times in durations(spans)[0].items()}
        return found, pace_of(spans, barrier=self.plan.barrier).step_time_s


class _Fit:
    """The residuals of all runs as a function of the logarithms of the factors."""

    def __init__(self, cases: Sequence[_Case], cluster: dict[str, Any], which: Sequence[Scale]):
        self.cases, self.cluster, self.which = cases, cluster, which
        before = [case.predict(case.problem)[0] for case in cases]
        self.keys: list[tuple[int, Key]] = []
        took: list[float] = []
        for c, (case, predicted) in enumerate(zip(cases, before, strict=True)):
            fastest = _fastest(case.took, predicted)
            for key in sorted(case.took.keys() & predicted.keys()):
                measured = fastest.get(key, case.took[key])
                if measured > SHORTEST and predicted[key] > SHORTEST:
                    self.keys.append((c, key))
                    took.append(measured)
        if not took:
            raise InputError("no op of the runs can be compared", expected="ops of a microsecond")
        self.log_took = np.log(took)
        self.weights = np.sqrt(self._weights(np.array(took)))

    def _weights(self, took: Floats) -> Floats:
        """Per op: its kind's share of the time, at least LEAST_WEIGHT, divided by its ops."""
        kinds = [key.kind for _, key in self.keys]
        members = np.array([self.cases[c].members[key] for c, key in self.keys], np.float64)
        names, number = np.unique(kinds, return_inverse=True)
        time = np.bincount(number, took * members, len(names))
        share = np.maximum(time / time.sum(), LEAST_WEIGHT)
        each: Floats = (share / np.bincount(number, minlength=len(names)))[number]
        found: Floats = each / each.sum()
        return found

    def document(self, x: Floats, sources: Sequence[str] | None = None) -> dict[str, Any]:
        """The cluster with factors ``exp(x)``."""
        words = sources or [""] * len(self.which)
        return scaled(self.cluster, self.which, np.exp(x).tolist(), words)

    def off(self, x: Floats) -> Floats:
        """log(predicted / measured) of every op."""
        problems = self.problems(self.document(x))
        predicted = [case.predict(p)[0] for case, p in zip(self.cases, problems, strict=True)]
        found: Floats = np.log([predicted[c][key] for c, key in self.keys]) - self.log_took
        return found

    def problems(self, cluster: dict[str, Any]) -> list[Problem]:
        """Each run's problem on a changed cluster."""
        machine = build_machine(validate(ClusterDoc, Source(cluster, "calibrated")))
        return [msgspec.structs.replace(case.problem, machine=machine) for case in self.cases]

    def residuals(self, x: Floats) -> Floats:
        """Weighted, the pull towards 1 at the end."""
        found: Floats = np.concatenate([self.weights * self.off(x), PULL * x])
        return found


def _fastest(took: dict[Key, float], predicted: dict[Key, float]) -> dict[Key, float]:
    """Of transfers over one pair that should take the same: the shortest that was measured."""
    alike: dict[tuple[int, int, str, float], list[Key]] = defaultdict(list)
    for key in took.keys() & predicted.keys():
        if key.peer >= 0:
            alike[key.rank, key.peer, key.kind, round(predicted[key], 9)].append(key)
    return {key: min(took[k] for k in keys) for keys in alike.values() for key in keys}


def calibrate(
    runs: Sequence[tuple[Plan, RunFacts]], cluster: dict[str, Any], date: str
) -> Calibration:
    """Correct a cluster so that it predicts the ops of runs.

    Args:
        runs: plans and what they took. cluster: normalised document, as ``Problem`` carries it.
        date: of the calibration, as 2026-01-31.

    Raises:
        InputError: a plan does not fit the cluster, a run had one step only, or no op can be
            compared.
    """
    if any(run.only_first for _, run in runs):
        text = "a run of one step says nothing: the first one warms up"
        raise InputError(text, expected="runs with --steps 2 or more")
    cluster = merged(cluster)
    cases = [_Case(plan, run, cluster) for plan, run in runs]
    every = scales(cluster)
    fit, x, errors = _solved(cases, cluster, _seen(_Fit(cases, cluster, every)))
    plans = ", ".join(plan.hash for plan, _ in runs)
    head = f"hetlab calibrate on {date} from runs of plan {plans}"
    sources = [
        f"{head}: factor {f:.4g} +- {e:.1%} on {s.name}"
        for s, f, e in zip(fit.which, np.exp(x).tolist(), errors.tolist(), strict=True)
    ]
    document = _titled(fit.document(x, sources), plans, date)
    return _result(fit, x, errors, document, every)


def _seen(fit: _Fit) -> list[Scale]:
    """Numbers that move some op."""
    base, found = fit.off(np.zeros(len(fit.which))), []
    for i, scale in enumerate(fit.which):
        one = np.eye(len(fit.which))[i]
        tried = (one * min(TRIED, float(np.log(scale.largest))), -TRIED * one)
        moves = [np.linalg.norm(fit.weights * (fit.off(x) - base)) for x in tried]
        if max(moves) > SEEN:
            found.append(scale)
    return found


def _solved(
    cases: Sequence[_Case], cluster: dict[str, Any], which: Sequence[Scale]
) -> tuple[_Fit, Floats, Floats]:
    """The fit, logarithms of the factors and their errors, uncertain ones left out."""
    from scipy.optimize import least_squares

    which = list(which)
    while which:
        fit, zero = _Fit(cases, cluster, which), np.zeros(len(which))
        largest = np.minimum(WIDEST, np.log([scale.largest for scale in which]))
        found = least_squares(
            fit.residuals, zero, bounds=(-WIDEST, largest), diff_step=np.full(len(which), STEP)
        )
        errors = _errors(np.asarray(found.jac), found.fun)
        worst = int(np.argmax(errors))
        if errors[worst] <= LARGEST_ERROR:
            return fit, found.x, errors
        del which[worst]
    return _Fit(cases, cluster, ()), np.zeros(0), np.zeros(0)


def _errors(jacobian: Floats, residuals: Floats) -> Floats:
    """Relative standard errors of the factors: s^2 (J^T J)^-1."""
    free = max(len(residuals) - 2 * jacobian.shape[1], 1)
    variance = float(residuals @ residuals) / free
    found: Floats = np.sqrt(np.diag(np.linalg.pinv(jacobian.T @ jacobian)) * variance)
    return found


def _titled(cluster: dict[str, Any], plans: str, date: str) -> dict[str, Any]:
    found = copy.deepcopy(cluster)
    for chip in found["profiles"]["accelerators"]:
        chip["calibrated"] = True
    note = f"calibrated on {date} from runs of plan {plans}"
    found["notes"] = [*found.get("notes", ()), note]
    return found


def _result(
    fit: _Fit,
    x: Floats,
    errors: Floats,
    document: dict[str, Any],
    every: Sequence[Scale],
) -> Calibration:
    before, after = (np.abs(np.exp(fit.off(at)) - 1) for at in (np.zeros(len(x)), x))
    kinds = np.array([key.kind for _, key in fit.keys])
    steps = []
    for case, problem in zip(fit.cases, fit.problems(document), strict=True):
        measured = float(np.median(case.run.step_times_s))
        steps.append((measured, case.predict(case.problem)[1], case.predict(problem)[1]))
    factors = dict(zip([s.name for s in fit.which], np.exp(x).tolist(), strict=True))
    error_of = dict(zip([s.name for s in fit.which], errors.tolist(), strict=True))
    return Calibration(
        cluster=document,
        changes=tuple(
            Change(
                name=s.name, before=s.value, after=s.value * factors.get(s.name, 1.0),
                factor=factors.get(s.name, 1.0), error=error_of.get(s.name, 0.0),
                decided=s.name in factors, bound=factors.get(s.name, 1.0) > 0.999 * s.largest,
            )
            for s in every
        ),
        ops=len(fit.keys),
        steps=sum(len(case.run.step_times_s) for case in fit.cases),
        error_before=float(np.median(before)),
        error_after=float(np.median(after)),
        kinds={
            str(k): (float(np.median(before[kinds == k])), float(np.median(after[kinds == k])))
            for k in np.unique(kinds)
        },
        step_times_s=tuple(steps),
    )  # fmt: skip
