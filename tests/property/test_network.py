"""Random networks against oracles that share no code with the engine.

Rates: lexicographic max-min by linear programs. Completion times: a simulation in exact fractions
that solves the whole network anew after each change.
"""

from __future__ import annotations

from fractions import Fraction
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from sim.engine.kernel import Kernel
from sim.engine.network import Network

CAPACITIES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 10, 12])
CAPS = st.sampled_from([inf, inf, inf, 1, 2, 5])


@st.composite
def paths(draw, num_links, max_length=3):
    """A path as (link, members) pairs; half of them on one link only."""
    length = draw(st.sampled_from([1, 1, *range(2, max_length + 1)]))
    links = draw(st.lists(st.integers(0, num_links - 1), min_size=1, max_size=length, unique=True))
    return tuple((link, draw(st.integers(1, 4))) for link in links)


@st.composite
def networks(draw):
    capacities = draw(st.lists(CAPACITIES, min_size=1, max_size=6))
    flow = st.tuples(paths(len(capacities)), CAPS)
    return capacities, draw(st.lists(flow, min_size=1, max_size=9))


def _maximise(objective, lower, frozen, capacities, flows):
    """Largest objective . (x, t) with t <= x of unfrozen flows, in the capacities and caps."""
    num = len(flows)
    rows, right = [], []
    for link, capacity in enumerate(capacities):
        rows.append([sum(w for k, w in path if k == link) for path, _ in flows] + [0])
        right.append(capacity)
    for i in range(num):
        if i not in frozen:
            rows.append([-1 if k == i else 0 for k in range(num)] + [1])
            right.append(0)
    bounds = [
        (frozen[i], frozen[i]) if i in frozen else (0, None if cap == inf else cap)
        for i, (_, cap) in enumerate(flows)
    ]
    answer = linprog([-c for c in objective], rows, right, bounds=[*bounds, (lower, None)])
    assert answer.status == 0, answer.message
    return -answer.fun


def lp_rates(capacities, flows):
    """Max-min fair rates: raise the common minimum, freeze who cannot go above it, repeat."""
    num, frozen = len(flows), {}
    while len(frozen) < num:
        level = _maximise([0] * num + [1], 0, frozen, capacities, flows)
        low = max(level - 1e-9, 0.0)
        for i in [i for i in range(num) if i not in frozen]:
            only_i = [1 if k == i else 0 for k in range(num)] + [0]
            if _maximise(only_i, low, frozen, capacities, flows) <= level + 1e-6:
                frozen[i] = level
    return [frozen[i] for i in range(num)]


@pytest.fixture(autouse=True, params=["whole", "grown", "grown, then whole"])
def tier(request, monkeypatch):
    """Every property holds for all ways of solving shared paths, at any size."""
    if request.param == "grown":
        monkeypatch.setattr("sim.engine.network._SMALL", 2)
    elif request.param == "grown, then whole":
        monkeypatch.setattr("sim.engine.network._SMALL", 0)
        monkeypatch.setattr("sim.engine.sharing._MOST", 2)
    return request.param


@given(networks())
def test_rates_equal_the_linear_program(case):
    capacities, flows = case
    kernel = Kernel()
    net = Network(kernel, capacities)
    started = [net.start(path, 1e12, lambda t: None, cap=cap) for path, cap in flows]
    kernel.run_all(until=0.0)
    assert [net.rate(f) for f in started] == pytest.approx(
        lp_rates(capacities, flows), rel=1e-9, abs=1e-12
    )


def exact_rates(capacity, live):
    """Progressive filling by the book: everyone rises at one speed, in exact fractions."""
    rate, rising = dict.fromkeys(live, Fraction(0)), set(live)
    while rising:
        room = []
        for link, total in capacity.items():
            want = sum(w for i in rising for k, w in live[i][0] if k == link)
            if want:
                used = sum(w * rate[i] for i in live for k, w in live[i][0] if k == link)
                room.append(((total - used) / want, link))
        caps = [live[i][1] - rate[i] for i in rising if live[i][1] != inf]
        rise = min([r for r, _ in room] + caps)
        for i in rising:
            rate[i] += rise
        full = {link for r, link in room if r == rise}
        rising = {
            i for i in rising if rate[i] != live[i][1] and not any(k in full for k, _ in live[i][0])
        }
    return rate


