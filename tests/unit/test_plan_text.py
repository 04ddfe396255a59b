"""The text form of ops and programs: round trips, and every malformed text is a PlanError."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import PlanError
from sim.plan.kinds import KINDS
from sim.plan.op import Dep, Op, Ref, format_op, parse_op
from sim.plan.program import format_program, parse_program

NAMES = st.text("abcxyz0123456789", min_size=1, max_size=5)
SMALL = st.integers(0, 99)


def ops() -> st.SearchStrategy[Op]:
    return st.builds(
        Op,
        kind=st.sampled_from(sorted(KINDS)),
        stage=st.integers(-1, 40),
        mb=st.integers(-1, 200),
        part=st.integers(-1, 7),
        label=st.just("") | NAMES,
        group=st.sampled_from(["", "tp", "dp", "ep"]),
        peer=st.integers(-1, 9),
        deps=st.none()
        | st.just(())
        | st.tuples(st.builds(Dep, st.just("0F1[x]"), st.integers(0, 3))),
        carried=st.integers(0, 1),
        ref=st.none() | st.builds(Ref, NAMES, NAMES, st.integers(0, 2)),
        stream=st.sampled_from(["", "host", "compute"]),
        channel=st.integers(0, 2),
        priority=st.none() | st.floats(-10, 10),
        saves=st.sampled_from(["all", "inputs"]),
        recompute=st.sampled_from(["", "inner"]),
    )


@given(ops())
def test_an_op_reads_back(op: Op) -> None:
    text = format_op(op)
    assert parse_op(text) == (op, len(text))


def test_the_documented_form() -> None:
    op, _ = parse_op("^1 2F0.1[mlp7]{saves=inputs} <- 2RECV_F0, OPT@1")
    assert (op.stage, op.kind, op.mb, op.part, op.label) == (2, "F", 0, 1, "mlp7")
    assert op.carried == 1 and op.saves == "inputs"
    assert op.deps == (Dep("2RECV_F0"), Dep("OPT", 1))


def test_kinds_with_digits() -> None:
    assert parse_op("D2H3")[0] == Op(kind="D2H", mb=3)
    assert parse_op("1H2D[x]")[0] == Op(kind="H2D", stage=1, label="x")


@pytest.mark.parametrize(
    "text",
    [
        "F0{channel=x}", "F0{priority=x}", "F0{priority=nan}", "F0{ref=a/b@x}", "F0{nonsense=1}",
        "F" + "9" * 5000, "X0", "F0 <- ", "repeat(0){F0}", "repeat{F0}", "repeat(9999999999){F0}",
        "once{F0", "on{F0}", "{", "F0 <- 0B0@99999999999",
        "once{" * 3000 + "F0" + "}" * 3000,
    ],
)  # fmt: skip
def test_malformed_text(text: str) -> None:
    with pytest.raises(PlanError):
        parse_program(text, (0,))


@given(st.text("0123FBWSEND_RECV{}()[]<-@;|:^.,= once repeat on steps"))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        program = parse_program(text, (0,))
    except PlanError:
        return
    assert parse_program(format_program(program), (0,)) == program
