"""The H2 ratio on 1,024 chips of four types: run with ``python tests/validation/h2_ratio.py``.

Heterogeneous throughput over the sum of each type's own best plan: same model, same global batch,
same search (h2.md 2.7). The four accelerators stand in for the paper's undisclosed chips, so the
paper's 109 and 116 % are no targets here. For every search: the space, what was evaluated, and the
gap to m * L / sum(stages / layer time) of the plan's own sizes and of the best sizes that fit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from sim.engine.simulate import simulate
from sim.errors import InfeasibleError
from sim.problem import Problem, load_problem
from strategies.search import SearchResult, search
from strategies.search.board import Effort

SMALLEST = "BI-V100"
MEMORY = ("24 GiB", "32 GiB", "48 GiB")
CLUSTERS = ("h2_1024", "h2_1024_oversubscribed")
LOOSE = 0.05
TOP = 4
"""Plans that each search simulates."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One search of the study.

    Args:
        name: types that take part. shared_s, alone_s: [s] step time with and without contention.
        found: the search's result.
    """

    name: str
    shared_s: float
    alone_s: float
    found: SearchResult


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the study.

    Args:
        label: what was searched. hetero: all types. homo: each type by itself.
        lacking: types on which nothing fits.
    """

    label: str
    hetero: Side
    homo: tuple[Side, ...]
    lacking: tuple[str, ...] = ()

    @property
    def shared(self) -> float:
        """Throughput ratio with contention."""
        return 1 / self.hetero.shared_s / sum(1 / s.shared_s for s in self.homo)

    @property
    def alone(self) -> float:
        """Throughput ratio when every transfer has links of its own."""
        return 1 / self.hetero.alone_s / sum(1 / s.alone_s for s in self.homo)

    @property
    def loose(self) -> tuple[str, ...]:
        """Homogeneous sides whose plan is more than 5 % above the bound of its own sizes."""
        return tuple(
            f"{s.name} {100 * s.found.plan_gap:.1f} %"
            for s in self.homo
            if s.found.plan_gap > LOOSE
        )


def one_side(problem: Problem, name: str, effort: Effort | None, **pins: object) -> Side:
    """Search once, and simulate its finalists without contention as well."""
    found = search(problem, pins={"families": "pipeline", **pins}, effort=effort, top=TOP)
    alone = min(simulate(f.plan, problem, contention=False).makespan for f in found.finalists[:TOP])
    return Side(name=name, shared_s=found.step_time_s, alone_s=alone, found=found)


def study(
    problem: Problem,
    label: str,
    known: dict[str, Side] | None = None,
    effort: Effort | None = None,
) -> Ratio:
    """Both sides of the ratio.

    Args:
        problem: cluster, model and job. label: what is varied, for people.
        known: homogeneous sides that do not depend on what is varied, used and filled.
        effort: of every search.
    """
    known = {} if known is None else known
    homo, lacking = [], []
    for name in sorted(problem.machine.accelerators):
        try:
            side = known.get(name) or one_side(problem, name, effort, accelerators=name)
            homo.append(side)
            if name != SMALLEST:
                known[name] = side
        except InfeasibleError as error:
            lacking.append(f"{name}: {error}")
    return Ratio(
        label=label,
        hetero=one_side(problem, "all types", effort),
        homo=tuple(homo),
        lacking=tuple(lacking),
    )


def bundled(cluster: str, memory: str) -> Problem:
    """The 100B model on a bundled cluster, with this memory on the smallest chip."""
    change = f"cluster.accelerators.{SMALLEST}.memory={memory}"
    return load_problem(cluster, "h2_100b", cluster, [change])


def lines(ratio: Ratio) -> list[str]:
    """The study of one cluster and memory size as text."""
    text = [
        f"{ratio.label}: ratio {100 * ratio.shared:.1f} % with "
        f"contention, {100 * ratio.alone:.1f} % without"
    ]
    for side in (*ratio.homo, ratio.hetero):
        f = side.found
        text.append(
            f"  {side.name:<13} {side.shared_s:8.3f} s {side.alone_s:8.3f} s alone  gap "
            f"{100 * f.plan_gap:5.1f} % (best sizes {100 * f.gap:5.1f} %)  space {f.space:9.3g}  "
            f"evaluated {f.evaluated:7,}  {f.wall_s:5.1f} s  {f.plan.name}"
        )
    if ratio.loose:
        text.append("  homogeneous gap above 5 %: " + ", ".join(ratio.loose))
    text += [f"  nothing fits on {x}" for x in ratio.lacking]
    return text


def main(clusters: Sequence[str] = CLUSTERS, memory: Sequence[str] = MEMORY) -> None:
    """Print the table."""
    began = time.monotonic()
    for cluster in clusters:
        known: dict[str, Side] = {}
        for size in memory:
            label = f"{cluster}, {SMALLEST} with {size}"
            for line in lines(study(bundled(cluster, size), label, known)):
                print(line, flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or CLUSTERS)
