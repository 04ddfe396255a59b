"""Fed with measured layer tables, the engine predicts the runs measured with them.

Runs: the GH200 OPT-350M rows of github.com/eth-easl/sailor (validation/clariden), read 2026-11;
rows whose table entry is launch-bound (one sequence per microbatch) are left out. The table already
contains the tensor-parallel collectives. Gradient sync is modelled. The runs' pipeline engine
blocks on every send and receive and ships the whole boundary tensor from each rank.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.engine.simulate import simulate
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.validate import validate
from sim.problem import load_problem

DATA = Path(__file__).parent / "data"

# run, chips, pp, dp, global batch, layers per stage (embedding and head counted), measured step [s]
RUNS = (
    ("sailor-15", 64, 1, 16, 1024, (26,), 1.92557),
    ("sailor-17", 64, 2, 8, 1024, (12, 14), 2.31116),
    ("sailor-16", 64, 4, 4, 1024, (5, 7, 7, 7), 2.72578),
    ("sailor-21", 128, 1, 32, 1024, (26,), 1.02594),
    ("sailor-22", 128, 4, 8, 1024, (5, 7, 7, 7), 1.47485),
    ("sailor-18", 8, 2, 1, 32, (12, 14), 0.65705),
    ("sailor-27", 32, 2, 4, 512, (12, 14), 2.2988),
)
TP, MICROBATCH = 4, 8


def predict(pp: int, dp: int, batch: int, layers: tuple[int, ...]) -> float:
    """Step time [s] of one run."""
    job = {
        "global_batch": batch,
        "sequence_length": 2048,
        "dtype": "fp32",
        "optimizer": "adam",
    }
    problem = load_problem(DATA / "gh200.yaml", DATA / "opt350m_gh200.yaml", job)
    cells = tuple(
        CellKnobs(
            stage=s,
            replica=r,
            tp=TP,
            chips=tuple(range((s * dp + r) * TP, (s * dp + r + 1) * TP)),
        )
        for s in range(pp)
        for r in range(dp)
    )
    draft = PlanDraft(
        cells=cells,
        pipeline=PipelineKnobs(
            cuts=(0, *np.cumsum(layers).tolist()),
            microbatch=MICROBATCH,
            blocking_p2p=True,
            whole_boundaries=True,
        ),
        data=DataKnobs(microbatches=(batch // (MICROBATCH * dp),) * dp),
    )
    plan = lower(problem, draft)
    validate(plan)
    return simulate(plan, problem, overlap=False).makespan


@pytest.fixture(scope="module")
def predicted() -> dict[str, float]:
    return {name: predict(pp, dp, batch, cut) for name, _, pp, dp, batch, cut, _ in RUNS}


def test_error(predicted: dict[str, float]) -> None:
    errors = [abs(predicted[name] / measured - 1) for name, *_, measured in RUNS]
    for (name, *_, measured), error in zip(RUNS, errors, strict=True):
        print(f"{name} measured {measured:.4f} predicted {predicted[name]:.4f} error {error:.1%}")
    print(f"median {np.median(errors):.1%}, 90th percentile {np.percentile(errors, 90):.1%}")
    assert np.median(errors) <= 0.04
    assert np.percentile(errors, 90) <= 0.10


@pytest.mark.parametrize("chips", [64, 128])
def test_ladder_is_ranked_exactly(predicted: dict[str, float], chips: int) -> None:
    ladder = [
        (measured, name) for name, n, *_, batch, _, measured in RUNS if (n, batch) == (chips, 1024)
    ]
    assert len(ladder) >= 2
    by_measure = [name for _, name in sorted(ladder)]
    assert sorted(by_measure, key=predicted.__getitem__) == by_measure
