"""Delay and the gap between test and train loss: the published direction, and its confound.

arXiv:2308.09430 reports that delay lowers the generalization error under a rate capped at
1/(20 mu (tau + 1)). Least squares, 200 samples, 20 features, batches of one. The gap is taken
against that of the first parameters, which know nothing of the samples: the same mean with less
of the luck of the draw.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from strategies.data.cosim import Rule, train_async
from strategies.data.cosim_learners import LeastSquares, linear_data, smoothness
from strategies.data.cosim_order import fixed_delay
from strategies.data.cosim_task import Task, Training, at_training_loss
from strategies.data.staleness import learning_rate_cap
from strategies.data.staleness_bounds import Quadratic, convex

TAUS = (0, 4, 16, 64)
UPDATES, REPEATS, SAMPLES = 1600, 12, 200


@cache
def tasks(batch: int) -> tuple[tuple[Task, float], ...]:
    found = []
    for seed in range(REPEATS):
        train, test = linear_data(SAMPLES, 2000, 20, seed=seed, noise=3.0)
        task = Task(
            learner=LeastSquares(num_features=20), train=train, test=test, batch=batch, seed=seed
        )
        found.append((task, smoothness(task.learner, task.start(), train)))
    return tuple(found)


@cache
def runs(tau: int, cap_tau: int, batch: int = 1) -> tuple[Training, ...]:
    """Runs at delay ``tau`` and the rate that the cap allows at delay ``cap_tau``."""
    order = fixed_delay(UPDATES, tau)
    return tuple(
        train_async(task, order, Rule(rate=learning_rate_cap(mu, cap_tau)), every=20)
        for task, mu in tasks(batch)
    )


def gap(group: tuple[Training, ...]) -> float:
    gaps = [r.test[-1] - r.train[-1] - (r.test[0] - r.train[0]) for r in group]
    return float(np.mean(gaps))


def test_delay_lowers_the_gap_under_its_cap_as_published() -> None:
    gaps = [gap(runs(tau, tau)) for tau in TAUS]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.5 * gaps[0]
    runs_of = [
        Quadratic(rate=learning_rate_cap(1.0, tau), updates=UPDATES, samples=SAMPLES)
        for tau in TAUS
    ]
    bounds = [convex(q, tau).value for q, tau in zip(runs_of, TAUS, strict=True)]
    assert bounds == sorted(bounds, reverse=True)


def test_the_confound_the_lower_rate_alone_does_the_same() -> None:
    for tau in TAUS:
        assert gap(runs(0, tau)) == pytest.approx(gap(runs(tau, tau)), rel=0.03)


def test_the_confound_at_one_rate_delay_hardly_matters() -> None:
    gaps = [gap(runs(tau, 64)) for tau in TAUS]
    assert max(gaps) < 1.03 * min(gaps)
    q = Quadratic(rate=learning_rate_cap(1.0, 64), updates=UPDATES, samples=SAMPLES)
    assert convex(q, 64).value / convex(q, 0).value == pytest.approx((UPDATES - 64) / UPDATES)


def test_the_confound_delay_under_its_cap_trains_less() -> None:
    """With whole batches: at equal updates the losses differ, at equal loss the gaps do not."""
    ends = [float(np.mean([r.train[-1] for r in runs(tau, tau, 0)])) for tau in TAUS]
    assert ends == sorted(ends) and ends[-1] > 1.1 * ends[0]
    for tau in TAUS[1:]:
        for late, prompt in zip(runs(tau, tau, 0), runs(0, 0, 0), strict=True):
            at = at_training_loss(prompt, float(late.train[-1]))
            assert at is not None and at.updates < UPDATES
            late_gap = float(late.test[-1] - late.train[-1])
            assert late_gap == pytest.approx(at.test - at.train, abs=0.02)
            assert at.rate_sum == pytest.approx(late.rate_sum[-1], rel=0.15)
