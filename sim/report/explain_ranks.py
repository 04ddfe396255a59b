"""Classes of ranks that an explanation speaks of: the equal cells of a stage."""

from __future__ import annotations

import msgspec
import numpy as np

from sim.engine.simulate import Run
from sim.report.explain_parts import OpParts, Parts, Window, in_order
from sim.report.explain_sweep import parts_of_ranks

__all__ = ["RankClass", "class_numbers", "mean_parts", "rank_classes"]

Key = tuple[object, ...]


class RankClass(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks of equal cells of a stage.

    Args:
        label: for people. stage: -1 outside cells. accelerator: "" where the plan does not say.
        first_rank: the smallest. num_ranks: how many.
        parts: part -> [s] of a step, the mean over the ranks; they add up to the step time.
    """

    label: str
    stage: int
    accelerator: str
    first_rank: int
    num_ranks: int
    parts: Parts


def _keys(run: Run) -> dict[int, Key]:
    """Rank -> what its class is made of; ranks outside cells stand alone."""
    placement = run.layout.plan.placement
    counts = placement.microbatches
    found: dict[int, Key] = {}
    for cell in placement.cells:
        m = counts[cell.replica] if counts else 0
        key = (cell.stage, cell.accelerator, cell.tp, cell.cp, m, cell.recompute, cell.offload)
        found |= dict.fromkeys(cell.ranks, key)
    return found | {r: (-1, r) for r in placement.extra_ranks if r not in found}


def _labels(run: Run) -> dict[Key, str]:
    """Class -> name, in order of stage and first rank; more is said where less is not unique."""
    keys = list(dict.fromkeys(k for _, k in sorted(_keys(run).items())))
    keys.sort(key=lambda k: (k[0] == -1, k[0]))
    short = {key: _label(key) for key in keys}
    texts = list(short.values())
    return {
        key: text if texts.count(text) == 1 else f"{text} m{key[4]} {key[5]} {key[6]}".rstrip()
        for key, text in short.items()
    }


def _label(key: Key) -> str:
    if key[0] == -1:
        return f"rank {key[1]}"
    text = f"stage {key[0]}" + (f" {key[1]}" if key[1] else "")
    text += f" tp{key[2]}" if key[2] != 1 else ""
    return text + (f" cp{key[3]}" if key[3] != 1 else "")


def class_numbers(run: Run) -> tuple[list[int], list[str]]:
    """Return the class of each actor of the graph, and the classes' short names."""
    keys, labels = _keys(run), _labels(run)
    number = {key: i for i, key in enumerate(labels)}
    of_actor = [number[keys[a.rank]] for a in run.layout.graph.actors]
    stages = [key[0] for key in labels]
    short = [
        label if key[0] == -1 or stages.count(key[0]) > 1 else f"stage {key[0]}"
        for key, label in labels.items()
    ]
    return of_actor, short


def rank_classes(run: Run, parts: OpParts, window: Window) -> tuple[RankClass, ...]:
    """Return the classes of ranks that have a compute stream, with the parts of their time.

    Args:
        run: simulated. parts: of it. window: that is explained.
    """
    graph, keys, labels = run.layout.graph, _keys(run), _labels(run)
    computing = {
        int(graph.actor[n]) for n in range(graph.num_nodes) if parts.stream(n) == "compute"
    }
    actors = [(i, a) for i, a in enumerate(graph.actors) if i in computing]
    of_actor = parts_of_ranks(parts, window)
    found = []
    for key, label in labels.items():
        mine = [(i, a) for i, a in actors if keys[a.rank] == key]
        ranks = [r for _, a in mine for r in a.ranks]
        if not mine:
            continue
        found.append(
            RankClass(
                label=label,
                stage=int(str(key[0])),
                accelerator=str(key[1]) if key[0] != -1 else "",
                first_rank=min(ranks),
                num_ranks=len(ranks),
                parts=_mean([(of_actor[i], len(a.ranks)) for i, a in mine]),
            )
        )
    return tuple(found)


def mean_parts(classes: tuple[RankClass, ...]) -> Parts:
    """Return the mean over all ranks; it adds up to the step time, too."""
    return _mean([(c.parts, c.num_ranks) for c in classes])


def _mean(rows: list[tuple[Parts, int]]) -> Parts:
    names = in_order([n for parts, _ in rows for n in parts])
    weights = np.array([w for _, w in rows], np.float64)
    return {
        n: float(np.average([parts.get(n, 0.0) for parts, _ in rows], weights=weights))
        for n in names
    }
