"""Layers of experts written out: the miniature's form, what boxed layers cost, what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sim.cost.ledger import peak_memory
from sim.cost.occupancy import memory_over_time
from sim.cost.stated import stated_prices
from sim.engine.simulate import lay_out, run_layout, simulate
from sim.errors import PlanError
from sim.plan.lower import lower
from sim.plan.op import Op
from sim.plan.passes import expand
from sim.plan.plan import Call, Plan, Table
from sim.plan.program import walk
from sim.plan.validate import validate
from strategies.testing import assert_memory_comes_back
from tests.unit.lend_cases import both, pro_prophet, small


@pytest.mark.parametrize(("steps", "makespan"), [(1, 19.75), (2, 34.25)])
@pytest.mark.parametrize("fold", [True, False])
def test_the_second_miniature_as_the_pass_writes_it(
    steps: int, makespan: float, fold: bool
) -> None:
    plan, seconds = pro_prophet()
    validate(plan)
    layout = lay_out(plan, steps=steps, fold=fold)
    run = run_layout(layout, lambda lay: stated_prices(lay.graph, seconds, {}, lay.late))
    assert run.makespan == makespan


def test_blocking_nothing_hides_a_transfer() -> None:
    """Step 1 then waits for 1.5 s of parameters and 1.5 s of gradients, each twice 0.75 s long."""
    plan, seconds = pro_prophet()
    calls = list(plan.lowering)
    calls[-1] = Call("lend", 1, calls[-1].args | {"overlap": False})
    values = dict(plan.tables["lent"].values)
    values |= {f"b1.{what}": [0.0, 3.0] for what in ("move", "reduce")}
    tables = plan.tables | {"lent": Table(values=values)}
    plan = msgspec.structs.replace(plan, lowering=tuple(calls), tables=tables)
    validate(plan)
    layout = lay_out(plan, steps=2)
    run = run_layout(layout, lambda lay: stated_prices(lay.graph, seconds, {}, lay.late))
    assert run.makespan == 34.25 + 2 * 1.5


@pytest.mark.parametrize(
    ("chips", "sizes"),
    [
        (8, {"ep": 8}),
        (8, {"ep": 4}),
        (16, {"ep": 8}),
        (16, {"ep": 4, "zero": 1}),
        (16, {"ep": 8, "pp": 2}),
        (16, {"ep": 4, "pp": 2, "recompute": "full"}),
        (8, {"ep": 8, "recompute": "selective", "microbatch": 2}),
        (16, {"tp": 2, "ep": 8}),
        (16, {"tp": 8, "ep": 2}),
        (8, {"tp": 2, "ep": 2, "sequence_parallel": True}),
        (16, {"cp": 2, "ep": 8}),
        (16, {"ep": 8, "pp": 2, "split_backward": True}),
        (16, {"ep": 8, "zero": 2}),
        (16, {"ep": 4, "zero": 3}),
    ],
)
def test_written_out_equals_boxed_where_boxing_is_legal(chips: int, sizes: dict[str, Any]) -> None:
    """Even tokens, and nothing else on the links of an exchange while it runs: the same step."""
    problem = small()
    boxed, out, _ = both(chips, **sizes)
    validate(out, problem)
    one, other = (simulate(p, problem, steps=2) for p in (boxed, out))
    zero = sizes.get("zero", 0)
    if zero < 2:  # sums and gathers of each pass run beside the exchanges
        assert other.makespan == pytest.approx(one.makespan, rel=1e-9)
    else:
        assert other.makespan == pytest.approx(one.makespan, rel=0.1)
    ours, theirs = (peak_memory(p, problem)[0, 0] for p in (out, boxed))
    assert ours.terms == pytest.approx(theirs.terms)
    assert_memory_comes_back(other, problem)


def test_what_chips_are_calibrated_to_counts_in_both_forms() -> None:
    """Exchanges slower than the links say, a fixed cost of routed passes, sums that are hidden."""
    problem = small()
    numbers = {"ep_cost": 0.7, "tp_cost": 1.3, "sync_cost": 0.8, "routing_overhead_s": 1e-4}
    chips = {
        name: msgspec.structs.replace(chip, **numbers)
        for name, chip in problem.machine.accelerators.items()
    }
    machine = msgspec.structs.replace(problem.machine, accelerators=chips)
    other = msgspec.structs.replace(problem, machine=machine)
    plans = both(16, tp=2, ep=8)[:2]
    boxed, out = (simulate(p, other).makespan for p in plans)
    assert out == pytest.approx(boxed, rel=1e-9)
    assert boxed > 1.5 * simulate(plans[0], problem).makespan


def test_exchanges_contend_where_a_box_would_not() -> None:
    """Transfers of the pipeline cross the NICs of the exchanges, and other passes go on beside."""
    problem = small()
    boxed, out, _ = both(32, tp=4, pp=2, ep=4)
    alone = [simulate(p, problem, contention=False).makespan for p in (boxed, out)]
    shared = [simulate(p, problem).makespan for p in (boxed, out)]
    assert shared[0] == pytest.approx(alone[0], rel=1e-3)
    assert shared[1] > alone[1] * 1.0005


def test_no_op_of_a_pass_is_lost_or_double() -> None:
    """Every forward and backward stands once per segment, and experts' once per layer."""
    _, out, _ = both(16, ep=8, pp=2, microbatch=1)
    programs = expand(out)
    for program in programs:
        names = [op.name for op in walk(program) if op.kind in "FB"]
        assert len(names) == len(set(names))
        experts = [n for n in names if "/experts" in n]
        assert len(experts) == 2 * 2 * 2  # two layers of each stage, two microbatches, F and B
    ops = list(walk(programs[0]))
    rest = next(op for op in ops if op.name == "0F0[l1]")
    assert [d.name for d in rest.deps or ()] == ["0ALL_TO_ALL0[l0/combine]"]


