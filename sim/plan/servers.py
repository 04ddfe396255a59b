"""Ranks outside any cell: which of them compute on a chip of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sim.errors import PlanError
from sim.plan.placement import Placement
from sim.plan.program import Program, walk
from sim.plan.unroll import stream_of

__all__ = ["check_servers", "serving_chips"]


def serving_chips(placement: Placement, programs: Sequence[Program]) -> dict[int, int]:
    """Return rank -> chip of the extra ranks whose ops run on a chip's compute stream.

    All other extra ranks are processes of their node.
    """
    computing = {
        rank
        for program in programs
        if any(stream_of(op) == "compute" for op in walk(program))
        for rank in program.ranks
    }
    on = placement.chips
    return {r: on[r] if on else r for r in placement.extra_ranks if r in computing}


def check_servers(placement: Placement, programs: Sequence[Program]) -> None:
    """Check that nobody else is on the chip of an extra rank that computes there.

    Raises:
        PlanError: two of them share a chip, or one sits on a cell's.
    """
    taken = Counter(serving_chips(placement, programs).values())
    for cell in placement.cells:
        taken.update(placement.chips[r] if placement.chips else r for r in cell.ranks)
    for rank, chip in serving_chips(placement, programs).items():
        if taken[chip] > 1:
            raise PlanError(
                f"rank {rank} computes on a chip that another rank uses",
                key="placement.chips",
                found=f"chip {chip}",
                expected="a chip of its own",
            )
