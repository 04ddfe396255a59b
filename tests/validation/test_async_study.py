"""What the study of late updates shows: facts of one machine, one seed, and small learners."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from sim.engine.faults import ChipLoss
from sim.report.report import report_of
from sim.report.settled import simulate_settled
from strategies.data.cosim_task import at_training_loss
from strategies.data.study import Outcome, common_loss, summary
from strategies.data.study_delays import DelayRow
from strategies.data.study_timing import WAYS, Timing, plan_of, timing_of
from tests.validation import async_study
from tests.validation.async_study import (
    SLOW,
    delay_rows,
    envelope,
    given,
    near_samples_per_s,
    outcomes,
    show,
    show_curves,
    show_delays,
    timings,
)


@cache
def speeds() -> tuple[Timing, ...]:
    return timings()


@cache
def trained(learner: str) -> tuple[Outcome, ...]:
    return outcomes(learner, speeds())


@cache
def delayed(learner: str, batch: int) -> tuple[DelayRow, ...]:
    return delay_rows(learner, batch, repeats=6 if learner == "linear" else 3, updates=1000)


def intervals(timing: Timing) -> list[float]:
    """[s] between two updates of each worker."""
    times = [[a.time for a in timing.order if a.worker == w] for w in timing.workers]
    return [float(np.median(np.diff(t))) for t in times]


def test_the_back_of_the_envelope() -> None:
    problem, _ = given()
    by_hand = envelope(problem)
    sync, late = speeds()[:2]
    near, slow, _, far = intervals(late)
    compute = (slow - near) / (SLOW.factor - 1)  # all else is alike for both
    assert by_hand["compute of a worker [s]"] < compute < near
    push, pull = by_hand["gradients over the WAN [s]"], by_hand["parameters over the WAN [s]"]
    assert compute + push + pull < far < near + 1.2 * (push + pull)
    # A step waits for the slow chip and, behind it, for one gradient over the WAN.
    step = 1 / sync.updates_per_s
    assert step == pytest.approx(SLOW.factor * compute + push, rel=0.03)
    assert by_hand["sync step at least [s]"] < step
    assert sync.samples_per_s < by_hand["sync samples/s at most"]
    assert late.updates_per_s < by_hand["async updates/s at most"]
    assert late.updates_per_s == pytest.approx(sum(1 / t for t in intervals(late)), rel=0.02)


def test_who_is_late() -> None:
    late, ssp = speeds()[1].delays, speeds()[2].delays
    assert late is not None and ssp is not None
    near, slow, other, far = (late.worker_mean[w] for w in range(4))
    assert near < 2.0 and other < 2.0 and 5.0 < slow < 7.0 and far > 20.0
    assert ssp.max == 3 and late.max > 20


def test_speeds() -> None:
    sync, late, ssp, local, streamed = speeds()
    assert sync.updates_per_s < ssp.updates_per_s < late.updates_per_s
    # A slack does not help against a worker that is always the slowest: its gradients cross the
    # WAN, then parameters come back, where an all-reduce uses both directions at once.
    assert ssp.samples_per_s < sync.samples_per_s
    assert ssp.samples_per_s == pytest.approx(4 * 128 / intervals(late)[3], rel=0.01)
    assert 2 * sync.samples_per_s < local.samples_per_s < streamed.samples_per_s
    assert streamed.samples_per_s < late.samples_per_s


def test_a_lost_worker_writes_no_more() -> None:
    problem, draft = given()
    found = timing_of(problem, draft, WAYS[1], seconds=300.0, faults=[ChipLoss(rank=0, at=60.0)])
    assert found.delays is not None
    start, writes = found.delays.start, [a for a in found.order if a.time > found.delays.start]
    assert found.updates_per_s == pytest.approx(len(writes) / (300.0 - start), rel=0.01)
    assert max(a.time for a in writes if a.worker == 0) <= 60.0
    assert found.delays.worker_rates[0] < 0.2 * found.delays.worker_rates[2]


def test_the_report_says_what_the_study_says() -> None:
    problem, draft = given()
    for way, timing in zip(WAYS[1:3], speeds()[1:3], strict=True):
        run = simulate_settled(plan_of(problem, draft, way), problem, faults=[SLOW])
        m = report_of(run, problem).metrics
        assert m.updates_per_s == pytest.approx(timing.updates_per_s, rel=0.02)
        assert m.tokens_per_s == pytest.approx(
            timing.samples_per_s * problem.job.sequence_length, rel=0.02
        )


def test_planning_around_the_slow_and_the_far_worker_is_as_fast_as_late_gradients() -> None:
    """Three near workers with 7, 2 and 7 microbatches keep step, with exact updates."""
    sync, late = speeds()[:2]
    assert near_samples_per_s() == pytest.approx(late.samples_per_s, rel=0.05)
    assert late.samples_per_s > 4 * sync.samples_per_s


def test_bytes_over_the_wan() -> None:
    sync, _, _, local, streamed = (t.wan_bytes_per_sample for t in speeds())
    assert local / sync == pytest.approx(1 / 8, rel=1e-6)  # H = 8, both in fp32
    assert streamed / sync == pytest.approx(1 / 8 * 8 / 32, rel=1e-6)


@pytest.mark.parametrize("learner", ["breast_cancer", "rings"])
def test_late_gradients_reach_the_loss_first(learner: str) -> None:
    rows = {r["way"]: r for r in summary(trained(learner))}
    sync = rows["sync"]
    assert 3 * rows["async"]["s to loss"] < sync["s to loss"]
    for way in ("DiLoCo 8", "DiLoCo 8 streamed"):
        assert rows[way]["s to loss"] < 0.8 * sync["s to loss"]
    assert rows["SSP 2"]["s to loss"] > 0.8 * sync["s to loss"]
    # With as many samples as the slowest way saw, async has trained about as far as sync.
    assert rows["async"]["train samples"] == pytest.approx(sync["train samples"], rel=0.25)
    # Its larger gap at the end of time goes with a lower loss; at one loss it is not larger.
    assert rows["async"]["gap end"] > 3 * sync["gap end"]
    assert rows["async"]["train end"] < 0.8 * sync["train end"]
    assert rows["async"]["gap loss"] < sync["gap loss"] + 0.005


def test_the_common_loss_is_reached_by_all() -> None:
    found = trained("breast_cancer")
    goal = common_loss(found)
    reached = [at_training_loss(o.training, goal) for o in found]
    assert all(at is not None and at.train == pytest.approx(goal) for at in reached)


@pytest.mark.parametrize("batch", [16, 0])
def test_the_published_direction_and_its_confound(batch: int) -> None:
    """Least squares: the gap falls with the delay under its cap, and as much without any delay."""
    rows = delayed("linear", batch)
    assert [r.tau for r in rows] == [0, 4, 8, 16, 32]
    gaps, losses = [r.gap[-1] for r in rows], [r.train[-1] for r in rows]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 0.5 * gaps[0]
    assert losses == sorted(losses) and losses[-1] > 1.1 * losses[0]
    bounds = [r.bound.value for r in rows]
    assert bounds == sorted(bounds, reverse=True)
    for r in rows:
        assert r.gap[-1] == pytest.approx(r.prompt_gap[-1], rel=0.02)
        assert r.level_gap[-1] == pytest.approx(rows[-1].gap[-1], rel=0.02)
        # Where all have one training loss, the gap is one too, earlier or later.
        near = 0.08 if batch else 0.03
        assert r.at_loss_gap == pytest.approx(rows[-1].at_loss_gap, rel=near)
        assert all(r.rate < 1.02 * limit.value for limit in r.limits)
    assert rows[0].at_loss_updates < 0.05 * rows[-1].at_loss_updates


def test_the_direction_is_no_law_for_a_network() -> None:
    rows = delayed("rings", 16)
    gaps, losses = [r.gap[-1] for r in rows], [r.train[-1] for r in rows]
    assert losses == sorted(losses) and gaps != sorted(gaps, reverse=True)
    at_loss = [r.at_loss_gap for r in rows]
    assert max(at_loss) < 1.3 * min(at_loss)
    for r in rows:
        assert r.gap[-1] == pytest.approx(r.prompt_gap[-1], rel=0.03)


def test_the_printed_tables(capsys: pytest.CaptureFixture[str]) -> None:
    rows = delayed("linear", 16)
    show(summary(trained("rings")))
    show_delays(rows)
    show_curves(rows)
    text = capsys.readouterr().out
    for value in (
        rows[3].gap[-1],
        rows[3].at_loss_gap,
        rows[3].bound.value,
        speeds()[1].updates_per_s,
    ):
        assert f"{value:.4g}" in text
    assert text.count("found: second-hand account") == 1 and "not the paper's theorem" in text
    assert f"{rows[4].train[96]:.4f}, {rows[4].gap[96]:+.4f}" in text.splitlines()[-1]


def test_pictures_go_to_a_folder_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = async_study.LEARNERS[0]
    monkeypatch.setattr(async_study, "timings", speeds)
    monkeypatch.setattr(async_study, "outcomes", lambda name, _: trained(name))
    monkeypatch.setattr(async_study, "LEARNERS", (learner,))
    monkeypatch.setattr(async_study, "BATCHES", {})
    folder = tmp_path / "new" / "pictures"
    async_study.main(["--pictures", str(folder)])
    assert [p.name for p in folder.iterdir()] == [f"study_{learner}.png"]
    assert f"pictures in {folder}" in capsys.readouterr().out
