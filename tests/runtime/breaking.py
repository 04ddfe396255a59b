"""What goes wrong with files and processes, made on purpose from a seed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _cut(file: Path, source: random.Random) -> None:
    """Lose the end."""
    file.write_bytes(file.read_bytes()[: source.randrange(file.stat().st_size)])


def _flip(file: Path, source: random.Random) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    file.write_bytes(content)


def _zero(file: Path, source: random.Random) -> None:
    """A block comes back as other bytes, the size unchanged."""
    content = bytearray(file.read_bytes())
    first = source.randrange(len(content))
    end = min(first + source.randrange(1, 512), len(content))
    content[first:end] = bytes(b ^ 0xFF for b in content[first:end])
    file.write_bytes(content)


def _grow(file: Path, source: random.Random) -> None:
    """Bytes too many."""
    file.write_bytes(file.read_bytes() + source.randbytes(source.randrange(1, 512)))


def _lose(file: Path, source: random.Random) -> None:
    """The file is gone."""
    file.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "cut off": _cut, "bit flipped": _flip, "block inverted": _zero, "too long": _grow,
    "missing": _lose,
}  # fmt: skip


def save_and_die(folder: Path, points: int) -> list[tuple[int, Path]]:
    """Go on from step 2, save step 3 while step 4 is trained, and die at each moment of saving.

    Args:
        folder: of checkpoints; each process works on a copy of it beside it.
        points: how many writes, syncs, renames and removals: the n-th process reaches n of them.

    Returns:
        Exit code and folder of each process.
    """
    import torch

    from real_runtime.checkpoint import load
    from real_runtime.checkpoint_save import Saver
    from real_runtime.rank import make_executor

    torch.set_num_threads(1)
    plan, settings = pickle.loads((folder.parent / "case.pickle").read_bytes())
    executor = make_executor(plan, settings, 0, torch.device("cpu"))
    assert executor is not None
    load(executor, folder / "step-00000002")
    executor.run_step(2)
    found = []
    for point in range(points):
        copy = folder.parent / f"died-{point}"
        shutil.copytree(folder, copy)
        child = os.fork()
        if not child:
            _die_after(point)
            saver = Saver(executor, settings, copy, None)
            saver.begin(3)
            executor.run_step(3)
            saver.finish()
            os._exit(0)
        found.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), copy))
    return found


def _die_after(point: int) -> None:
    """From now on the process ends after so many changes to files."""
    left = [point]

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os._exit(77)
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    os.fsync = dying(os.fsync)
    for name in ("rename", "write_bytes", "mkdir"):
        setattr(Path, name, dying(getattr(Path, name)))
    shutil.rmtree = dying(shutil.rmtree)  # type: ignore[assignment]


def save_on_a_full_disk(folder: Path) -> str:
    """Go on from step 2 and save step 3 where no room is left: the error."""
    import resource

    import torch

    from real_runtime.checkpoint import load
    from real_runtime.checkpoint_save import Saver
    from real_runtime.errors import CheckpointError
    from real_runtime.rank import make_executor

    torch.set_num_threads(1)
    plan, settings = pickle.loads((folder.parent / "case.pickle").read_bytes())
    executor = make_executor(plan, settings, 0, torch.device("cpu"))
    assert executor is not None
    load(executor, folder / "step-00000002")
    executor.run_step(2)
    saver = Saver(executor, settings, folder, None)
    limit = (folder / "step-00000002" / "rank-00000.safetensors").stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    saver.begin(3)
    executor.run_step(3)
    try:
        saver.finish()
    except CheckpointError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    if sys.argv[2:] == ["full"]:
        print(json.dumps(save_on_a_full_disk(Path(sys.argv[1]))))
    else:
        print(json.dumps([(code, str(at)) for code, at in save_and_die(Path(sys.argv[1]), 12)]))
    sys.stdout.flush()
