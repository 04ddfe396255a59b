"""What a run left, damaged: each file is named, whatever is wrong with it."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import plans  # noqa: E402
import recorded  # noqa: E402

from real_runtime.compare_run import read_run  # noqa: E402
from sim.cli import main  # noqa: E402
from sim.errors import InputError  # noqa: E402
from sim.plan.io import save_plan  # noqa: E402
from sim.plan.lower import lower  # noqa: E402
from sim.plan.plan import Plan  # noqa: E402
from sim.report.spans import Spans  # noqa: E402

PROBLEM = recorded.problem_of(recorded.machine())
LOG, SPANS = "events.jsonl", "spans.npz"
UNREADABLE = "spans.npz: the span table cannot be read"
Change = Callable[[bytes], bytes]


def pipeline() -> Plan:
    return lower(PROBLEM, plans.draft_of([[1], [1]], (4,), microbatch=4, cuts=(0, 5, 10)))


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plan.json and run: a start and four steps."""
    folder, plan = tmp_path_factory.mktemp("recorded"), pipeline()
    save_plan(plan, folder / "plan.json")
    recorded.record(folder / "run", plan, PROBLEM)
    return folder


def add(text: str) -> Change:
    return lambda raw: raw + text.encode()


def field(line: int, key: str, *value: Any) -> Change:
    """Change a field of a line's event; no value removes it."""

    def change(raw: bytes) -> bytes:
        lines = raw.decode().splitlines()
        event = json.loads(lines[line - 1])
        event = {k: v for k, v in event.items() if k != key} | ({key: value[0]} if value else {})
        lines[line - 1] = json.dumps(event)
        return "\n".join(lines).encode()

    return change


def archive(**changed: np.ndarray) -> Change:
    def change(raw: bytes) -> bytes:
        file = io.BytesIO()
        np.savez(file, **{**np.load(io.BytesIO(raw)), **changed})
        return file.getvalue()

    return change


def one_array(_: bytes) -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (SPANS, lambda raw: raw[: len(raw) // 2], UNREADABLE),
        (SPANS, lambda raw: b"", UNREADABLE),
        (SPANS, lambda raw: b"text\n", UNREADABLE),
        (SPANS, one_array, UNREADABLE),
        (SPANS, archive(start_s=np.zeros(3)), UNREADABLE),
        (SPANS, archive(**{"kind.names": np.array(["F"])}), "a code of kind has no name"),
        (SPANS, archive(**{"op.names": np.zeros(2)}), "names of op are float64"),
        (LOG, lambda raw: b"\xff\xfe" + raw, "events.jsonl:1: not a line of a run's log"),
        (LOG, add("\0\1\2\n"), "events.jsonl:6: not a line"),
        (LOG, add("[]"), "events.jsonl:6: not a line of a run's log; found []"),
        (LOG, add("5"), "events.jsonl:6: not a line of a run's log; found 5"),
        (LOG, add('{"step": 4}'), "events.jsonl:6: not a line"),
        (LOG, add("[" * 100_000), "events.jsonl:6: not a line"),
        (LOG, add("9" * 5_000), "events.jsonl:6: not a line"),
        (LOG, lambda raw: b"", "the run's log has no start"),
        (LOG, field(3, "seconds"), "events.jsonl:3: a broken step in the run's log"),
        (LOG, field(3, "seconds", "x"), "events.jsonl:3: a broken step"),
        (LOG, field(3, "seconds", math.nan), "events.jsonl:3: a broken step"),
        (LOG, field(3, "seconds", math.inf), "events.jsonl:3: a broken step"),
        (LOG, field(3, "seconds", 0), "events.jsonl:3: a broken step"),
        (LOG, field(1, "dtype"), "events.jsonl:1: a broken start in the run's log"),
        (LOG, field(1, "ranks", "2"), "events.jsonl:1: a broken start"),
        (LOG, field(1, "seed", -1), "events.jsonl:1: a broken start"),
        (LOG, field(1, "plan_hash", 5), "events.jsonl:1: a broken start"),
        (LOG, field(1, "emulate", "mixed"), "the run was an emulation"),
    ],
)  # fmt: skip
def test_a_broken_file_of_a_run_is_named(
    recorded_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    file: str, change: Change, words: str,
) -> None:  # fmt: skip
    shutil.copytree(recorded_run, tmp_path, dirs_exist_ok=True)
    broken = tmp_path / "run" / file
    broken.write_bytes(change(broken.read_bytes()))
    pair = [str(tmp_path / "plan.json"), str(tmp_path / "run")]
    for args in (["compare", *pair], ["calibrate", *pair, "--out", str(tmp_path / "x.yaml")]):
        with pytest.raises(SystemExit) as left:
            main(args)
        said = " ".join(capsys.readouterr().err.split())
        assert left.value.code == 4 and words in said, said
        assert str(tmp_path / "run") in said


def test_a_damaged_span_table_is_refused_or_read_whole(recorded_run: Path, tmp_path: Path) -> None:
    raw = (recorded_run / "run" / SPANS).read_bytes()
    draw, refused = np.random.default_rng(5), 0
    for at in draw.integers(0, len(raw), 150).tolist():
        damaged = bytearray(raw)
        damaged[at] ^= 1 << int(draw.integers(8))
        for text in (bytes(damaged), raw[:at]):
            (tmp_path / SPANS).write_bytes(text)
            try:
                assert len(Spans.load(tmp_path / SPANS)) > 0
            except InputError:
                refused += 1
    assert refused > 150


def test_a_span_table_is_written_whole_or_not_at_all(
    recorded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, file = Spans.load(recorded_run / "run" / SPANS), tmp_path / SPANS
    spans.take(spans["kind"] == "F").save(file)
    before = file.read_bytes()

    def full(opened: Any, **_: Any) -> None:
        opened.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(InputError, match="cannot write it; found No space left"):
        spans.save(file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_a_run_of_one_step_is_its_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = pipeline()
    save_plan(plan, tmp_path / "plan.json")
    pair = [str(tmp_path / "plan.json"), str(tmp_path / "run")]
    assert read_run(recorded.record(tmp_path / "run", plan, PROBLEM, steps=1), plan).only_first
    with pytest.raises(SystemExit) as left:
        main(["compare", *pair, "--json"])
    said = capsys.readouterr()
    assert not left.value.code and json.loads(said.out)["only_first"]
    assert "the run had one step" in " ".join(said.err.split())
    with pytest.raises(SystemExit) as left:
        main(["calibrate", *pair, "--out", str(tmp_path / "x.yaml")])
    assert left.value.code == 4 and not (tmp_path / "x.yaml").exists()
    assert "the first one warms up" in " ".join(capsys.readouterr().err.split())
