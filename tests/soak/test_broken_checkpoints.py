"""Every kind of file of a checkpoint, broken in every way, is refused by name."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from pathlib import Path

import breaking
import plans
import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

import checkpoint_world  # noqa: E402
import world  # noqa: E402

from real_runtime.resume import INDEX, newest_good  # noqa: E402
from real_runtime.settings import RunSettings  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a sharded plan on two ranks."""
    folder = tmp_path_factory.mktemp("kept")
    plan = plans.plan_of(plans.problem_of(), [[1, 1]], microbatches=(2, 2), zero=1)
    settings = RunSettings(plan="", data=str(plans.write_tokens(folder)), out="", steps=2)
    case = ("checkpoints", [(plan, 1), (plan, 2)], settings)
    (folder / "cases.pickle").write_bytes(pickle.dumps([case]))
    world.run_processes(Path(checkpoint_world.__file__), folder, 2)
    return folder / "checkpoints"


@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("damage", breaking.DAMAGES)
@pytest.mark.parametrize("file", [INDEX, "rank-00000.safetensors", "rank-00001.safetensors"])
def test_a_broken_file_is_refused(
    file: str, damage: str, number: int, kept: Path, tmp_path: Path
) -> None:
    seed = int(os.environ["HETLAB_SOAK_SEED"]) + number
    copy = tmp_path / "checkpoints"
    shutil.copytree(kept, copy)
    breaking.DAMAGES[damage](copy / "step-00000002" / file, random.Random(f"{damage} {seed}"))
    refused: list[str] = []
    good = newest_good(copy, lambda e: refused.append(str(e)))
    assert good is not None and good[1].steps == 1, f"seed {seed}"
    assert len(refused) == 1 and file in refused[0], f"seed {seed}: {refused}"
