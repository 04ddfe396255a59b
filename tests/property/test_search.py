"""The search against brute force through the engine, on problems small enough for it."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.cost.ledger import peak_memory
from sim.engine.simulate import simulate
from sim.errors import InfeasibleError, UsageError
from sim.plan.draft import (
    CellKnobs,
    DataKnobs,
    PipelineKnobs,
    PlanDraft,
    TensorKnobs,
)
from sim.plan.lower import lower
from sim.plan.uniform import layer_cuts
from sim.problem import Problem, load_problem
from strategies.search import search
from strategies.search.board import Effort
from strategies.search.costs import Costs
from strategies.search.drafts import draft_of
from strategies.search.evaluate import Evaluator
from strategies.search.mixed import MixedPlan, draft_of_mixed, mixed_seconds
from strategies.search.options import choices_of
from strategies.search.pools import pools_of
from strategies.search.recurrence import step_times
from strategies.search.screen import by_stages, exact_times, place_layers, rough_times
from strategies.search.slab import Knobs, Slab, structure_key
from strategies.search.space import blocks_of
from strategies.search.store import RunTable
from strategies.search.structures import enumerate_block
from tests.validation.pin_sweep import losses

V100, T4, A100 = "V100-SXM2-16GB", "T4", "A100-SXM4-80GB"


def small(
    nodes: list[dict[str, Any]],
    *,
    layers: int = 4,
    batch: int = 4,
    memory: dict[str, str] | None = None,
    hidden: int = 1024,
    tied: bool = False,
    vocabulary: int = 16000,
    **job: Any,
) -> Problem:
    cluster = {
        "name": "small",
        "sites": [{"name": "here", "nodes": nodes}],
        "accelerators": {name: {"memory": size} for name, size in (memory or {}).items()},
    }
    model = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
    }
    work = {"global_batch": batch, "sequence_length": 1024, "dtype": "fp16", **job}
    return load_problem(cluster, model, work)


MIXED = [{"profile": "p3_8xlarge", "chips": 2}, {"profile": "g4dn_12xlarge", "chips": 2}]
"""Two V100, two T4."""
THREE = [
    {"profile": "a100_80gb_hdr", "chips": 2},
    {"profile": "p3_8xlarge", "chips": 2},
    {"profile": "g4dn_12xlarge", "chips": 1},
]


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [
        (first, *rest)
        for first in range(1, total - parts + 2)
        for rest in compositions(total - first, parts - 1)
    ]


def every_plan(
    problem: Problem, *, modes: tuple[str, ...], schedules: list[tuple[str, bool]], zeros: list[int]
) -> list[PlanDraft]:
    """All unlike pipelines with microbatches of one sequence, written down one by one."""
    total = problem.model.num_layers
    nodes: dict[str, list[int]] = {}
    for node in problem.machine.nodes:
        nodes.setdefault(node.accelerator, []).extend(range(*node.chips))
    found = []
    for size in range(1, len(nodes) + 1):
        for types in itertools.permutations(sorted(nodes), size):
            for dp in range(1, problem.job.global_batch + 1):
                if problem.job.global_batch % dp:
                    continue
                options = [
                    [
                        (t, tp, pp, mode)
                        for tp in (1, 2)
                        for pp in range(1, 9)
                        for mode in modes
                        if dp * tp * pp <= len(nodes[t]) // tp * tp
                    ]
                    for t in types
                ]
                for groups in itertools.product(*options):
                    stages = sum(pp for _, _, pp, _ in groups)
                    if stages > total:
                        continue
                    for layers in compositions(total, stages):
                        for (name, split), zero in itertools.product(schedules, zeros):
                            if (zero and dp == 1) or (
                                stages == 1 and (name, split) != schedules[0]
                            ):
                                continue
                            found.append(
                                draft(problem, nodes, dp, groups, layers, name, split, zero)
                            )
    return found


def draft(
    problem: Problem,
    nodes: dict[str, list[int]],
    dp: int,
    groups: tuple[tuple[str, int, int, str], ...],
    layers: tuple[int, ...],
    schedule: str,
    split: bool,
    zero: int,
) -> PlanDraft:
    cells, stage = [], 0
    for name, tp, pp, mode in groups:
        free = iter(nodes[name])
        for _ in range(pp):
            for r in range(dp):
                chips = tuple(next(free) for _ in range(tp))
                cells.append(
                    CellKnobs(stage=stage, replica=r, chips=chips, tp=tp, recompute=mode)  # type: ignore[arg-type]
                )
            stage += 1
    return PlanDraft(
        cells=tuple(cells),
        pipeline=PipelineKnobs(
            schedule=schedule, split_backward=split, cuts=layer_cuts(problem.model, layers)
        ),
        data=DataKnobs(microbatches=(problem.job.global_batch // dp,) * dp, zero=zero),
        tensor=TensorKnobs(sequence_parallel=False),
    )


def fastest(problem: Problem, drafts: list[PlanDraft]) -> tuple[float, int]:
    """Least step time of the plans that fit, and how many of them there are."""
    best, fitting = float("inf"), 0
    for d in drafts:
        plan = lower(problem, d)
        if all(x.verdict == "fits" for x in peak_memory(plan, problem).values()):
            fitting += 1
            best = min(best, simulate(plan, problem).makespan)
    return best, fitting


PINS = {
    "microbatch": 1, "sequence_parallel": False, "scatter": False, "families": "pipeline",
    "chunks": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "memory", "layers", "batch"),
    [
        (MIXED, None, 4, 4),
        (MIXED, {V100: "3 GB", T4: "4 GB"}, 4, 4),
        (MIXED, {V100: "2.6 GB", T4: "2.6 GB"}, 5, 2),
        (THREE, {A100: "3.2 GB", V100: "2.6 GB", T4: "2.4 GB"}, 5, 2),
    ],
)
def test_found_plan_is_the_best_of_all_plans(
    nodes: list[dict[str, Any]], memory: dict[str, str] | None, layers: int, batch: int
) -> None:
    problem = small(nodes, layers=layers, batch=batch, memory=memory)
    drafts = every_plan(problem, modes=("none",), schedules=[("1f1b", False)], zeros=[0])
    best, fitting = fastest(problem, drafts)
    pins = PINS | {"recompute": "none", "schedule": "1f1b", "split_backward": False, "zero": 0}
    found = search(problem, pins=pins, top=8)
    assert found.whole
    assert found.space == len(drafts)
    assert found.evaluated <= fitting <= len(drafts)
    assert found.step_time_s == pytest.approx(best, rel=1e-9)
    assert found.bound_s <= found.step_time_s
    assert found.run.makespan == pytest.approx(found.step_time_s, rel=1e-12)


def test_found_plan_is_the_best_with_recomputation_and_knobs_free() -> None:
    problem = small(MIXED, layers=4, batch=2, memory={V100: "2.2 GB", T4: "1.9 GB"})
    drafts = every_plan(
        problem,
        modes=("none", "full"),
        schedules=[("1f1b", False), ("1f1b", True), ("zb-h1", False)],
        zeros=[0, 1],
    )
    best, fitting = fastest(problem, drafts)
    assert 0 < fitting < len(drafts)
    found = search(problem, pins=PINS, top=8)
    # Selective recomputation is in the search's space only: it may win, but nothing may beat both.
    assert found.step_time_s <= best * (1 + 1e-9)
    without = [f for f in found.finalists if "selective" not in f.plan.name]
    assert without[0].step_time_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("alike", [False, True])
def test_pruning_loses_none_of_the_best(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.search.evaluate.CHUNK", 64)
    # On equal chips with many microbatches the bounds are tight, and the best plans lie in several
    # blocks.
    problem = (
        small([{"profile": "a100_80gb_hdr", "chips": 4}], layers=6, batch=32)
        if alike
        else small(THREE, layers=5, batch=4, memory={A100: "3 GB", V100: "2.4 GB", T4: "2.2 GB"})
    )
    costs = Costs(problem)
    choices = choices_of(problem, PINS)
    pools = pools_of(problem.machine)
    effort = Effort(exhaustive=10**9)
    pruned = Evaluator(costs, choices, effort, 8)
    pruned.run(pools)
    everything = Evaluator(costs, choices, effort, 10**6)
    everything.run(pools)
    assert pruned.pruned["bound"] > 0 and everything.pruned["bound"] == 0
    assert pruned.evaluated < everything.evaluated
    ours = [score for score, _ in pruned.ranked.best(8)]
    theirs = [score for score, _ in everything.ranked.best(8)]
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_screened_search_finds_nearly_the_optimum_of_the_whole_space() -> None:
    problem = small(THREE, layers=6, batch=8, memory={A100: "3 GB", V100: "2.6 GB", T4: "2.4 GB"})
    pins = {"families": "pipeline", "chunks": 1}
    whole = search(problem, pins=pins, effort=Effort(exhaustive=10**9))
    screened = search(problem, pins=pins, effort=Effort(exhaustive=0))
    assert whole.whole and not screened.whole
    assert screened.exact < whole.exact
    assert screened.step_time_s <= 1.02 * whole.step_time_s
    assert whole.step_time_s <= screened.step_time_s * (1 + 1e-9)


def test_screened_search_of_a_tied_model_finds_nearly_the_optimum() -> None:
    """The tied sum outweighs all else here: structures that need none must not be passed over."""
    nodes = [{"profile": "p3_8xlarge"}, {"profile": "g4dn_12xlarge", "chips": 2}]
    problem = small(nodes, layers=6, batch=8, hidden=512, tied=True, vocabulary=200_000)
    pins = {"families": "pipeline", "chunks": 1}
    whole = search(problem, pins=pins, effort=Effort(exhaustive=10**9))
    few = Effort(exhaustive=0, shortlist=4, tuned=4, coarse=1)
    screened = search(problem, pins=pins, effort=few)
    assert whole.whole and not screened.whole
    assert screened.step_time_s <= 1.02 * whole.step_time_s


@pytest.mark.parametrize("tied", [False, True])
def test_the_estimate_is_close_to_the_exact_time(tied: bool) -> None:
    problem = small(MIXED, layers=6, batch=8, tied=tied, vocabulary=100_000)
    costs = Costs(problem)
    pools = pools_of(problem.machine)
    checked = 0
    for block in blocks_of(costs, pools, choices_of(problem, PINS), knobs=[Knobs()]):
        found = enumerate_block(block, 6, float("inf"), Counter())
        for slab in by_stages(found) if found is not None else ():
            for knobs in (Knobs(), Knobs(zero=1)) if slab.dp > 1 else (Knobs(),):
                placed = place_layers(costs, slab.with_knobs(knobs), Counter())
                if len(placed):
                    ratio = rough_times(costs, placed) / exact_times(costs, [placed])[0]
                    assert ratio.min() > 0.85 and ratio.max() < 1.15
                    checked += len(placed)
    assert checked > 20


def test_no_pin_gives_a_better_plan_than_the_free_search() -> None:
    problem = load_problem("v100_t4", "gpt2_355m", "v100_t4")
    pins = [{"dp": 4}, {"dp": 8}, {"pp": 1}, {"pp": 2}, {"tp": 1}, {"tp": 2}]
    effort = Effort(shortlist=128, tuned=12, refined=4, coarse=2)
    free, better = losses(problem, pins, effort=effort, top=4)
    assert better == []
    assert not free.whole


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_exact_times_are_the_engines_without_contention(schedule: str, mode: str) -> None:
    problem = small(THREE, layers=8, batch=8)
    costs = Costs(problem)
    choices = choices_of(problem, {"schedule": schedule, "recompute": mode})
    evaluator = Evaluator(costs, choices, Effort(exhaustive=0), 8)
    evaluator.run(pools_of(problem.machine))
    checked = 0
    for _, slab in evaluator.ranked.best(24, alike=2):
        found = exact_times(costs, [slab], in_step=False)[0][0]
        plan = lower(problem, draft_of(problem, slab))
        run = simulate(plan, problem, contention=False, overlap=False)
        assert found == pytest.approx(run.makespan, rel=1e-9)
        peak, _ = costs.memory(slab)
        ledgers = peak_memory(plan, problem)
        for stage in range(slab.num_stages):
            assert peak[0, stage] == pytest.approx(ledgers[stage, 0].peak_bytes, rel=1e-9)
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize("zero", [0, 1])
def test_exact_times_of_experts_spread_over_replicas(zero: int) -> None:
    model = {
        "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 1000, "max_position_embeddings": 512, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    job = {"global_batch": 16, "sequence_length": 256, "dtype": "fp16"}
    problem = load_problem("v100_t4", model, job)
    costs = Costs(problem)
    pins = {"ep": 2, "zero": zero, "microbatch": 1, "accelerators": V100, "dp": 4}
    choices = choices_of(problem, pins)
    evaluator = Evaluator(costs, choices, Effort(exhaustive=0), 8)
    evaluator.run(pools_of(problem.machine, choices.accelerators))
    found = evaluator.ranked.best(6, alike=1)
    assert len(found) >= 2
    for _, slab in found:
        plan = lower(problem, draft_of(problem, slab))
        assert plan.placement.ep == 2
        run = simulate(plan, problem, contention=False, overlap=False)
        seconds = exact_times(costs, [slab], in_step=False)[0][0]
        assert seconds == pytest.approx(run.makespan, rel=1e-9)
        assert (costs.memory(slab)[0] <= costs.memory(slab)[1]).all()


def test_layers_that_memory_allows_are_exact() -> None:
    problem = small(MIXED, layers=6, batch=4, memory={V100: "3 GB", T4: "3 GB"})
    costs = Costs(problem)
    evaluator = Evaluator(costs, choices_of(problem, PINS), Effort(exhaustive=10**9), 10**6)
    evaluator.run(pools_of(problem.machine))
    assert evaluator.pruned["memory"] > 0
    for slab, _ in evaluator.ranked.parts:
        most = costs.most_layers(slab)
        peak, limit = costs.memory(slab)
        assert (peak <= limit).all() and (slab.layers <= most).all()
        if slab.num_stages > 1:
            # One layer more than allowed, taken from anywhere else, does not fit.
            for row in range(min(len(slab), 4)):
                stage = int(np.argmax(slab.layers[row] - most[row]))
                more = most[row, stage] + 1 - slab.layers[row, stage]
                others = slab.layers[row].copy()
                others[stage] += more
                giver = 0 if stage else 1
                others[giver] -= more
                if others[giver] >= 1:
                    moved = slab.take(slice(row, row + 1)).with_layers(others[None, :])
                    over, bound = costs.memory(moved)
                    assert over[0, stage] > bound[0, stage]


def test_structures_are_cut_exactly_at_their_bound() -> None:
    """Rule (d) by its formula, and no structure's bound is above its best plan."""
    problem = small(THREE, layers=5, batch=4)
    costs = Costs(problem)
    choices = choices_of(problem, PINS | {"schedule": "1f1b", "split_backward": False})
    pools = pools_of(problem.machine)
    everything = Evaluator(costs, choices, Effort(exhaustive=10**9), 10**6)
    everything.run(pools)
    for block in blocks_of(costs, pools, choices, knobs=[Knobs()]):
        assert block.fill == 1.0
        plain = msgspec.structs.replace(block, fill=0.0)
        rates = [{o[:3]: o.rate for o in group} for group in block.options]
        rows = enumerate_block(plain, 5, float("inf"), Counter())
        assert rows is not None
        sizes = np.stack([rows.tp, rows.pp, rows.recompute], axis=2).tolist()
        bounds = np.array(
            [
                block.num_microbatches
                * 5
                / sum(r[tuple(x)] for r, x in zip(rates, row, strict=True))
                for row in sizes
            ]
        )
        for limit in np.unique(bounds):
            pruned: Counter[str] = Counter()
            kept = enumerate_block(plain, 5, float(limit) * (1 + 1e-9), pruned)
            assert kept is not None and len(kept) == (bounds <= limit * (1 + 1e-9)).sum()
            assert pruned["bound"] == (bounds > limit * (1 + 1e-9)).sum()
        for row in range(len(rows)):
            best = everything.firsts.get(structure_key(rows, row))
            if best is not None:
                limit = best[0] * (1 + 1e-9)
                kept = enumerate_block(block, 5, limit, Counter())
                keys = {structure_key(kept, k) for k in range(len(kept))} if kept else set()
                assert structure_key(rows, row) in keys