def lending(**more: Any) -> tuple[Plan, list[Op]]:
    """Two stages of two layers each whose experts may be lent, by a table of zeros."""
    tables = {"lent": Table(values={"none": [0.0]})}
    _, plan, _ = both(16, {"table": "lent", "slots": 2, **more}, ep=8, pp=2)
    plan = msgspec.structs.replace(plan, tables=tables)
    return plan, list(walk(expand(plan)[0]))


def test_transfers_stand_once_a_step() -> None:
    """Parameters go out in the first microbatch, gradients come back in the last."""
    _, ops = lending()
    moves = [op.name for op in ops if op.kind == "MOVE_EXPERT"]
    sums = [op.name for op in ops if op.kind == "REDUCE_EXPERT"]
    assert moves == ["0MOVE_EXPERT[l0]", "0MOVE_EXPERT.0[l1]", "0MOVE_EXPERT.1[l1]"]
    assert sums == ["0REDUCE_EXPERT.0[l1]", "0REDUCE_EXPERT.1[l1]", "0REDUCE_EXPERT[l0]"]
    by_name = {op.name: {d.name for d in op.deps or ()} for op in ops}
    assert "0MOVE_EXPERT.1[l1]" in by_name["0F0[l1/experts]"]
    assert "0MOVE_EXPERT.1[l1]" not in by_name["0F1[l1/experts]"]
    assert by_name["0REDUCE_EXPERT.1[l1]"] == {"0ALL_TO_ALL1[l0/combine_b]"}
    assert set(sums) <= by_name["0OPT"]
    plain, _ = lending(slots=0)
    assert not [op for op in walk(expand(plain)[0]) if op.kind == "MOVE_EXPERT"]


@pytest.mark.parametrize(
    ("sizes", "updated"),
    [
        ({"pp": 2}, {"0OPT"}),
        ({"ep": 4, "zero": 1}, {"0OPT", "0UNSHARD[experts]"}),
        ({"zero": 2}, {"0OPT[l1]", "0UNSHARD[l1/experts]"}),
        ({"zero": 3}, {"0OPT[l1]"}),
    ],
)
def test_what_is_lent_is_updated_before(sizes: dict[str, Any], updated: set[str]) -> None:
    """Parameters leave behind the update of the step before, gathered where it shards them."""
    _, plan, _ = both(8 if "pp" not in sizes else 16, {"slots": 1}, **({"ep": 8} | sizes))
    ops = {op.name: op for op in walk(expand(plan)[0])}
    for part in (0, 1):
        deps = ops[f"0MOVE_EXPERT.{part}[l1]"].deps or ()
        assert {d.name for d in deps if d.distance == 1} == updated


