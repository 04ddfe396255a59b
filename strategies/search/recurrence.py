"""Exact step times of many pipelines at once: max-plus over a shared skeleton.

K plans of one shape (schedule, positions, microbatches) are evaluated level by level, every level
as one operation on arrays (nodes of the level, K). Equal to sim.engine.maxplus.longest_path on the
lowered graph without contention (Baccelli et al. 1992, chapter 2).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.search.skeleton import Shape, Skeleton, skeleton

__all__ = ["Ready", "StageTimes", "Sync", "run_pipeline", "step_times", "synchronise"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CELLS = 8_000_000
"""Most array cells (nodes x plans) evaluated together: 64 MB."""


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of K plans over V virtual stages [s], shape (K, V) each.

    Args:
        forward: F. backward: B, or I when the weight gradient is apart.
        weight: W; ignored by shapes that do not split the backward pass.
        send_f: transfer from stage v to v + 1 (entry V - 1 is ignored).
        send_b: transfer from stage v to v - 1 (entry 0 is ignored).
        gather_f, gather_b: all-gather behind the transfer that arrives at stage v; it counts where
            ``gathers`` is True.
        gathers: (K, V) True where the receiving cell re-assembles what arrives (tp > 1 without
            sequence parallelism).
    """

    forward: Floats
    backward: Floats
    weight: Floats
    send_f: Floats
    send_b: Floats
    gather_f: Floats
    gather_b: Floats
    gathers: Bools

    def take(self, rows: slice | NDArray[np.int64]) -> StageTimes:
        """Return the plans ``rows``."""
        return StageTimes(**{k: getattr(self, k)[rows] for k in self.__struct_fields__})


class Ready(msgspec.Struct, frozen=True):
    """Where the passes of K plans end.

    Args:
        gradient: [s] shape (K, V), when a virtual stage's gradient is complete.
        free: [s] shape (K, P), when a position's compute stream has done its last pass.
    """

    gradient: Floats
    free: Floats


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """What follows the last backward pass of K plans [s].

    Args:
        reduce: REDUCE_GRAD, shape (K, V). update: OPT. unshard: UNSHARD.
        reduce_experts, unshard_experts: those of routed experts, on a group of their own.
        embed: shape (K,), the ALL_REDUCE between first and last stage of a tied embedding, 0
            without.
        barrier: shape (K,).
        queued: shape (K, P), True where the sums of a position leave through the same NIC as those
            of the next and therefore wait for them (which ends when sharing would); None for
            nowhere.
    """

    reduce: Floats
    reduce_experts: Floats
    update: Floats
    unshard: Floats
    unshard_experts: Floats
    embed: Floats
    barrier: Floats
    queued: Bools | None = None


