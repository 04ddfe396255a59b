"""Real training under simulated delays: gradients at the version read, applied when written.

The order of writes and the versions read come from the engine (``cosim_order.arrivals``), so loss
and seconds belong to one run. A rule may scale, correct or leave out a gradient. It cannot change
when things happen: the order was fixed before. So a dropped gradient still costs its time, and the
staleness bound is a filter here (see Rule); one that makes workers wait needs a plan of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.data.cosim_order import Arrival, check_order
from strategies.data.cosim_task import Curve, Inner, Task, Training, Workers
from strategies.data.staleness import learning_rate_cap

__all__ = ["Rule", "train_async"]

Floats = NDArray[np.float64]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What the server does with a gradient that is ``tau`` applied updates old; rules combine.

    Args:
        rate: eta, constant unless a rule below changes it.
        scaled: eta / (1 + tau).
        smoothness, tau_max: cap eta at 1 / (20 smoothness (tau_max + 1)).
        drop_above: leave out a gradient older than this.
        slack: stale synchronous parallel as a filter. A worker whose clock leads that of the
            slowest unfinished worker by more than ``slack`` would have waited; here its gradient
            is left out and its clock, the number of gradients that passed, stands still. The
            bound on the lead holds; the time and work that a waiting worker would save, and its
            fresher reads, do not appear.
        compensation: lambda of g + lambda g * g * (w_t - w_s) (DC-ASGD, remembered).
        momentum, buffer: delayed Nesterov: each gradient moves by eta g / N; every N-th updates
            the momentum with the mean of N and moves along it. N = 1 is plain Nesterov.
    """

    rate: float
    scaled: bool = False
    smoothness: float | None = None
    tau_max: int | None = None
    drop_above: int | None = None
    slack: int | None = None
    compensation: float = 0.0
    momentum: float = 0.0
    buffer: int = 1

    def __post_init__(self) -> None:
        if (self.smoothness is None) != (self.tau_max is None):
            raise InputError("the cap needs smoothness and tau_max", key="rule.tau_max")
        if self.rate <= 0.0 or self.buffer < 1 or not 0.0 <= self.momentum < 1.0:
            raise InputError("rate > 0, buffer >= 1 and momentum in [0, 1)", key="rule")

    @property
    def capped_rate(self) -> float:
        """The rate after the cap, before scaling."""
        if self.smoothness is None or self.tau_max is None:
            return self.rate
        return min(self.rate, learning_rate_cap(self.smoothness, self.tau_max))


class _Server:
    """Parameters, clocks of the workers, momentum."""

    def __init__(self, rule: Rule, order: Sequence[Arrival], params: Floats) -> None:
        self.rule, self.params = rule, params
        self.clock = {a.worker: 0 for a in order}
        self.left = dict.fromkeys(self.clock, 0)
        for a in order:
            self.left[a.worker] += 1
        self.velocity = self.gathered = np.zeros_like(params)
        self.in_buffer = 0

    def rate(self, worker: int, stale: int) -> float:
        """Rate for this gradient, 0 when it is left out; moves the worker's clock."""
        rule = self.rule
        lead = self.clock[worker] - min(self.clock[w] for w, n in self.left.items() if n)
        self.left[worker] -= 1
        if rule.slack is not None and lead > rule.slack:
            return 0.0
        self.clock[worker] += 1
        if rule.drop_above is not None and stale > rule.drop_above:
            return 0.0
        return rule.capped_rate / (1 + stale) if rule.scaled else rule.capped_rate

    def apply(self, gradient: Floats, read: Floats, rate: float) -> None:
        """Write one version."""
        rule = self.rule
        if rule.compensation:
            gradient = gradient + rule.compensation * gradient * gradient * (self.params - read)
        if rule.buffer == 1 and not rule.momentum:
            self.params = self.params - rate * gradient
            return
        self.params = self.params - rate * gradient / rule.buffer
        self.gathered = self.gathered + gradient
        self.in_buffer += 1
        if self.in_buffer == rule.buffer:
            self.velocity = rule.momentum * self.velocity + self.gathered / rule.buffer
            self.params = self.params - rate * rule.momentum * self.velocity
            self.gathered, self.in_buffer = np.zeros_like(self.params), 0


def train_async(
    task: Task,
    order: Sequence[Arrival],
    rule: Rule,
    *,
    inner: Inner | None = None,
    every: int = 1,
) -> Training:
    """Train along an order of writes.

    Args:
        task: what is trained. order: (T,) writes. rule: of the server.
        inner: without it a worker sends the gradient of one batch; with it, the way it went in
            its local steps, read - local (asynchronous local SGD, DiLoCo with ``rule.momentum``).
        every: writes between two points of the curve; the first and last are always there.

    Returns:
        The run. It stops early, with ``diverged``, when a parameter is no longer finite.

    Raises:
        InputError: the order is none.
    """
    order = check_order(order)
    workers = Workers(task, [a.worker for a in order])
    server = _Server(rule, order, task.start())
    last_use = {a.read: t for t, a in enumerate(order)}
    kept = {0: server.params}
    applied = [0]
    delays: list[int] = []
    stale: list[int] = []
    rates: list[float] = []
    samples, total, diverged = 0, 0.0, False
    curve = Curve(task)
    curve.add(0.0, 0, 0, 0.0, server.params)
    for t, a in enumerate(order):
        read = kept[a.read] if last_use[a.read] > t else kept.pop(a.read)
        stale.append(applied[t] - applied[a.read])
        delays.append(t - a.read)
        with np.errstate(over="ignore", invalid="ignore"):
            sent = _sent(workers, read, a.worker, inner)
            rate = server.rate(a.worker, stale[t])
            if rate:
                server.apply(sent, read, rate)
                samples += workers.batch_size(a.worker) * _steps(inner, a.worker)
                total += rate if inner is None else rate * inner.rate * _steps(inner, a.worker)
        applied.append(applied[t] + bool(rate))
        rates.append(rate)
        if t + 1 in last_use:
            kept[t + 1] = server.params
        diverged = not bool(np.isfinite(server.params).all())
        if diverged or (t + 1) % every == 0 or t + 1 == len(order):
            curve.add(a.time, t + 1, samples, total, server.params)
        if diverged:
            break
    return curve.training(server.params, delays=delays, stale=stale, rates=rates, diverged=diverged)


def _sent(workers: Workers, read: Floats, worker: int, inner: Inner | None) -> Floats:
    if inner is None:
        return workers.gradient(read, worker)
    return read - workers.local(read, worker, inner)


def _steps(inner: Inner | None, worker: int) -> int:
    return 1 if inner is None else inner.num_steps(worker)
