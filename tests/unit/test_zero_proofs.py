"""ZeRO-2 and 3: what the proof of updates refuses, and what strategy and plan refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sim.errors import InputError, PlanError
from sim.plan.deps import resolve
from sim.plan.draft import DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.flat import flatten
from sim.plan.lower import lower
from sim.plan.op import Dep, Op
from sim.plan.passes import expand
from sim.plan.plan import Plan, ProgramText
from sim.plan.program import Block, Program, format_program, parse_program, walk
from sim.plan.uniform import uniform
from sim.plan.validate import validate
from strategies.compose import compose
from strategies.registry import get
from tests.property.cost_cases import machine, problem, small
from tests.unit.test_offload import gpt
from tests.unit.zero_cases import sharded

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
        ({"pipeline": PipelineKnobs(blocking_p2p=True)}, "blocking"),
        ({"data": DataKnobs(microbatches=(1,) * 4, zero=3, buffers=-1)}, "below its range"),
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
