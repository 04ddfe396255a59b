"""No pin may give a better plan: run with ``python tests/validation/pin_sweep.py [CLUSTER ...]``.

A pinned search looks at a part of the free search's space, so a better plan there is a plan the
free search lost. Every value of pp, dp and tp is pinned by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

from sim.errors import InfeasibleError
from sim.problem import Problem, load_problem
from strategies.base import divisors
from strategies.search import SearchResult, search
from strategies.search.board import Effort
from strategies.search.pools import pools_of
from strategies.tensor.megatron import tp_sizes

__all__ = ["bundled", "losses", "main", "single_pins"]

BUNDLED = {
    "v100_t4": "gpt2_355m",
    "a100x64": "llama2_7b",
    "h100_a100_wan": "llama3_8b",
}
CLOSE = 1e-6
"""Differences of step times that do not count."""


def bundled(cluster: str) -> Problem:
    """A bundled cluster with the model and the job that go with it."""
    return load_problem(cluster, BUNDLED[cluster], cluster)


def single_pins(problem: Problem) -> Iterator[dict[str, int]]:
    """Every legal pp, dp and tp, one at a time."""
    pools = pools_of(problem.machine)
    chips = problem.machine.num_chips
    sizes = {tp for pool in pools for tp in tp_sizes(problem, pool.chips)[0]}
    yield from ({"tp": tp} for tp in sorted(sizes))
    yield from ({"dp": dp} for dp in divisors(problem.job.global_batch) if dp <= chips)
    layers = problem.model.num_layers
    yield from ({"pp": pp} for pp in range(1, min(layers, chips) + 1))


def losses(
    problem: Problem, pins: Sequence[dict[str, int]], *, effort: Effort | None = None, top: int = 8
) -> tuple[SearchResult, list[tuple[dict[str, int], SearchResult]]]:
    """The free search, and the pinned ones that beat it."""
    free = search(problem, effort=effort, top=top)
    better = []
    for pin in pins:
        try:
            found = search(problem, pins=pin, effort=effort, top=top)
        except InfeasibleError:
            continue
        if found.finalists[0].score < free.finalists[0].score * (1 - CLOSE):
            better.append((pin, found))
    return free, better


def main(clusters: Sequence[str]) -> None:
    """Print the free search of each cluster and every pin that beats it."""
    for cluster in clusters:
        began = time.monotonic()
        problem = bundled(cluster)
        pins = list(single_pins(problem))
        free, better = losses(problem, pins)
        print(f"{cluster}: {free!r}; {len(pins)} pins, {time.monotonic() - began:.0f} s")
        for pin, found in better:
            ahead = 100 * (1 - found.step_time_s / free.step_time_s)
            best = found.finalists[0]
            print(
                f"  {pin} is {ahead:.2f} % faster: {found.plan.name}, {found.step_time_s:.6g} s, "
                f"estimate {best.estimate_s:.6g} s (free {free.finalists[0].estimate_s:.6g} s)",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:] or list(BUNDLED))