def test_eager_transfers_of_the_first_layer_hold_nobody_up() -> None:
    """Parameters leave before the first forward, and no backward waits for gradients."""
    _, ops = lending(eager=True, search="lent")
    by_name = {op.name: {d.name for d in op.deps or ()} for op in ops}
    names = [op.name for op in ops]
    assert names.index("0MOVE_EXPERT[l0]") < names.index("0F0[l0]")
    assert by_name["0MOVE_EXPERT[l0]"] == {"0OPT", "0HOST[l0]"}
    assert "0MOVE_EXPERT[l0]" in by_name["0F0[l0/experts]"]
    assert by_name["0B1[l0]"] == {"0ALL_TO_ALL1[l0/dispatch_b]"}
    _, ops = lending(search="lent")
    waits = {op.name: {d.name for d in op.deps or ()} for op in ops}
    assert waits["0B1[l0]"] == {"0REDUCE_EXPERT[l0]"}
    assert "0ALL_TO_ALL0[l0/dispatch]" in waits["0MOVE_EXPERT[l0]"]


def test_slots_take_memory() -> None:
    """Parameters and gradients of two experts in each of a stage's two layers."""
    problem = small()
    plans = [both(16, {"slots": n}, ep=8, pp=2)[1] for n in (0, 2)]
    none, two = (peak_memory(p, problem)[0, 0].terms for p in plans)
    expert = problem.model.blocks[2].params_experts / 8
    assert two["gathered"] - none["gathered"] == pytest.approx(4 * expert * 2)
    job = problem.job
    assert two["gradients"] - none["gradients"] == pytest.approx(4 * expert * job.gradient_bytes)
    assert two["parameters"] == none["parameters"]


@pytest.mark.parametrize(
    ("args", "sizes", "message"),
    [
        ({"experts": {"0[l9]": "l9"}}, {}, "no such segment"),
        ({"slots": 1}, {"zero": 2, "ep": 4}, "ZeRO-2 or 3 shares out"),
        ({"fresh": True}, {}, "a search whose result its own step needs"),
    ],
)
def test_what_the_pass_does_not_carry_is_refused(
    args: dict[str, Any], sizes: dict[str, Any], message: str
) -> None:
    _, plan, _ = both(16, args, **({"ep": 8} | sizes))
    with pytest.raises(PlanError, match=message):
        expand(plan)


def test_unlike_members_of_an_exchange_are_refused() -> None:
    """A replica that repeats its forwards would list more exchanges than others of its group."""
    _, _, draft = both(8, ep=8)
    cells = (msgspec.structs.replace(draft.cells[0], recompute="full"), *draft.cells[1:])
    with pytest.raises(PlanError, match="unlike programs"):
        expand(lower(small(), msgspec.structs.replace(draft, cells=cells)))


def test_without_expert_parallelism_nothing_changes() -> None:
    boxed, out, _ = both(8)
    assert [op.kind for op in walk(expand(boxed)[0]) if op.kind == "F"] == ["F", "F"]
    assert not [op for op in walk(expand(out)[0]) if op.kind == "ALL_TO_ALL"]


def test_memory_over_time_counts_a_segment_once() -> None:
    problem = small()
    boxed, out, _ = both(8, ep=8)
    peaks = []
    for plan in (boxed, out):
        run = simulate(plan, problem)
        lay = run.layout
        rows = memory_over_time(
            lay.graph, lay.wiring, plan, problem, run.outcome.start, run.outcome.end
        )
        peaks.append(max(float(sizes.max()) for _, sizes in rows))
    assert peaks[1] == pytest.approx(peaks[0])
