"""The best structures again: under every legal set of knobs, then with single layers moved."""

from __future__ import annotations

from collections import Counter

import numpy as np

from strategies.search.board import Board
from strategies.search.screen import fits, place_layers, rough_times
from strategies.search.shortlist import Shortlist
from strategies.search.slab import Slab, plan_key
from strategies.search.split import moves

__all__ = ["refine", "tune"]

TOGETHER = 16
"""Structures whose variants are run together: plans of one shape share the work."""

FAR = 1.25
"""Estimates this far above the incumbent are not followed up. The estimate is no bound: on
samples of v100_t4 and h2_1024 it was 7 % below the exact time to 14 % above."""


def tune(search: Board, screened: Shortlist) -> None:
    """Exact times of the shortlist; the best again under every legal set of knobs."""
    batches = screened.batches(256)
    for i, batch in enumerate(batches):
        search.tell("exact", i, len(batches))
        if search.late() or min(s.min() for _, s in batch) > FAR * search.incumbent.value:
            break
        search.judge([slab for slab, _ in batch])
    chosen = [slab for _, slab in search.ranked.best(search.effort.tuned)]
    seen: set[bytes] = set()
    for first in range(0, len(chosen), TOGETHER):
        search.tell("knobs", first, len(chosen))
        if search.late():
            return
        variants: list[Slab] = []
        for slab in chosen[first : first + TOGETHER]:
            variants += _under_other_knobs(search, slab, seen)
        search.evaluated += len(variants)
        search.judge(variants)


def _under_other_knobs(search: Board, slab: Slab, seen: set[bytes]) -> list[Slab]:
    """The structure of a plan under every other legal set of knobs, layers split anew."""
    found = []
    for knobs in search.knobs(slab):
        if knobs != slab.knobs:
            bare = slab.with_layers(slab.layers[:, :0]).with_knobs(knobs)
            placed = place_layers(search.costs, bare, Counter())
            if len(placed) and plan_key(placed) not in seen:
                seen.add(plan_key(placed))
                found.append(placed)
    return found


def refine(search: Board) -> None:
    """Move single layers between stages of the best plans while that helps."""
    done: set[bytes] = set()
    for turn in range(search.effort.rounds):
        search.tell("layers", turn, search.effort.rounds)
        tried = []
        for _, slab in search.ranked.best(search.effort.refined):
            if plan_key(slab) in done:
                continue
            done.add(plan_key(slab))
            tried.append(_neighbours(search, slab))
        tried = [t for t in tried if len(t)]
        if not tried or search.late():
            return
        search.evaluated += sum(map(len, tried))
        search.judge(tried)


def _neighbours(search: Board, slab: Slab) -> Slab:
    """The plan with one layer moved, as far as memory allows and the estimate is close."""
    found = moves(slab.layers[0], search.costs.most_layers(slab)[0])
    wide = slab.repeat(len(found)).with_layers(found)
    if not len(wide):
        return wide
    wide = wide.take(fits(search.costs, wide))
    if len(wide) > 64:
        rough = rough_times(search.costs, wide)
        wide = wide.take(np.argpartition(rough, 63)[:64])
    return wide
