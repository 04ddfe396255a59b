"""The key ``routing`` of a job."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import InputError
from sim.problem import load_problem, problem_from_documents

JOB = {"global_batch": 8, "sequence_length": 512}


def resolved(routing: dict[str, Any] | None) -> Any:
    job = JOB if routing is None else {**JOB, "routing": routing}
    return load_problem("v100_t4", "gpt2_355m", job)


def test_draws_and_traces() -> None:
    drawn = resolved({"sigma": 0.3, "phi": 0.9, "concentration": 50})
    assert drawn.job.routing is not None and drawn.job.routing.trace == ""
    assert drawn.job.routing.numbers == {"sigma": 0.3, "phi": 0.9, "concentration": 50.0}
    traced = resolved({"trace": "counts.csv"}).job.routing
    assert traced is not None and (traced.trace, traced.numbers) == ("counts.csv", {})
    assert resolved(None).job.routing is None
    again = problem_from_documents(drawn.documents)
    assert again.job == drawn.job and again.hash == drawn.hash != resolved(None).hash


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ({}, "a trace or a draw"),
        ({"trace": "x.csv", "sigma": 0.1}, "trace stands alone"),
        ({"sigma": 0.1, "zipf": 1.0}, "sigma stands alone"),
        ({"phi": 1.5}, "phi"),
        ({"skew": 1}, "skew"),
    ],
)
def test_what_is_refused(routing: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(routing)
