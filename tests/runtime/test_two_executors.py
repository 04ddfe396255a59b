"""Two executors, one rule: the runtime starts a plan's ops as the simulator says.

The miniature plans run on real processes with handlers that sleep for the stated seconds.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

from real_runtime.errors import UnsupportedPlanError
from real_runtime.program import rank_program
from sim.report.record import spans_of_run
from sim.report.spans import Spans

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]
import sleeping  # noqa: E402
import world  # noqa: E402

from tests.contract import miniatures as mini  # noqa: E402

pytestmark = pytest.mark.timeout(200)

UNIT = 0.05
"""[s] of one stated second."""
CASES: dict[str, Callable[[], mini.Miniature]] = {
    "h2": mini.h2,
    "h2 fused": partial(mini.h2, fused=True),
    "merak": mini.merak,
    "merak rendezvous": partial(mini.merak, buffers=0),
    "merak plain": partial(mini.merak, plain=True),
    "fusionllm": mini.fusionllm,
    "fusionllm dense": partial(mini.fusionllm, coded=False),
    "oases": mini.oases,
}


def simulated(name: str) -> tuple[mini.Miniature, Spans, float]:
    """A case, its spans of one actor per rank, and its makespan [s] at the unit."""
    case = CASES[name]()
    run = case.run(fold=False, factor=UNIT)
    return case, spans_of_run(run), run.makespan


def seconds_of(spans: Spans) -> sleeping.Seconds:
    columns = ("rank", "op", "peer", "start_s", "end_s")
    rows = zip(*(spans[n].tolist() for n in columns), strict=True)
    return {(rank, op, peer): end - start for rank, op, peer, start, end in rows}


def starts(spans: Spans) -> dict[tuple[int, str], list[str]]:
    """Ops of every stream of every rank in the order in which they started."""
    found: dict[tuple[int, str], list[Any]] = {}
    columns = ("rank", "stream", "start_s", "end_s", "op", "peer")
    for rank, stream, *rest in zip(*(spans[n].tolist() for n in columns), strict=True):
        found.setdefault((rank, stream), []).append(tuple(rest))
    return {key: [op for _, _, op, _ in sorted(rows)] for key, rows in found.items()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sleeping")
    cases = []
    for name in CASES:
        case, spans, makespan = simulated(name)
        assert makespan == pytest.approx(case.makespan * UNIT)
        cases.append((name, case.plan, seconds_of(spans), makespan))
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    return world.run_processes(FOLDER / "sleeping.py", folder, 3)


@pytest.mark.parametrize("name", CASES)
def test_ops_of_every_stream_start_in_the_simulated_order(
    name: str, measured: dict[str, Any]
) -> None:
    _, spans, _ = simulated(name)
    expected = starts(spans)
    assert any(len(ops) > 2 for ops in expected.values())
    assert starts(measured[name][1]) == expected


@pytest.mark.parametrize("name", CASES)
def test_the_makespan_is_the_simulated_one(name: str, measured: dict[str, Any]) -> None:
    """The closest of up to three runs, within 5 %; a machine busier than its cores may miss."""
    _, _, makespan = simulated(name)
    tries, _, load = measured[name]
    said = f"{name}: {[f'{t:.3f}' for t in tries]} s, simulated {makespan:.3f} s, load {load:.1f}"
    print(said)
    close = min(abs(t / makespan - 1) for t in tries) <= sleeping.CLOSE
    if not close and load > (os.cpu_count() or 1):
        pytest.skip(f"the machine is busy: {said}")
    assert close, said


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (mini.pro_prophet, "late amount"),
        (mini.async_sgd, "program of several blocks; found on on"),
        (mini.embrace, "program of several blocks"),
        (mini.autohete, "stream of an op's own"),
    ],
)
def test_what_the_issuer_does_not_do_is_refused_by_name(
    make: Callable[[], mini.Miniature], words: str
) -> None:
    plan = make().plan
    rank = plan.programs[0].ranks[0]
    with pytest.raises(UnsupportedPlanError, match=words):
        rank_program(plan, rank)