def test_no_recomputation_where_everything_fits_without() -> None:
    roomy = small(MIXED, layers=4, batch=4)
    costs = Costs(roomy)
    for block in blocks_of(costs, pools_of(roomy.machine), choices_of(roomy, PINS)):
        assert {o.recompute for group in block.options for o in group} == {0}
    tight = small(MIXED, layers=4, batch=4, memory={V100: "2.2 GB", T4: "1.9 GB"})
    costs = Costs(tight)
    blocks = blocks_of(costs, pools_of(tight.machine), choices_of(tight, PINS))
    assert {o.recompute for b in blocks for group in b.options for o in group} == {0, 1, 2}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("shares", [(2, 10), (9, 3), (6, 6)])
def test_unlike_replicas_take_as_long_as_the_engine_says(
    zero: int, shares: tuple[int, int]
) -> None:
    problem = small(MIXED, layers=4, batch=12)
    costs = Costs(problem)
    one = np.ones((1, 1), np.int64)
    parts = [
        Slab(
            pools=(pool,), dp=1, microbatch=1, num_microbatches=m, knobs=Knobs(zero=zero),
            tp=one, pp=2 * one, recompute=0 * one, layers=np.array([[2, 2]]),
        )
        for pool, m in zip(pools_of(problem.machine), shares, strict=True)
    ]  # fmt: skip
    found = mixed_seconds(costs, parts)
    plan = lower(
        problem, draft_of_mixed(problem, MixedPlan(parts=tuple(parts), seconds=found, bound=0.0))
    )
    assert plan.placement.microbatches == shares
    assert found == pytest.approx(simulate(plan, problem).makespan, rel=0.02)