def run_pipeline(shape: Shape, times: StageTimes) -> Ready:
    """Run the passes of K plans of one shape.

    Args:
        shape: schedule and sizes. times: of the K plans.

    Raises:
        InputError: the schedule does not take this shape.
    """
    graph = skeleton(shape)
    count = len(times.forward)
    width = max(1, min(count, CELLS // len(graph.row)))
    gradient, free = np.empty((count, graph.virtual)), np.empty((count, shape.num_stages))
    for first in range(0, count, width):
        rows = slice(first, first + width)
        end = _walk(graph, times.take(rows))
        gradient[rows], free[rows] = end[graph.gradient].T, end[graph.last].T
    return Ready(gradient, free)


def _walk(graph: Skeleton, times: StageTimes) -> Floats:
    """End of every node [s], shape (N, K)."""
    masks = times.gathers.T
    rows = [
        times.forward,
        times.backward,
        times.weight,
        times.send_f,
        times.send_b,
        np.where(times.gathers, times.gather_f, 0.0),
        np.where(times.gathers, times.gather_b, 0.0),
    ]
    seconds = np.concatenate([r.T for r in rows])
    # A buffer is released by the gather where there is one, else by the op that consumes it.
    positions = graph.shape.num_stages
    behind = np.where(masks[:positions], 0.0, -np.inf)
    direct = np.where(masks[:positions], -np.inf, 0.0)
    end = np.zeros((len(graph.row), len(times.forward)))
    for a, b in zip(graph.levels[:-1].tolist(), graph.levels[1:].tolist(), strict=True):
        start = end[graph.ends[a:b, 0]]
        for column in range(1, graph.ends.shape[1]):
            before = graph.ends[a:b, column]
            some = np.flatnonzero(before)
            if len(some):
                start[some] = np.maximum(start[some], end[before[some]])
        gated = np.flatnonzero(graph.gate_compute[a:b])
        if len(gated):
            place = graph.position[a:b][gated]
            for source, bias in (
                (graph.gate_gather[a:b][gated], behind),
                (graph.gate_compute[a:b][gated], direct),
            ):
                release = end[source] - seconds[graph.row[source]] + bias[place]
                start[gated] = np.maximum(start[gated], release)
        end[a:b] = start + seconds[graph.row[a:b]]
    return end


def synchronise(ready: Ready, sync: Sync, chunks: int = 1) -> Floats:
    """End of the step [s], shape (K,): gradient sums, update, gathered parameters, barrier.

    Args:
        ready: of the slowest replica. sync: times. chunks: virtual stages per position.
    """
    count, virtual = ready.gradient.shape
    positions = virtual // chunks
    reduced, experts = np.empty((count, virtual)), np.empty((count, virtual))
    streams = (np.zeros((count, positions)), np.zeros((count, positions)))
    for p in reversed(range(positions)):
        _enqueue(streams, p, sync.queued)
        # The last backward pass of the last chunk comes first.
        for v in range(virtual - positions + p, -1, -positions):
            for out, stream, seconds in zip(
                (reduced, experts), streams, (sync.reduce, sync.reduce_experts), strict=True
            ):
                begin = np.maximum(ready.gradient[:, v], stream[:, p])
                out[:, v] = stream[:, p] = begin + seconds[:, v]
    if sync.queued is not None:
        # Gathered parameters leave when all sums of the queue have.
        for stream in streams:
            for p in range(1, positions):
                before = np.where(sync.queued[:, p - 1], stream[:, p - 1], 0.0)
                stream[:, p] = np.maximum(stream[:, p], before)
    tied = sync.embed > 0
    shared = np.maximum(reduced[:, 0], reduced[:, -1]) + sync.embed
    total = np.zeros(count)
    for p in reversed(range(positions)):
        clock = ready.free[:, p]
        _enqueue(streams, p, sync.queued)
        for v in range(p, virtual, positions):
            wait = np.maximum(reduced[:, v], experts[:, v])
            if v in (0, virtual - 1):
                wait = np.where(tied, np.maximum(wait, shared), wait)
            clock = np.maximum(clock, wait) + sync.update[:, v]
            for stream, seconds in zip(streams, (sync.unshard, sync.unshard_experts), strict=True):
                sent = np.maximum(stream[:, p], clock) + seconds[:, v]
                stream[:, p] = np.where(seconds[:, v] > 0, sent, stream[:, p])
        total = np.maximum.reduce([total, clock, streams[0][:, p], streams[1][:, p]])
    return np.asarray(total + sync.barrier)


def _enqueue(streams: tuple[Floats, Floats], position: int, queued: Bools | None) -> None:
    """A position's sums start no earlier than the queue before them is through."""
    if queued is None or position + 1 == streams[0].shape[1]:
        return
    for stream in streams:
        waits = np.where(queued[:, position], stream[:, position + 1], 0.0)
        stream[:, position] = np.maximum(stream[:, position], waits)


def step_times(shape: Shape, times: StageTimes, sync: Sync) -> Floats:
    """Exact step times of K plans with equal replicas [s], shape (K,).

    Args:
        shape: schedule and sizes. times: passes and transfers. sync: what follows.
    """
    return synchronise(run_pipeline(shape, times), sync, shape.chunks)
