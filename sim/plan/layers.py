"""Virtual stages cut into segments of one layer each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sim.model.graph import Model
from sim.plan.placement import Segment

__all__ = ["cut_layers"]


def cut_layers(model: Model, stages: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return one segment per layer of every virtual stage; embedding and head stand apart.

    Args:
        model: whose blocks. stages: one segment per virtual stage, in order.
    """
    found = []
    for stage in stages:
        labels = itertools.groupby(range(*stage.blocks), key=lambda i: model.blocks[i].layer)
        for layer, run in labels:
            mine = list(run)
            inside = 0 <= layer < model.num_layers
            found.append(
                Segment(
                    name=f"l{layer}" if inside else "embed" if layer < 0 else "head",
                    stage=stage.stage,
                    cell=stage.cell,
                    blocks=(mine[0], mine[-1] + 1),
                )
            )
    return tuple(found)