def test_unlike_replicas_share_the_batch_by_speed() -> None:
    problem = small(MIXED, layers=4, batch=12)
    found = search(problem, pins={"families": "replicas", "microbatch": 1})
    placement = found.plan.placement
    assert len({c.accelerator for c in placement.cells if c.stage == 0}) == 2
    assert sum(placement.microbatches) == 12
    by_type = {placement.cell(0, r).accelerator: m for r, m in enumerate(placement.microbatches)}
    assert by_type[V100] > by_type[T4]
    assert found.step_time_s == pytest.approx(simulate(found.plan, problem).makespan)


def test_pins_hold() -> None:
    problem = small(MIXED, layers=4, batch=8)
    found = search(
        problem, pins={"tp": 2, "pp": 2, "recompute": "full", "microbatch": 2, "zero": 0}
    )
    for f in found.finalists:
        cells = f.plan.placement.cells
        assert {c.tp for c in cells} == {2} and f.plan.placement.num_stages == 2
        assert {c.recompute for c in cells} == {"full"} and f.plan.mathematics.microbatch == 2
    with pytest.raises(UsageError, match="no such pin: tpp"):
        search(problem, pins={"tpp": 2})


def test_when_nothing_fits_the_cell_and_the_change_are_named() -> None:
    problem = small(MIXED, layers=4, batch=4, memory={V100: "1.3 GB", T4: "1.3 GB"})
    with pytest.raises(InfeasibleError) as caught:
        search(problem)
    text = str(caught.value)
    assert "short of" in text and "GB" in text and "memory of stage" in text
    assert caught.value.exit_code == 3
    with pytest.raises(InfeasibleError) as caught:
        search(problem, pins={"zero": 0})
    assert "drop the pin" not in str(caught.value)


