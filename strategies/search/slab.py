"""Candidates as arrays: a slab holds many plans that differ in sizes and layers only."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.plan.placement import Recompute
from strategies.search.pools import Pool
from strategies.search.skeleton import Shape

__all__ = ["RECOMPUTE", "Knobs", "Slab", "plan_key", "structure_key"]

Ints = NDArray[np.int64]

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Codes of the recomputation modes, least recomputation first."""


class Knobs(NamedTuple):
    """Knobs that hold for a whole plan.

    Args:
        schedule, chunks, split_backward: of the pipeline. zero: 0 or 1.
        sequence_parallel: activations split along the sequence where tp > 1.
        scatter: False puts the replicas of a stage side by side, so that gradient sums stay near;
            True the stages of a replica, so that pipeline transfers do.
    """

    schedule: str = "1f1b"
    chunks: int = 1
    split_backward: bool = False
    zero: int = 0
    sequence_parallel: bool = False
    scatter: bool = False


class Slab(msgspec.Struct, frozen=True, kw_only=True):
    """n candidates with the same pools, batch split, knobs and number of stages.

    Each of the G groups is a run of stages on one pool.

    Args:
        pools: of the groups, in order of stages. dp: replicas. microbatch: [sequences].
        num_microbatches: of a replica. ep: expert-parallel size. knobs: of the whole plan.
        tp, pp, recompute: of each group, shape (n, G); recompute as codes of ``RECOMPUTE``.
        layers: of each virtual stage, shape (n, V); (n, 0) before they are split.
    """

    pools: tuple[Pool, ...]
    dp: int
    microbatch: int
    num_microbatches: int
    ep: int = 1
    knobs: Knobs = Knobs()
    tp: Ints
    pp: Ints
    recompute: Ints
    layers: Ints

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_stages(self) -> int:
        """Pipeline positions of every candidate."""
        return int(self.pp[0].sum())

    @property
    def shape(self) -> Shape:
        """What the recurrence needs to know."""
        k = self.knobs
        return Shape(k.schedule, self.num_stages, self.num_microbatches, k.chunks, k.split_backward)

    def take(self, rows: Ints | slice | NDArray[np.bool_]) -> Slab:
        """Return some candidates."""
        return msgspec.structs.replace(
            self,
            tp=self.tp[rows],
            pp=self.pp[rows],
            recompute=self.recompute[rows],
            layers=self.layers[rows],
        )

    def repeat(self, counts: Ints | int) -> Slab:
        """Return every candidate several times in a row, without layers."""
        tp = np.repeat(self.tp, counts, axis=0)
        return msgspec.structs.replace(
            self,
            tp=tp,
            pp=np.repeat(self.pp, counts, axis=0),
            recompute=np.repeat(self.recompute, counts, axis=0),
            layers=np.zeros((len(tp), 0), np.int64),
        )

    def with_layers(self, layers: Ints) -> Slab:
        """Return the same candidates with these layers."""
        return msgspec.structs.replace(self, layers=layers)

    def with_knobs(self, knobs: Knobs) -> Slab:
        """Return the same candidates under other knobs; other chunks need other layers."""
        same = knobs.chunks == self.knobs.chunks
        layers = self.layers if same else np.zeros((len(self), 0), np.int64)
        return msgspec.structs.replace(self, knobs=knobs, layers=layers)

    def groups(self) -> tuple[Ints, Ints]:
        """Group of each stage, and its number inside the group; shape (n, P) each."""
        ends = np.cumsum(self.pp, axis=1)
        stage = np.arange(self.num_stages)
        group = (stage[None, :, None] >= ends[:, None, :]).sum(axis=2)
        first = np.take_along_axis(ends - self.pp, group, axis=1)
        return group, stage[None, :] - first

    def ranges(self) -> tuple[Ints, Ints]:
        """First and last + 1 layer of each virtual stage, shape (n, V) each."""
        last = np.cumsum(self.layers, axis=1)
        return last - self.layers, last


def structure_key(slab: Slab, row: int = 0) -> bytes:
    """Identity of a candidate without its knobs and layers."""
    head = repr(([p.name for p in slab.pools], slab.dp, slab.microbatch, slab.ep)).encode()
    parts: list[bytes] = [x[row].tobytes() for x in (slab.tp, slab.pp, slab.recompute)]
    return head + b"".join(parts)


def plan_key(slab: Slab, row: int = 0) -> bytes:
    """Identity of a candidate."""
    knobs = repr(tuple(slab.knobs)).encode()
    layers: bytes = slab.layers[row].tobytes()
    return structure_key(slab, row) + knobs + layers
