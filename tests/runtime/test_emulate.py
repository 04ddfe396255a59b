"""hetlab run --emulate: unlike chips and links on one machine, and the training stays the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the runtime needs PyTorch")

from real_runtime.compare_run import read_run
from real_runtime.cores import usable_cores
from real_runtime.emulate import CALIBRATION, Emulation, Flow, Message, emulation, share_of
from real_runtime.emulate_rank import Board, Emulator, _message
from real_runtime.program import rank_program
from real_runtime.restarts import train
from real_runtime.resume import INDEX, Index, run_of, seal
from real_runtime.settings import RunSettings
from sim.cli import main
from sim.errors import InputError, UsageError
from sim.hardware.route import path, transfer_time
from sim.plan.io import save_plan
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem
from sim.report.spans import Spans

sys.path.insert(0, str(Path(__file__).parent))
import plans

pytestmark = pytest.mark.timeout(200)

FOLDER = Path(__file__).parent
SAMPLE = FOLDER.parents[1] / "real_runtime" / "sample.txt"
RATE, LATENCY = 1e9 / 8, 4e-3
"""[B/s], [s] between two nodes: of a NIC, and of both ends' NICs."""
STEPS = CALIBRATION + 3


def cluster(slow: float = 3.0, update: float = 0.0) -> dict[str, Any]:
    """One chip a node; the other type is that much slower in all, or has its own bandwidth."""
    fast = plans.CLUSTER["profiles"]["accelerators"][0] | {"kernel_overhead": "10 us"}
    other = fast | {
        "name": "SLOW", "peaks": {"fp32": f"{50 / slow} GFLOP/s"},
        "memory_bandwidth": f"{update or 10 / slow} GB/s", "kernel_overhead": f"{10 * slow} us",
    }  # fmt: skip
    node = {"chips": 1, "count": 1, "nics": {"rate": "1 Gb/s", "latency": "2 ms"}}
    kinds = ("CPU", "SLOW", "SLOW", "CPU")
    return {
        "name": "mixed", "profiles": {"accelerators": [fast, other]},
        "sites": [{"name": "here", "nodes": [node | {"accelerator": k} for k in kinds]}],
    }  # fmt: skip


def problem(**changes: Any) -> Problem:
    return load_problem(cluster(**changes), "llama_tiny", "two_processes")


def plan_of(
    found: Problem, tp: list[list[int]], microbatches: tuple[int, ...], **knobs: Any
) -> Plan:
    blocks, n = len(found.model.blocks), len(tp) * knobs.get("chunks", 1)
    knobs.setdefault("microbatch", 4)
    cuts = tuple(round(i * blocks / n) for i in range(n + 1))
    return lower(found, plans.draft_of(tp, microbatches, cuts=cuts if n > 1 else (), **knobs))


def alone_s(message: Message) -> float:
    """Emulated [s] with nobody else on the links."""
    return message.fixed_s + max((flow.alone_s for flow in message.flows), default=0.0)


def test_factors_are_the_ratios_of_the_chips_times() -> None:
    found = problem()
    what = emulation(plan_of(found, [[1, 1]], (2, 2)), found)
    assert what.fastest == "CPU" and what.factors == pytest.approx((1.0, 3.0))
    by_rank = defaultdict(list)
    for (rank, _), op in sorted(what.passes.items()):
        by_rank[rank].append(op)
    for fast, slow in zip(by_rank[0], by_rank[1], strict=True):
        assert fast.factor == pytest.approx(1.0) and slow.factor == pytest.approx(3.0)
        assert slow.own_s == pytest.approx(3 * fast.own_s) and fast.own_s > 0
    # A chip that computes slower and updates faster: the update sets the pace of all.
    ahead = problem(update=20.0)
    what = emulation(plan_of(ahead, [[1, 1]], (2, 2)), ahead)
    least = min(what.passes.values(), key=lambda op: op.factor)
    assert least.factor == pytest.approx(1.0) and what.factors[0] > 1.1


def test_a_message_lasts_as_its_path_says_and_rings_as_their_closed_form() -> None:
    found = problem()
    what = emulation(plan_of(found, [[1], [1]], (4,)), found)
    pairs = [m for key, m in what.messages.items() if key[0] == "pair"]
    route, nbytes = path(found.machine, 0, 1), 64 * 4 * 128 * 4
    assert len(pairs) == 8
    for message in pairs:
        # The tied weight's gradient crosses the same NICs, so that bytes stand in line there.
        assert message.fixed_s == pytest.approx(LATENCY) and len(message.flows) == 1
        assert alone_s(message) == pytest.approx(LATENCY + nbytes / RATE)
        assert alone_s(message) == pytest.approx(transfer_time(route, nbytes))
    plan = plan_of(found, [[1, 1, 1]], (2, 1, 1))
    groups = [m for m in emulation(plan, found).messages.values() if len(m.members) == 3]
    params = sum(b.params for b in found.model.blocks) - 256 * 128  # the head's is tied
    ring = 2 * 2 * LATENCY + 4 / 3 * params * 4 / RATE
    assert max(map(alone_s, groups)) == pytest.approx(ring, rel=0.05)


