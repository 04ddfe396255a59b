"""Start a probe's ranks on this machine and collect what they measured. Imports no torch."""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from real_runtime.errors import RunError
from real_runtime.launch import environment
from real_runtime.probe.records import Facts, ProbeSettings, Record, merged
from sim.errors import StoppedError

__all__ = ["SAY", "measure"]

SAY = "hetlab> "
"""Head of rank 0's progress lines."""
GRACE = 5.0
"""[s] that ranks get to end."""


def measure(settings: ProbeSettings, show: Callable[[str], None]) -> tuple[Facts, list[Record]]:
    """Run a probe to its end.

    Args:
        settings: of it. show: takes each line of progress.

    Returns:
        What rank 0 knows, and the records of all ranks merged.

    Raises:
        RunError: a rank failed; StoppedError: interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="hetlab-probe-") as folder:
        at = Path(folder)
        (at / "settings.json").write_bytes(msgspec.json.encode(settings))
        _run(settings, at, show)
        files = [at / f"rank-{rank}.json" for rank in range(settings.ranks)]
        found = [
            msgspec.json.decode(f.read_bytes(), type=tuple[Facts, list[Record]]) for f in files
        ]
    return found[0][0], merged([records for _, records in found])


def _run(settings: ProbeSettings, folder: Path, show: Callable[[str], None]) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "real_runtime.probe.worker", str(folder), str(rank)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environment(settings.threads), start_new_session=True,
        )
        for rank in range(settings.ranks)
    ]  # fmt: skip
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    said: list[list[str]] = [[] for _ in children]

    def follow(rank: int) -> None:
        stream = children[rank].stderr
        assert stream is not None
        for line in stream:
            if line.startswith(SAY):
                show(line[len(SAY) :].rstrip())
            else:
                said[rank].append(line)
        ended.put((rank, children[rank].wait()))

    readers = [threading.Thread(target=follow, args=(r,)) for r in range(len(children))]
    for reader in readers:
        reader.start()
    try:
        for _ in children:
            rank, code = ended.get()
            if code:
                last = "".join(said[rank]).strip().splitlines()[-1:] or [f"exit code {code}"]
                raise RunError(f"rank {rank} of the probe failed: {last[0]}")
    except KeyboardInterrupt:
        raise StoppedError("interrupted; nothing was written") from None
    finally:
        for child in children:
            _end(child)
        for reader in readers:
            reader.join()
        for child in children:
            assert child.stderr is not None
            child.stderr.close()


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
