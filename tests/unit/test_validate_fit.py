"""Amounts along the critical path, and fits to them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from scipy.optimize import approx_fprime

from sim.engine.simulate import simulate
from sim.fidelity.amounts import Amounts, Sample, whole_step
from sim.fidelity.build import draft_of, microbatches_of, problem_of
from sim.fidelity.calibrate import calibrate, calibrated_predictor, held_out_rows, interval_of
from sim.fidelity.cases import case_of, levels_of
from sim.fidelity.evaluate import Compared, compare
from sim.fidelity.fit import _FACTORS as FACTORS
from sim.fidelity.fit import LEVELS, PRIORS, Case, Fitted, fit, predict
from sim.fidelity.fit import _Table as Table
from sim.fidelity.fit import _times as times_of
from sim.fidelity.judge import folds_of
from sim.fidelity.predict import Predictor
from sim.fidelity.runs import MeasuredRun, MeasuredValue, read_runs
from sim.fidelity.settings import Settings, settings_of
from sim.fidelity.store import Calibration, numbers_of
from sim.hardware.catalog import bundled_catalog
from sim.hardware.machine import Accelerator
from sim.plan.lower import lower

RUNS = {r.run_id: r for r in read_runs()}
IDS = ("korth-01-sel", "korth-02-full", "mbridge-049", "simumax-41", "foundry-010", "sailor-16")


def samples_of(run_id: str) -> tuple[Settings, tuple[Sample, ...]]:
    s = settings_of(RUNS[run_id])
    return s, Predictor().samples(s)


def priced(a: Amounts, chip: Accelerator) -> float:
    """The amounts at a chip's own rates, written out [s]."""
    memory = a.memory * chip.memory_efficiency
    total = a.tp + a.ep + a.cp + a.transfers + a.sync + a.rest
    for m, n, k, count, weight, other, peak in a.gemms:
        d = chip.gemm_half
        busy = 2 * m * n * k * (1 + d / m) * (1 + d / n) * (1 + d / k) / chip.gemm_efficiency / peak
        total += count * max(busy, ((m * k + m * n) * other + k * n * weight) / memory)
    total += a.core / a.core_peak / chip.attention_efficiency + a.traffic / memory
    return total + (a.launches + a.routed) * chip.kernel_overhead_s + a.optimizer / memory


@pytest.mark.parametrize("run_id", IDS)
def test_amounts_at_the_profiles_rates_are_the_step(run_id: str) -> None:
    s, samples = samples_of(run_id)
    chip = next(iter(samples[-1].problem.machine.accelerators.values()))
    expected = Predictor().predict(s).step_s
    assert priced(whole_step(samples, microbatches_of(s)), chip) == pytest.approx(
        expected, rel=1e-6
    )


def known() -> Fitted:
    """Numbers that differ from every prior."""
    numbers = {p.name: p.prior * (1.1 + 0.01 * i) for i, p in enumerate(PRIORS)}
    return Fitted(numbers=numbers, offsets={})


@pytest.mark.parametrize("run_id", IDS)
def test_engine_and_fit_say_the_same_under_a_calibration(run_id: str) -> None:
    """A fit's prediction and the simulation with its numbers agree: one model in two forms."""
    s = settings_of(RUNS[run_id])
    levels = levels_of(s)
    offsets = {f"{level}:{levels[level]}": 0.02 * i for i, level in enumerate(LEVELS)}
    fitted = msgspec.structs.replace(known(), offsets=offsets)
    numbers = numbers_of(s, fitted, bundled_catalog())
    m = microbatches_of(s)
    problem = problem_of(s, bundled_catalog(), m, numbers)
    simulated = simulate(lower(problem, draft_of(s, problem, m)), problem, overlap=False)
    amounts = Predictor().predict(s).amounts
    assert amounts is not None
    expected = predict(fitted, [case_of(s, amounts)])[0]
    assert simulated.makespan == pytest.approx(expected, rel=0.02)


