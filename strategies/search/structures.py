"""Structures of unlike pipelines: how each group of stages is run.

A block fixes pools, replicas and microbatch; inside it a structure chooses (tp, stages,
recomputation) per group. Structures are enumerated group by group as arrays, cut by the rules of
h2.md 2.4 as they grow:

    (a) dp * tp * stages fits into the pool, dp * microbatch divides the batch: nothing else is made
    (b) tp is a power of two inside a node that divides heads and features
    (c) a group whose single layer does not fit even with all that saves memory is cut ("memory")
    (d) m * L / sum(stages / layer time), the groups still open at their fastest, above the
        incumbent is cut ("bound"); the incumbent is the slowest of the best plans kept, so nothing
        that belongs among them is lost. Sharpened by what filling costs, see ``grow``
    (e) no recomputation, where every split of the layers fits without it, beats recomputation,
        which is then not made: no pass is shorter with it, and max-plus is monotone
    (f) sub-groups of one pool come in one order: falling (tp, recomputation) ("order")
    (g) neighbouring sub-groups that would be run alike are one group ("merge")
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.search.pools import Pool
from strategies.search.slab import Slab

__all__ = ["Block", "Option", "count_structures", "enumerate_block", "grow", "structures_by_stages"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CELLS = 500_000
"""Partial structures times options that are looked at together."""
MAX_ROWS = 400_000
"""Most structures kept while a block grows; beyond it the best by bound (rule "beam")."""


class Option(NamedTuple):
    """One way to run a group: sizes, and the layers it does per second [1/s]."""

    tp: int
    pp: int
    recompute: int
    rate: float


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Structures that share pools, replicas and microbatch.

    Args:
        pools: of the groups, in order of stages. options: per group.
        dp, microbatch, num_microbatches, ep: of the batch.
        bound: [s] no structure of the block is faster. fill: see ``grow``.
    """

    pools: tuple[Pool, ...]
    options: tuple[tuple[Option, ...], ...]
    dp: int
    microbatch: int
    num_microbatches: int
    ep: int
    bound: float
    fill: float = 0.0


def grow(total: Floats, rate: Floats, stages: Floats, m: int, fill: float) -> Floats:
    """Put a group of equal stages before those behind it and sum up what they can do.

    The last stage of a pipeline ends no earlier than m times its own work after ``fill`` times the
    work of the stages before it. Of all real-valued splits of L layers the best makes
    m T_p + fill (T_0 + ... + T_(p-1)) equal to X on every stage; by linear programming duality
    X >= L / Y with Y = sum of y_p, y_p = max(0, (rate_p - fill sum_(q > p) y_q) / m). Without
    filling this is H2's m L / sum(stages / layer time).

    Args:
        total: Y of the stages behind. rate: layers per second of one stage. stages: how many.
        m: microbatches. fill: share of a stage's work that filling and draining are sure to cost.

    Returns:
        Y with the group, shapes broadcast.
    """
    if fill == 0.0:
        return np.asarray(total + rate * stages / m)
    limit = rate / fill
    shrink = (1.0 - fill / m) ** stages
    return np.asarray(np.maximum(total, limit + (total - limit) * shrink))


def count_structures(block: Block, num_layers: int, pp: int | None = None) -> int:
    """Structures of a block with at most one stage per layer (or exactly ``pp`` stages)."""
    ways = structures_by_stages(block, num_layers)
    if pp is not None:
        return int(ways[pp]) if pp < len(ways) else 0
    return int(ways.sum())


def structures_by_stages(block: Block, num_layers: int) -> Floats:
    """Structures of a block by number of stages, up to one stage per layer."""
    ways = np.array([1.0])
    for group in block.options:
        of_size = np.bincount([o.pp for o in group]).astype(np.float64)
        ways = np.convolve(ways, of_size)[: num_layers + 1]
    return ways