def exact_completions(capacities, flows, changes):
    """Times of completion by flow number; a flow may start when another has finished."""
    capacity = {link: Fraction(rate) for link, rate in enumerate(capacities)}
    agenda = [(Fraction(t), change) for t, change in changes]
    agenda += [(Fraction(f["at"]), ("start", i)) for i, f in enumerate(flows) if "at" in f]
    agenda.sort(key=lambda entry: entry[0])
    now, live, left, done, cap = Fraction(0), {}, {}, {}, {}
    while agenda or live:
        rate = exact_rates(capacity, live)
        ends = [now + left[i] / rate[i] for i in live if rate[i] > 0]
        then = min(ends + [t for t, _ in agenda[:1]], default=None)
        if then is None:
            break
        for i in live:
            left[i] -= rate[i] * (then - now)
        now = then
        begin = []
        for i in [i for i in live if left[i] == 0]:
            done[i] = now
            del live[i]
            begin += [k for k, f in enumerate(flows) if f.get("after") == i]
        while agenda and agenda[0][0] == now:
            kind, *what = agenda.pop(0)[1]
            if kind == "start":
                begin.append(what[0])
            elif kind == "capacity":
                capacity[what[0]] = Fraction(what[1])
            else:
                cap[what[0]] = what[1]
                if what[0] in live:
                    live[what[0]] = (live[what[0]][0], what[1])
        for i in begin:
            live[i] = (flows[i]["path"], cap.get(i, flows[i]["cap"]))
            left[i] = Fraction(flows[i]["nbytes"])
    return done


@st.composite
def stories(draw):
    """Flows that start at a time or after another, and changes of capacities and caps."""
    num_links = draw(st.integers(1, 4))
    capacities = draw(st.lists(CAPACITIES, min_size=num_links, max_size=num_links))
    flows = []
    for i in range(draw(st.integers(1, 8))):
        flow = {
            "path": draw(paths(num_links)),
            "nbytes": draw(st.integers(1, 40)),
            "cap": draw(CAPS),
        }
        if i and draw(st.booleans()):
            flow["after"] = draw(st.integers(0, i - 1))
        else:
            flow["at"] = draw(st.integers(0, 6))
        flows.append(flow)
    change = st.one_of(
        st.tuples(st.just("capacity"), st.integers(0, num_links - 1), CAPACITIES),
        st.tuples(st.just("cap"), st.integers(0, len(flows) - 1), st.sampled_from([0, 1, 3, inf])),
    )
    changes = draw(st.lists(st.tuples(st.integers(0, 12), change), max_size=5))
    return capacities, flows, changes


def completions(capacities, flows, changes):
    """The same story told to the engine: [(flow number, time)] in order of announcement."""
    kernel = Kernel()
    net = Network(kernel, capacities)
    log, handle, cap = [], {}, {}

    def start(i):
        flow = flows[i]
        handle[i] = net.start(
            flow["path"],
            float(flow["nbytes"]),
            lambda t: finished(i, t),
            cap=cap.get(i, flow["cap"]),
        )

    def finished(i, t):
        log.append((i, t))
        for k, flow in enumerate(flows):
            if flow.get("after") == i:
                start(k)

    def change(what):
        if what[0] == "capacity":
            net.set_capacity(what[1], what[2])
        else:
            cap[what[1]] = what[2]
            if what[1] in handle:
                net.set_cap(handle[what[1]], what[2])

    for t, what in sorted(changes, key=lambda entry: entry[0]):
        kernel.call_at(float(t), change, value=what)
    for i, flow in enumerate(flows):
        if "at" in flow:
            kernel.call_at(float(flow["at"]), start, value=i)
    kernel.run_all()
    return log, net


@settings(max_examples=200)
@given(stories())
def test_completion_times_equal_a_full_exact_simulation(story):
    log, net = completions(*story)
    expected = exact_completions(*story)
    assert dict(log) == pytest.approx({i: float(t) for i, t in expected.items()}, rel=1e-9)
    if len(log) == len(story[1]):
        moved = [0.0] * len(story[0])
        for flow in story[1]:
            for link, weight in flow["path"]:
                moved[link] += weight * flow["nbytes"]
        assert [use.nbytes for use in net.use()] == pytest.approx(moved, rel=1e-9)


@given(stories())
def test_the_same_story_twice_is_byte_identical(story):
    first = [(i, t.hex()) for i, t in completions(*story)[0]]
    clutter = [object() for _ in range(1000)]  # other addresses for the second run
    assert [(i, t.hex()) for i, t in completions(*story)[0]] == first
    assert len(clutter) == 1000


