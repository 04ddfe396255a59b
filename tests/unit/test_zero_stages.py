"""ZeRO-2 and 3: which sums and gathers a plan lists, and its memory."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from sim.cost.collective import collective_cost
from sim.cost.ledger import knobs_of, ledger, peak_memory
from sim.cost.offload import host_ledgers
from sim.engine.simulate import simulate
from sim.model.amounts import rank_params
from sim.plan.draft import CellKnobs, DataKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.passes import expand
from sim.plan.plan import Plan
from sim.plan.program import walk
from sim.plan.uniform import uniform
from sim.plan.validate import validate
from sim.problem import Problem
from strategies.compose import compose
from tests.property.cost_cases import machine, problem, small
from tests.unit.test_offload import LAYERS, gpt, spans
from tests.unit.zero_cases import LAYER, sharded


def kinds_of(plan: Plan) -> Counter[tuple[str, str]]:
    return Counter((op.kind, op.label) for op in walk(expand(plan)[0]))


# -- what is listed


def test_each_stage_lists_its_own_sums_and_gathers() -> None:
    given_, m, names = gpt(2, 6), 3, ("embed", "l0", "l1", "l2", "l3", "head")
    found = {z: kinds_of(sharded(given_, z)) for z in (1, 2, 3)}
    assert found[1]["REDUCE_GRAD", ""] == found[1]["UNSHARD", ""] == 1
    for name in names:
        assert found[2]["REDUCE_GRAD", name] == found[3]["REDUCE_GRAD", name] == m
        assert found[2]["UNSHARD", name] == 1 and not found[2]["UNSHARD_B", name]
        # The last segment's forward and backward share a gather, and so do two microbatches'.
        shares = {"head": m, "embed": m - 1}.get(name, 0)
        assert found[3]["UNSHARD", name] + found[3]["UNSHARD_B", name] == 2 * m - shares


def test_the_pass_is_named_once_in_either_order() -> None:
    given_ = gpt(2, 2)
    orders = []
    for choices in (["zero", "offload"], ["offload", "zero"]):
        knobs = {"zero": {"stage": 3}, "offload": {"parameters": 2, "optimizer": LAYERS}}
        draft = uniform(given_.model, 2, range(2))
        orders.append(lower(given_, compose(given_, [(c, knobs[c]) for c in choices], start=draft)))
    assert orders[0] == orders[1]
    assert [c.name for c in orders[0].lowering].count("segments") == 1
    alone = lower(given_, uniform(given_.model, 2, range(2), zero=3))
    assert [c.name for c in alone.lowering].count("segments") == 1


# -- memory


@pytest.mark.parametrize("chips", [2, 4])
def test_states_are_divided_as_the_paper_says(chips: int) -> None:
    # Section 5 and figure 1: 2, 2 and 12 bytes a parameter, each divided from its stage on.
    given_ = gpt(chips, 2 * chips)
    params = sum(rank_params(given_.model.blocks))
    rings = {"gradients": 2 * 2 * LAYER, "gathered": 2 * 2 * LAYER}
    for zero in (0, 1, 2, 3):
        plan = sharded(given_, zero)
        terms = ledger(plan, given_, plan.placement.cells[0]).terms
        shares = [chips if zero >= at else 1 for at in (1, 2, 3)]
        assert terms["optimizer"] == pytest.approx(12 * params / shares[0])
        ring = rings["gradients"] if zero >= 2 else 0
        assert terms["gradients"] == pytest.approx(2 * params / shares[1] + ring)
        assert terms["parameters"] == pytest.approx(2 * params / shares[2])
        assert terms["gathered"] == pytest.approx(rings["gathered"] if zero == 3 else 0)


def test_gradients_of_one_microbatch_leave_for_the_host() -> None:
    given_ = gpt(2, 2)
    params = sum(rank_params(given_.model.blocks))
    for hosted, shards in ((0, params / 2), (LAYERS, (params - LAYERS * LAYER) / 2 + LAYER)):
        knobs = {"optimizer": hosted} if hosted else {}
        plan = sharded(given_, 2, **knobs)
        terms = ledger(plan, given_, plan.placement.cells[0]).terms
        assert terms["gradients"] == pytest.approx(2 * (2 * LAYER + shards))


def test_the_host_holds_and_moves_shards() -> None:
    given_, chips = gpt(4, 4), 4
    knobs = {"parameters": 2, "optimizer": LAYERS, "priority": False}
    plan = sharded(given_, 3, **knobs)
    terms = ledger(plan, given_, plan.placement.cells[0]).terms
    rest = sum(rank_params(given_.model.blocks)) - LAYERS * LAYER
    assert terms["parameters"] == pytest.approx(2 * (rest + 2 * LAYER) / chips)
    assert terms["optimizer"] == pytest.approx(12 * rest / chips)
    assert terms["gathered"] == pytest.approx(2 * 2 * (LAYER + LAYER / chips))
    # All ranks of the node together hold each state once.
    host = host_ledgers(plan, given_, knobs_of)[0].terms
    want = {"optimizer": 12.0, "gradients": 2.0, "parameters": 2.0}
    assert host == pytest.approx({k: n * LAYERS * LAYER for k, n in want.items()})
    moved = bytes_of(plan, given_)
    assert moved["D2H", "l3"] == pytest.approx(2 * LAYER / chips)
    assert moved["H2D", "l3"] == pytest.approx(2 * LAYER / chips)
    assert moved["FETCH_F", "l0"] == moved["FETCH_B", "l0"] == pytest.approx(2 * LAYER / chips)
    assert ("H2D", "l0") not in moved
    assert peak(plan, given_) < peak(sharded(given_, 3), given_) < peak(sharded(given_, 1), given_)


def peak(plan: Plan, given_: Problem) -> float:
    return max(x.peak_bytes for x in peak_memory(plan, given_).values())


def bytes_of(plan: Plan, given_: Problem) -> dict[tuple[str, str], float]:
    run = simulate(plan, given_)
    nbytes = run.prices.nbytes
    assert nbytes is not None
    return {
        (op.kind, op.label): float(n) for op, n in zip(run.layout.graph.ops, nbytes, strict=True)
    }


def test_a_tied_matrix_is_gathered_and_summed_where_it_is_used() -> None:
    given_ = problem(machine(1, 2), small(tied=True), batch=2)
    plan = lower(given_, uniform(given_.model, 2, range(2), zero=3))
    validate(plan, given_)
    moved = bytes_of(plan, given_)
    head = next(s for s in plan.placement.segments if s.name == "head")
    blocks = given_.model.blocks[slice(*head.blocks)]
    assert any(b.shares for b in blocks)
    assert moved["UNSHARD", "head"] == pytest.approx(sum(rank_params(blocks)) * 2 / 2)
    assert moved["REDUCE_GRAD", "head"] == pytest.approx(sum(rank_params(blocks)) * 4 / 2)
    # It is owned, and updated, once.
    terms = ledger(plan, given_, plan.placement.cells[0]).terms
    assert terms["parameters"] == pytest.approx(2 * sum(rank_params(given_.model.blocks)) / 2)


def test_unlike_tensor_parallelism_gathers_fine_shards() -> None:
    given_ = problem(machine(1, 3), small(), batch=4)
    draft = PlanDraft(
        cells=(
            CellKnobs(stage=0, replica=0, chips=(0,)),
            CellKnobs(stage=0, replica=1, chips=(1, 2), tp=2),
        ),
        data=DataKnobs(microbatches=(2, 2), zero=3),
    )
    plan = lower(given_, draft)
    validate(plan, given_)
    run = simulate(plan, given_, steps=2)
    assert run.makespan == pytest.approx(simulate(plan, given_, steps=2, fold=False).makespan)
    single = simulate(plan, given_, fold=False)
    graph = single.layout.graph
    pieces = [k for k, op in enumerate(graph.ops) if op.name == "0UNSHARD0[l1]"]
    assert len(pieces) == 2 and single.prices.nbytes is not None
    layer = next(s for s in plan.placement.segments if s.name == "l1")
    half = sum(rank_params(given_.model.blocks[slice(*layer.blocks)], 2))
    assert single.prices.nbytes[pieces] == pytest.approx(2 * half / 2)


@pytest.mark.parametrize("tp", [1, 2])
def test_gathers_between_nodes_cost_what_the_collective_does(tp: int) -> None:
    given_ = problem(machine(2, 2), small(), batch=4)
    plan = lower(given_, uniform(given_.model, 4, range(4), tp=tp, zero=3))
    validate(plan, given_)
    run = simulate(plan, given_, contention=False)
    assert run.makespan == pytest.approx(
        simulate(plan, given_, contention=False, fold=False).makespan
    )
    layer = next(s for s in plan.placement.segments if s.name == "l1")
    nbytes = 2 * sum(rank_params(given_.model.blocks[slice(*layer.blocks)], tp))
    chips = [0, 2] if tp == 2 else [0, 1, 2, 3]
    want = collective_cost(given_.machine, "all_gather", chips, nbytes).seconds
    start, end = spans(run)[0, "UNSHARD", 0, "l1", 0]
    assert end - start == pytest.approx(want)
    shared = [simulate(plan, given_, fold=fold).makespan for fold in (True, False)]
    assert shared[0] == pytest.approx(shared[1]) and shared[0] >= run.makespan * (1 - 1e-9)


def test_context_parallel_ranks_share_as_replicas_do() -> None:
    given_ = problem(machine(1, 4), small(), batch=2)
    plan = lower(given_, uniform(given_.model, 2, range(4), cp=2, zero=3))
    validate(plan, given_)
    terms = ledger(plan, given_, plan.placement.cells[0]).terms
    assert terms["parameters"] == pytest.approx(sum(rank_params(given_.model.blocks)) * 2 / 4)


def test_fp16_updates_wait_for_all_gradients() -> None:
    base = gpt(2, 2)
    fp16 = msgspec.structs.replace(base, job=msgspec.structs.replace(base.job, dtype="fp16"))
    for given_, late in ((base, False), (fp16, True)):
        plan = sharded(given_, 3)
        assert plan.placement.late_updates == late
        at = spans(simulate(plan, given_))
        last = max(v[1] for k, v in at.items() if k[1] == "REDUCE_GRAD")
        assert (min(v[0] for k, v in at.items() if k[1] == "OPT") >= last - 1e-12) == late
