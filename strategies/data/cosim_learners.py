"""Small models with gradients by hand, and data made from a seed: what co-simulation trains.

A learner is data; its loss is the mean over samples plus ``decay`` / 2 times the squared norm of
the parameters. Parameters are one flat vector (P,). No function changes its arguments.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.data.cosim_order import stream

__all__ = [
    "LeastSquares",
    "Learner",
    "Logistic",
    "Network",
    "Samples",
    "linear_data",
    "ring_data",
    "smoothness",
    "two_class_data",
]

Floats = NDArray[np.float64]


class Samples(msgspec.Struct, frozen=True, eq=False):
    """Inputs ``x`` (n, d) and targets ``y`` (n,): numbers, or class numbers from 0."""

    x: Floats
    y: Floats

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.shape != self.x.shape[:1] or not len(self.y):
            raise InputError(
                "samples are x (n, d) and y (n,)",
                key="samples",
                found=f"x {self.x.shape}, y {self.y.shape}",
            )

    @property
    def num_samples(self) -> int:
        """Number of samples n."""
        return len(self.y)

    def take(self, index: NDArray[np.int64] | slice) -> Samples:
        """The samples at an index."""
        return Samples(self.x[index], self.y[index])


class Learner(Protocol):
    """A model: where it starts, its loss and its gradient."""

    def start(self, rng: np.random.Generator) -> Floats:
        """First parameters (P,)."""
        ...

    def loss(self, params: Floats, samples: Samples) -> float:
        """Mean loss."""
        ...

    def gradient(self, params: Floats, samples: Samples) -> Floats:
        """Gradient of ``loss``, (P,)."""
        ...


class LeastSquares(msgspec.Struct, frozen=True, kw_only=True):
    """Half the squared error of a linear model: the quadratic of the theory, with A = X'X / n."""

    num_features: int
    decay: float = 0.0

    def start(self, rng: np.random.Generator) -> Floats:
        """Zeros (d,)."""
        return np.zeros(self.num_features)

    def loss(self, params: Floats, samples: Samples) -> float:
        """Mean of (x w - y)^2 / 2."""
        error = samples.x @ params - samples.y
        return float(0.5 * np.mean(error**2) + 0.5 * self.decay * params @ params)

    def gradient(self, params: Floats, samples: Samples) -> Floats:
        """X' (X w - y) / n."""
        error = samples.x @ params - samples.y
        return np.asarray(samples.x.T @ error / samples.num_samples + self.decay * params)