@given(stories(), st.integers(2, 5))
def test_a_folded_flow_equals_its_members(story, weight):
    """Unfolded, each member crosses shared links alone; what it reaches, and when, is the same."""
    capacities, flows, _ = story
    plain = [{**f, "path": tuple((k, 1) for k, _ in f["path"])} for f in flows]
    folded = [{**f, "path": tuple((k, weight) for k, _ in f["path"])} for f in flows]
    num = len(flows)
    members = []
    for member in range(weight):
        for f in plain:
            again = {"after": f["after"] + member * num} if "after" in f else {}
            members.append({**f, **again})
    one = dict(completions(capacities, folded, [])[0])
    many = dict(completions(capacities, members, [])[0])
    expected = {i + m * num: t for i, t in one.items() for m in range(weight)}
    assert many == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 4), st.integers(2, 4), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_members_spread_over_equal_trunks_equal_separate_flows(per_trunk, trunks, sizes):
    """One shared NIC, then equal trunks, each crossed by an equal part of the members."""
    capacities = [10.0, *[4.0] * trunks]
    folded, members = [], []
    for nbytes in sizes:
        base = {"nbytes": nbytes, "cap": inf, "at": 0}
        spread = [(1 + k, per_trunk) for k in range(trunks)]
        folded.append({**base, "path": ((0, per_trunk * trunks), *spread)})
        for k in range(trunks):
            members += [{**base, "path": ((0, 1), (1 + k, 1))}] * per_trunk
    one = dict(completions(capacities, folded, [])[0])
    many = dict(completions(capacities, members, [])[0])
    width = per_trunk * trunks
    assert many == pytest.approx({i: one[i // width] for i in many}, rel=1e-9)
    assert len(many) == width * len(sizes)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_large_component_solved_around_each_change_stays_fair(seed, folded, tier):
    """80 live flows on 15 links, also after hundreds of changes: rates equal a full solve."""
    random = Random(seed)
    capacities = [random.randrange(1, 30) for _ in range(15)]
    kernel = Kernel()
    net = Network(kernel, capacities)
    live = {}

    def begin(_=None):
        path = tuple(
            (link, random.randrange(1, 4) if folded else 1)
            for link in random.sample(range(15), random.randrange(1, 4))
        )
        cap = random.choice([inf, inf, inf, 1.0, 0.25])
        flow = net.start(path, random.random() * 50.0, lambda t: finish(flow), cap=cap)
        live[flow.id] = (flow, path)

    def finish(flow):
        del live[flow.id]
        begin()

    for _ in range(80):
        begin()
    for _ in range(4):
        kernel.run_all(until=kernel.now + 20.0)
        link = random.randrange(15)
        capacities[link] = random.randrange(0, 30)
        net.set_capacity(link, capacities[link])
        kernel.run_all(until=kernel.now)
        flows = {i: (path, cap_of(flow)) for i, (flow, path) in live.items()}
        expected = exact_rates({k: Fraction(c) for k, c in enumerate(capacities)}, flows)
        rates = {i: net.rate(flow) for i, (flow, _) in live.items()}
        assert rates == pytest.approx({i: float(r) for i, r in expected.items()}, rel=1e-9)
    assert net.tiers.flows > 120
    assert (net.tiers.grown > 50) == (tier != "whole")


def test_two_changes_of_one_instant_far_apart_in_one_component(tier):
    """A chain of flows, each sharing a link with the next, changed at both ends at once."""
    kernel = Kernel()
    capacities = [6.0] * 12
    net = Network(kernel, capacities)
    chain = [net.start((i, i + 1), 1e6, lambda t: None) for i in range(11)]
    kernel.run_all(until=1.0)
    for link, rate in ((0, 1.0), (2, 5.0), (11, 2.0)):
        net.set_capacity(link, rate)
        capacities[link] = rate
    kernel.run_all(until=1.0)
    flows = {i: (((i, 1), (i + 1, 1)), inf) for i in range(11)}
    expected = exact_rates({k: Fraction(c) for k, c in enumerate(capacities)}, flows)
    assert [net.rate(f) for f in chain] == pytest.approx([float(expected[i]) for i in flows])


def cap_of(flow):
    return inf if flow.cap == inf else Fraction(flow.cap)
