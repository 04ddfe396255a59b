"""hetlab export and simulate --seed, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import sim
from sim.interop.schedule_csv import plan_order, schedule_knobs
from sim.plan.placement import Placement
from sim.plan.plan import Plan, ProgramText, Table
from sim.plan.schedules import explicit_order
from tests.cli.test_plan_commands import hetlab


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("export")
    sim.save_plan(pipeline(), where / "plan.json")
    return where


def pipeline(batch: int = 4) -> Plan:
    changes = [f"job.global_batch={batch}"]
    problem = sim.load_problem("v100_t4", "gpt2_355m", "v100_t4", overrides=changes)
    return sim.lower(problem, sim.uniform(problem.model, batch, [0, 1], pp=2))


def test_the_schedule_is_what_the_plan_computes(folder: Path) -> None:
    done = hetlab("export", "plan.json", "--schedule-csv", "out.csv", cwd=folder)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    text = (folder / "out.csv").read_text()
    assert explicit_order(list(schedule_knobs(text).order)) == plan_order(pipeline())
    assert not list(folder.glob("*.part"))
    shown = hetlab("export", "plan.json", "--schedule-csv", "-", cwd=folder)
    assert (shown.returncode, shown.stdout) == (0, text)


def test_wrong_requests_are_refused(folder: Path) -> None:
    assert hetlab("export", "plan.json", cwd=folder).returncode == 2
    replica = hetlab("export", "plan.json", "--schedule-csv", "-", "--replica", "9", cwd=folder)
    assert replica.returncode == 4 and "no such replica" in replica.stderr
    nowhere = hetlab("export", "plan.json", "--schedule-csv", "no/such/out.csv", cwd=folder)
    assert nowhere.returncode == 4 and "cannot write" in nowhere.stderr


def test_a_plan_without_compute_programs_is_refused(folder: Path) -> None:
    idle = Plan(
        placement=Placement(extra_ranks=(0, 1)),
        programs=(ProgramText((0,), "SEND_F0>1"), ProgramText((1,), "RECV_F0<0")),
        barrier=False,
    )
    hosts = (ProgramText((0, 1), "HOST"),)
    cells = msgspec.structs.replace(pipeline(), lowering=(), programs=hosts)
    for name, plan in (("idle.json", idle), ("cells.json", cells)):
        sim.save_plan(plan, folder / name)
        (folder / "kept.csv").write_text("as it was\n")
        done = hetlab("export", name, "--schedule-csv", "kept.csv", cwd=folder)
        assert done.returncode == 4, (name, done.stderr)
        assert "no compute programs" in done.stderr and "Traceback" not in done.stderr
        assert (folder / "kept.csv").read_text() == "as it was\n"


def test_seed_reaches_the_tables_and_the_report(folder: Path) -> None:
    jitter = Table(
        origin="generator", generator="lognormal", parameters={"keys": ["x"], "sigma": 0.5}
    )
    texts = ("F0{ref=jitter/x} SEND_F0 RECV_B0 B0 OPT", "RECV_F0 F0 B0 SEND_B0 OPT")
    jittered = msgspec.structs.replace(
        pipeline(1),
        lowering=(),
        programs=tuple(ProgramText((rank,), text) for rank, text in enumerate(texts)),
        tables={"jitter": jitter},
        barrier=False,
    )
    sim.save_plan(jittered, folder / "jitter.json")
    found = []
    for seed in ("0", "7", "7"):
        done = hetlab("simulate", "jitter.json", "--seed", seed, "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert [d["seed"] for d in found] == [0, 7, 7]
    times = [d["metrics"]["step_time_s"] for d in found]
    assert times[0] != times[1] == times[2]
    assert "seed 7" in hetlab("simulate", "jitter.json", "--seed", "7", cwd=folder).stdout
