"""Cost of issuing a step, as a ratio to a yardstick in the same run.

The yardstick is a bare heapq loop with as many pushes and pops as the step has ops.
"""

from __future__ import annotations

import heapq
import time

from tests.benchmarks.dispatch import MICROBATCHES, REPEATS, issuers, step_seconds

RATIO = 30.0
"""Most heap operations that one op's issue may cost (about 10 to 15 measured)."""
LIMIT = 2.5e-3
"""[s] a step of 2 stages and 8 microbatches may cost on any machine that runs the tests."""


def heap_seconds(n: int) -> float:
    """Median seconds of n pushes and pops at depth 1,000."""
    seconds = []
    for _ in range(REPEATS):
        heap = [(float(i), i) for i in range(1000)]
        began = time.perf_counter()
        for i in range(n):
            heapq.heappush(heap, (heap[0][0] + 1000.0, i))
            heapq.heappop(heap)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[REPEATS // 2]


def test_issuing_a_step_costs_little() -> None:
    for issuer in issuers():
        ops = len(issuer.nodes)
        assert ops == 4 * MICROBATCHES + 2  # F, B and two transfers each; OPT and BARRIER
        ours, heap = step_seconds(issuer), heap_seconds(ops)
        print(f"{ops} ops: {ours * 1e3:.3f} ms, {ours / heap:.1f} heap loops")
        assert ours <= LIMIT and ours / heap <= RATIO
