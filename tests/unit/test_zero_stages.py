"""ZeRO-2 and 3: which sums and gathers a plan lists, its memory, its proofs and its refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.collective import collective_cost
from sim.cost.ledger import knobs_of, ledger, peak_memory
from sim.cost.occupancy import memory_over_time
from sim.cost.offload import host_ledgers
from sim.engine.maxplus import longest_path
from sim.engine.simulate import Run, simulate
from sim.errors import InputError, PlanError
from sim.model.amounts import rank_params
from sim.plan.deps import resolve
from sim.plan.draft import CellKnobs, DataKnobs, ExpertKnobs, PipelineKnobs, PlanDraft
from sim.plan.flat import flatten
from sim.plan.io import plan_from_json, plan_to_json
from sim.plan.lower import lower
from sim.plan.op import Dep, Op
from sim.plan.passes import expand
from sim.plan.plan import Call, Plan, ProgramText
from sim.plan.program import Block, Program, format_program, parse_program, walk
from sim.plan.uniform import layer_cuts, uniform
from sim.plan.validate import validate
from sim.problem import Problem
from strategies.compose import compose
from strategies.registry import get
from tests.property.cost_cases import machine, problem, small
from tests.unit.test_offload import LAYERS, gpt, most, spans

LAYER = 12 * 1024**2 + 13 * 1024
"""Parameters of a layer of the small GPT."""


def sharded(
    given_: Problem,
    zero: int,
    *,
    stages: int = 1,
    chunks: int = 1,
    schedule: str = "1f1b",
    buffers: int = 0,
    **offload: Any,
) -> Plan:
    """Equal cells on all chips of a machine, with or without offloading."""
    blocks, chips = given_.model.blocks, given_.machine.num_chips
    virtual = stages * chunks
    replicas, m = chips // stages, given_.job.global_batch * stages // chips
    draft = PlanDraft(
        cells=tuple(
            CellKnobs(stage=s, replica=r, chips=(r * stages + s,))
            for s in range(stages)
            for r in range(replicas)
        ),
        pipeline=PipelineKnobs(
            cuts=layer_cuts(given_.model, (LAYERS // virtual,) * virtual),
            schedule="interleaved" if chunks > 1 else schedule,
            chunks=chunks,
        ),
        data=DataKnobs(microbatches=(m,) * replicas),
    )
    assert draft.pipeline.cuts[-1] == len(blocks)
    choices: list[tuple[str, Any]] = [("zero", {"stage": zero, "buffers": buffers})]
    if offload:
        choices.insert(len(offload) % 2, ("offload", offload))
    return lower(given_, compose(given_, choices, start=draft))


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


# -- any plan is sound


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Plan]:
    replicas, stages, chunks = draw(
        st.sampled_from([(2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1)])
    )
    m = draw(st.sampled_from([1, 2, 3])) * (stages if chunks > 1 else 1)
    zero = draw(st.sampled_from([2, 3]))
    count = st.integers(0, LAYERS)
    offload = {
        "checkpointed": draw(count),
        "parameters": draw(count) if zero == 3 else 0,
        "optimizer": draw(count),
        "clipping": draw(st.sampled_from(["none", "global", "speculate"])),
        "whole_steps": draw(st.booleans()),
        "parameter_buffers": draw(st.integers(1, 3)),
        "gradient_buffers": draw(st.integers(1, 3)),
    }
    given_ = gpt(replicas * stages, replicas * m)
    plan = sharded(
        given_,
        zero,
        stages=stages,
        chunks=chunks,
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
        buffers=draw(st.sampled_from([0, 1, 2])),
        **(offload if draw(st.booleans()) else {}),
    )
    return given_, plan


@settings(max_examples=40)
@given(cases())
def test_any_sharded_plan_is_sound(case: tuple[Problem, Plan]) -> None:
    given_, plan = case
    validate(plan, given_)
    assert plan_from_json(plan_to_json(plan)) == plan
    run = simulate(plan, given_, steps=3)
    assert run.makespan == pytest.approx(simulate(plan, given_, steps=3, fold=False).makespan)
    rings_hold(plan, run)
    for times, nbytes in memory_over_time(
        run.layout.graph, run.layout.wiring, plan, given_, run.outcome.start, run.outcome.end
    ):
        assert len(times) and nbytes.min() >= 0
        assert nbytes[-1] == pytest.approx(nbytes[0])


def rings_hold(plan: Plan, run: Run) -> None:
    """Gathered parameters are fresh and there, and never more than there are buffers for."""
    at, placement = spans(run), plan.placement
    gathered: list[tuple[int, str, int, str, int]] = []
    unsummed = []
    for key, (start, end) in sorted(at.items(), key=lambda x: x[1]):
        step, kind, stage, label, mb = key
        if kind in ("UNSHARD", "UNSHARD_B") and mb >= 0 and step:
            assert start >= at[step - 1, "OPT", stage, label, -1][1]
        if kind in ("B", "W") and (kind == "W" or (step, "W", stage, label, mb) not in at):
            summed = at[step, "REDUCE_GRAD", stage, label, mb]
            assert summed[0] >= end - 1e-12
            unsummed += [(start, 1), (summed[1], -1)]
        if kind in ("F", "B", "I"):
            gathered.append(key)
    most(unsummed, placement.gradient_buffers)
    if plan.mathematics.zero < 3:
        return
    held = []
    gathered.sort(key=lambda k: (k[0], at[k]))
    last = None
    for key in gathered:
        step, kind, stage, label, mb = key
        came = at.get((step, "UNSHARD" if kind == "F" else "UNSHARD_B", stage, label, mb))
        if (step, stage, label) == last:
            assert came is None
            held[-1] = (at[key][1], -1)
        else:
            assert came is not None and came[1] <= at[key][0] + 1e-12
            held += [(came[0], 1), (at[key][1], -1)]
        last = (step, stage, label)
    most(held, placement.parameter_buffers)


@settings(max_examples=15)
@given(cases())
def test_engine_equals_max_plus_without_contention(case: tuple[Problem, Plan]) -> None:
    given_, plan = case
    if any(op.priority is not None for p in expand(plan) for op in walk(p)):
        calls = [
            Call(c.name, c.version, c.args | ({"priority": False} if c.name == "segments" else {}))
            for c in plan.lowering
        ]
        plan = msgspec.structs.replace(plan, lowering=tuple(calls))
    run = simulate(plan, given_, steps=2, contention=False, overlap=False)
    _, end = longest_path(run.layout.graph, run.prices.seconds)
    assert run.makespan == pytest.approx(end.max(), rel=1e-9)


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


# -- broken programs


def rewritten(plan: Plan, change: Callable[[list[Op]], list[Op]]) -> Plan:
    """The plan with its programs written out and changed; dependencies on lost ops go too."""
    found = []
    for p in expand(plan):
        ops = change(list(walk(p)))
        names = {op.name for op in ops}
        ops = [
            op
            if op.deps is None
            else msgspec.structs.replace(op, deps=tuple(d for d in op.deps if d.name in names))
            for op in ops
        ]
        block = Block(form="repeat", items=tuple(ops), count=0)
        found.append(ProgramText(p.ranks, format_program(Program(ranks=p.ranks, blocks=(block,)))))
    return msgspec.structs.replace(plan, programs=tuple(found), lowering=())


def lose(ops: list[Op]) -> list[Op]:
    return [op for op in ops if op.name != "0REDUCE_GRAD1[l2]"]


def twice(ops: list[Op]) -> list[Op]:
    at = next(i for i, op in enumerate(ops) if op.name == "0REDUCE_GRAD1[l2]")
    return [*ops[: at + 1], ops[at], *ops[at + 1 :]]


def whole_too(ops: list[Op]) -> list[Op]:
    at = max(i for i, op in enumerate(ops) if op.kind == "REDUCE_GRAD" and op.label == "l2")
    return [*ops[: at + 1], msgspec.structs.replace(ops[at], mb=-1), *ops[at + 1 :]]


def early(ops: list[Op]) -> list[Op]:
    of = next(i for i, op in enumerate(ops) if op.name == "0REDUCE_GRAD1[l2]")
    to = next(i for i, op in enumerate(ops) if op.name == "0B1[l2]")
    one = msgspec.structs.replace(ops[of], deps=())
    return [*ops[:to], one, *ops[to:of], *ops[of + 1 :]]


def of_another(ops: list[Op]) -> list[Op]:
    at = next(i for i, op in enumerate(ops) if op.name == "0REDUCE_GRAD1[l2]")
    more = msgspec.structs.replace(ops[at], mb=7)
    return [*ops[: at + 1], more, *ops[at + 1 :]]


def hasty(ops: list[Op]) -> list[Op]:
    """The update of l2 waits for the backward, but not for the last sum."""
    found = [op for op in ops if op.name != "0OPT[l2]"]
    at = next(i for i, op in enumerate(found) if op.name == "0REDUCE_GRAD1[l2]")
    update = Op(kind="OPT", stage=0, label="l2", deps=(Dep("0B1[l2]"), Dep("0REDUCE_GRAD0[l2]")))
    return [*found[:at], update, *found[at:]]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose, "never reduced"),
        (twice, "reduced twice"),
        (whole_too, "reduced twice"),
        (early, "before all of its gradient"),
        (of_another, "no backward makes"),
        (hasty, "never reduced"),
    ],
)
def test_broken_sums_are_refused(
    zero: int, change: Callable[[list[Op]], list[Op]], message: str
) -> None:
    plan = sharded(gpt(2, 4), zero)
    validate(rewritten(plan, list))
    with pytest.raises(PlanError, match=message):
        validate(rewritten(plan, change))


def test_text_implies_what_the_pass_writes() -> None:
    program = parse_program(
        "0UNSHARD0 ; 0F0 ; 0UNSHARD1 ; 0F1 ; 0UNSHARD_B1 ; 0B1 ; 0REDUCE_GRAD1 ; 0B0 ; "
        "0REDUCE_GRAD0 ; 0OPT",
        (0,),
    )
    flat = flatten(program)
    names = [op.name for op in flat.ops]
    found = {
        names[i]: {(names[j], d) for j, d in deps}
        for i, deps in enumerate(resolve(flat, frozenset({0})))
    }
    assert found["0F0"] == {("0UNSHARD0", 0), ("0OPT", 1)}
    assert ("0UNSHARD1", 0) in found["0F1"] and ("0UNSHARD0", 0) not in found["0F1"]
    assert ("0UNSHARD_B1", 0) in found["0B1"] and ("0UNSHARD_B1", 0) not in found["0B0"]
    assert found["0REDUCE_GRAD1"] == {("0B1", 0)} and found["0REDUCE_GRAD0"] == {("0B0", 0)}
    assert found["0OPT"] == {("0REDUCE_GRAD1", 0), ("0REDUCE_GRAD0", 0)}


# -- refusals


def drafted(**changes: Any) -> PlanDraft:
    return msgspec.structs.replace(uniform(gpt(4, 4).model, 4, range(4), zero=3), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": DataKnobs(microbatches=(2, 1, 1), zero=2)}, "equally many"),
        ({"expert": ExpertKnobs(ep=2)}, "experts"),
        ({"pipeline": PipelineKnobs(blocking_p2p=True)}, "blocking"),
        ({"data": DataKnobs(microbatches=(1,) * 4, zero=3, buffers=-1)}, "at least one buffer"),
    ],
)
def test_what_does_not_run_by_segment_is_refused(changes: dict[str, Any], message: str) -> None:
    draft = drafted(**changes)
    if len(draft.data.microbatches) == 3:
        draft = msgspec.structs.replace(draft, cells=draft.cells[:3])
    with pytest.raises(InputError, match=message):
        lower(gpt(4, 4), draft)


def test_a_tied_embedding_on_two_positions_is_refused() -> None:
    given_ = problem(machine(1, 4), small(tied=True), batch=4)
    with pytest.raises(InputError, match="tied embedding"):
        lower(given_, uniform(given_.model, 4, range(4), pp=2, zero=3))
    draft = uniform(given_.model, 4, range(4), pp=2)
    assert [k.stage for k in get("zero").space(given_, draft)] == [1, 0]


def test_plans_are_refused_likewise() -> None:
    plan = sharded(gpt(2, 4), 3, optimizer=1)
    for changes, message in (
        ({"mathematics": msgspec.structs.replace(plan.mathematics, zero=4)}, "unknown ZeRO"),
        ({"lowering": plan.lowering[:-1]}, "segment by segment"),
    ):
        with pytest.raises(PlanError, match=message):
            validate(msgspec.structs.replace(plan, **changes))
    hosted = sharded(gpt(2, 4), 3, parameters=1)
    for zero in (1, 2):
        math = msgspec.structs.replace(hosted.mathematics, zero=zero)
        with pytest.raises(PlanError, match="whole parameters on the host"):
            expand(msgspec.structs.replace(hosted, mathematics=math))
        with pytest.raises(InputError, match="stage 3"):
            sharded(gpt(2, 4), zero, parameters=1)
    placement = msgspec.structs.replace(plan.placement, microbatches=(3, 1))
    with pytest.raises(PlanError, match="unlike numbers"):
        expand(msgspec.structs.replace(plan, placement=placement))


def test_the_strategy_offers_all_stages_and_refuses_no_buffers() -> None:
    given_ = gpt(2, 2)
    draft = uniform(given_.model, 2, range(2))
    assert [k.stage for k in get("zero").space(given_, draft)] == [1, 0, 3, 2]
    pins = msgspec.structs.replace(given_.job.pins, zero=3)
    pinned = msgspec.structs.replace(given_, job=msgspec.structs.replace(given_.job, pins=pins))
    assert [k.stage for k in get("zero").space(pinned, draft)] == [3]
    with pytest.raises(InputError, match="at least one buffer"):
        compose(given_, [("zero", {"stage": 3, "buffers": -1})], start=draft)
    with pytest.raises(InputError, match="knobs of strategy zero"):
        compose(given_, [("zero", {"stage": 4})], start=draft)
