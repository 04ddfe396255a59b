"""Start a plan's ranks on this machine with torchrun, and watch them. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from real_runtime.cores import usable_cores
from real_runtime.errors import RunError
from real_runtime.run_folder import CHECKPOINTS, check_own, put_aside, remove
from real_runtime.run_log import EVENTS, SAY, mend
from real_runtime.settings import RunSettings
from sim.errors import HetlabError, InputError, StoppedError

__all__ = ["SHARED", "command_line", "launch", "prepare"]

SHARED = "emulation.shared"
"""File in a run's folder through which its ranks know what emulated links carry."""

LOG = "launch.log"
"""What torchrun and its ranks said, in a run's folder."""
FAIL = "hetlab! "
"""Head of the line of a rank that has failed."""
GRACE = 5.0
"""[s] that the other ranks get to end after one has failed."""


def command_line(ranks: int, folder: Path) -> list[str]:
    """Return the command that starts every rank on this machine."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1",
        f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1",
        "-m", "real_runtime.worker", str(folder),
    ]  # fmt: skip


def environment(threads: int) -> dict[str, str]:
    """Return the environment of the ranks."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(threads))
    if sys.platform == "linux":
        # One machine: talk over loopback, whatever its name resolves to.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def threads_per_rank(ranks: int) -> int:
    """Processor cores per rank, at least 1."""
    return max((len(usable_cores()) or os.cpu_count() or 1) // ranks, 1)


def prepare(settings: RunSettings, again: bool = False) -> Path:
    """Write what the ranks read; results of an earlier run in the folder are put aside.

    Args:
        settings: of the run. again: the same run starts once more and keeps its log.

    Raises:
        InputError: the folder holds something else.
    """
    folder = Path(settings.out)
    check_own(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("errors", "pids"):
        remove(folder / name)
        (folder / name).mkdir()
    remove(folder / SHARED)
    if not again:
        put_aside(folder, goes_on=bool(settings.resume))
        remove(folder / LOG)
    elif not settings.resume:
        remove(folder / CHECKPOINTS)
    mend(folder / EVENTS)
    (folder / "run.json").write_bytes(msgspec.json.encode(settings))
    return folder


def launch(ranks: int, folder: Path, threads: int, show: Callable[[str], None]) -> None:
    """Run all ranks to their end.

    Args:
        ranks: how many. folder: of the run, see ``prepare``. threads: per rank.
        show: takes rank 0's progress lines.

    Raises:
        RunError: a rank failed, died or waited too long, or torchrun died.
        StoppedError: Ctrl-C, SIGTERM or SIGHUP; no process of the run is left.
        HetlabError: what a rank raised, with its exit code.
    """
    with _ended_by_signals(folder):
        _watch(ranks, folder, threads, show)
    for name in ("errors", "pids"):
        shutil.rmtree(folder / name)
    (folder / SHARED).unlink(missing_ok=True)


def _watch(ranks: int, folder: Path, threads: int, show: Callable[[str], None]) -> None:
    """Start torchrun, pass on what it says, and leave none of its processes behind."""
    command = [
        sys.executable, "-m", "real_runtime.parent", str(os.getpid()), *command_line(ranks, folder)
    ]  # fmt: skip
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=environment(threads), start_new_session=True,
    )  # fmt: skip
    said: list[str] = []
    timer: threading.Timer | None = None
    assert child.stderr is not None
    watcher = threading.Thread(target=_outlived, args=(child, folder), daemon=True)
    watcher.start()
    try:
        with (folder / LOG).open("a") as log:
            for line in child.stderr:
                if line.startswith(SAY):
                    show(line[len(SAY) :].rstrip())
                elif line.startswith(FAIL) and timer is None:
                    # torchrun itself waits 30 s for ranks that are stopped and hear no signal.
                    timer = threading.Timer(GRACE, _kill_ranks, (folder,))
                    timer.start()
                else:
                    log.write(line)
                    said.append(line)
        code = child.wait()
    finally:
        _heed(signal.SIG_IGN)  # a second signal must not leave ranks behind
        if timer is not None:
            timer.cancel()
        _end(child, folder)
        watcher.join()
    if code:
        raise _failure(folder, "".join(said), code)


def _outlived(child: subprocess.Popen[str], folder: Path) -> None:
    """Wait for torchrun; ranks that outlive its death hold its pipe open and must not train on."""
    if child.wait():
        _kill_ranks(folder)


_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what ends jobs, and a terminal that is closed."""


@contextmanager
def _ended_by_signals(folder: Path) -> Iterator[None]:
    """Let these signals raise StoppedError, with the exit code that shells give.

    From the first on they are ignored: the process is about to end by itself, with that code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        _heed(signal.SIG_IGN)
        stopped.append(number)
        sent = signal.Signals(number).name
        name = "interrupted" if number == signal.SIGINT else f"ended by {sent}"
        error = StoppedError(f"{name}; all ranks are stopped, and what was logged is in {folder}")
        error.exit_code = 128 + number
        raise error

    stopped: list[int] = []
    before = {s: signal.getsignal(s) for s in _STOPS}
    _heed(stop)
    for number, handler in before.items():
        if handler is signal.SIG_IGN:  # as a shell starts what runs in its background
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items() if not stopped else ():
            signal.signal(number, handler or signal.SIG_DFL)


def _heed(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Handle the signals that end a run; where another thread launches it, they are not its own."""
    if threading.current_thread() is threading.main_thread():
        for number in _STOPS:
            signal.signal(number, handler)


def _end(child: subprocess.Popen[str], folder: Path) -> None:
    """End torchrun and its ranks: by SIGTERM, then for certain."""
    assert child.stderr is not None
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            _kill_ranks(folder)
            child.kill()
            child.wait()
    child.stderr.close()


def _kill_ranks(folder: Path) -> None:
    """End every rank of this run that still lives; each left its process number."""
    for file in (folder / "pids").glob("*"):
        number = file.read_text()
        with suppress(ProcessLookupError):
            if number:  # else it is being written
                os.kill(int(number), signal.SIGKILL)


def _failure(folder: Path, said: str, code: int = 1) -> HetlabError:
    """What went wrong first: a rank's own error, else a death, else what a peer noticed.

    Without torchrun, by its exit code, ranks lose their store; what they say then is no cause.
    """
    if not folder.is_dir():
        return InputError("the run's folder was removed while it ran", str(folder))
    if code < 0:
        name = signal.Signals(-code).name
        return RunError(f"torchrun was ended by {name}; its ranks were stopped")
    failures = [json.loads(f.read_text()) for f in sorted((folder / "errors").glob("*.json"))]
    failures.sort(key=lambda f: (f["peer"], f["unix_s"]))
    killed = _killed(said)
    if failures and not failures[0]["peer"]:
        first = failures[0]
        error = HetlabError(f"rank {first['rank']}: {first['text']}")
        error.exit_code = first["exit_code"]
        return error
    if killed is not None:
        rank, sign = killed
        name = signal.Signals(sign).name
        return RunError(f"rank {rank} was ended by {name}; its peers were stopped")
    if failures:
        return RunError(failures[0]["text"])
    return RunError(f"torchrun failed without a word from a rank; see {folder / LOG}")


def _killed(said: str) -> tuple[int, int] | None:
    """(rank, signal) of a rank that a signal ended, torchrun's own signals left out.

    torchrun ends the peers by SIGTERM and does not always say so, so a rank that another signal
    ended goes first.
    """
    stopped = set(re.findall(r"Sending process (\d+) closing signal", said))
    report = r"rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*-(\d+) \(pid: (\d+)\)"
    found = [(int(r), int(s)) for r, s, pid in re.findall(report, said) if pid not in stopped]
    return min(found, key=lambda f: f[1] == signal.SIGTERM, default=None)


def printed(ranks: int, folder: Path, threads: int) -> str:
    """The command as a person would type it."""
    env = environment(threads)
    names = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    given = " ".join(f"{n}={env[n]}" for n in names if n in env)
    return f"{given} {shlex.join(command_line(ranks, folder))}"