def cases_of(fitted: Fitted) -> list[Case]:
    predictor, found = Predictor(), []
    for run_id in IDS:
        s = settings_of(RUNS[run_id])
        amounts = predictor.predict(s).amounts
        assert amounts is not None
        case = case_of(s, amounts, 1.0)
        seconds = float(predict(fitted, [case])[0])
        found.append(msgspec.structs.replace(case, measured=seconds))
    return found


def test_fit_returns_to_the_numbers_data_were_made_with() -> None:
    """Few runs cannot pin every number, but the fit must explain data of its own model."""
    cases = cases_of(known())
    again = predict(fit(cases), cases)
    assert np.abs(again / np.array([c.measured for c in cases]) - 1).max() < 0.01


def test_derivatives_are_those_of_differences() -> None:
    cases = cases_of(known())
    table = Table(cases)
    names = [p.name for p in PRIORS]
    start = np.log([p.prior for p in PRIORS])
    ones = dict.fromkeys(FACTORS, np.ones(len(cases)))

    def total(z: np.ndarray, i: int) -> float:
        return float(times_of(table, dict(zip(names, np.exp(z), strict=True)), ones)[0][i])

    slopes = times_of(table, dict(zip(names, np.exp(start), strict=True)), ones)[1]
    for i in range(len(cases)):
        found = approx_fprime(start, total, 1e-7, i)
        assert [slopes[n][i] for n in names] == pytest.approx(found, rel=1e-3, abs=1e-6)


def test_folds_keep_names_together_and_hold_everything() -> None:
    folds = folds_of(["a", "b", "a", "c", "b"], 2)
    assert folds[0] == folds[2] and folds[1] == folds[4] and set(folds) == {0, 1}
    assert sorted(folds_of(["x", "y", "z"], 0)) == [0, 1, 2]


@pytest.fixture(scope="module")
def rows() -> tuple[Compared, ...]:
    return compare([RUNS[i] for i in IDS], Predictor())


def test_held_out_runs_do_not_move_their_own_prediction(rows: tuple[Compared, ...]) -> None:
    """Held out by run, a run's prediction must not depend on its own measurement."""
    other = MeasuredRun(
        run_id=rows[0].run.run_id,
        columns=rows[0].run.columns,
        values=(MeasuredValue("step_time", 100.0, "s"),),
    )
    changed = compare([other, *(r.run for r in rows[1:])], Predictor())
    first = [
        next(
            r.step.predicted
            for r in held_out_rows(x, "run")
            if r.run.run_id == other.run_id and r.step
        )
        for x in (rows, changed)
    ]
    assert first[0] == pytest.approx(first[1], rel=1e-9)


def test_two_anchors_set_one_factor(rows: tuple[Compared, ...]) -> None:
    """A source whose runs are all off by one factor is exact once two of them are known."""
    runs = [RUNS[i] for i in ("korth-01-sel", "korth-01-full", "korth-02-sel", "foundry-010")]
    first = held_out_rows(compare(runs, Predictor()), "source")
    slow = []
    for row in first:
        assert row.step is not None
        off = 3.0 if row.run.source == "korth" else 1.0
        value = MeasuredValue("step_time", off * row.step.predicted, "s")
        slow.append(msgspec.structs.replace(row.run, values=(value,)))
    (last,) = [r for r in held_out_rows(compare(slow, Predictor()), "anchored") if r.step]
    assert last.run.source == "korth" and last.step is not None
    assert last.step.predicted == pytest.approx(last.step.measured, rel=0.05)


def test_calibration_round_trip(rows: tuple[Compared, ...]) -> None:
    apart = {"plan": held_out_rows(rows, "plan"), "source": held_out_rows(rows, "source")}
    made = calibrate(rows, apart, "six runs")
    again = msgspec.json.decode(msgspec.json.encode(made), type=Calibration)
    assert again == made
    found = compare([r.run for r in rows], calibrated_predictor(bundled_catalog(), again))
    before = [abs(r.step.predicted / r.step.measured - 1) for r in rows if r.step]
    after = [abs(r.step.predicted / r.step.measured - 1) for r in found if r.step]
    assert np.median(after) < np.median(before) / 3
    settings = rows[0].settings
    assert settings is not None and interval_of(settings, 1.0, again) is None