@pytest.mark.parametrize(
    ("tp", "microbatches", "knobs"),
    [
        ([[1, 1], [1, 1]], (2, 2), {}), ([[1], [2]], (4,), {}), ([[1], [2], [1]], (4,), {}),
        ([[1], [1]], (4,), {"chunks": 2, "schedule": "interleaved"}),
        ([[1, 1]], (2, 2), {"zero": 1}), ([[1, 2]], (2, 2), {}),
    ],
)  # fmt: skip
def test_every_op_of_every_rank_is_emulated_and_members_agree(
    tp: list[list[int]], microbatches: tuple[int, ...], knobs: dict[str, Any]
) -> None:
    found = problem()
    plan = plan_of(found, tp, microbatches, **knobs)
    what, users = emulation(plan, found), defaultdict(list)
    for rank in range(plan.placement.num_ranks):
        program, places = rank_program(plan, rank), defaultdict[object, int](int)
        for node in program.nodes:
            if node.on_wire:
                message = _message(what, node, places)
                users[message.number].append(rank)
                assert node.peer < 0 or set(message.members) == {rank, node.peer}
            else:
                assert what.passes[rank, node.name].factor >= 1
    members = {m.number: sorted(m.members) for m in what.messages.values()}
    assert {number: sorted(ranks) for number, ranks in users.items()} == members


def board(folder: Path, messages: list[Message], links: int, wires: int) -> Board:
    what = Emulation(
        passes={}, messages=dict(enumerate(messages)), links=links, wires=wires, fastest="",  # type: ignore[arg-type]
        factors=(), step_s=0.0,
    )  # fmt: skip
    return Board(folder / "board", what)


def test_shares_of_the_fullest_core() -> None:
    assert [share_of(*x) for x in ((2, 2), (3, 2), (4, 2), (5, 2), (4, 1))] == [
        1, 1 / 2, 1 / 2, 1 / 3, 1 / 4
    ]  # fmt: skip


def test_messages_stand_in_line_for_shared_links(tmp_path: Path) -> None:
    a = Message(0, 0, (0, 1), 1.0, (Flow((0,), (4.0,), 5.0),))
    b = Message(1, 1, (0, 2), 1.0, (Flow((0, 1), (2.0, 3.0), 3.0),))
    later = Message(2, 0, (0, 1), 0.5)
    one = board(tmp_path, [a, b, later], 2, 2)
    other = board(tmp_path, [a, b, later], 2, 2)  # as another rank sees it
    one.begin(a, 0, 1, 2.0, 100.0)
    assert other.over(a, 1) == 0.0
    other.begin(a, 1, 1, 2.0, 110.0)  # the last member: 110 + 2 (1 + 5), its link until 112 + 8
    assert one.over(a, 1) == other.over(a, 1) == 122.0
    one.begin(b, 0, 1, 2.0, 111.0)
    one.begin(b, 2, 1, 2.0, 111.0)  # ready at 113, the link is free at 120
    assert one.over(b, 1) == 126.0
    one.begin(later, 0, 1, 2.0, 112.0)
    one.begin(later, 1, 1, 2.0, 112.0)  # its wire carries a until 122
    assert one.over(later, 1) == 123.0
    one.begin(a, 1, 2, 2.0, 200.0)
    assert one.over(a, 2) == 0.0
    one.begin(a, 0, 2, 2.0, 200.0)
    assert one.over(a, 2) == 212.0


def hetlab(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["run", "plan.json", "--data", str(SAMPLE), "--dry-run", *args])
    return int(left.value.code or 0)


def test_what_cannot_be_emulated_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = problem()
    save_plan(plan_of(found, [[1, 1]], (2, 2)), "plan.json")
    Path("mixed.yaml").write_text(json.dumps(cluster()))  # JSON is YAML
    Path("other.yaml").write_text(json.dumps(cluster(slow=2.0)))
    assert hetlab("--emulate", "mixed.yaml") == 0
    assert "take 1.00 3.00 times those of CPU" in " ".join(capsys.readouterr().err.split())
    for wrong, code, words in (
        (("other.yaml",), 4, "another cluster than is to be emulated"),
        (("mixed.yaml", "--steps", "4"), 2, "needs more than 4 steps"),
        (("mixed.yaml", "--restarts", "1"), 2, "leave out --restarts"),
        (("mixed.yaml", "--launcher", "sbatch"), 2, "leave out --launcher"),
    ):
        assert hetlab("--emulate", *wrong) == code
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_resumed_emulation_needs_steps_that_find_its_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(plan := plan_of(problem(), [[1, 1]], (2, 2)), "plan.json")
    Path("mixed.yaml").write_text(json.dumps(cluster()))
    same = run_of(plan, RunSettings(plan="", data="", out="", steps=1))
    index = Index(steps=6, plan_hash=plan.hash, run=same, files={}, parameters={})
    (checkpoint := Path("hetlab-run", "checkpoints", "step-00000006")).mkdir(parents=True)
    (checkpoint / INDEX).write_bytes(seal(index))
    for steps, code in ((7, 2), (10, 2), (11, 0)):
        assert hetlab("--emulate", "mixed.yaml", "--resume", "--steps", str(steps)) == code
        said = " ".join(capsys.readouterr().err.split())
        assert ("has done 6 of them; give --steps of at least 11" in said) == bool(code), said


