"""Fluid flows against values worked out by hand."""

from __future__ import annotations

from math import inf, nan, nextafter

import pytest

from sim.engine.kernel import Kernel
from sim.engine.network import LinkUse, Network


class Bench:
    """A network with a list of (time, name) of completions."""

    def __init__(self, *capacities: float, at: float = 0.0) -> None:
        self.kernel = Kernel(at)
        self.net = Network(self.kernel, capacities)
        self.log: list[tuple[float, str]] = []

    def start(self, name, links, nbytes, weight=1, cap=inf):
        return self.net.start(
            links, nbytes, lambda t: self.log.append((t, name)), weight=weight, cap=cap
        )

    def at(self, t, function, *args):
        self.kernel.call_at(t, lambda _: function(*args))

    def run(self):
        self.kernel.run_all()
        return self.log


def test_rates_of_the_three_flow_two_link_example() -> None:
    bench = Bench(10.0, 4.0)
    both = bench.start("both", (0, 1), 1e6)
    first = bench.start("first", (0,), 1e6)
    second = bench.start("second", (1,), 1e6)
    bench.kernel.run_all(until=0.0)
    assert [bench.net.rate(flow) for flow in (both, first, second)] == [2.0, 8.0, 2.0]


def test_rates_with_weights_and_a_cap() -> None:
    bench = Bench(12.0)
    folded = bench.start("folded", (0,), 1e6, weight=3)
    capped = bench.start("capped", (0,), 1e6, cap=1.0)
    bench.kernel.run_all(until=0.0)
    assert bench.net.rate(capped) == 1.0
    assert bench.net.rate(folded) == pytest.approx(11.0 / 3.0, rel=1e-15)


def test_members_spread_over_two_trunks_use_each_with_their_part() -> None:
    bench = Bench(12.0, 6.0)  # four members: three cross link 0, one crosses link 1
    folded = bench.start("folded", ((0, 3), (1, 1)), 8.0, weight=4)
    other = bench.start("other", (1,), 8.0)
    bench.kernel.run_all(until=0.0)
    assert [bench.net.rate(folded), bench.net.rate(other)] == [3.0, 3.0]
    bench.kernel.run_all()
    assert bench.net.use() == [LinkUse(0, 24.0, 8.0 / 3.0), LinkUse(1, 16.0, 8.0 / 3.0)]


def test_a_link_named_twice_is_used_twice() -> None:
    bench = Bench(10.0)
    bench.start("there and back", (0, 0), 10.0)
    assert bench.run() == [(2.0, "there and back")]


@pytest.mark.parametrize("path", [(0,), (0, 1)], ids=["pooled", "general"])
def test_capacity_changes_in_mid_flight(path: tuple[int, ...]) -> None:
    # 40 B until 4 s, 10 B until 6 s, nothing until 10 s, the last 50 B at 25 B/s
    bench = Bench(10.0, 1000.0)
    bench.start("a", path, 100.0)
    for t, rate in [(4.0, 5.0), (6.0, 0.0), (10.0, 25.0)]:
        bench.at(t, bench.net.set_capacity, 0, rate)
    assert bench.run() == [(12.0, "a")]
    use = bench.net.use()[0]
    assert (use.nbytes, use.busy_s) == (100.0, 8.0)


@pytest.mark.parametrize("path", [(), (0,), (0, 1)], ids=["no link", "pooled", "general"])
def test_cap_changes_in_mid_flight(path: tuple[int, ...]) -> None:
    bench = Bench(20.0, 1000.0)
    flow = bench.start("a", path, 100.0, cap=10.0)
    for t, cap in [(4.0, 5.0), (6.0, 0.0), (10.0, 20.0), (99.0, 1.0)]:
        bench.at(t, bench.net.set_cap, flow, cap)
    assert bench.run() == [(12.5, "a")]


def test_a_cap_on_one_of_two_equals_leaves_the_rest_to_the_other() -> None:
    bench = Bench(10.0)
    slow = bench.start("slow", (0,), 20.0)
    bench.start("fast", (0,), 40.0)
    bench.at(2.0, bench.net.set_cap, slow, 2.0)  # 10 and 30 B left, at 2 and 8 B/s
    assert bench.run() == [(5.75, "fast"), (7.0, "slow")]


def test_a_link_returns_to_virtual_time_when_the_crossing_flow_has_left() -> None:
    bench = Bench(12.0, 12.0)
    bench.start("a", (0,), 100.0)
    bench.start("b", (0,), 124.0)
    bench.at(1.0, bench.start, "crossing", (0, 1), 8.0)
    # 6 each until 1 s; 4 each until 3 s; 6 each: a has 86 left, b 110; then b alone
    times, names = zip(*bench.run(), strict=True)
    assert names == ("crossing", "a", "b")
    assert times == pytest.approx((3.0, 3.0 + 86.0 / 6.0, 3.0 + 196.0 / 12.0), rel=1e-15)
    tiers = bench.net.tiers
    assert (tiers.general, tiers.pooled) == (1, 4)


@pytest.mark.parametrize("path", [(0,), (0, 1)], ids=["pooled", "general"])
def test_flows_that_end_together_end_in_one_instant_in_order_of_start(path) -> None:
    bench = Bench(0.7, 1.0, at=0.1)
    bench.start("a", path, 0.1 + 0.2)  # 0.30000000000000004
    bench.start("b", path, 0.3)
    bench.start("c", path, 0.1)
    bench.start("d", path, 0.3, weight=2)
    log = bench.run()
    assert [name for _, name in log] == ["c", "a", "b", "d"]
    assert len({t for t, _ in log[1:]}) == 1
    assert bench.kernel.events <= 8