def enumerate_block(
    block: Block,
    num_layers: int,
    incumbent: float,
    pruned: Counter[str],
    pp: int | None = None,
    max_rows: int = MAX_ROWS,
) -> Slab | None:
    """Structures of a block that may still beat the incumbent, without layers.

    Args:
        block: what. num_layers: L. incumbent: [s] bounds above it are cut.
        pruned: counts by rule, updated; cut subtrees count all their leaves.
        pp: exact number of stages, None for any. max_rows: see ``MAX_ROWS``.

    Returns:
        The structures, of any number of stages, or None when none is left.
    """
    chosen = np.zeros((1, 0), np.int64)
    total, stages = np.zeros(1), np.zeros(1, np.int64)
    # From the last group to the first, because filling counts the stages before a stage.
    for g in reversed(range(len(block.options))):
        group = block.options[g]
        step = max(1, CELLS // len(group))
        parts = [
            _extend(block, g, chosen[k : k + step], total[k : k + step], stages[k : k + step],
                    num_layers, incumbent, pp, pruned)
            for k in range(0, len(chosen), step)
        ]  # fmt: skip
        chosen, total, stages = (np.concatenate(x) for x in zip(*parts, strict=True))
        if len(chosen) > max_rows:
            order = np.argpartition(-total, max_rows)[:max_rows]
            below = float(np.prod([len(x) for x in block.options[:g]]))
            pruned["beam"] += int((len(chosen) - max_rows) * below)
            chosen, total, stages = chosen[order], total[order], stages[order]
        if not len(chosen):
            return None
    tables = [np.array([o[:3] for o in group], np.int64) for group in block.options]
    fields = np.stack([t[chosen[:, g]] for g, t in enumerate(tables)], axis=1)
    return Slab(
        pools=block.pools,
        dp=block.dp,
        microbatch=block.microbatch,
        num_microbatches=block.num_microbatches,
        ep=block.ep,
        tp=fields[:, :, 0],
        pp=fields[:, :, 1],
        recompute=fields[:, :, 2],
        layers=np.zeros((len(chosen), 0), np.int64),
    )


def _extend(
    block: Block,
    g: int,
    chosen: Ints,
    total: Floats,
    stages: Ints,
    num_layers: int,
    incumbent: float,
    pp: int | None,
    pruned: Counter[str],
) -> tuple[Ints, Floats, Ints]:
    """Put every option of group g before partial structures, and keep what may still win."""
    m, group, ahead = block.num_microbatches, block.options[g], block.options[:g]
    below = float(np.prod([len(x) for x in ahead]))
    rest = sum(max(o.rate for o in x) / m for x in ahead)
    table = np.array([(o.pp, o.rate) for o in group])
    grown = grow(total[:, None], table[:, 1] / table[:, 0], table[:, 0], m, block.fill)
    count = stages[:, None] + table[:, 0].astype(np.int64)
    keep = count + sum(min(o.pp for o in x) for x in ahead) <= (num_layers if pp is None else pp)
    if pp is not None and g == 0:
        keep &= count == pp
    pruned["layers"] += int((keep.size - np.count_nonzero(keep)) * below)
    fast = grown >= num_layers / incumbent - rest
    pruned["bound"] += int(np.count_nonzero(keep & ~fast) * below)
    keep &= fast
    if g + 1 < len(block.pools) and _siblings(block.pools[g], block.pools[g + 1]):
        keep &= _canonical(chosen[:, 0], group, block.options[g + 1], keep, below, pruned)
    index, own = np.nonzero(keep)
    longer = np.concatenate([own[:, None], chosen[index]], axis=1)
    return longer, grown[index, own], count[index, own]


def _siblings(a: Pool, b: Pool) -> bool:
    """Whether two pools are sub-pools of one."""
    return "/" in a.name and a.name.rpartition("/")[0] == b.name.rpartition("/")[0]


def _canonical(
    later: Ints,
    group: tuple[Option, ...],
    after: tuple[Option, ...],
    keep: NDArray[np.bool_],
    below: float,
    pruned: Counter[str],
) -> NDArray[np.bool_]:
    """Rules (f) and (g) between a sub-group and the one behind it, shape (rows, options)."""
    behind = np.array([o.tp * 4 + o.recompute for o in after])[later][:, None]
    mine = np.array([o.tp * 4 + o.recompute for o in group])
    same, rising = keep & (mine == behind), keep & (mine < behind)
    pruned["merge"] += int(np.count_nonzero(same) * below)
    pruned["order"] += int(np.count_nonzero(rising) * below)
    return np.asarray(~same & ~rising)