class Logistic(msgspec.Struct, frozen=True, kw_only=True):
    """Logistic regression on classes 0 and 1: convex, not quadratic."""

    num_features: int
    decay: float = 0.0

    def start(self, rng: np.random.Generator) -> Floats:
        """Zeros (d,)."""
        return np.zeros(self.num_features)

    def loss(self, params: Floats, samples: Samples) -> float:
        """Mean cross-entropy."""
        score = samples.x @ params
        cross = np.logaddexp(0.0, score) - samples.y * score
        return float(np.mean(cross) + 0.5 * self.decay * params @ params)

    def gradient(self, params: Floats, samples: Samples) -> Floats:
        """X' (p - y) / n with p = sigmoid(X w)."""
        probability = 0.5 * (1.0 + np.tanh(0.5 * (samples.x @ params)))
        error = probability - samples.y
        return np.asarray(samples.x.T @ error / samples.num_samples + self.decay * params)


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """One hidden tanh layer and a softmax over classes: not convex.

    Parameters in order: (d, hidden) weights, (hidden,) biases, (hidden, classes), (classes,).
    """

    num_features: int
    hidden: int
    num_classes: int = 2
    decay: float = 0.0

    def _parts(self, params: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        d, h, c = self.num_features, self.hidden, self.num_classes
        a, b, e = d * h, d * h + h, d * h + h + h * c
        return params[:a].reshape(d, h), params[a:b], params[b:e].reshape(h, c), params[e:]

    def start(self, rng: np.random.Generator) -> Floats:
        """Normal weights scaled by one over the root of the inputs, biases 0."""
        d, h, c = self.num_features, self.hidden, self.num_classes
        first = rng.normal(size=d * h) / np.sqrt(d)
        second = rng.normal(size=h * c) / np.sqrt(h)
        return np.concatenate([first, np.zeros(h), second, np.zeros(c)])

    def _forward(self, params: Floats, x: Floats) -> tuple[Floats, Floats]:
        """Hidden values (n, hidden) and log-probabilities (n, classes)."""
        w1, b1, w2, b2 = self._parts(params)
        hidden = np.tanh(x @ w1 + b1)
        score = hidden @ w2 + b2
        score = score - score.max(axis=1, keepdims=True)
        return hidden, score - np.log(np.exp(score).sum(axis=1, keepdims=True))

    def loss(self, params: Floats, samples: Samples) -> float:
        """Mean cross-entropy."""
        _, logp = self._forward(params, samples.x)
        picked = logp[np.arange(samples.num_samples), samples.y.astype(np.int64)]
        return float(-np.mean(picked) + 0.5 * self.decay * params @ params)

    def gradient(self, params: Floats, samples: Samples) -> Floats:
        """Back-propagation through both layers."""
        hidden, logp = self._forward(params, samples.x)
        score = np.exp(logp)
        score[np.arange(samples.num_samples), samples.y.astype(np.int64)] -= 1.0
        score /= samples.num_samples
        back = (score @ self._parts(params)[2].T) * (1.0 - hidden**2)
        parts = (samples.x.T @ back, back.sum(axis=0), hidden.T @ score, score.sum(axis=0))
        return np.concatenate([p.ravel() for p in parts]) + self.decay * params


def smoothness(
    learner: Learner, params: Floats, samples: Samples, seed: int = 0, iterations: int = 100
) -> float:
    """Largest eigenvalue of the Hessian by power iteration on Hessian-vector products.

    A product is a central difference of gradients along the vector: exact to rounding for a
    quadratic. Finds the eigenvalue of largest size, which for a convex loss is the largest one.
    """
    vector = stream(seed, "smoothness").normal(size=params.shape)
    step, value = 1e-4 * (1.0 + float(np.abs(params).max(initial=0.0))), 0.0
    for _ in range(iterations):
        vector = vector / np.linalg.norm(vector)
        ahead = learner.gradient(params + step * vector, samples)
        product = (ahead - learner.gradient(params - step * vector, samples)) / (2 * step)
        value = float(vector @ product)
        if not product.any():
            return 0.0
        vector = product
    return abs(value)


def linear_data(
    num_train: int, num_test: int, num_features: int, seed: int, noise: float = 0.5
) -> tuple[Samples, Samples]:
    """Train and test samples of one linear law with noise; features of unlike scale."""
    rng = stream(seed, "linear data")
    total = num_train + num_test
    scales = np.geomspace(1.0, 0.2, num_features)
    x = rng.normal(size=(total, num_features)) * scales
    y = x @ rng.normal(size=num_features) + noise * rng.normal(size=total)
    return Samples(x[:num_train], y[:num_train]), Samples(x[num_train:], y[num_train:])


def two_class_data(
    num_train: int, num_test: int, num_features: int, seed: int, apart: float = 1.0
) -> tuple[Samples, Samples]:
    """Train and test samples of two normal clouds whose means lie 2 ``apart`` from each other."""
    rng = stream(seed, "two classes")
    total = num_train + num_test
    y = rng.integers(0, 2, size=total).astype(np.float64)
    way = rng.normal(size=num_features)
    x = rng.normal(size=(total, num_features))
    x += np.outer(2.0 * y - 1.0, apart * way / np.linalg.norm(way))
    return Samples(x[:num_train], y[:num_train]), Samples(x[num_train:], y[num_train:])


def ring_data(
    num_train: int, num_test: int, seed: int, noise: float = 0.1
) -> tuple[Samples, Samples]:
    """Train and test samples of a disc inside a ring: no linear model separates them."""
    rng = stream(seed, "rings")
    total = num_train + num_test
    y = rng.integers(0, 2, size=total).astype(np.float64)
    angle = rng.uniform(0.0, 2.0 * np.pi, size=total)
    radius = 0.5 + y + noise * rng.normal(size=total)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return Samples(x[:num_train], y[:num_train]), Samples(x[num_train:], y[num_train:])
