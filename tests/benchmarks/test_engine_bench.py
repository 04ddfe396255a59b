"""Engine speed on the reference plan, as a ratio to a yardstick in the same run.

The yardstick is a bare heapq loop with as many pushes and pops as the plan has ops. A program that
prints ``rep ... cpu= X ms`` and ``stage ... cpu= X ms`` (a specialised simulator of this one plan)
may be given in HETLAB_YARDSTICK; the ratio to it is then printed and held to 1.5.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from heapq import heappop, heappush
from time import process_time

import pytest

from sim.engine.execute import Execution
from sim.engine.simulate import Layout, lay_out
from tests.benchmarks.reference_plan import MAKESPAN_S, reference_plan, reference_prices


def heap_seconds(n: int) -> float:
    """CPU seconds of n pushes and pops at depth 1,000."""
    heap = [(float(i), i) for i in range(1000)]
    began = process_time()
    for i in range(n):
        heappush(heap, (heap[0][0] + 1000.0, i))
        heappop(heap)
    return process_time() - began


def engine_seconds(layout: Layout) -> float:
    """CPU seconds of one run, set-up of the execution included, best of five."""
    prices = reference_prices(layout)
    best = float("inf")
    for _ in range(5):
        gc.collect()
        began = process_time()
        outcome = Execution(layout.graph, prices).run()
        best = min(best, process_time() - began)
        assert outcome.makespan == pytest.approx(MAKESPAN_S, rel=1e-9)
    return best


@pytest.mark.parametrize(("level", "fold"), [("rep", True), ("stage", False)])
def test_reference_plan(level: str, fold: bool) -> None:
    began = process_time()
    layout = lay_out(reference_plan(), fold=fold)
    laid_out = process_time() - began
    seconds = engine_seconds(layout)
    n = layout.graph.num_nodes
    yard = min(heap_seconds(n) for _ in range(5))
    print(
        f"{level}: {n} ops, layout {laid_out * 1e3:.0f} ms, "
        f"run {seconds * 1e3:.1f} ms, {seconds / yard:.1f} x heapq"
    )
    assert seconds / yard < 12.0
    if "HETLAB_YARDSTICK" in os.environ:
        command = [sys.executable, os.environ["HETLAB_YARDSTICK"], "128", "8", level]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = re.search(rf"^{level} .*cpu=\s*([\d.]+) ms", text, re.MULTILINE)
        assert found is not None
        ratio = seconds * 1e3 / float(found[1])
        whole = ratio + laid_out * 1e3 / float(found[1])
        print(
            f"{level}: {ratio:.2f} x the specialised simulator ({found[1]} ms), "
            f"{whole:.2f} x with laying the plan out, which the other has wired in"
        )
        assert ratio <= 1.5
