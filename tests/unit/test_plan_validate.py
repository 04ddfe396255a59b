"""Each rule of the plan format, broken once."""

from __future__ import annotations

import msgspec
import pytest

from sim.errors import PlanError
from sim.plan.io import load_plan, plan_from_json, plan_to_json, save_plan
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment, pieces
from sim.plan.plan import FORMAT, Call, Plan, ProgramText
from sim.plan.validate import validate

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
    validate(plan())


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
        (GOOD[0].replace("0SEND_F0 ", "").replace("0F0 ", "0F0 0SEND_F9 "), GOOD[1], "list differ"),
        (GOOD[0], GOOD[1].replace("1RECV_F0 1F0", "1F0"), "list differ"),
        (GOOD[0].replace("0OPT", "0OPT <- 0B7"), GOOD[1], "not an op of its rank"),
        (GOOD[0].replace("0F0 ", "0F0 <- 0B1 "), GOOD[1], "later in the list"),
        (GOOD[0].replace("0F0 ", "0X0 "), GOOD[1], "unknown op kind"),
        (GOOD[0].replace("0B0 ", "0B0{reads=latest} "), GOOD[1], "changes the mathematics"),
    ],
)
def test_broken_programs(first: str, second: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(plan(first, second))


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
