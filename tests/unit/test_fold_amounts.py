"""Ranks whose late amounts differ are not folded, whatever the shape of the amount."""

from __future__ import annotations

from typing import Any

import pytest

from sim.engine.simulate import lay_out
from sim.plan.placement import Cell, Placement, Segment
from sim.plan.plan import Plan, ProgramText, Table


@pytest.mark.parametrize(
    ("value", "folds"),
    [
        (2.0, True),
        ([3, 3], True),
        ([3, 1], False),
        ([[1, 1], [1, 1]], True),
        ([[1, 2], [1, 2]], False),  # equal rows, but rank 1 receives twice as much
        ([[1, 1], [2, 2]], False),
    ],
)
def test_late_amounts_split_classes(value: Any, folds: bool) -> None:
    text = "ALL_TO_ALL{ref=t/x} <- none ; F <- ALL_TO_ALL ; B <- F ; OPT <- B"
    plan = Plan(
        barrier=False,
        placement=Placement(
            cells=tuple(Cell(stage=0, replica=r, ranks=(r,)) for r in (0, 1)),
            segments=(Segment(stage=0, cell=0),),
            microbatches=(1, 1),
            ep=2,
        ),
        programs=(ProgramText((0, 1), text),),
        tables={"t": Table(values={"x": [value]})},
    )
    assert (lay_out(plan).graph.classes == [0, 0]) is folds


@pytest.mark.parametrize(("role", "classes"), [(":ep", [0, 1, 0, 1]), ("", [0, 1, 2, 3])])
def test_ranks_in_the_same_place_of_their_groups_fold(role: str, classes: list[int]) -> None:
    """Two groups of experts: a compute op that says which group it means tells places apart."""
    text = f"F{role}{{ref=t/x}} ; ALL_TO_ALL{{ref=t/y}} <- F ; B <- ALL_TO_ALL ; OPT <- B"
    plan = Plan(
        barrier=False,
        placement=Placement(
            cells=tuple(Cell(stage=0, replica=r, ranks=(r,)) for r in range(4)),
            segments=(Segment(stage=0, cell=0),),
            microbatches=(1,) * 4,
            ep=2,
        ),
        programs=(ProgramText((0, 1, 2, 3), text),),
        tables={"t": Table(values={"x": [[3, 1]], "y": [[[1, 2], [3, 1]]]})},
    )
    assert lay_out(plan).graph.classes == classes
