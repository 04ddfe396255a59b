"""Checkpoints: another plan goes on with the same training, and broken ones are refused by name."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from real_runtime import checkpoint_save  # noqa: E402
from real_runtime.checkpoint import load  # noqa: E402
from real_runtime.checkpoint_save import Saver  # noqa: E402
from real_runtime.errors import CheckpointError, RunError  # noqa: E402
from real_runtime.rank import make_executor  # noqa: E402
from real_runtime.resume import (  # noqa: E402
    INDEX,
    check_complete,
    check_resumable,
    complete,
    newest_good,
    read_index,
    seal,
)
from real_runtime.settings import Recipe, RunSettings  # noqa: E402
from sim.errors import InputError  # noqa: E402

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import breaking  # noqa: E402
import killing  # noqa: E402
import plans  # noqa: E402
import world  # noqa: E402
from saving import SlowDisk, save  # noqa: E402

pytestmark = pytest.mark.timeout(300)

HALF, STEPS = 2, 4
RECIPE = Recipe(learning_rate=1e-2, warmup=2, clip=1.0)
TIED = {"tie_word_embeddings": True}
MOE = {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}  # fmt: skip

PLANS: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "one": ([[1]], {}),
    "dp2": ([[1, 1]], {"microbatches": (2, 2)}),
    "dp2 zero1": ([[1, 1]], {"microbatches": (2, 2), "zero": 1}),
    "dp4 zero1": ([[1, 1, 1, 1]], {"microbatches": (1, 1, 1, 1), "zero": 1}),
    "dp2 tp2 zero1": ([[2, 2]], {"microbatches": (3, 1), "zero": 1}),
    "unlike zero1": ([[1, 2]], {"microbatches": (1, 3), "zero": 1}),
    "tp2": ([[2]], {}),
    "tp2 sequence": ([[2]], {"sequence_parallel": True}),
    "pp2": ([[1], [1]], {}),
    "pp2 interleaved": (
        [[1], [1]], {"schedule": "interleaved", "chunks": 2, "recompute": "full"},
    ),
    "pp3 zb-h1": ([[1], [1], [1]], {"schedule": "zb-h1"}),
    "dp2 pp2 zero1": ([[1, 1], [1, 1]], {"microbatches": (2, 2), "zero": 1}),
    "ep2 dp4 zero1": ([[1, 1, 1, 1]], {"microbatches": (1,) * 4, "ep": 2, "zero": 1}),
}  # fmt: skip
LEGS: list[tuple[dict[str, Any], str, str]] = [
    # (model, plan that saves, plan that goes on)
    ({}, "dp2", "pp2"),
    ({}, "tp2", "pp2"),
    ({}, "pp2", "dp2 zero1"),
    ({}, "dp2", "dp4 zero1"),
    ({}, "unlike zero1", "tp2 sequence"),
    ({}, "dp2 tp2 zero1", "pp3 zb-h1"),
    ({}, "pp2 interleaved", "unlike zero1"),
    (TIED, "dp2 pp2 zero1", "tp2"),
    (MOE, "ep2 dp4 zero1", "pp2"),
    (MOE, "tp2", "ep2 dp4 zero1"),
]
SAME = (("tp2", "bf16"), ("dp2 tp2 zero1", "bf16"), ("pp2 interleaved", "fp32"))
"""Plans that go on themselves, bit for bit."""


def made(model: dict[str, Any], name: str) -> Any:
    tp, knobs = PLANS[name]
    return plans.plan_of(plans.problem_of(**model), tp, **knobs)


def settings_of(tokens: Path, dtype: str = "fp64", steps: int = STEPS) -> RunSettings:
    return RunSettings(
        plan="", data=str(tokens), out="", steps=steps, dtype=dtype, recipe=RECIPE
    )  # fmt: skip


def name_of(model: dict[str, Any], first: str, second: str) -> str:
    kind = "tied" if model is TIED else "experts" if model is MOE else "dense"
    return f"{kind}, {first} then {second}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("world")
    tokens = plans.write_tokens(folder)
    cases: list[Any] = []
    for model, first, second in LEGS:
        legs = [(made(model, first), HALF), (made(model, second), STEPS)]
        cases.append((name_of(model, first, second), legs, settings_of(tokens)))
    for plan, dtype in SAME:
        one, settings = made({}, plan), settings_of(tokens, dtype)
        cases.append((f"{plan} {dtype} whole", [(one, STEPS)], settings))
        cases.append((f"{plan} {dtype} cut", [(one, HALF), (one, STEPS)], settings))
    cases.append(("held", [(made({}, "dp2 zero1"), STEPS)], settings_of(tokens)))
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    return world.run_processes(FOLDER / "checkpoint_world.py", folder, 4)


_ORACLES: dict[str, list[tuple[float, float]]] = {}


def uninterrupted(model: dict[str, Any], tokens: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of one process that never stopped."""
    key = repr(sorted(model.items()))
    if key not in _ORACLES:
        torch.set_num_threads(1)
        one = make_executor(made(model, "one"), settings_of(tokens), 0, torch.device("cpu"))
        assert one is not None
        results = [one.run_step(step) for step in range(STEPS)]
        _ORACLES[key] = [(r.loss, r.norm) for r in results]
    return _ORACLES[key]


