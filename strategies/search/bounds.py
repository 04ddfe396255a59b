"""Closed forms of the step time: an estimate to rank by, and a bound that is proven.

Both take the same arrays as the exact recurrence and cost a few operations per plan and stage.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strategies.search.recurrence import Ready, StageTimes, Sync, synchronise
from strategies.search.skeleton import Shape

__all__ = ["estimate", "lower_bound"]

Floats = NDArray[np.float64]


def _passes(shape: Shape, times: StageTimes) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """F, B (or I) and W per virtual stage, and what a microbatch waits at each boundary."""
    weight = times.weight if shape.splits else np.zeros_like(times.weight)
    down, up = np.zeros_like(times.forward), np.zeros_like(times.forward)
    gather_f = np.where(times.gathers, times.gather_f, 0.0)
    gather_b = np.where(times.gathers, times.gather_b, 0.0)
    if shape.num_stages > 1:
        down[:, 1:] = times.send_f[:, :-1] + gather_f[:, 1:]
        up[:, :-1] = times.send_b[:, 1:] + gather_b[:, :-1]
    return times.forward, times.backward, weight, down, up


def _before(values: Floats) -> Floats:
    """Exclusive running sum over stages."""
    return np.cumsum(values, axis=1) - values


def _round_trip(forward: Floats, backward: Floats, down: Floats, up: Floats) -> Floats:
    """From the start of a microbatch's F on stage v to the end of its B there."""
    work = np.cumsum((forward + backward)[:, ::-1], axis=1)[:, ::-1]
    wire = np.zeros_like(work)
    both = down[:, 1:] + up[:, :-1]
    wire[:, :-1] = np.cumsum(both[:, ::-1], axis=1)[:, ::-1]
    return work + wire


def estimate(shape: Shape, times: StageTimes, sync: Sync) -> Floats:
    """Step time by a closed form of the passes and the exact end of the step [s], shape (K,).

    Behind the first round trip come m - 1 times the slowest stage's work, or, where that is more,
    a round trip behind stage s for every P - s microbatches, which is what 1F1B keeps in flight
    there; stage s ends earlier than stage 0 by the backward passes before it. For the interleaved
    schedule the first round trip is that of one chunk and the work a position's on all chunks.
    Gradient sums, the sum of a tied embedding, queues at NICs and updates follow as in the exact
    recurrence. No bound in either direction; it ranks.
    """
    forward, backward, weight, down, up = _passes(shape, times)
    own = forward + backward + weight
    m, p, chunks = shape.num_microbatches, shape.num_stages, shape.chunks
    if chunks > 1:
        period = own.reshape(len(own), chunks, p).sum(axis=1).max(axis=1)
        end = (own + down + up).sum(axis=1) / chunks + (m - 1 / chunks) * period
    else:
        trip = _round_trip(forward, backward, down, up)
        first = trip[:, 0] + weight[:, 0]
        rest = (m - 1) * own.max(axis=1)
        if shape.schedule != "gpipe":
            flight = np.arange(p, 0, -1)
            turns = np.where(m > flight, (m - 1) / flight, 0.0)
            rest = np.maximum(rest, (turns * trip).max(axis=1))
        end = first + rest
    drain = _before(backward + up)
    gradient = end[:, None] - drain - weight[:, :1] + weight
    return synchronise(Ready(gradient, gradient[:, :p]), sync, chunks)


def lower_bound(shape: Shape, times: StageTimes, sync: Sync) -> Floats:
    """A bound no schedule of this shape can beat [s], shape (K,).

    For every virtual stage s: nothing can start there before a microbatch has come through the
    stages before it; then its position's stream must do every pass it is given; and after the last
    backward pass of s the stages before it still have to do theirs, and whoever ends last has its
    gradient sum and update to do. With 1F1B order, additionally: F of microbatch i + (P - s) is
    listed after B of microbatch i, so every P - s microbatches cost a whole round trip behind s.
    Never more than the exact recurrence (property test).
    """
    forward, backward, weight, down, up = _passes(shape, times)
    p, m, chunks = shape.num_stages, shape.num_microbatches, shape.chunks
    fill = _before(forward) + np.cumsum(down, axis=1)
    # From the end of the last backward pass on s to the end of the last one on stage 0.
    drain = _before(backward + up)
    own = forward + backward + weight
    tail = _tail(sync)
    if chunks > 1:
        work = own.reshape(len(own), chunks, p).sum(axis=1)
        least = tail.reshape(len(own), chunks, p).min(axis=1)
        return np.asarray((fill[:, :p] + m * work + least).max(axis=1) + sync.barrier)
    late = _late_weights(shape)
    stream = fill + m * (forward + backward) + (m - late) * weight
    ends = np.maximum(stream + late * weight + tail, stream + drain + tail[:, :1])
    trip = _round_trip(forward, backward, down, up)
    if shape.schedule != "gpipe":
        flight = np.arange(p, 0, -1)
        turns, rest = np.divmod(m - 1, flight)
        ends = np.maximum(ends, fill + rest * forward + (turns + 1) * trip + drain + tail[:, :1])
    return np.asarray(ends.max(axis=1) + sync.barrier)


def _late_weights(shape: Shape) -> Floats:
    """W passes listed after a position's last I, per position."""
    m, p = shape.num_microbatches, shape.num_stages
    if shape.schedule == "zb-h1":
        return np.minimum(np.arange(p) + 1, m).astype(np.float64)
    return np.full(p, 1.0 if shape.splits else 0.0)


def _tail(sync: Sync) -> Floats:
    """What a virtual stage still does when its gradient is complete."""
    before = np.maximum(sync.reduce, sync.reduce_experts)
    after = np.maximum(sync.unshard, sync.unshard_experts)
    return np.asarray(before + sync.update + after)
