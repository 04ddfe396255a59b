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

from real_runtime.checkpoint import load, save
from real_runtime.rank import make_executor
from real_runtime.settings import RunSettings
from sim.plan.plan import Plan

Leg = tuple[Plan, int]
"""A plan and the step it trains up to; every leg but the first goes on from a checkpoint."""
Case = tuple[str, list[Leg], RunSettings]


def run_case(case: Case, rank: int, folder: Path) -> list[tuple[float, float]]:
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
            save(executor, settings, folder / name, end, 9)
            executor.groups.close()
        begin = end
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
    found: dict[str, Any] = {c[0]: run_case(c, rank, Path(folder)) for c in cases}
    if rank == 0:
        (Path(folder) / "found.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # as the worker does
