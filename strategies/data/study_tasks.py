"""What the study trains: small learners on data that scikit-learn bundles, or made from a seed."""

from __future__ import annotations

from typing import Literal

import numpy as np

from sim.optional import import_optional
from strategies.data.cosim_learners import (
    LeastSquares,
    Logistic,
    Network,
    Samples,
    linear_data,
    ring_data,
)
from strategies.data.cosim_order import stream
from strategies.data.cosim_task import Task

__all__ = ["study_task"]

Name = Literal["breast_cancer", "digits", "rings", "linear"]


def study_task(name: Name, *, batch: int = 8, seed: int = 0) -> Task:
    """A task by name; its split, start and batches follow the seed.

    Args:
        name: "breast_cancer": logistic regression, 569 samples of 30 features; "digits": a network
            with 32 hidden units, 1,797 samples of 64; both half train, half test, features scaled
            by the training half. "rings": a network with 8 hidden units on 200 made samples.
            "linear": least squares with noise on 200 made samples of 20 features.
        batch: samples per gradient. seed: of everything.

    Raises:
        UsageError: the data set is scikit-learn's and it is not installed.
    """
    if name == "rings":
        train, test = ring_data(200, 1000, seed, noise=0.3)
        network = Network(num_features=2, hidden=8)
        return Task(learner=network, train=train, test=test, batch=batch, seed=seed)
    if name == "linear":
        train, test = linear_data(200, 2000, 20, seed, noise=3.0)
        linear = LeastSquares(num_features=20)
        return Task(learner=linear, train=train, test=test, batch=batch, seed=seed)
    train, test = _bundled(name, seed)
    width = train.x.shape[1]
    learner = (
        Logistic(num_features=width)
        if name == "breast_cancer"
        else Network(num_features=width, hidden=32, num_classes=10)
    )
    return Task(learner=learner, train=train, test=test, batch=batch, seed=seed)


def _bundled(name: str, seed: int) -> tuple[Samples, Samples]:
    x, y = getattr(import_optional("sklearn.datasets"), f"load_{name}")(return_X_y=True)
    order = stream(seed, "split").permutation(len(y))
    half = len(y) // 2
    train, test = x[order[:half]], x[order[half:]]
    scale = np.where(train.std(axis=0) > 0.0, train.std(axis=0), 1.0)
    mean, classes = train.mean(axis=0), np.asarray(y, np.float64)
    return (
        Samples((train - mean) / scale, classes[order[:half]]),
        Samples((test - mean) / scale, classes[order[half:]]),
    )
