"""Collective formulas against closed forms and a message-by-message execution."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sim.cost.collective import collective_cost, mesh_all_reduce
from sim.errors import InputError
from sim.hardware.machine import Accelerator, Link, Machine, Node
from sim.hardware.route import path

FABRIC, NIC, TRUNK = 100e9, 10e9, 5e9
FABRIC_S, NIC_S = 1e-6, 5e-6


def machine(
    nodes: int,
    per_node: int,
    nics: int = 1,
    sites: int = 1,
    fabric: float = FABRIC,
    nic: float = NIC,
    fabric_s: float = FABRIC_S,
    nic_s: float = NIC_S,
) -> Machine:
    """Equal nodes; a link in and out per chip port and NIC, one trunk each way between sites."""
    links: list[Link] = []

    def both(name: str, rate: float, latency: float, kind: str) -> tuple[int, int]:
        for way in ("out", "in"):
            links.append(Link(name=f"{name}/{way}", rate=rate, latency=latency / 2, kind=kind))
        return len(links) - 2, len(links) - 1

    made = []
    for n in range(nodes):
        ports = tuple(both(f"n{n}/c{c}", fabric, fabric_s, "fabric") for c in range(per_node))
        cards = tuple(both(f"n{n}/nic{c}", nic, nic_s, "nic") for c in range(nics))
        site = f"s{n * sites // nodes}"
        made.append(
            Node(
                index=n,
                profile="node",
                site=site,
                island=site,
                accelerator="chip",
                chips=(n * per_node, (n + 1) * per_node),
                fabric_rate=fabric,
                nics=nics,
                nic_rate=nic,
                chip_nic=tuple(c * nics // per_node for c in range(per_node)),
                chip_links=ports,
                nic_links=cards,
            )
        )
    routes: dict[str, tuple[int, ...]] = {}
    for a in range(sites):
        for b in range(sites):
            routes[f"s{a}>s{b}"] = ()
            if a != b:
                links.append(Link(name=f"wan{a}{b}", rate=TRUNK, latency=1e-3, kind="wan"))
                routes[f"s{a}>s{b}"] = (len(links) - 1,)
    chip = Accelerator(
        name="chip", memory_bytes=1e10, memory_bytes_per_s=1e12, peak_flops_per_s={"bf16": 1e14}
    )
    return Machine(
        name="test",
        accelerators={"chip": chip},
        nodes=tuple(made),
        links=tuple(links),
        routes=routes,
    )


# -- closed forms -------------------------------------------------------------------------------


@given(st.integers(2, 8), st.floats(1e3, 1e9))
def test_a_ring_in_a_node_is_the_textbook_formula(n: int, nbytes: float) -> None:
    m = machine(1, n)
    for kind, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
        cost = collective_cost(m, kind, range(n), nbytes, algorithm="ring")
        assert cost.seconds == pytest.approx(rounds * (n - 1) * (FABRIC_S + nbytes / n / FABRIC))
        assert cost.flows == ()
        assert cost.nbytes_per_chip == pytest.approx(rounds * (n - 1) / n * nbytes)


@given(st.integers(2, 9), st.floats(1e3, 1e9))
def test_a_tree_takes_log_steps_of_the_whole_message(n: int, nbytes: float) -> None:
    cost = collective_cost(machine(1, n), "all_reduce", range(n), nbytes, algorithm="tree")
    steps = 2 * math.ceil(math.log2(n))
    assert cost.seconds == pytest.approx(steps * (FABRIC_S + nbytes / FABRIC))


@given(st.integers(2, 6), st.sampled_from([2, 4, 8]), st.floats(1e6, 1e9))
def test_hierarchical_is_scatter_ring_gather(nodes: int, g: int, nbytes: float) -> None:
    cost = collective_cost(
        machine(nodes, g), "all_reduce", range(nodes * g), nbytes, algorithm="hierarchical"
    )
    inside = 2 * (g - 1) * (FABRIC_S + nbytes / g / FABRIC)
    # g rings of nbytes / g share the node's one NIC
    across = 2 * (nodes - 1) * (NIC_S + nbytes / nodes / NIC)
    assert cost.seconds == pytest.approx(inside + across)
    assert cost.fixed_s == pytest.approx(inside + 2 * (nodes - 1) * NIC_S)


@given(st.integers(2, 8), st.floats(1e3, 1e9))
def test_an_even_all_to_all_sends_all_but_its_own_share(n: int, nbytes: float) -> None:
    cost = collective_cost(machine(1, n), "all_to_all", range(n), nbytes)
    assert cost.seconds == pytest.approx(FABRIC_S + nbytes * (n - 1) / n / FABRIC)


def test_an_uneven_all_to_all_is_as_slow_as_its_busiest_link() -> None:
    matrix = [[5e9, 0, 0], [1e9, 7e9, 0], [2e9, 0, 0]]
    cost = collective_cost(machine(3, 1), "all_to_all", range(3), 0, matrix=matrix)
    assert cost.seconds == pytest.approx(NIC_S + 3e9 / NIC)
    assert {f[:2] for f in cost.flows} == {(1, 0), (2, 0)}
    with pytest.raises(InputError, match="does not fit its group"):
        collective_cost(machine(3, 1), "all_to_all", range(2), 0, matrix=matrix)


def test_groups_side_by_side_share_the_nic_but_not_the_fabric() -> None:
    m = machine(2, 8)
    one = collective_cost(m, "all_reduce", (0, 8), 1e8)
    eight = collective_cost(m, "all_reduce", (0, 8), 1e8, share=8)
    assert eight.seconds - 2 * NIC_S == pytest.approx(8 * (one.seconds - 2 * NIC_S))
    inside = [collective_cost(m, "all_reduce", (0, 1), 1e8, share=s).seconds for s in (1, 8)]
    assert inside[0] == inside[1]


def test_a_flat_ring_over_sites_is_not_legal() -> None:
    m = machine(4, 2, sites=2)
    cost = collective_cost(m, "all_reduce", range(8), 1e8)
    assert cost.algorithm == "hierarchical"
    with pytest.raises(InputError, match="no such way"):
        collective_cost(m, "all_reduce", range(8), 1e8, algorithm="ring")
    # only the sum crosses the trunk: 2 (2 - 1) / 2 of the bytes each way
    crossing = [f for f in cost.flows if f[0] // 4 != f[1] // 4]
    assert sum(f[2] for f in crossing if f[0] < 4) == pytest.approx(1e8)


def test_the_mesh_of_user_report_7() -> None:
    size, rate = 160e6, 20e9
    for shape in ((2, 8), (8, 2)):
        turns = mesh_all_reduce(shape, size, rate, chunked=False)
        assert turns.seconds == pytest.approx(15.0e-3)
        assert turns.mode == "one dimension after another"
    assert mesh_all_reduce((2, 8), size, rate, chunked=True).seconds == pytest.approx(8.0e-3)
    assert mesh_all_reduce((8, 2), size, rate, chunked=True).seconds == pytest.approx(14.0e-3)
    assert "chunks" in mesh_all_reduce((8, 2), size, rate, chunked=True).mode
    with pytest.raises(InputError):
        mesh_all_reduce((0, 2), size, rate, chunked=True)


# -- a message-by-message execution -------------------------------------------------------------


def run_ring(hops: list[tuple[float, float]], chunk: float) -> float:
    """All-reduce of n chunks on a ring of (latency, rate) hops, one message at a time.

    A hop sends one message after another; a chip forwards a chunk once it has arrived and been
    added. Every chip must end with every chip's share of every chunk.
    """
    n = len(hops)
    has = [[{i} for _ in range(n)] for i in range(n)]
    at = [[0.0] * n for _ in range(n)]
    free = [0.0] * n
    for step in range(2 * (n - 1)):
        moved = []
        for i, (latency, rate) in enumerate(hops):
            c = (i - step) % n
            start = max(free[i], at[i][c])
            free[i] = start + chunk / rate
            moved.append(((i + 1) % n, c, free[i] + latency, set(has[i][c])))
        for to, c, when, content in moved:
            has[to][c] = has[to][c] | content
            at[to][c] = max(at[to][c], when)
    assert all(x == set(range(n)) for row in has for x in row)
    return max(max(row) for row in at)


@given(st.integers(2, 8), st.floats(1e3, 1e9))
def test_equal_hops_take_exactly_the_formula(n: int, nbytes: float) -> None:
    cost = collective_cost(machine(n, 1), "all_reduce", range(n), nbytes, algorithm="ring")
    assert cost.seconds == pytest.approx(run_ring([(NIC_S, NIC)] * n, nbytes / n))


@given(st.integers(2, 4), st.integers(2, 4), st.floats(1e3, 1e9), st.floats(1e9, 1e11))
def test_unequal_hops_take_no_longer_and_little_less(
    nodes: int, g: int, nbytes: float, nic: float
) -> None:
    n = nodes * g
    m = machine(nodes, g, nic=nic)
    cost = collective_cost(m, "all_reduce", range(n), nbytes, algorithm="ring")
    hops = [(NIC_S, nic) if (i + 1) % g == 0 else (FABRIC_S, FABRIC) for i in range(n)]
    real = run_ring(hops, nbytes / n)
    assert real <= cost.seconds * (1 + 1e-9)
    slowest = 2 * (n - 1) * nbytes / n / min(nic, FABRIC)
    assert cost.seconds - cost.fixed_s == pytest.approx(slowest)
    assert real >= slowest


def run_tree(n: int, latency: float, message: float) -> float:
    """Binomial reduction and broadcast, one message at a time; ports carry one each way."""
    has, at = [{i} for i in range(n)], [0.0] * n
    gap = 1
    while gap < n:
        for i in range(0, n - gap, 2 * gap):
            at[i] = max(at[i], at[i + gap]) + latency + message
            has[i] |= has[i + gap]
        gap *= 2
    assert has[0] == set(range(n))
    done = {0: at[0]}
    gap //= 2
    while gap:
        for i in range(0, n - gap, 2 * gap):
            done[i + gap] = done[i] + latency + message
            done[i] = done[i] + message
        gap //= 2
    return max(done.values())


@given(st.sampled_from([2, 4, 8, 16]), st.floats(1e3, 1e9))
def test_a_tree_message_by_message(n: int, nbytes: float) -> None:
    cost = collective_cost(machine(1, n), "all_reduce", range(n), nbytes, algorithm="tree")
    assert cost.seconds == pytest.approx(run_tree(n, FABRIC_S, nbytes / FABRIC))


# -- properties ---------------------------------------------------------------------------------

KINDS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"])


@given(KINDS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.floats(1, 1e9))
def test_more_bytes_or_more_sharing_never_take_less_time(
    kind: str, nodes: int, g: int, nics: int, nbytes: float
) -> None:
    n = nodes * g
    assume(n > 1 and nics <= g)
    m = machine(nodes, g, nics=nics)
    cost = collective_cost(m, kind, range(n), nbytes)
    assert collective_cost(m, kind, range(n), 2 * nbytes).seconds >= cost.seconds
    assert collective_cost(m, kind, range(n), nbytes, share=2).seconds >= cost.seconds
    assert cost.algorithm in cost.reason
    # the flows alone on their links take what the formula says
    load: dict[int, float] = {}
    slowest = 0.0
    for (a, b, size), cap in zip(cost.flows, cost.flow_caps, strict=True):
        slowest = max(slowest, size / cap)
        for x in path(m, a, b).links:
            load[x] = load.get(x, 0.0) + size
    slowest = max([slowest, *(v / m.links[x].rate for x, v in load.items())])
    assert cost.fixed_s + slowest == pytest.approx(cost.seconds)


def test_a_group_of_one_costs_nothing_and_an_unknown_kind_is_refused() -> None:
    m = machine(1, 2)
    assert collective_cost(m, "all_reduce", (0,), 1e9).seconds == 0.0
    assert collective_cost(m, "all_reduce", (0, 1), 0.0).seconds == 0.0
    with pytest.raises(InputError, match="unknown collective"):
        collective_cost(m, "all_sum", (0, 1), 1.0)
