"""The H2 ratio on 1,024 chips of four types: run with ``python tests/validation/h2_ratio.py``.

Heterogeneous throughput over the sum of each type's own best plan: same model, same global batch,
same search (h2.md 2.7). The four accelerators stand in for the paper's undisclosed chips, so the
paper's 109 and 116 % are no targets here. Both sides are searched with contention, without, and
with sub-groups of a type (h2.md 2.4, stage 2) for the same time. For every search: the space, what
was evaluated, and the gap to m * L / sum(stages / layer time) of the plan's own sizes and of the
best sizes that fit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from sim.engine.simulate import simulate
from sim.errors import InfeasibleError
from sim.problem import Problem, load_problem
from strategies.search import SearchResult, search, sub_grouped
from strategies.search.board import Effort

SMALLEST = "BI-V100"
MEMORY = ("24 GiB", "32 GiB", "48 GiB")
CLUSTERS = ("h2_1024", "h2_1024_oversubscribed")
LOOSE = 0.05
TOP = 4
"""Plans that each search simulates."""
SECONDS = 60.0
"""How long each side looks for sub-groups [s]."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One search of the study.

    Args:
        name: types that take part. shared_s, alone_s: [s] step time with and without contention,
            each the best plan of a search of its own. found: the result of that with contention.
        grouped_s: [s] with contention, when parts of a type choose sizes of their own as well.
        grouped: what that tried, in words.
    """

    name: str
    shared_s: float
    alone_s: float
    found: SearchResult
    grouped_s: float
    grouped: str = ""


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
    def grouped(self) -> float:
        """Throughput ratio with contention, both sides refined by sub-groups."""
        return 1 / self.hetero.grouped_s / sum(1 / s.grouped_s for s in self.homo)

    @property
    def loose(self) -> tuple[str, ...]:
        """Homogeneous sides whose plan is more than 5 % above the bound of its own sizes."""
        return tuple(
            f"{s.name} {100 * s.found.plan_gap:.1f} %"
            for s in self.homo
            if s.found.plan_gap > LOOSE
        )


def one_side(
    problem: Problem, name: str, effort: Effort | None, seconds: float, **pins: object
) -> Side:
    """Search with contention, and without; the plan of the first is simulated without too."""
    pins = {"families": "pipeline", **pins}
    found = search(problem, pins=pins, effort=effort, top=TOP)
    alone = search(problem, pins=pins, effort=effort, top=TOP, contention=False)
    same = simulate(found.plan, problem, contention=False).makespan
    side = Side(
        name=name,
        shared_s=found.step_time_s,
        alone_s=min(alone.step_time_s, same),
        found=found,
        grouped_s=found.step_time_s,
    )
    if seconds <= 0:
        return side
    fine = sub_grouped(found, pins=pins, effort=effort, top=TOP, seconds=seconds)
    return msgspec.structs.replace(side, grouped_s=fine.step_time_s, grouped=fine.sub_groups)


def study(
    problem: Problem,
    label: str,
    known: dict[str, Side] | None = None,
    effort: Effort | None = None,
    seconds: float = 0.0,
) -> Ratio:
    """Both sides of the ratio.

    Args:
        problem: cluster, model and job. label: what is varied, for people.
        known: homogeneous sides that do not depend on what is varied, used and filled.
        effort: of every search. seconds: [s] that each side may look for sub-groups, 0 for none.
    """
    known = {} if known is None else known
    homo, lacking = [], []
    for name in sorted(problem.machine.accelerators):
        try:
            side = known.get(name) or one_side(problem, name, effort, seconds, accelerators=name)
            homo.append(side)
            if name != SMALLEST:
                known[name] = side
        except InfeasibleError as error:
            lacking.append(f"{name}: {error}")
    return Ratio(
        label=label,
        hetero=one_side(problem, "all types", effort, seconds),
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
        + (f", {100 * ratio.grouped:.1f} % with sub-groups" if ratio.hetero.grouped else "")
    ]
    for side in (*ratio.homo, ratio.hetero):
        f = side.found
        text.append(
            f"  {side.name:<13} {side.shared_s:8.3f} s {side.alone_s:8.3f} s alone  gap "
            f"{100 * f.plan_gap:5.1f} % (best sizes {100 * f.gap:5.1f} %)  space {f.space:9.3g}  "
            f"evaluated {f.evaluated:7,}  {f.wall_s:5.1f} s  {f.plan.name}"
        )
        if side.grouped:
            text.append(f"  {'':<13} {side.grouped_s:8.3f} s with sub-groups: {side.grouped}")
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
            for line in lines(study(bundled(cluster, size), label, known, seconds=SECONDS)):
                print(line, flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or CLUSTERS)