@pytest.mark.parametrize(("model", "first", "second"), LEGS, ids=[name_of(*x) for x in LEGS])
def test_another_plan_goes_on_with_the_same_training(
    model: dict[str, Any], first: str, second: str, found: dict[str, Any], tmp_path: Path
) -> None:
    expected = uninterrupted(model, plans.write_tokens(tmp_path))
    mine = found[name_of(model, first, second)]
    assert len(mine) == STEPS
    worst = max(
        abs(a / b - 1)
        for got, wanted in zip(mine, expected, strict=True)
        for a, b in zip(got, wanted, strict=True)
    )
    print(f"{name_of(model, first, second)}: {worst:.1e}")
    assert worst <= 1e-9


@pytest.mark.parametrize(("plan", "dtype"), SAME)
def test_the_same_plan_goes_on_bit_for_bit(plan: str, dtype: str, found: dict[str, Any]) -> None:
    assert found[f"{plan} {dtype} cut"] == found[f"{plan} {dtype} whole"]


def test_a_checkpoint_is_complete_only_with_every_ranks_file(found: dict[str, Any]) -> None:
    held = found["held"]
    assert len(held["losses"]) == STEPS - 1  # trained while rank 1's file was held back
    assert held["before"] == []
    assert held["saved"] == [1, STEPS + 1]
    assert held["after"] == ["step-00000001", f"step-{STEPS + 1:08d}"]


# -- one process: files ------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Any, RunSettings]:
    """Two checkpoints of a small run, its plan and settings."""
    settings = settings_of(plans.write_tokens(tmp_path))
    plan = made({}, "one")
    executor = make_executor(plan, settings, 0, torch.device("cpu"))
    assert executor is not None
    for step in (0, 1):
        executor.run_step(step)
        save(executor, settings, tmp_path / "checkpoints", step + 1, 2)
    return tmp_path / "checkpoints", plan, settings


def test_a_checkpoint_is_json_and_safetensors_with_every_element_once(kept: Any) -> None:
    folder, plan, _ = kept
    newest = folder / "step-00000002"
    assert {f.name for f in newest.iterdir()} == {INDEX, "rank-00000.safetensors"}
    index = read_index(newest)
    assert index.steps == 2 and index.plan_hash == plan.hash
    stored = index.parameters["model.layers.0.mlp.down_proj.weight"]
    assert stored.shape == (32, 48) and set(stored.pieces) == {"value", "exp_avg", "exp_avg_sq"}
    piece = stored.pieces["value"][0]
    short = msgspec.structs.replace(piece, count=piece.count - 1)
    for wrong in ((short,), (piece, piece), ()):
        broken = msgspec.structs.replace(stored, pieces={"value": wrong})
        with pytest.raises(InputError, match="is not whole"):
            check_complete(msgspec.structs.replace(index, parameters={"a": broken}), "here")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("damage", breaking.DAMAGES)
@pytest.mark.parametrize("file", [INDEX, "rank-00000.safetensors"])
def test_a_broken_file_is_refused_by_name_and_the_checkpoint_before_is_used(
    file: str, damage: str, seed: int, kept: Any
) -> None:
    folder, plan, settings = kept
    breaking.DAMAGES[damage](folder / "step-00000002" / file, random.Random(f"{damage} {seed}"))
    refused: list[str] = []
    found, index = check_resumable(folder, plan, settings, lambda e: refused.append(str(e)))
    assert found.name == "step-00000001" and index.steps == 1
    assert len(refused) == 1 and str(Path("step-00000002") / file) in refused[0], refused


@pytest.mark.parametrize(
    ("resumes", "left"),
    [(True, ["step-00000001", "step-00000003"]),
     (False, ["step-00000001", "step-00000002", "step-00000003"])],
)  # fmt: skip
def test_a_broken_checkpoint_does_not_count_and_files_of_others_do_no_harm(
    resumes: bool, left: list[str], kept: Any
) -> None:
    folder, plan, settings = kept
    file = folder / "step-00000002" / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw if resumes else raw[:-1])  # altered, which takes reading; or cut off
    for name in ("step-00000099", "step-00000003.part", "step-00000003.old"):
        (folder / name).write_text("")
    begin = folder / "step-00000001"
    if resumes:
        settings = msgspec.structs.replace(settings, resume=str(begin))
    executor = make_executor(plan, settings, 0, torch.device("cpu"))
    assert executor is not None
    for step in range(load(executor, begin), 3):
        executor.run_step(step)
    save(executor, settings, folder, 3, 2)
    assert sorted(p.name for p in folder.iterdir()) == [*left, "step-00000099"]
    assert [p.name for p in complete(folder)] == left


