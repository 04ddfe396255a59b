"""A short version of the H2 study: three types, memory makes or breaks the ratio."""

from __future__ import annotations

from typing import Any

import pytest

from sim.problem import Problem, load_problem
from tests.validation.h2_ratio import Ratio, lines, study

V100, T4, A100 = "V100-SXM2-16GB", "T4", "A100-SXM4-80GB"


def small(memory: dict[str, str]) -> Problem:
    cluster: dict[str, Any] = {
        "name": "three types",
        "sites": [
            {
                "name": "here",
                "nodes": [
                    {"profile": "a100_80gb_hdr", "chips": 4},
                    {"profile": "p3_8xlarge", "nics": {"profile": "ib_hdr_200g", "count": 4}},
                    {"profile": "g4dn_12xlarge", "nics": {"profile": "ib_hdr_200g", "count": 4}},
                ],
            }
        ],
        "accelerators": {name: {"memory": size} for name, size in memory.items()},
    }
    job = {"global_batch": 32, "sequence_length": 1024, "dtype": "fp16"}
    return load_problem(cluster, "gpt2_355m", job)


@pytest.fixture(scope="module")
def roomy() -> Ratio:
    return study(small({}), "roomy")


def test_ratio_is_throughput_over_the_sum_of_the_parts(roomy: Ratio) -> None:
    assert not roomy.lacking and len(roomy.homo) == 3
    parts = sum(1 / s.found.step_time_s for s in roomy.homo)
    assert roomy.shared == pytest.approx(1 / roomy.hetero.found.step_time_s / parts)
    # All chips together are faster than the fastest type, and here no faster than the sum.
    assert roomy.hetero.shared_s < min(s.shared_s for s in roomy.homo)
    assert 0.5 < roomy.shared <= 1.0
    for side in (*roomy.homo, roomy.hetero):
        assert side.alone_s <= side.shared_s * (1 + 1e-9)
        assert side.found.bound_s <= side.found.plan_bound_s * (1 + 1e-9)
        assert side.found.plan_bound_s <= side.shared_s
    assert {x.split()[0] for x in roomy.loose} <= {V100, T4, A100}
    text = "\n".join(lines(roomy))
    assert "ratio" in text and text.count("gap") >= 4 and "sub-groups" not in text


def test_sub_groups_refine_both_sides() -> None:
    both = study(small({T4: "3.5 GB"}), "sub-groups", seconds=3.0)
    for side in (*both.homo, both.hetero):
        assert side.grouped_s <= side.shared_s and "ways to cut the types" in side.grouped
    parts = sum(1 / s.grouped_s for s in both.homo)
    assert both.grouped == pytest.approx(1 / both.hetero.grouped_s / parts)
    assert "with sub-groups" in lines(both)[0]


def test_short_memory_of_one_type_raises_the_ratio(roomy: Ratio) -> None:
    """A type that alone must recompute or shrink its batch gives the pipeline its best part."""
    tight = study(small({T4: "3.5 GB"}), "tight")
    alone = {s.name: s.shared_s for s in tight.homo}
    before = {s.name: s.shared_s for s in roomy.homo}
    assert T4 not in alone or alone[T4] > before[T4]
    assert tight.shared > roomy.shared
