"""What torchrun starts once per rank: ``python -m real_runtime.worker FOLDER``."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from real_runtime.checkpoint import load
from real_runtime.checkpoint_save import Saver
from real_runtime.cores import pin
from real_runtime.devices import backend_of, local_device, peak_memory
from real_runtime.emulate_rank import Emulator
from real_runtime.emulate_start import calibrate, emulator_of, kept_up
from real_runtime.errors import RunError
from real_runtime.executor import Executor
from real_runtime.launch import FAIL
from real_runtime.parent import PARENT, bind
from real_runtime.places import identity
from real_runtime.preflight import PreflightError
from real_runtime.preflight_rank import preflight
from real_runtime.rank import make_executor
from real_runtime.record import join
from real_runtime.run_folder import CHECKPOINTS, begun
from real_runtime.run_log import RunLog
from real_runtime.settings import RunSettings
from real_runtime.weight_files import StoredWeights, save_weights
from sim.errors import HetlabError
from sim.plan.io import load_plan
from sim.problem import problem_from_documents

__all__ = ["SETTINGS", "SPANS", "main"]

SETTINGS, SPANS = "run.json", "spans.npz"
"""What a run's folder holds."""


def _store(rank: int, size: int, deadline: float) -> Store:
    """The store where torchrun's processes meet."""
    wait = timedelta(seconds=deadline)
    store: Store = next(rendezvous("env://", rank, size, timeout=wait))[0]
    store.set_timeout(wait)
    return store


@contextmanager
def _world(
    store: Store, rank: int, size: int, deadline: float, device: torch.device
) -> Iterator[None]:
    dist.init_process_group(
        backend_of(device), store=PrefixStore("world", store), rank=rank, world_size=size,
        timeout=timedelta(seconds=deadline),
    )  # fmt: skip
    yield
    # Only after success: a failed rank must not wait for the others here.
    dist.destroy_process_group()


def run(folder: Path) -> None:
    """Train as a run's folder says."""
    settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=RunSettings)
    me = identity(os.environ)
    rank, size = me.rank, me.size
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = torch.device("cpu") if settings.emulate else local_device(me.device)
    pinned = settings.cores if device.type == "cpu" else ()
    if pinned:
        pin(pinned[rank])
    plan = load_plan(settings.plan)
    store, notes = _store(rank, size, settings.deadline), tuple[str, ...]()
    if settings.preflight:
        apart = PrefixStore("preflight", store)
        notes = preflight(apart, plan, settings, rank, size, device).notes
    with _world(store, rank, size, settings.deadline, device):
        values = StoredWeights(settings.weights) if settings.weights else None
        problem = problem_from_documents(plan.problem)
        executor = make_executor(plan, settings, rank, device, problem, values)
        assert executor is not None
        world = executor.groups.of("world")
        group = executor.groups.handle(world[0]) if world else None
        executor.recorder.align(group)
        log = RunLog(folder, rank, plan, problem, settings.steps, settings.tensorboard)
        log.write(
            "start", plan_hash=plan.hash, spec_hash=plan.problem_hash, seed=settings.seed,
            version=plan.version, ranks=size, dtype=settings.dtype, device=device.type,
            steps=settings.steps, threads=torch.get_num_threads(), cores=pinned,
            emulate=settings.emulate,
        )  # fmt: skip
        if not rank:
            begun(folder)
        for note in notes:
            log.write("note", text=note)
            log.say(note)
        emulator = emulator_of(executor, settings, problem, folder, log)
        _train(executor, settings, log, folder, store, emulator)
        memory = _finish(executor, settings, folder, group)
        more = kept_up(emulator, group) if emulator is not None else {}
        log.write("end", steps=settings.steps, memory_bytes=memory, **more)
        log.close()


def _train(
    executor: Executor,
    settings: RunSettings,
    log: RunLog,
    folder: Path,
    store: Store,
    emulator: Emulator | None,
) -> None:
    first, every = 0, settings.checkpoint_every
    if settings.resume:
        first = load(executor, Path(settings.resume))
        log.write("resume", step=first, checkpoint=Path(settings.resume).name)
    saver = Saver(executor, settings, folder / CHECKPOINTS, store) if every else None
    for step in range(first, settings.steps):
        result = executor.run_step(step)
        log.step(step, result, peak_memory(executor.device))
        if emulator is not None:
            calibrate(emulator, executor, settings, log, step + 1 - first)
        if saver is not None:
            _checkpoint(saver, step + 1, settings, log)


def _checkpoint(saver: Saver, done: int, settings: RunSettings, log: RunLog) -> None:
    """Begin a checkpoint where one is due, and log those that are complete."""
    if done % settings.checkpoint_every == 0:
        begun = saver.begin(done)
        log.write("checkpoint_begun", step=done, copy_s=begun.copy_s, waited_s=begun.waited_s)
        if begun.waited_for:
            log.say(
                f"the checkpoint after step {done} waited {begun.waited_s:.1f} s for the one "
                f"after step {begun.waited_for}"
            )
    for saved in saver.finish() if done == settings.steps else saver.check():
        log.write("checkpoint", step=saved.steps, seconds=saved.seconds)


def _finish(
    executor: Executor, settings: RunSettings, folder: Path, group: dist.ProcessGroup | None
) -> list[float]:
    """Write spans and weights; return the memory [B] that each rank has used at most."""
    itemsize = torch.empty((), dtype=executor.boundaries.dtype).element_size()
    rows = executor.recorder.rows(executor.plan, executor.program, executor.groups.wiring, itemsize)
    memory = [peak_memory(executor.device)]
    if group is not None:
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, (rows, memory), group=group)
        rows = [row for part, _ in said for row in part]
        memory = [used for _, part in said for used in part]
    if executor.program.rank == 0:
        join(rows, executor.plan.name or executor.plan.hash).save(folder / SPANS)
    if settings.save:
        save_weights(executor, folder / "weights")
    return memory


def main(folder: str) -> int:
    """Run one rank; an error goes to a file that the launcher reads, and to the exit code."""
    bind(int(os.environ.get(PARENT, 0)))
    rank = str(identity(os.environ).rank)
    (Path(folder) / "pids" / rank).write_text(str(os.getpid()))
    try:
        run(Path(folder))
    except Exception as error:  # noqa: BLE001 - the launcher must learn of every failure
        text = str(error) if isinstance(error, HetlabError) else f"{type(error).__name__}: {error}"
        code = int(getattr(error, "exit_code", 1))
        failure = {
            "rank": error.rank if isinstance(error, PreflightError) else int(rank),
            "text": text, "unix_s": time.time(), "exit_code": code,
            "peer": _of_a_peer(error),
        }  # fmt: skip
        (Path(folder) / "errors" / f"rank-{rank}.json").write_text(json.dumps(failure))
        print(f"{FAIL}rank {rank}: {text}", file=sys.stderr)  # noqa: T201 - the launcher reads this
        if not isinstance(error, HetlabError):
            traceback.print_exc()
        return code
    return 0


def _of_a_peer(error: Exception) -> bool:
    """Whether an error says no more than that another rank is gone or silent."""
    if isinstance(error, RunError | dist.DistError):
        return True
    # Gloo's collectives raise plain errors.
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def _leave(code: int) -> NoReturn:
    """End the process at once.

    An ordinary exit waits for threads that may sit in a collective with a dead peer, and a native
    thread that wants the interpreter while it ends aborts the whole process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1]))