def test_no_good_checkpoint_is_an_error_and_a_half_written_one_is_none(kept: Any) -> None:
    folder, plan, settings = kept
    for number in (1, 2):
        (folder / f"step-{number:08d}" / INDEX).unlink()
    (folder / "step-00000003.part").mkdir()
    refused: list[InputError] = []
    with pytest.raises(InputError, match="no checkpoint to resume from"):
        check_resumable(folder, plan, settings, refused.append)
    assert len(refused) == 2


def test_an_index_cannot_name_files_elsewhere(kept: Any) -> None:
    folder, _, _ = kept
    at = folder / "step-00000002"
    index = read_index(at)
    name = "rank-00000.safetensors"
    shutil.copy(at / name, folder / "elsewhere.safetensors")
    raw = msgspec.json.encode(index).replace(name.encode(), b"../elsewhere.safetensors")
    (at / INDEX).write_bytes(seal(msgspec.json.decode(raw, type=type(index))))
    refused: list[str] = []
    good = newest_good(folder, lambda e: refused.append(str(e)))
    assert good is not None and good[0].name == "step-00000001"
    assert "outside the checkpoint" in refused[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed: the checkpoint belongs to another run"),
        ({"dtype": "fp32"}, "dtype: the checkpoint belongs to another run"),
        ({"steps": 2}, "nothing is left to train"),
    ],
)
def test_another_training_is_refused(change: dict[str, Any], words: str, kept: Any) -> None:
    folder, plan, settings = kept
    other = msgspec.structs.replace(settings, **change)
    with pytest.raises(InputError, match=words):
        check_resumable(folder, plan, other, lambda e: None)


@pytest.mark.parametrize(("schedule", "same"), [(STEPS, True), (0, False)])
def test_a_run_of_more_steps_goes_on_bit_for_bit_where_the_schedule_stays(
    schedule: int, same: bool, tmp_path: Path
) -> None:
    """Planned for half the steps, then resumed with all of them."""

    def part(steps: int, length: int, begin: Path | None = None) -> list[tuple[float, float]]:
        recipe = msgspec.structs.replace(RECIPE, length=length, warmup=0)
        settings = msgspec.structs.replace(settings_of(tokens, steps=steps), recipe=recipe)
        executor = make_executor(plan, settings, 0, torch.device("cpu"))
        assert executor is not None
        first = load(executor, begin) if begin is not None else 0
        results = [executor.run_step(step) for step in range(first, steps)]
        save(executor, settings, tmp_path, steps, 9)
        return [(r.loss, r.norm) for r in results]

    torch.set_num_threads(1)
    plan, tokens = made({}, "one"), plans.write_tokens(tmp_path)
    whole = part(STEPS, 0)
    begun = part(HALF, schedule) + part(STEPS, schedule, tmp_path / f"step-{HALF:08d}")
    assert (begun == whole) is same


def test_another_model_is_refused_by_parameter(kept: Any) -> None:
    folder, _, settings = kept
    wider = make_executor(
        made({"intermediate_size": 64}, "one"), settings, 0, torch.device("cpu")
    )  # fmt: skip
    assert wider is not None
    with pytest.raises(
        InputError, match=r"gate_proj.*another model; found \(48, 32\); expected \(64, 32\)"
    ):
        load(wider, folder / "step-00000002")


