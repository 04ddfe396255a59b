"""Pools, pins, knobs, wires and HeteroPP: the parts of the search one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from sim.engine.simulate import simulate
from sim.errors import InputError, UsageError
from sim.hardware.route import path, transfer_time
from sim.plan.lower import lower
from sim.plan.validate import validate
from sim.problem import Problem, load_problem
from strategies.compose import compose
from strategies.pipeline.hetero import HeteroGroup, HeteroKnobs
from strategies.registry import get
from strategies.search import search
from strategies.search.costs import Costs
from strategies.search.hetero_auto import hetero_auto, sub_grouped, sub_groupings
from strategies.search.options import choices_of, fill_share, knobs_for, screening_knobs
from strategies.search.pools import pools_of, slots, split_pool
from strategies.search.shortlist import Incumbent, Shortlist
from strategies.search.slab import Knobs, Slab
from strategies.search.space import blocks_of
from strategies.search.store import RunTable
from strategies.search.structures import count_structures, enumerate_block
from strategies.search.wires import Wires, stage_cells


@pytest.fixture(scope="module")
def mixed() -> Problem:
    return load_problem("v100_t4", "gpt2_355m", "v100_t4")


def test_pools_are_types_largest_memory_first() -> None:
    h2 = load_problem("h2_1024", "h2_100b", "h2_1024").machine
    pools = pools_of(h2)
    assert [p.accelerator for p in pools] == ["H20", "C500", "Ascend-910B3", "BI-V100"]
    assert {p.num_chips for p in pools} == {256}
    assert sorted(c for p in pools for c in p.chips) == list(range(1024))
    assert [p.name for p in pools_of(h2, ("C500",))] == ["C500"]
    with pytest.raises(InputError, match="no such accelerator"):
        pools_of(h2, ("H800",))


def test_one_type_on_two_sites_makes_two_pools() -> None:
    cluster = {
        "name": "two",
        "sites": [
            {"name": s, "nodes": [{"profile": "a100_80gb_hdr", "count": 2}]} for s in ("a", "b")
        ],
        "links": [{"between": ["a", "b"], "profile": "wan_oregon_california"}],
    }
    problem = load_problem(cluster, "llama3_8b", "h100_a100_wan")
    pools = pools_of(problem.machine)
    assert [p.name for p in pools] == ["A100-SXM4-80GB@a", "A100-SXM4-80GB@b"]


def test_slots_stay_inside_nodes(mixed: Problem) -> None:
    pool = pools_of(mixed.machine)[0]
    assert slots(pool, 4) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert len(slots(pool, 2)) == 6 and slots(pool, 8) == ()
    halves = split_pool(pool, (1, 2))
    assert [p.num_chips for p in halves] == [4, 8] and halves[0].chips == (0, 1, 2, 3)
    with pytest.raises(InputError, match="divide the nodes"):
        split_pool(pool, (1, 1))


def test_cells_side_by_side_or_scattered(mixed: Problem) -> None:
    pool = pools_of(mixed.machine)[0]
    near = [stage_cells(pool, 1, 4, 3, i, False).chips for i in range(4)]
    assert near[0] == ((0,), (1,), (2,)) and near[3] == ((9,), (10,), (11,))
    far = [stage_cells(pool, 1, 4, 3, i, True).chips for i in range(4)]
    assert far[0] == ((0,), (4,), (8,)) and far[1] == ((1,), (5,), (9,))


def test_transfers_in_step_share_the_nic(mixed: Problem) -> None:
    pool = pools_of(mixed.machine)[0]
    wires = Wires(mixed.machine)
    a, b = (stage_cells(pool, 1, 3, 4, i, False) for i in (0, 1))
    alone, in_step = wires.transfer(a, b, 8e6)
    route = path(mixed.machine, 0, 4)
    assert alone == pytest.approx(transfer_time(route, 8e6))
    # Four replicas leave through the one NIC of their node at once.
    rate = min(mixed.machine.links[x].rate for x in route.links)
    assert in_step == pytest.approx(route.latency + 4 * 8e6 / rate)


def test_pins_come_from_the_job_and_the_call() -> None:
    job = {"global_batch": 32, "sequence_length": 1024, "pins": {"tp": 2, "zero": 1}}
    problem = load_problem("v100_t4", "gpt2_355m", job)
    assert choices_of(problem).tp == 2
    both = choices_of(problem, {"tp": "4", "sequence_parallel": "true", "accelerators": "T4"})
    assert (both.tp, both.zero, both.sequence_parallel, both.accelerators) == (4, 1, True, ("T4",))
    for wrong in ({"tp": "four"}, {"schedule": "2f2b"}, {"recompute": "some"}):
        with pytest.raises(UsageError):
            choices_of(problem, wrong)


def test_knobs_of_a_shape(mixed: Problem) -> None:
    def knobs(**pins: Any) -> list[Knobs]:
        choices = choices_of(mixed, pins)
        return knobs_for(
            mixed, choices, num_stages=4, num_microbatches=8, dp=2, tps=frozenset({1, 2})
        )

    every = knobs()
    assert {(k.schedule, k.chunks) for k in every} == {
        ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4),
    }  # fmt: skip
    assert len(every) == len(set(every)) == 5 * 2 * 2 * 2
    assert {k.schedule for k in knobs(schedule="gpipe")} == {"gpipe"}
    assert {k.zero for k in knobs(zero=0)} == {0}
    lean = screening_knobs(every)
    assert (lean.schedule, lean.chunks, lean.zero, lean.sequence_parallel) == ("1f1b", 1, 1, True)
    assert fill_share(every, 0.3) == 0.0
    assert fill_share([Knobs("zb-h1"), Knobs()], 0.3) == 0.3
    assert fill_share([Knobs()], 0.3) == 1.0


def test_structures_are_counted_and_enumerated_alike(mixed: Problem) -> None:
    costs = Costs(mixed)
    choices = choices_of(mixed, {"microbatch": 1, "dp": 2})
    for block in blocks_of(costs, pools_of(mixed.machine), choices):
        pruned: Counter[str] = Counter()
        found = enumerate_block(block, costs.passes.num_layers, float("inf"), pruned)
        count = count_structures(block, costs.passes.num_layers)
        assert found is not None and len(found) == count
        combinations = np.prod([len(o) for o in block.options])
        assert count + pruned["layers"] == combinations
        for p in (2, 3):
            exact = enumerate_block(block, 24, float("inf"), Counter(), pp=p)
            assert (0 if exact is None else len(exact)) == count_structures(block, 24, p)
        rows = np.concatenate([found.tp, found.pp, found.recompute], axis=1)
        assert len(np.unique(rows, axis=0)) == len(rows)


def test_sub_groups_come_in_one_order_and_never_alike(mixed: Problem) -> None:
    costs = Costs(mixed)
    pool = pools_of(mixed.machine)[0]
    choices = choices_of(mixed, {"microbatch": 1, "dp": 1, "all_types": True, "orders": "memory"})
    block = blocks_of(costs, split_pool(pool, (1, 2)), choices)[0]
    pruned: Counter[str] = Counter()
    found = enumerate_block(block, 24, float("inf"), pruned)
    assert found is not None
    code = found.tp * 4 + found.recompute
    assert (code[:, 0] > code[:, 1]).all()
    assert pruned["merge"] > 0 and pruned["order"] > 0
    groupings = sub_groupings(pools_of(mixed.machine))
    assert all(sum(p.num_chips for p in g) == 16 for g in groupings)
    assert [len(g) for g in groupings] == [3, 3]


def slab_of(mixed: Problem, layers: list[list[int]]) -> Slab:
    n = len(layers)
    one = np.ones((n, 1), np.int64)
    return Slab(
        pools=pools_of(mixed.machine)[:1], dp=1, microbatch=1, num_microbatches=4,
        tp=one, pp=2 * one, recompute=0 * one, layers=np.array(layers),
    )  # fmt: skip


def test_incumbent_keeps_the_smallest_and_counts_no_plan_twice(mixed: Problem) -> None:
    rows = [[k, 24 - k] for k in range(1, 8)]
    best = Incumbent(3)
    best.add(np.array([5.0, 1.0]), slab_of(mixed, rows[:2]))
    assert best.value == float("inf")
    best.add(np.array([1.0, 5.0]), slab_of(mixed, rows[1::-1]))
    assert best.scores == [1.0, 5.0]
    best.add(np.array([4.0, 9.0, 2.0]), slab_of(mixed, rows[2:5]))
    assert best.scores == [1.0, 2.0, 4.0] and best.value == 4.0
    best.seed(0.5)
    best.add(np.array([0.7]), slab_of(mixed, rows[5:6]))
    assert best.value == 0.5


def test_shortlist_keeps_the_best_and_each_plan_once(mixed: Problem) -> None:
    found = Shortlist(2)
    rows = [[1, 23], [2, 22], [3, 21], [4, 20], [5, 19], [1, 23]]
    for k, row in enumerate(rows):
        found.add(slab_of(mixed, [row]), np.array([[3.0, 1.0, 2.0, 9.0, 8.0, 3.0][k]]))
    assert [s for s, _ in found.best(5)] == [1.0, 2.0]
    again = Shortlist(10)
    again.add(slab_of(mixed, rows), np.array([3.0, 1.0, 2.0, 9.0, 8.0, 3.0]))
    assert [s for s, _ in again.best(10)] == [1.0, 2.0, 3.0, 8.0, 9.0]
    assert [s for s, _ in again.best(10, alike=2)] == [1.0, 2.0]
    sizes = [sum(len(s) for s, _ in batch) for batch in again.batches(2)]
    assert sum(sizes) == 6


def test_run_table_refuses_another_file(tmp_path: Any) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a table, but long enough to be read as a broken header " * 40)
    with pytest.raises(InputError, match="run table"):
        RunTable(other)


GROUPS = (
    HeteroGroup(pool="V100-SXM2-16GB", tp=4, layers=(7, 7, 6)),
    HeteroGroup(pool="T4", tp=2, layers=(2, 2), recompute="full"),
)


def test_hetero_pp_places_unlike_groups(mixed: Problem) -> None:
    draft = compose(mixed, [("hetero-pp", HeteroKnobs(groups=GROUPS)), ("ddp", {"microbatch": 1})])
    plan = lower(mixed, draft)
    validate(plan)
    cells = plan.placement.cells
    assert [(c.accelerator, c.tp, c.recompute) for c in cells] == [
        *[("V100-SXM2-16GB", 4, "none")] * 3, *[("T4", 2, "full")] * 2,
    ]  # fmt: skip
    assert sum(b - a for a, b in (s.blocks for s in plan.placement.segments)) == len(
        mixed.model.blocks
    )
    names = [c.name for c in plan.lowering]
    assert "split_backward" in names
    plain = lower(
        mixed,
        compose(
            mixed,
            [
                ("hetero-pp", HeteroKnobs(groups=GROUPS, split_backward=False)),
                ("ddp", {"microbatch": 1}),
            ],
        ),
    )
    # The send of the input gradient runs under the weight gradient: never slower, here faster.
    assert simulate(plan, mixed).makespan < simulate(plain, mixed).makespan


def test_hetero_pp_gives_sub_groups_nodes_of_their_own(mixed: Problem) -> None:
    groups = (
        HeteroGroup(pool="V100-SXM2-16GB", tp=4, layers=(8,)),
        HeteroGroup(pool="V100-SXM2-16GB", tp=2, layers=(4, 4, 4, 4)),
    )
    draft = get("hetero-pp").apply(mixed, compose(mixed, [], complete=False),
                                   HeteroKnobs(groups=groups))  # fmt: skip
    assert [c.chips for c in draft.cells] == [(0, 1, 2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]


@pytest.mark.parametrize(
    ("groups", "replicas", "message"),
    [
        ((), 1, "needs groups"),
        ((HeteroGroup(pool="H100", layers=(24,)),), 1, "unknown accelerator"),
        ((HeteroGroup(pool="T4", tp=3, layers=(24,)),), 1, "chips of every node"),
        ((HeteroGroup(pool="T4", tp=2, layers=(8, 8, 8)),), 1, "too few chips"),
        ((HeteroGroup(pool="T4", layers=(8, 8)),), 1, "place every layer"),
        ((HeteroGroup(pool="T4", layers=(24,)),), 8, "too few chips"),
    ],
)
def test_hetero_pp_refuses(
    mixed: Problem, groups: tuple[HeteroGroup, ...], replicas: int, message: str
) -> None:
    knobs = HeteroKnobs(groups=groups, replicas=replicas)
    with pytest.raises(InputError, match=message) as caught:
        compose(mixed, [("hetero-pp", knobs), ("ddp", {})])
    assert caught.value.expected


def test_hetero_auto_is_at_least_as_good_as_one_group_per_type(mixed: Problem) -> None:
    pins = {"microbatch": 1, "zero": 0, "sequence_parallel": False, "chunks": 1, "scatter": False}
    fixed = {"families": "pipeline", "all_types": True, "orders": "memory"}
    first = search(mixed, pins=fixed | pins, top=4)
    auto = hetero_auto(mixed, pins=pins, top=4)
    assert auto.step_time_s <= first.step_time_s
    assert auto.space > first.space and auto.evaluated > first.evaluated
    assert {c.accelerator for c in auto.plan.placement.cells} == {"V100-SXM2-16GB", "T4"}
    validate(auto.plan)
    assert "of 2 ways to cut the types tried" in auto.sub_groups


def test_sub_groups_keep_replicas_order_and_pins(mixed: Problem) -> None:
    pins = {"microbatch": 1, "dp": 2, "families": "pipeline", "zero": 0, "chunks": 1}
    first = search(mixed, pins=pins, top=2)
    assert first.pools and not first.sub_groups
    found = sub_grouped(first, pins=pins, top=2)
    assert found.step_time_s <= first.step_time_s
    assert found.plan.placement.num_replicas == 2 and found.plan.mathematics.microbatch == 1
    assert found.wall_s > first.wall_s
    late = sub_grouped(first, pins=pins, top=2, seconds=0.0)
    assert late.plan.hash == first.plan.hash and late.stopped
    assert late.sub_groups.startswith("0 of ")
