"""hetlab compare: spans of a machine with known other numbers show just these differences."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import plans  # noqa: E402
import recorded  # noqa: E402

from real_runtime.compare import compare, line_up  # noqa: E402
from real_runtime.compare_run import moved, read_run  # noqa: E402
from real_runtime.spreads import wide_spreads  # noqa: E402
from sim.engine.simulate import simulate  # noqa: E402
from sim.errors import InputError  # noqa: E402
from sim.plan.io import save_plan  # noqa: E402
from sim.plan.lower import lower  # noqa: E402
from sim.plan.plan import Plan  # noqa: E402
from sim.report.record import spans_of_run  # noqa: E402

PROBLEM = recorded.problem_of(recorded.machine())


def pipeline() -> Plan:
    return lower(PROBLEM, plans.draft_of([[1], [1]], (4,), microbatch=4, cuts=(0, 5, 10)))


def replicas() -> Plan:
    return lower(PROBLEM, plans.draft_of([[1, 1]], (2, 2), microbatch=4, zero=1))


@pytest.mark.parametrize("make", [pipeline, replicas])
def test_a_run_like_its_simulation_differs_in_nothing(tmp_path: Path, make: object) -> None:
    plan = make()  # type: ignore[operator]
    run = read_run(recorded.record(tmp_path / "run", plan, PROBLEM), plan)
    found = compare(plan, PROBLEM, run)
    assert found.predicted_step_time_s == pytest.approx(found.measured_step_time_s)
    assert found.ops and not found.only_predicted and not found.only_measured
    assert all(r.predicted_s == pytest.approx(r.measured_s, abs=1e-9) for r in found.ops)
    assert {r.steps for r in found.ops} == {3}  # the first of four is left out
    computing = sum(k.measured_share for k in found.kinds if k.kind in ("F", "B", "OPT"))
    assert 0.5 < computing <= 1.0 + 1e-9


def test_slower_products_show_in_compute_and_a_slower_link_in_transfers(tmp_path: Path) -> None:
    plan = pipeline()
    slow = recorded.problem_of(
        recorded.machine(
            {"rate": "0.5 GB/s", "latency": "40 us"},
            peaks={"fp32": "30 GFLOP/s"}, memory_bandwidth="5 GB/s", kernel_overhead="200 us",
        )
    )  # fmt: skip
    run = read_run(recorded.record(tmp_path / "run", plan, slow), plan)
    found = compare(plan, PROBLEM, run)
    for k in found.kinds:
        if k.kind != "BARRIER":
            assert k.predicted_over_measured == pytest.approx(0.5), k
    assert found.predicted_step_time_s / found.measured_step_time_s == pytest.approx(0.5)
    off = [abs(r.off_s) for r in found.ops]
    assert off == sorted(off, reverse=True) and found.ops[0].kind in ("B", "F")
    transfers = {k.kind for k in found.kinds if k.upper_bound}
    assert transfers == {"SEND_F", "SEND_B"}


def test_waiting_for_a_member_is_not_the_collectives_time() -> None:
    plan = replicas()
    spans = spans_of_run(simulate(plan, PROBLEM, fold=False))
    reduce = np.flatnonzero(spans["kind"] == "REDUCE_GRAD")
    columns = {k: v.copy() for k, v in spans.columns.items()}
    early = reduce[columns["rank"][reduce] == 0]
    columns["start_s"][early] -= 1.0  # rank 0 is there a second before rank 1
    late = type(spans)(columns, spans.names)
    rows, _, _ = line_up(spans, late)
    found = [r for r in rows if r.kind == "REDUCE_GRAD"]
    assert found and all(r.members == 2 for r in found)
    assert all(r.measured_s == pytest.approx(r.predicted_s) for r in found)


def test_the_first_update_of_a_step_begins_with_the_last_rank() -> None:
    """It sums the gradient's norm over all ranks, so an early rank waits inside it."""
    spans = spans_of_run(simulate(replicas(), PROBLEM, steps=2, fold=False))
    columns = {k: v.copy() for k, v in spans.columns.items()}
    early = (spans["kind"] == "OPT") & (columns["rank"] == 0)
    columns["start_s"][early] -= 1.0
    measured = type(spans)(columns, dict(spans.names) | {"source": ("measured",)})
    rows, _, _ = line_up(spans, measured)
    found = [r for r in rows if r.kind == "OPT"]
    assert len(found) == 2
    assert all(r.measured_s == pytest.approx(r.predicted_s) for r in found)