def test_when_a_pin_is_to_blame_the_change_is_to_drop_it() -> None:
    problem = small(MIXED, layers=6, batch=8, memory={V100: "2.2 GB", T4: "2 GB"}, hidden=1024)
    search(problem)
    with pytest.raises(InfeasibleError, match="drop the pin microbatch=8"):
        search(problem, pins={"microbatch": 8})


def test_a_step_time_limit_that_cannot_be_kept_is_named() -> None:
    problem = small(MIXED, limits={"max_step_time": "1 ms"})
    with pytest.raises(InfeasibleError, match="max_step_time"):
        search(problem)


def test_cost_objective_prefers_cheaper_chips() -> None:
    by_time = search(small(MIXED, layers=4, batch=4))
    by_cost = search(small(MIXED, layers=4, batch=4, objective="cost"))
    assert by_cost.finalists[0].score == min(f.score for f in by_cost.finalists)
    assert by_cost.step_time_s >= by_time.step_time_s * (1 - 1e-9)
    chips = len(by_cost.plan.placement.cells) * by_cost.plan.placement.cells[0].tp
    assert chips <= 4


def test_run_table_spares_simulations(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small(MIXED, layers=4, batch=4)
    first = search(problem, store=tmp_path / "runs.sqlite", top=4)
    table = RunTable(tmp_path / "runs.sqlite")
    assert len(table) == len(first.finalists)

    def refuse(*_: Any) -> float:
        raise AssertionError("simulated again")

    monkeypatch.setattr("strategies.search.finalists._step_time", refuse)
    again = search(problem, store=tmp_path / "runs.sqlite", top=4)
    assert again.plan.hash == first.plan.hash
    assert again.step_time_s == first.step_time_s


def test_budget_and_ctrl_c_return_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small(THREE, layers=6, batch=8)
    full = search(problem)
    seen = []

    def interrupt(what: str, done: int, total: int) -> None:
        seen.append(what)
        if what == "knobs":
            raise KeyboardInterrupt

    found = search(problem, progress=interrupt, effort=Effort(exhaustive=0))
    assert found.stopped and "knobs" in seen
    assert found.step_time_s >= full.step_time_s * (1 - 1e-9)
    assert not full.stopped


def test_a_tiny_budget_still_gives_a_plan() -> None:
    for problem in (
        small(THREE, layers=6, batch=8),
        load_problem("v100_t4", "gpt2_355m", "v100_t4"),
    ):
        found = search(problem, budget=0.0, effort=Effort(exhaustive=0))
        assert found.stopped
        assert [f.simulated for f in found.finalists].count(True) == 1
        assert found.finalists[0].simulated
        assert found.step_time_s == pytest.approx(simulate(found.plan, problem).makespan)


@pytest.mark.parametrize("families", ["pipeline", "both"])
def test_a_budget_that_ends_before_any_plan_is_no_infeasibility(
    families: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.search.board.GRACE_S", -1.0)
    monkeypatch.setattr("strategies.search.evaluate.enumerate_block", lambda *_: None)
    problem = small([{"profile": "p3_8xlarge", "chips": 2}], layers=4, batch=4)
    with pytest.raises(UsageError, match="budget of 0 s ended before a plan was found") as caught:
        search(problem, budget=0.0, pins={"families": families})
    assert caught.value.exit_code == 2 and "give at least" in str(caught.value)


def test_pins_that_exclude_one_another_are_no_lack_of_memory() -> None:
    problem = small([{"profile": "p3_8xlarge", "chips": 2}], layers=4, batch=4)
    with pytest.raises(InfeasibleError, match="keeps all pins") as caught:
        search(problem, pins={"families": "replicas"})
    text = str(caught.value)
    assert "short of" not in text and "families=replicas" in text


def test_sums_that_leave_through_one_nic_wait_for_one_another() -> None:
    """Two stages of dp 2 on two nodes: all four sums leave through the same two NICs."""
    nodes = [{"profile": "g4dn_12xlarge", "count": 2}]
    problem = small(nodes, layers=4, batch=4)
    pool = pools_of(problem.machine)[0]
    one = np.ones((1, 1), np.int64)
    slab = Slab(
        pools=(pool,), dp=2, microbatch=1, num_microbatches=2, knobs=Knobs(scatter=True),
        tp=one, pp=4 * one, recompute=0 * one, layers=np.array([[1, 1, 1, 1]]),
    )  # fmt: skip
    costs = Costs(problem)
    sync = costs.sync(slab)
    assert sync.queued is not None and sync.queued.tolist() == [[True, True, True, False]]
    found = exact_times(costs, [slab])[0][0]
    run = simulate(lower(problem, draft_of(problem, slab)), problem)
    assert found == pytest.approx(run.makespan, rel=0.03)
    free = step_times(slab.shape, costs.times(slab), msgspec.structs.replace(sync, queued=None))
    assert free[0] < 0.8 * found


def test_without_contention_the_search_prices_links_alone() -> None:
    problem = small(MIXED, layers=4, batch=12)
    for families in ("pipeline", "replicas"):
        pins = {"families": families, "microbatch": 1}
        found = search(problem, pins=pins, contention=False)
        for f in found.finalists:
            alone = simulate(f.plan, problem, contention=False, overlap=False).makespan
            assert f.estimate_s == pytest.approx(alone, rel=1e-9)
