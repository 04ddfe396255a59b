"""Training in rounds on simulated times: synchronous SGD, local SGD, DiLoCo and its streaming form.

The times are the caller's, from a simulated plan (``cosim_order.round_ends``) or a closed form; the
algorithms here do not wait for anything and cost nothing by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.data.cosim_task import Curve, Inner, Task, Training, Workers

__all__ = ["Fragments", "Outer", "quantise", "train_local", "train_streaming", "train_sync"]

Floats = NDArray[np.float64]


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    """The step of the shared parameters along the mean of the workers' ways.

    Args:
        rate: 1 with momentum 0 is local SGD (the mean of the workers); DiLoCo uses 0.7 and 0.9.
        momentum: Nesterov. bits: of each worker's way on the wire; 0 sends it as it is.
    """

    rate: float = 1.0
    momentum: float = 0.0
    bits: int = 0

    def __post_init__(self) -> None:
        if self.rate <= 0.0 or not 0.0 <= self.momentum < 1.0 or self.bits == 1 or self.bits < 0:
            raise InputError(
                "rate > 0, momentum in [0, 1), bits 0 or at least 2", key="outer", found=str(self)
            )


class Fragments(msgspec.Struct, frozen=True, kw_only=True):
    """How streaming DiLoCo cuts the exchange.

    Args:
        count: fragments of the parameters, exchanged in turn at equal distances within H steps.
        overlap: local steps between sending a fragment and using the answer; at H / count the
            answer is used just before the next fragment leaves, as in plans of ``local_sgd``.
        mix: share of the worker's own values kept when the answer comes; 0 takes the answer.
    """

    count: int = 1
    overlap: int = 0
    mix: float = 0.0


def quantise(values: Floats, bits: int) -> Floats:
    """Values rounded to 2^bits - 1 equal levels up to the largest one; 0 bits changes nothing.

    Integer levels with one scale for the vector, not the FP4 of the paper.
    """
    if not bits:
        return values
    scale = float(np.abs(values).max()) / (2 ** (bits - 1) - 1)
    if scale == 0.0:
        return np.zeros_like(values)
    return np.asarray(np.rint(values / scale) * scale)


class _Shared:
    """The shared parameters and their Nesterov momentum."""

    def __init__(self, outer: Outer, params: Floats) -> None:
        self.outer, self.params = outer, params
        self.velocity = np.zeros_like(params)

    def move(self, ways: Sequence[Floats], part: slice = slice(None)) -> None:
        """Step along the mean of the ways (global minus local), on a part of the parameters."""
        outer = self.outer
        mean = _mean([quantise(way, outer.bits) for way in ways])
        velocity, params = self.velocity.copy(), self.params.copy()
        velocity[part] = outer.momentum * velocity[part] + mean
        params[part] -= outer.rate * (mean + outer.momentum * velocity[part])
        self.velocity, self.params = velocity, params


def _mean(values: Sequence[Floats]) -> Floats:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total / len(values)


def _check_times(times: Sequence[float]) -> None:
    if not len(times) or any(b < a for a, b in pairwise([0.0, *times])):
        raise InputError("times [s] are not empty and do not go back", key="times")


def _finish(curve: Curve, params: Floats, rates: Sequence[float]) -> Training:
    """A run without delays."""
    none = [0] * len(rates)
    finite = bool(np.isfinite(params).all())
    return curve.training(params, delays=none, stale=none, rates=rates, diverged=not finite)


def train_sync(
    task: Task, times: Sequence[float], workers: Sequence[int], rate: float, *, every: int = 1
) -> Training:
    """Synchronous SGD: each round, one step along the mean of the workers' gradients.

    Args:
        task: what is trained. times: end of each round [s]. workers: ranks. rate: eta.
        every: rounds between two points of the curve; the first and last are always there.

    Raises:
        InputError: the times are none.
    """
    _check_times(times)
    crew, params = Workers(task, workers), task.start()
    batch = sum(crew.batch_size(w) for w in crew.ranks)
    curve, rates = Curve(task), [0.0] * 0
    curve.add(0.0, 0, 0, 0.0, params)
    for k, time in enumerate(times, start=1):
        with np.errstate(over="ignore", invalid="ignore"):
            params = params - rate * _mean([crew.gradient(params, w) for w in crew.ranks])
        rates.append(rate)
        finite = bool(np.isfinite(params).all())
        if k % every == 0 or k == len(times) or not finite:
            curve.add(time, k, k * batch, k * rate, params)
        if not finite:
            break
    return _finish(curve, params, rates)


def train_local(
    task: Task,
    times: Sequence[float],
    workers: Sequence[int],
    inner: Inner,
    outer: Outer,
    *,
    every: int = 1,
) -> Training:
    """Local SGD and DiLoCo: each round, H local steps, then one outer step along their mean.

    Args:
        task: what is trained. times: end of each round [s]. workers: ranks.
        inner: local steps, of single workers too. outer: step of the shared parameters.
        every: rounds between two points; the shared parameters are evaluated, no worker's own.

    Raises:
        InputError: the times are none.
    """
    _check_times(times)
    crew, shared = Workers(task, workers), _Shared(outer, task.start())
    batch = sum(crew.batch_size(w) * inner.num_steps(w) for w in crew.ranks)
    step = outer.rate * inner.rate * float(np.mean([inner.num_steps(w) for w in crew.ranks]))
    curve, rates = Curve(task), [0.0] * 0
    curve.add(0.0, 0, 0, 0.0, shared.params)
    for k, time in enumerate(times, start=1):
        with np.errstate(over="ignore", invalid="ignore"):
            start = shared.params
            shared.move([start - crew.local(start, w, inner) for w in crew.ranks])
        rates.append(outer.rate)
        finite = bool(np.isfinite(shared.params).all())
        if k % every == 0 or k == len(times) or not finite:
            curve.add(time, k, k * batch, k * step, shared.params)
        if not finite:
            break
    return _finish(curve, shared.params, rates)


def _parts(cut: Fragments, inner: Inner, num_params: int) -> list[slice]:
    """Fragments of the parameters, in the order of their exchange.

    Raises:
        InputError: H is not a multiple of the fragments, or an answer comes after the next send.
    """
    if cut.count < 1 or cut.count > num_params or inner.steps % cut.count or inner.steps_of:
        raise InputError(
            "H is one multiple of the number of fragments for all workers",
            key="fragments.count",
            found=f"{cut.count} fragments, H = {inner.steps}",
        )
    distance = inner.steps // cut.count
    if not 0 <= cut.overlap <= distance or not 0.0 <= cut.mix <= 1.0:
        raise InputError(
            "one fragment is on its way at a time, and mix is a share",
            key="fragments.overlap",
            found=f"overlap {cut.overlap}, mix {cut.mix}",
            expected=f"overlap 0 to {distance}, mix 0 to 1",
        )
    edges = [num_params * i // cut.count for i in range(cut.count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def train_streaming(
    task: Task,
    times: Sequence[float],
    workers: Sequence[int],
    inner: Inner,
    outer: Outer,
    cut: Fragments,
    *,
    every: int = 0,
) -> Training:
    """Streaming DiLoCo: a fragment each H / count local steps, used ``overlap`` steps later.

    Fragment p (from 1) is first sent after p H / count steps, then every H. A worker's fragment
    becomes mix * own + (1 - mix) * answer. One fragment of count H steps is DiLoCo.

    Args:
        task: what is trained. times: end of each local step [s]. workers: ranks.
        inner, outer: as in DiLoCo. cut: the fragments.
        every: local steps between two points, H when 0.

    Raises:
        InputError: the times are none, or fragments and H do not fit.
    """
    _check_times(times)
    crew, shared = Workers(task, workers), _Shared(outer, task.start())
    parts = _parts(cut, inner, len(shared.params))
    distance, every = inner.steps // cut.count, every or inner.steps
    batch = sum(crew.batch_size(w) for w in crew.ranks)
    own = [shared.params] * len(crew.ranks)
    sent: dict[int, tuple[slice, list[Floats]]] = {}
    curve, rates = Curve(task), [0.0] * 0
    curve.add(0.0, 0, 0, 0.0, shared.params)
    for k, time in enumerate(times, start=1):
        with np.errstate(over="ignore", invalid="ignore"):
            own = [crew.step(p, w, inner) for p, w in zip(own, crew.ranks, strict=True)]
            if not cut.overlap:
                _send(sent, k, distance, parts, shared.params, own)
            if k - cut.overlap in sent:
                part, ways = sent.pop(k - cut.overlap)
                shared.move(ways, part)
                rates.append(outer.rate)
                own = [_mixed(p, shared.params, part, cut.mix) for p in own]
            if cut.overlap:
                _send(sent, k, distance, parts, shared.params, own)
        finite = bool(np.isfinite(shared.params).all())
        if k % every == 0 or k == len(times) or not finite:
            curve.add(time, len(rates), k * batch, k * outer.rate * inner.rate, shared.params)
        if not finite:
            break
    return _finish(curve, shared.params, rates)


def _send(
    sent: dict[int, tuple[slice, list[Floats]]],
    k: int,
    distance: int,
    parts: Sequence[slice],
    shared: Floats,
    own: Sequence[Floats],
) -> None:
    """Put the fragment that leaves after step ``k`` on its way, if one does."""
    if k % distance == 0:
        part = parts[(k // distance - 1) % len(parts)]
        sent[k] = part, [shared[part] - p[part] for p in own]


def _mixed(own: Floats, shared: Floats, part: slice, mix: float) -> Floats:
    mixed = own.copy()
    mixed[part] = mix * own[part] + (1.0 - mix) * shared[part] if mix else shared[part]
    return mixed