def test_ops_of_one_table_only_are_named() -> None:
    plan = pipeline()
    spans = spans_of_run(simulate(plan, PROBLEM, fold=False))
    fewer = spans.take(spans["kind"] != "OPT")
    _, only_left, only_right = line_up(spans, fewer)
    assert len(only_left) == 2 and all(x.startswith("OPT ") for x in only_left)
    assert only_right == ()


def test_a_plan_moves_to_a_cluster_of_other_names_and_enough_chips(tmp_path: Path) -> None:
    plan = pipeline()
    other = json.loads(json.dumps(recorded.machine()).replace('"CPU"', '"mine"'))
    simulated, problem = moved(plan, other)
    run = read_run(recorded.record(tmp_path / "run", plan, PROBLEM), plan)
    found = compare(simulated, problem, run, plan.hash)
    assert found.plan_hash == plan.hash != simulated.hash
    assert found.predicted_step_time_s == pytest.approx(found.measured_step_time_s)
    with pytest.raises(InputError, match=r"more chips than the cluster has.*at least 2"):
        moved(plan, recorded.machine(chips=1))


def test_folders_that_are_no_run_of_the_plan_are_refused(tmp_path: Path) -> None:
    plan = pipeline()
    folder = recorded.record(tmp_path / "run", plan, PROBLEM)
    with pytest.raises(InputError, match="another plan; found .*; expected " + replicas().hash):
        read_run(folder, replicas())
    with pytest.raises(InputError, match="not the folder of a run"):
        read_run(tmp_path, plan)
    events = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(events + "{half a li")
    with pytest.raises(InputError, match=r"events.jsonl:6: not a line of a run's log"):
        read_run(folder, plan)
    (folder / "events.jsonl").write_text(events)
    (folder / "spans.npz").unlink()
    with pytest.raises(InputError, match="it has not ended"):
        read_run(folder, plan)


def test_the_command(tmp_path: Path) -> None:
    plan = pipeline()
    save_plan(plan, tmp_path / "plan.json")
    slow = recorded.problem_of(recorded.machine(kernel_overhead="2 ms"))
    recorded.record(tmp_path / "run", plan, slow)
    command = [sys.executable, "-c", "from sim.cli import main; main()", "compare", "plan.json"]

    def hetlab(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *args], cwd=tmp_path, capture_output=True, text=True)

    done = hetlab("run", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["predicted_step_time_s"] < 0.5 * said["measured_step_time_s"]
    assert {"F", "B", "OPT", "SEND_F", "SEND_B", "BARRIER"} <= {k["kind"] for k in said["kinds"]}
    shown = hetlab("run", "--top", "2")
    assert "step time" in shown.stdout and "off most:" in shown.stdout
    assert plan.hash in shown.stdout and shown.stdout.count("measured ") >= 3
    assert hetlab("nowhere").returncode == 4


def test_numbers_that_spread_widely_are_named(tmp_path: Path) -> None:
    """A cluster as hetlab probe writes it: link and chip with their spreads in the sources."""
    said = "measured by hetlab probe; how; spread {} of 9"
    overhead = {"value": "100 us", "source": said.format("45.6%")}
    rate = {"value": "1 GB/s", "source": said.format("infinite")}
    link = {
        "name": "wire", "kind": "fabric", "rate": rate,
        "latency": {"value": "20 us", "source": said.format("19.9%")},
        "curve": [{"size": "1 kB", "fraction": 0.5}, {"size": "1 MB", "fraction": 1.0}],
        "origins": {"curve": {"source": "probe; largest spread of a point 31.0%"}},
    }  # fmt: skip
    cluster = recorded.machine(kernel_overhead=overhead)
    cluster["profiles"]["links"] = [link]
    cluster["sites"][0]["nodes"][0]["fabric"] = "wire"
    problem = recorded.problem_of(cluster)
    wide = wide_spreads(problem.documents["cluster"])
    assert [(s.name, s.spread) for s in wide] == [
        ("wire rate", math.inf), ("CPU kernel_overhead", 0.456), ("wire curve", 0.31),
    ]  # fmt: skip
    plan = lower(problem, plans.draft_of([[1], [1]], (4,), microbatch=4, cuts=(0, 5, 10)))
    save_plan(plan, tmp_path / "plan.json")
    recorded.record(tmp_path / "run", plan, problem)
    command = [sys.executable, "-c", "from sim.cli import main; main()", "compare", "plan.json"]
    done = subprocess.run([*command, "run", "--json"], cwd=tmp_path, capture_output=True, text=True)
    warned = " ".join(done.stderr.split())
    assert "more than 20 %" in warned and "CPU kernel_overhead (46%)" in warned, warned
    assert "latency" not in warned
    assert len(json.loads(done.stdout)["wide"]) == 3
    assert wide_spreads(PROBLEM.documents["cluster"]) == ()
