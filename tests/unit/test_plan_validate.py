"""Each rule of the plan format, broken once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from sim.errors import PlanError
from sim.plan.io import load_plan, plan_from_json, plan_to_json, save_plan
from sim.plan.lower import lower
from sim.plan.passes import expand, standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment, pieces
from sim.plan.plan import FORMAT, Call, Plan, ProgramText
from sim.plan.program import format_program
from sim.plan.uniform import uniform
from sim.plan.validate import validate
from sim.problem import load_problem

GOOD = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0OPT",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1OPT",
)


def placement(m: int = 2) -> Placement:
    return Placement(
        cells=(Cell(stage=0, replica=0, ranks=(0,)), Cell(stage=1, replica=0, ranks=(1,))),
        segments=(
            Segment(stage=0, cell=0, blocks=(0, 2)),
            Segment(stage=1, cell=1, blocks=(2, 4)),
        ),
        boundaries=(Boundary(src=0, dst=1),),
        microbatches=(m,),
    )


def plan(first: str = GOOD[0], second: str = GOOD[1], **changes: object) -> Plan:
    base = Plan(
        placement=placement(), programs=(ProgramText((0,), first), ProgramText((1,), second))
    )
    return msgspec.structs.replace(base, **changes)


def test_a_good_plan_passes() -> None:
    assert validate(plan()) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (GOOD[0].replace("0F1 0SEND_F1", "0SEND_F1"), GOOD[1], "every microbatch"),
        (GOOD[0].replace("0F1 ", "0F1 0F1 "), GOOD[1], "runs 2 times"),
        (GOOD[0].replace("0B1 ", ""), GOOD[1], "needs one B, or one I and one W"),
        (GOOD[0].replace("0B1 ", "0I1 "), GOOD[1], "needs one B, or one I and one W"),
        (GOOD[0].replace("0F1 ", "0F1{saves=inputs} "), GOOD[1], "recomputed 0 times"),
        (GOOD[0].replace("0B1 ", "0R1 0B1 "), GOOD[1], "recomputed 1 times"),
        (GOOD[0].replace(" 0OPT", ""), GOOD[1], "never applied"),
        (GOOD[0].replace("0F0 ", "1F0 "), GOOD[1], "stages it hosts"),
        (
            GOOD[0].replace("0SEND_F0 ", "").replace("0F0 ", "0F0 0SEND_F9 "),
            GOOD[1],
            "list differ|has no (SEND|RECV)_F",
        ),
        (GOOD[0], GOOD[1].replace("1RECV_F0 1F0", "1F0"), "list differ|has no (SEND|RECV)_F"),
        (GOOD[0].replace("0OPT", "0OPT <- 0B7"), GOOD[1], "not an op of its rank"),
        (GOOD[0].replace("0F0 ", "0F0 <- 0B1 "), GOOD[1], "later in the list"),
        (GOOD[0].replace("0F0 ", "0X0 "), GOOD[1], "unknown op kind"),
        (GOOD[0].replace("0B0 ", "0B0{reads=latest} "), GOOD[1], "changes the mathematics"),
    ],
)
def test_broken_programs(first: str, second: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(plan(first, second))


@pytest.fixture(scope="module")
def lowered() -> Plan:
    problem = load_problem(
        "a100x64", "llama2_7b", {"global_batch": 8, "sequence_length": 512, "dtype": "bf16"}
    )
    return lower(problem, uniform(problem.model, 8, range(4), pp=2))


def text_of(plan: Plan, edit: Callable[[str], str]) -> Plan:
    """The lowered plan with its programs written out and edited."""
    texts = tuple(ProgramText(p.ranks, edit(format_program(p))) for p in expand(plan))
    return msgspec.structs.replace(plan, lowering=(), programs=texts)


def test_a_lowered_plan_passes_both_ways(lowered: Plan) -> None:
    assert validate(lowered) is None  # type: ignore[func-returns-value]
    assert validate(text_of(lowered, lambda t: t)) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.replace("REDUCE_GRAD ;", "REDUCE_GRAD ; 0REDUCE_GRAD ;", 1), "reduced twice"),
        (lambda t: t.replace("OPT ;", "OPT ; 0OPT ;", 1), "applied twice"),
        (
            lambda t: t.replace("0REDUCE_GRAD ; ", "").replace("1REDUCE_GRAD ; ", ""),
            "never reduced",
        ),
        (lambda t: t.replace("0B3 ; 0REDUCE_GRAD", "0REDUCE_GRAD ; 0B3"), "before all of its grad"),
        (lambda t: t.replace("0OPT", "0OPT <- 0B0"), "never reduced"),
        (lambda t: t.replace("0B2", "0I2"), "needs one B, or one I and one W"),
        (
            lambda t: t.replace("0B3 ;", "0I3 ; 0W3 ;").replace("0OPT", "0OPT{stream=host} <- 0I3"),
            "before all of its gradient",
        ),
        (lambda t: t.replace("0F0 ;", "0F0 ; 0UNSHARD ; 0RESHARD ; 0RESHARD ;"), "not dropped as"),
    ],
)
def test_gradients_are_proved(lowered: Plan, edit: Callable[[str], str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(text_of(lowered, edit))


def with_placement(plan: Plan, **changes: object) -> Plan:
    return msgspec.structs.replace(
        plan, placement=msgspec.structs.replace(plan.placement, **changes)
    )


def test_a_plan_belongs_to_its_problem(lowered: Plan) -> None:
    last = lowered.placement.segments[-1]
    short = msgspec.structs.replace(last, blocks=(last.blocks[0], last.blocks[1] - 1))
    ten = {k: msgspec.structs.replace(a, flops=10 * a.flops) for k, a in lowered.amounts.items()}
    wrong_cell = msgspec.structs.replace(lowered.placement.cells[0], accelerator="T4")
    broken = {
        "blocks": with_placement(lowered, segments=(*lowered.placement.segments[:-1], short)),
        "boundaries": with_placement(lowered, boundaries=()),
        "microbatches": with_placement(lowered, microbatches=(2, 2)),
        "other accelerators": with_placement(
            lowered, cells=(wrong_cell, *lowered.placement.cells[1:])
        ),
        "chip the machine lacks": with_placement(lowered, chips=(0, 1, 2, 99)),
        "problem_hash": msgspec.structs.replace(lowered, problem_hash="0" * 16),
        "global_batch": msgspec.structs.replace(
            lowered, mathematics=msgspec.structs.replace(lowered.mathematics, global_batch=64)
        ),
        "amounts": msgspec.structs.replace(lowered, amounts=ten),
    }
    for what, plan_ in broken.items():
        with pytest.raises(PlanError) as caught:
            validate(plan_)
        assert what in str(caught.value), (what, str(caught.value))


@pytest.mark.parametrize(
    "changes",
    [
        {"ep": 0}, {"microbatches": (0, 4)}, {"chips": (-1, 0, 1, 2)}, {"cells": ()},
        {"microbatches": (10**9, 4)},
    ],
)  # fmt: skip
def test_impossible_sizes(lowered: Plan, changes: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        validate(with_placement(lowered, **changes))


def test_odd_segments_boundaries_and_calls(lowered: Plan) -> None:
    far = msgspec.structs.replace(lowered.placement.segments[0], cell=7)
    broken = [
        with_placement(lowered, segments=(far, lowered.placement.segments[1])),
        with_placement(lowered, boundaries=(Boundary(src=0, dst=5),)),
        with_placement(lowered, cells=lowered.placement.cells[:-1]),
        msgspec.structs.replace(lowered, lowering=(Call("schedule", 1, {"name": 3}),)),
        msgspec.structs.replace(lowered, lowering=(Call("schedule", 1, {"chunks": 0}),)),
        msgspec.structs.replace(lowered, lowering=(Call("transfers"),)),
    ]
    for plan_ in broken:
        with pytest.raises(PlanError):
            validate(plan_)


def test_unknown_keys_of_a_file_are_refused(lowered: Plan) -> None:
    data = plan_to_json(lowered).replace(b'"buffers":2', b'"buffers":2,"bufers":3')
    with pytest.raises(PlanError, match="bufers"):
        plan_from_json(data)


def test_the_hash_covers_what_changes_a_run(lowered: Plan) -> None:
    changed = [
        msgspec.structs.replace(lowered, buffers=3),
        msgspec.structs.replace(lowered, barrier=False),
        with_placement(lowered, whole_boundaries=True),
        msgspec.structs.replace(lowered, lowering=lowered.lowering[:-1]),
    ]
    hashes = {lowered.hash, *(p.hash for p in changed)}
    assert len(hashes) == 1 + len(changed)
    assert msgspec.structs.replace(lowered, version="other").hash == lowered.hash


def test_a_circle_is_named() -> None:
    # Each rank waits for the other's transfer before it sends its own.
    first = "0RECV_B0 0F0 <- 0RECV_B0 ; 0SEND_F0 0B0 0OPT"
    with pytest.raises(PlanError, match="circle") as caught:
        validate(
            plan(
                first,
                "1RECV_F0 1F0 1B0 1SEND_B0 1OPT",
                placement=msgspec.structs.replace(placement(1)),
            )
        )
    assert "RECV" in caught.value.found or "SEND" in caught.value.found


def test_host_optimizer_must_wait_for_its_gradient() -> None:
    late = GOOD[0].replace("0OPT", "0OPT{stream=host} <- 0B0")
    with pytest.raises(PlanError, match="before all of its gradient"):
        validate(plan(late))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exact": False}, "must say why"),
        ({"reason": "x"}, "no reason to be inexact"),
        ({"buffers": -1}, "negative"),
        ({"placement": msgspec.structs.replace(placement(), chips=(0, 0))}, "each used once"),
        ({"placement": msgspec.structs.replace(placement(), microbatches=(2, 2))}, "per replica"),
        (
            {
                "placement": msgspec.structs.replace(
                    placement(),
                    segments=(
                        Segment(stage=0, cell=0, blocks=(0, 2)),
                        Segment(stage=1, cell=1, blocks=(3, 4)),
                    ),
                )
            },
            "placed once",
        ),
        ({"programs": (ProgramText((0,), GOOD[0]),)}, "has none"),
    ],
)
def test_broken_plans(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(plan(**changes))


def test_cells_and_sizes_must_agree() -> None:
    bad = msgspec.structs.replace(
        placement(),
        cells=(
            Cell(stage=0, replica=0, ranks=(0,), tp=2),
            Cell(stage=1, replica=0, ranks=(1,)),
        ),
    )
    with pytest.raises(PlanError, match="tp x cp"):
        validate(plan(placement=bad))


def test_tp_sizes_that_do_not_divide_are_refused_by_name() -> None:
    cells = (
        Cell(stage=0, replica=0, ranks=(0, 1), tp=2),
        Cell(stage=0, replica=1, ranks=(2, 3, 4), tp=3),
    )
    bad = Plan(
        placement=Placement(cells=cells, segments=(Segment(stage=0, cell=0),), microbatches=(1, 1)),
        lowering=standard_calls("1f1b", 1, False, False, (), ()),
    )
    with pytest.raises(PlanError, match="do not divide one another") as caught:
        validate(bad)
    assert caught.value.found == "2 and 3"


def test_pieces_cross_the_wire_once() -> None:
    a = Cell(stage=0, replica=0, ranks=(0, 1, 2, 3), tp=4)
    b = Cell(stage=1, replica=0, ranks=(4, 5), tp=2)
    found = pieces(a, b)
    assert [(p.src, p.dst) for p in found] == [(0, 4), (1, 4), (2, 5), (3, 5)]
    assert sum((p.stop - p.start) / p.of for p in found) == 1.0


def test_a_pass_that_is_not_installed() -> None:
    with pytest.raises(PlanError, match="not installed"):
        validate(plan(programs=(), lowering=(Call("no-such-pass"),)))


def test_a_pass_of_a_newer_version() -> None:
    with pytest.raises(PlanError, match="newer version"):
        validate(plan(programs=(), lowering=(Call("schedule", 99),)))


def test_file_round_trip(tmp_path) -> None:  # type: ignore[no-untyped-def]
    target = tmp_path / "plan.json"
    save_plan(plan(), target)
    assert load_plan(target) == plan()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_never_replaces_a_device_or_a_folder(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for target in ("/dev/null", tmp_path, tmp_path / "absent" / "plan.json"):
        with pytest.raises(PlanError, match="cannot write"):
            save_plan(plan(), target)
    assert list(tmp_path.iterdir()) == []


def test_bad_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    data = plan_to_json(plan())
    with pytest.raises(PlanError, match="truncated"):
        plan_from_json(data[:-40], "p.json")
    with pytest.raises(PlanError, match="newer version"):
        plan_from_json(data.replace(b'"format":1', b'"format":%d' % (FORMAT + 1)))
    with pytest.raises(PlanError, match="not a plan"):
        plan_from_json(data.replace(b'"buffers":2', b'"buffers":"two"'))
    with pytest.raises(PlanError, match="cannot read"):
        load_plan(tmp_path / "absent.json")
    for nested in (b"[" * 100_000, b'{"a":' * 100_000, b'{"problem":' + b"[" * 100_000):
        with pytest.raises(PlanError):
            plan_from_json(nested)
