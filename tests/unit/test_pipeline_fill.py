"""The ideal makespan that a real pipeline is held against."""

from __future__ import annotations

import pytest

from tests.validation.pipeline_fill import Row, ideal_makespan


def one_f_one_b(m: int, f: float, b: float, late: float) -> list[Row]:
    """Spans of two stages that measured ``late`` seconds between ops; only durations count."""
    orders = {
        0: ["F0"] + [x for k in range(1, m) for x in (f"F{k}", f"B{k - 1}")] + [f"B{m - 1}"],
        1: [x for k in range(m) for x in (f"F{k}", f"B{k}")],
    }
    rows: list[Row] = []
    for rank, order in orders.items():
        at = 0.0
        for op in order:
            took = f if op[0] == "F" else b
            rows.append((rank, op[0], int(op[1:]), at + late, at + late + took))
            at += late + took
    return rows


@pytest.mark.parametrize("m", [1, 2, 8])
def test_equal_stages_have_the_known_bubble(m: int) -> None:
    """(m + 1) (f + b): m rounds and the fill of one stage."""
    assert ideal_makespan(one_f_one_b(m, 1.0, 2.0, 0.3)) == pytest.approx((m + 1) * 3.0)


def test_spans_that_are_no_pipeline_are_refused() -> None:
    with pytest.raises(ValueError, match="no two-stage pipeline"):
        ideal_makespan([(1, "F", 0, 0.0, 1.0)])
