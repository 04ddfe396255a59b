"""One world of processes that trains plans, saves, and goes on with other plans."""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from saving import SlowDisk, save

from real_runtime import checkpoint_save
from real_runtime.checkpoint import load
from real_runtime.checkpoint_save import Saver
from real_runtime.rank import make_executor
from real_runtime.resume import complete
from real_runtime.settings import RunSettings
from sim.plan.plan import Plan

Leg = tuple[Plan, int]
"""A plan and the step it trains up to; every leg but the first goes on from a checkpoint."""
Case = tuple[str, list[Leg], RunSettings]


def run_case(case: Case, rank: int, folder: Path, store: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step, as this rank saw them."""
    name, legs, settings = case
    found: list[tuple[float, float]] = []
    begin = 0
    for plan, end in legs:
        executor = make_executor(plan, settings, rank, torch.device("cpu"))
        if executor is not None:
            if begin:
                begin = load(executor, folder / name / f"step-{begin:08d}")
            for step in range(begin, end):
                result = executor.run_step(step)
                found.append((result.loss, result.norm))
            save(executor, settings, folder / name, end, 9, store)
            executor.groups.close()
        begin = end
        dist.barrier()
    return found


def run_held(case: Case, rank: int, folder: Path, store: Any) -> dict[str, Any]:
    """Train on while rank 1's file is held back: the names there are before and after."""
    name, [(plan, steps)], settings = case
    disk, found = SlowDisk(), dict[str, Any]()
    executor = make_executor(plan, settings, rank, torch.device("cpu"))
    if executor is None:
        dist.barrier()
        return found
    if rank == 1:
        checkpoint_save.write_tensors = disk.write
    executor.run_step(0)
    saver = Saver(executor, settings, folder / name, store)
    saver.begin(1)
    found["losses"] = [executor.run_step(step).loss for step in range(1, steps)]
    saver.check()
    found["before"] = [p.name for p in complete(folder / name)]
    executor.run_step(steps)  # rank 1 lets go only after rank 0 has looked
    disk.go.set()
    saver.begin(steps + 1)
    found["saved"] = [s.steps for s in saver.finish()]
    found["after"] = [p.name for p in complete(folder / name)]
    executor.groups.close()
    dist.barrier()
    return found


def main(folder: str, rank: int, size: int, port: int) -> None:
    """Entry of one process: run every case of the folder and leave what rank 0 found."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    cases = pickle.loads((Path(folder) / "cases.pickle").read_bytes())
    found: dict[str, Any] = {}
    for number, case in enumerate(cases):
        work = run_held if case[0] == "held" else run_case
        apart = dist.PrefixStore(str(number), store)
        found[case[0]] = work(case, rank, Path(folder), apart)
    if rank == 0:
        (Path(folder) / "found.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # as the worker does