def test_a_crash_while_saving_never_loses_the_last_good_one(kept: Any) -> None:
    """A process ends without warning after each number of writes, syncs, renames and removals."""
    folder, plan, settings = kept
    (folder.parent / "case.pickle").write_bytes(pickle.dumps((plan, settings)))
    done = subprocess.run(
        [sys.executable, str(FOLDER / "breaking.py"), str(folder)], capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = []
    for code, copy in json.loads(done.stdout):
        assert code in (0, 77), done.stderr
        good = newest_good(Path(copy), lambda e: pytest.fail(f"half written but complete: {e}"))
        assert good is not None
        steps.append(good[1].steps)
        names = sorted(p.name for p in Path(copy).iterdir())
        assert code == 77 or names == ["step-00000002", "step-00000003"]
    codes = [code for code, _ in json.loads(done.stdout)]
    assert steps == sorted(steps) and set(steps) == {2, 3}
    assert codes == sorted(codes, reverse=True) and set(codes) == {0, 77}


# -- while training goes on --------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    slow = SlowDisk()
    monkeypatch.setattr(checkpoint_save, "write_tensors", slow.write)
    return slow


@pytest.fixture
def executor(tmp_path: Path) -> Any:
    torch.set_num_threads(1)
    settings = settings_of(plans.write_tokens(tmp_path))
    return make_executor(made({}, "one"), settings, 0, torch.device("cpu"))


def saver_of(executor: Any, folder: Path, deadline: float = 60.0) -> Saver:
    settings = settings_of(folder / "tokens.npy")
    settings = msgspec.structs.replace(settings, deadline=deadline)
    return Saver(executor, settings, folder / "checkpoints", None)


def test_steps_go_on_while_a_slow_disk_writes_the_state_they_began_with(
    disk: SlowDisk, executor: Any, tmp_path: Path
) -> None:
    executor.run_step(0)
    before = [part.master.clone() for part in executor.stages[0].update.parts]
    saver = saver_of(executor, tmp_path)
    saver.begin(1)
    assert disk.reached.wait(60)
    after = []
    for step in (1, 2):
        after.append(executor.run_step(step).loss)
        assert saver.check() == [] and complete(tmp_path / "checkpoints") == []
    disk.go.set()
    assert [s.steps for s in saver.finish()] == [1]
    settings = settings_of(tmp_path / "tokens.npy")
    other = make_executor(made({}, "one"), settings, 0, torch.device("cpu"))
    assert other is not None
    assert load(other, tmp_path / "checkpoints" / "step-00000001") == 1
    parts = other.stages[0].update.parts
    assert all(torch.equal(p.master, b) for p, b in zip(parts, before, strict=True))
    assert (other.run_step(1).loss, other.run_step(2).loss) == tuple(after)


def test_the_next_checkpoint_waits_for_the_one_before_and_says_so(
    disk: SlowDisk, executor: Any, tmp_path: Path
) -> None:
    executor.run_step(0)
    saver = saver_of(executor, tmp_path)
    assert saver.begin(1).waited_for == 0
    executor.run_step(1)
    letting_go = threading.Timer(0.2, disk.go.set)
    letting_go.start()
    begun = saver.begin(2)
    assert begun.waited_for == 1 and begun.waited_s > 0.05
    assert [s.steps for s in saver.finish()] == [1, 2]


def test_training_waits_for_a_disk_up_to_the_deadline(
    disk: SlowDisk, executor: Any, tmp_path: Path
) -> None:
    executor.run_step(0)
    saver = saver_of(executor, tmp_path, deadline=0.1)
    saver.begin(1)
    with pytest.raises(
        CheckpointError, match=r"after step 1 is not complete .* 0.1 s .*rank-00000.safetensors"
    ):
        saver.finish()
    disk.go.set()


def test_what_the_writer_cannot_do_is_an_error_at_the_next_step(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(tensors: Any, file: Path) -> Any:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(checkpoint_save, "write_tensors", fails)
    executor.run_step(0)
    saver = saver_of(executor, tmp_path)
    saver.begin(1)
    executor.run_step(1)
    for thread in threading.enumerate():
        if thread.name == "checkpoint 1":
            thread.join()
    with pytest.raises(CheckpointError, match=r"after step 1 could not .*No space left on device"):
        saver.check()
    with pytest.raises(CheckpointError, match="after step 1"):
        saver.begin(2)
    assert complete(tmp_path / "checkpoints") == []


def test_a_lost_store_is_a_death_elsewhere(executor: Any, tmp_path: Path) -> None:
    saver = saver_of(executor, tmp_path)
    saver._error = torch.distributed.DistNetworkError("Failed to recv, got 0 bytes")
    with pytest.raises(RunError, match=r"rank 0 lost the others .*Failed to recv"):
        saver.check()


def test_a_full_disk_ends_the_run_and_keeps_the_last_good_one(kept: Any) -> None:
    """No file of the child may grow past a limit, which the rank's would."""
    folder, plan, settings = kept
    (folder.parent / "case.pickle").write_bytes(pickle.dumps((plan, settings)))
    done = subprocess.run(
        [sys.executable, str(FOLDER / "breaking.py"), str(folder), "full"], capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = json.loads(done.stdout)
    assert text.startswith("the checkpoint after step 3 could not be written: "), text
    assert "rank-00000.safetensors" in text and "File too large" in text, text
    good = newest_good(folder, lambda e: pytest.fail(f"half written but complete: {e}"))
    assert good is not None and good[1].steps == 2


def test_a_rank_that_cannot_write_is_named(tmp_path: Path) -> None:
    plan = made({}, "pp2")
    settings = killing.settings_of(tmp_path / "run", plan)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2);"
        "from sim.cli import main; main()"
    )
    done = subprocess.run(
        [
            sys.executable, "-c", code, "run", settings.plan, "--data", settings.data, "--out",
            settings.out, "--checkpoint-every", "2", "--restarts", "1",
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, said
    assert "the checkpoint after step 2 could not be written" in said and "rank " in said, said
    assert "start again" not in said, said
