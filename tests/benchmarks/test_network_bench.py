"""Cost of one flow change, as a multiple of one event of a bare heapq loop in the same run.

    pytest tests/benchmarks/test_network_bench.py --benchmark-enable

Microseconds depend on the machine, ratios less. A bare event takes 0.09 to 0.17 us on two shared
EPYC cores (its heap holds one entry); the bars leave room for that spread.
"""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random
from time import process_time

import pytest

from sim.engine.kernel import Kernel
from sim.engine.network import Network

BARE_EVENTS = 20_000


def bare_heapq():
    """A self-rearming call on a heap of (time, priority, number, function), nothing else."""
    heap, number = [], 0

    def again(now):
        nonlocal number
        number += 1
        if number < BARE_EVENTS:
            heappush(heap, (now + 1.0, 1, number, again))

    again(0.0)
    while heap:
        now, _, _, function = heappop(heap)
        function(now)


def kernel_calls():
    kernel, left = Kernel(), [BARE_EVENTS]

    def again(_):
        left[0] -= 1
        if left[0]:
            kernel.call_at(kernel.now + 1.0, again)

    again(None)
    kernel.run_all()
    return BARE_EVENTS, kernel


def closed_loop(capacities, path, live, flows, weight=1, small=None):
    """Keep ``live`` flows on their way until ``flows`` have started; return changes and network."""
    kernel, random = Kernel(), Random(0)
    network = Network(kernel, capacities)
    if small is not None:
        network._small = small
    started = 0

    def begin(_=None):
        nonlocal started
        if started < flows:
            started += 1
            network.start(path(random), 500.0 + 1000.0 * random.random(), begin, weight)

    for _ in range(live):
        begin()
    kernel.run_all()
    return 2 * flows, network


def folded_reference():
    """Single links one folded flow at a time, as in the folded 1,024-chip plan: 1,568 changes."""
    return closed_loop([50.0] * 38, lambda r: (r.randrange(38),), 1, 784, weight=8)


def one_trunk():
    return closed_loop([50.0], lambda r: (0,), 100, 3000)


def component(nics, spines, live):
    """``live`` flows, three links a path: NIC, shared spine, NIC."""

    def path(random):
        spine = 2 * nics + random.randrange(spines)
        return random.randrange(nics), spine, nics + random.randrange(nics)

    return closed_loop([50.0] * (2 * nics) + [200.0] * spines, path, live, live + 700)


def component_of_16():
    return component(16, 1, 16)


def component_of_45():
    return component(24, 3, 45)


def large_component(small=None):
    """1,500 flows over 3,000 NICs and 187 spines."""

    def path(random):
        return random.randrange(1500), 3000 + random.randrange(187), 1500 + random.randrange(1500)

    return closed_loop([50.0] * 3000 + [200.0] * 187, path, 1500, 1700, small=small)


def measure(benchmark, run, rounds=5):
    """Return the cost of a change over that of a bare event, both the best of the rounds."""
    bare, ours, changes = [], [], 1

    def timed():
        nonlocal changes
        begin = process_time()
        bare_heapq()
        middle = process_time()
        changes, _ = run()
        bare.append(middle - begin)
        ours.append(process_time() - middle)

    benchmark.pedantic(timed, rounds=rounds, warmup_rounds=1)
    each, event = min(ours) / changes, min(bare) / BARE_EVENTS
    benchmark.extra_info["us_per_change"] = round(each * 1e6, 3)
    benchmark.extra_info["bare_event_us"] = round(event * 1e6, 3)
    benchmark.extra_info["ratio"] = round(each / event, 1)
    print(f"\n{each * 1e6:.2f} us = {each / event:.1f} bare events of {event * 1e6:.3f} us")
    return each / event


@pytest.mark.parametrize(
    ("run", "most"),
    [
        (kernel_calls, 3.5),
        (folded_reference, 18.0),
        (one_trunk, 18.0),
        (component_of_16, 200.0),
        (component_of_45, 500.0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_cost_of_a_change(benchmark, run, most):
    assert measure(benchmark, run) <= most


def test_growing_from_the_change_pays_in_a_large_component(benchmark):
    whole, grown = [], []

    def timed():
        begin = process_time()
        large_component(small=10**9)
        middle = process_time()
        _, network = large_component()
        whole.append(middle - begin)
        grown.append(process_time() - middle)
        assert network.tiers.grown > 0

    benchmark.pedantic(timed, rounds=2)
    gain = min(whole) / min(grown)
    benchmark.extra_info["gain"] = round(gain, 2)
    print(f"\n{gain:.1f} times faster than solving the whole component")
    assert gain > 1.2