def test_passes_longer_than_the_deadline_say_so_at_once(tmp_path: Path) -> None:
    found = problem(slow=931.0)
    plan = plan_of(found, [[1, 1]], (2, 2))
    what, program = emulation(plan, found), rank_program(plan, 1)
    emulator = Emulator(what, program, Board(tmp_path / "board", what), 1.0, deadline=1e-6)
    first = next(i for i, op in enumerate(emulator.passes) if op is not None)
    emulator.enter(first)
    with pytest.raises(UsageError, match=r"ranks wait 1e-06 s for each other; give --deadline"):
        emulator.leave(first)


def trained(folder: Path, plan: Plan, emulated: str) -> list[dict[str, Any]]:
    """Train with one thread a rank on two cores at most; return the events of the log."""
    folder.mkdir()
    save_plan(plan, folder / "plan.json")
    two, ranks = usable_cores()[:2], plan.placement.num_ranks
    settings = RunSettings(
        plan=str(folder / "plan.json"), data=str(SAMPLE), out=str(folder / "run"), steps=STEPS,
        threads=1, emulate=emulated, preflight=False,
        cores=tuple((two[r % len(two)],) for r in range(ranks)) if two else (),
    )  # fmt: skip
    train(settings, ranks, 0, lambda line: None, print)
    return events_of(folder / "run")


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (run / "events.jsonl").read_text().splitlines()]


def lasted(spans: Spans, kind: str) -> np.ndarray:
    return np.asarray((spans["end_s"] - spans["start_s"])[spans["kind"] == kind])


def test_unlike_replicas_are_as_slow_as_planned_and_train_the_same(tmp_path: Path) -> None:
    found = problem()
    plan = plan_of(found, [[1, 1]], (2, 2))
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "mixed.yaml").write_text(json.dumps(cluster()))
    command = (
        sys.executable, "-c", "from sim.cli import main; main()", "run", "plan.json", "--data",
        str(SAMPLE), "--steps", str(STEPS), "--json", "--emulate", "mixed.yaml",
    )  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "1 emulated second lasts" in " ".join(done.stderr.split())
    document, events = json.loads(done.stdout), events_of(tmp_path / "hetlab-run")
    said, what = document["emulation"], emulation(plan, found)
    assert events[0]["emulate"] == "mixed"
    assert document["threads"] == 1 and len(document["cores"]) == 2 * bool(usable_cores())
    assert said["predicted_step_time_s"] == pytest.approx(said["scale"] * what.step_s)
    assert document["step_time_s"] > 0.8 * said["predicted_step_time_s"]
    spans = Spans.load(tmp_path / "hetlab-run" / "spans.npz")
    assert spans["step"].min() == CALIBRATION and len(said["late"]) == 2
    # Measured by processor time, since what else runs here makes an op longer.
    asked = events[-1]["passes_s"]
    assert 2 < asked[1] / asked[0] < 4.5
    for rank in (0, 1):
        mine = spans.take((spans["rank"] == rank) & (spans["stream"] == "compute"))
        computed = sum(lasted(mine, kind).sum() for kind in ("F", "B", "OPT"))
        assert computed > 0.97 * asked[rank]
        assert lasted(mine, "B").sum() < 1.25 * asked[rank] * (1 + said["late"][rank])
    sums = [alone_s(m) for m in what.messages.values()]
    assert lasted(spans, "REDUCE_GRAD").min() >= said["scale"] * max(sums) * (1 - 1e-6)
    with pytest.raises(InputError, match="was an emulation"):
        read_run(tmp_path / "hetlab-run", plan)
    losses = [
        [(e["loss"], e["grad_norm"]) for e in log if e["event"] == "step"]
        for log in (events, trained(tmp_path / "plain", plan, ""))
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


def test_a_pipeline_of_three_waits_for_its_links(tmp_path: Path) -> None:
    events = trained(tmp_path / "three", plan_of(problem(), [[1], [1], [1]], (4,)), "mixed")
    (said,) = (e for e in events if e["event"] == "emulation")
    assert said["share"] == 1 / -(-3 // (len(usable_cores()[:2]) or os.cpu_count() or 1))
    spans = Spans.load(tmp_path / "three" / "run" / "spans.npz")
    formula = said["scale"] * (LATENCY + 64 * 4 * 128 * 4 / RATE)
    for kind in ("SEND_F", "SEND_B"):
        assert len(lasted(spans, kind)) == 2 * 4 * (STEPS - CALIBRATION)
        assert lasted(spans, kind).min() >= formula * (1 - 1e-6)
