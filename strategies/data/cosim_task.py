"""What co-simulated runs share: the task, the workers that compute, the curve they leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.data.cosim_learners import Learner, Samples
from strategies.data.cosim_order import stream

__all__ = ["Curve", "Inner", "Point", "Task", "Training", "Workers", "at_training_loss"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Task(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is trained, the same for every way of training it.

    Args:
        learner: the model. train, test: samples.
        batch: samples per gradient, drawn with replacement; 0 for all of them.
        seed: of the first parameters and of every worker's stream of batches.
        split: each worker draws from its own share of the samples instead of from all.
    """

    learner: Learner
    train: Samples
    test: Samples
    batch: int = 0
    seed: int = 0
    split: bool = False

    def start(self) -> Floats:
        """First parameters (P,)."""
        return self.learner.start(stream(self.seed, "start"))


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """Local steps between two exchanges.

    Args:
        rate: of the inner optimizer. steps: H. steps_of: H of single workers where it differs.
        optimizer: sgd or adamw; its state stays with the worker from round to round.
        decay, beta1, beta2, epsilon: of adamw.
    """

    rate: float
    steps: int
    steps_of: dict[int, int] = {}
    optimizer: Literal["sgd", "adamw"] = "sgd"
    decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if min([self.steps, *self.steps_of.values()]) < 1 or self.rate <= 0.0:
            raise InputError("at least one local step at a rate above 0", key="inner")

    def num_steps(self, worker: int) -> int:
        """H of a worker."""
        return self.steps_of.get(worker, self.steps)


class Training(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A run: its curve at E points and its T updates.

    Args:
        times: simulated seconds (E,) [s]. updates: exchanges or writes so far (E,).
        samples: samples in the gradients used so far (E,). rate_sum: rates so far, outer times
            inner, without momentum (E,).
        train, test: mean loss (E,).
        delays: versions between read and write (T,). stale: updates that were applied between
            them (T,). rates: of each write (T,), 0 where it was not applied.
        params: at the end (P,). diverged: the run stopped because a parameter overflowed.
    """

    times: Floats
    updates: Ints
    samples: Ints
    rate_sum: Floats
    train: Floats
    test: Floats
    delays: Ints
    stale: Ints
    rates: Floats
    params: Floats
    diverged: bool


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A place on a curve; times in [s], losses as in the learner, the rest as in ``Training``."""

    time: float
    updates: float
    samples: float
    rate_sum: float
    train: float
    test: float


def at_training_loss(training: Training, loss: float) -> Point | None:
    """Where a run first reaches a training loss, between points by a straight line.

    Runs are to be compared here too, because a delayed or capped run trains less per update.
    None when it never does.
    """
    below = np.flatnonzero(training.train <= loss)
    if not below.size:
        return None
    j = int(below[0])
    i = max(0, j - 1)
    drop = float(training.train[i] - training.train[j])
    share = (float(training.train[i]) - loss) / drop if drop > 0.0 else 0.0

    def between(values: Floats | Ints) -> float:
        return float(values[i] + share * (values[j] - values[i]))

    names = ("updates", "samples", "rate_sum", "train", "test")
    return Point(time=between(training.times), **{n: between(getattr(training, n)) for n in names})


class Curve:
    """Collects the points of a run."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.rows: list[tuple[float, float, float, float, float, float]] = []

    def add(self, time: float, updates: int, samples: int, rate_sum: float, params: Floats) -> None:
        """Evaluate the parameters and keep a point."""
        learner, task = self.task.learner, self.task
        with np.errstate(over="ignore", invalid="ignore"):
            losses = learner.loss(params, task.train), learner.loss(params, task.test)
        self.rows.append((time, updates, samples, rate_sum, *losses))

    def training(
        self,
        params: Floats,
        *,
        delays: Sequence[int],
        stale: Sequence[int],
        rates: Sequence[float],
        diverged: bool,
    ) -> Training:
        """The finished run."""
        times, updates, samples, rate_sum, train, test = np.array(self.rows, dtype=np.float64).T
        return Training(
            times=times,
            updates=updates.astype(np.int64),
            samples=samples.astype(np.int64),
            rate_sum=rate_sum,
            train=train,
            test=test,
            delays=np.array(delays, dtype=np.int64),
            stale=np.array(stale, dtype=np.int64),
            rates=np.array(rates, dtype=np.float64),
            params=params,
            diverged=diverged,
        )


class Workers:
    """The workers of a run: each has its stream of batches and its inner optimizer's state.

    The k-th batch of a worker is the same in every run of the task, whatever the others do.
    """

    def __init__(self, task: Task, ranks: Sequence[int]) -> None:
        self.task, self.ranks = task, sorted(set(ranks))
        count = len(self.ranks)
        if task.split and count > task.train.num_samples:
            raise InputError(
                "more workers than samples to split", key="split", found=f"{count} workers"
            )
        self.streams = {r: stream(task.seed, "batches", r) for r in self.ranks}
        self.shares = {
            r: task.train.take(slice(i, None, count)) if task.split else task.train
            for i, r in enumerate(self.ranks)
        }
        self.moments: dict[int, tuple[int, Floats, Floats]] = {}

    def batch_size(self, worker: int) -> int:
        """Samples in one gradient of a worker."""
        return self.task.batch or self.shares[worker].num_samples

    def gradient(self, params: Floats, worker: int) -> Floats:
        """Gradient on the worker's next batch, (P,)."""
        share = self.shares[worker]
        if self.task.batch:
            pick = self.streams[worker].integers(0, share.num_samples, size=self.task.batch)
            share = share.take(pick)
        return self.task.learner.gradient(params, share)

    def step(self, params: Floats, worker: int, inner: Inner) -> Floats:
        """Parameters after one local step."""
        g = self.gradient(params, worker)
        if inner.optimizer == "sgd":
            return params - inner.rate * g
        k, m, v = self.moments.get(worker, (0, np.zeros_like(g), np.zeros_like(g)))
        m = inner.beta1 * m + (1.0 - inner.beta1) * g
        v = inner.beta2 * v + (1.0 - inner.beta2) * g * g
        self.moments[worker] = k + 1, m, v
        mean, square = m / (1.0 - inner.beta1 ** (k + 1)), v / (1.0 - inner.beta2 ** (k + 1))
        move = mean / (np.sqrt(square) + inner.epsilon) + inner.decay * params
        return params - inner.rate * move

    def local(self, params: Floats, worker: int, inner: Inner) -> Floats:
        """Parameters after the worker's H local steps."""
        for _ in range(inner.num_steps(worker)):
            params = self.step(params, worker, inner)
        return params
