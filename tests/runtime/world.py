"""One world of processes that runs many plans, and the whole gradients of each step."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from real_runtime.executor import Executor
from real_runtime.rank import make_executor
from real_runtime.settings import RunSettings
from sim.plan.plan import Plan

Part = tuple[str, int, int, int, np.ndarray]
"""(name, split, tp index, tp, gradient) of what a rank holds."""
Case = tuple[str, Plan, RunSettings]


def local_gradients(executor: Executor) -> list[Part]:
    """Gradients of everything this rank holds, shares of a sharded one put together."""
    found = []
    for stage in executor.stages.values():
        for bucket in stage.buckets:
            if bucket.sharded:
                flat = bucket.gradient.new_empty(bucket.size)
                dist.all_gather_single(flat, bucket.gradient, group=bucket.group)
                for s in bucket.slices:
                    s.gradient.copy_(flat[s.first : s.first + s.size].view(s.gradient.shape))
        tp = executor.groups.tp
        for w in stage.weights:
            split = -1 if w.spec.split is None else w.spec.split
            found.append((w.spec.name, split, tp.index, tp.size, w.gradient.numpy().copy()))
    return found


def whole(parts: list[Part]) -> dict[str, list[np.ndarray]]:
    """Name -> every copy of the whole gradient that some cell holds."""
    found: dict[str, list[np.ndarray]] = {}
    pieces: dict[tuple[str, int, int], dict[int, list[np.ndarray]]] = {}
    for name, split, index, tp, tensor in parts:
        if split < 0:
            found.setdefault(name, []).append(tensor)
        else:
            pieces.setdefault((name, split, tp), {}).setdefault(index, []).append(tensor)
    for (name, split, _), by_index in pieces.items():
        columns = [by_index[i] for i in sorted(by_index)]
        for copies in zip(*columns, strict=True):
            found.setdefault(name, []).append(np.concatenate(copies, split))
    return found


def run_case(case: Case, rank: int, checked: int) -> dict[str, Any] | None:
    """Run a plan; rank 0 returns losses, norms and the whole gradients of the first steps."""
    _, plan, settings = case
    seen: list[Any] = []

    def probe(executor: Executor) -> None:
        if executor.step_number < checked:
            seen.append(local_gradients(executor))

    executor = make_executor(plan, settings, rank, torch.device("cpu"), probe=probe)
    results = []
    if executor is not None:
        results = [executor.run_step(step) for step in range(settings.steps)]
        executor.groups.close()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    if rank:
        return None
    steps = min(checked, settings.steps)
    gradients = [whole([p for s in everyone if s for p in s[k]]) for k in range(steps)]
    return {
        "loss": [r.loss for r in results],
        "norm": [r.norm for r in results],
        "gradients": gradients,
    }


def main(folder: str, rank: int, size: int, port: int) -> None:
    """Entry of one process: run every case of the folder and leave what rank 0 found."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    cases, checked = pickle.loads((Path(folder) / "cases.pickle").read_bytes())
    found: dict[str, Any] = {}
    for case in cases:
        found[case[0]] = run_case(case, rank, checked)
    if rank == 0:
        (Path(folder) / "found.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_processes(script: Path, folder: Path, size: int) -> Any:
    """Run a world's script as ``size`` processes and return what rank 0 left."""
    port = free_port()
    logs = [(folder / f"rank{r}.log").open("w") for r in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(r), str(size), str(port)],
            stdout=logs[r], stderr=subprocess.STDOUT,
        )
        for r in range(size)
    ]  # fmt: skip
    try:
        codes = [rank.wait(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for log in logs:
            log.close()
    said = "\n".join((folder / f"rank{r}.log").read_text() for r in range(size))
    assert codes == [0] * size, said
    return pickle.loads((folder / "found.pickle").read_bytes())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # as the worker does