def test_many_starts_of_one_instant_are_one_solve() -> None:
    bench = Bench(*[10.0] * 6)
    for i in range(60):
        bench.start(f"f{i}", (i % 3, 3 + i % 2), 1.0)
    bench.kernel.run_all(until=0.0)
    assert bench.net.tiers.instants == 1


@pytest.mark.parametrize("crossing", [False, True], ids=["alone", "joined at that instant"])
@pytest.mark.parametrize("path", [(0,), (0, 1)], ids=["pooled", "general"])
def test_a_link_that_goes_down_at_a_completion_does_not_hold_it(path, crossing) -> None:
    for clock in (0.0, 1e4):
        for x in range(1, 20):
            for y in range(1, 20):
                nbytes, rate = x / 7e3, y / 3.0
                down = nextafter(clock + nbytes / rate, 0.0)  # a rounding before the completion
                bench = Bench(rate, 1e9, at=clock)
                bench.start("a", path, nbytes / 4)
                bench.at(clock + nbytes / 2 / rate, bench.start, "b", path, nbytes / 4)
                bench.at(clock + nbytes / 2 / rate, bench.start, "c", path, nbytes / 4)
                if crossing:
                    bench.at(down, bench.start, "crossing", (0, 1), 1.0)
                bench.at(down, bench.net.set_capacity, 0, 0.0)
                assert [name for _, name in bench.run()] == ["a", "b", "c"]


@pytest.mark.parametrize("path", [(), (0,), (0, 1)], ids=["no link", "pooled", "general"])
def test_a_flow_shorter_than_the_clock_can_tell_ends_at_once(path: tuple[int, ...]) -> None:
    bench = Bench(1e12, 1e12, at=1e9)
    for i in range(5):
        bench.start(f"f{i}", path, 1e-6, cap=1e12)
    log = bench.run()
    assert [t for t, _ in log] == [1e9] * 5
    assert bench.kernel.events < 30


def test_zero_bytes_end_at_once_even_on_a_link_that_is_down() -> None:
    bench = Bench(0.0)
    bench.start("empty", (0,), 0.0)
    bench.start("free", (), 5.0)
    assert bench.log == []
    assert bench.run() == [(0.0, "empty"), (0.0, "free")]


def test_a_stalled_flow_stays_and_the_link_is_idle() -> None:
    bench = Bench(0.0, 1.0)
    flow = bench.start("a", (0, 1), 5.0)
    bench.kernel.run_all(until=10.0)
    assert (bench.log, bench.net.rate(flow)) == ([], 0.0)
    assert bench.net.use() == [LinkUse(0, 0.0, 0.0), LinkUse(1, 0.0, 0.0)]


def test_small_flows_beside_a_huge_one_keep_their_precision() -> None:
    bench = Bench(2e12)
    bench.start("huge", (0,), 1e13)
    bench.at(0.5, bench.net.set_capacity, 0, 2.0)
    ends: list[float] = []

    def again(t: float) -> None:
        ends.append(t)
        bench.net.start((0,), 0.3, again)

    bench.at(0.5, again, 0.5)
    bench.kernel.run_all(until=300.0)
    assert ends == pytest.approx([0.5 + 0.3 * k for k in range(len(ends))], rel=1e-12)
    assert len(ends) == 999


def test_use_counts_every_member_and_every_second() -> None:
    bench = Bench(10.0, 40.0, 5.0)
    bench.start("a", (0, 1), 20.0, weight=2)  # 5 B/s each, until 4 s
    bench.at(6.0, bench.start, "b", (0,), 30.0)  # until 9 s
    bench.kernel.run_all(until=8.0)
    assert bench.net.use() == [LinkUse(0, 60.0, 6.0), LinkUse(1, 40.0, 4.0), LinkUse(2, 0.0, 0.0)]
    bench.kernel.run_all()
    assert bench.net.use()[0] == LinkUse(0, 70.0, 7.0)


def test_void_completions_do_not_pile_up() -> None:
    bench = Bench(10.0, 10.0)
    flow = bench.start("long", (0, 1), 1e9)
    for i in range(5000):
        bench.at(float(i), bench.net.set_cap, flow, 1.0 + i % 2)
    bench.kernel.run_all(until=5000.0)
    assert len(bench.net._finish) <= 1100


def test_wrong_values_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="capacity -1"):
        Network(Kernel(), [1.0, -1.0])
    with pytest.raises(ValueError, match="capacity inf"):
        Network(Kernel(), [inf])
    bench = Bench(1.0)
    for nbytes in (-1.0, nan, inf):
        with pytest.raises(ValueError, match="a flow of"):
            bench.start("a", (0,), nbytes)
    with pytest.raises(ValueError, match="cap of -1"):
        bench.start("a", (0,), 1.0, cap=-1.0)
    for weight in (0, 1.5, nan):
        with pytest.raises(ValueError, match=f"weight {weight} on link 0"):
            bench.start("a", (0,), 1.0, weight=weight)
    with pytest.raises(IndexError, match="link 7"):
        bench.start("a", (7,), 1.0)
    flow = bench.start("a", (0,), 1.0)
    with pytest.raises(ValueError, match="cap of nan"):
        bench.net.set_cap(flow, nan)
    with pytest.raises(ValueError, match="capacity nan"):
        bench.net.set_capacity(0, nan)
