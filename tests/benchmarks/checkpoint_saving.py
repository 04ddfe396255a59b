"""What a checkpoint costs the steps beside it.

``.venv/bin/python -m tests.benchmarks.checkpoint_saving`` trains one process on one thread and
prints milliseconds a step: without checkpoints, with one every few steps that is written while
training goes on, and with one that training waits for. Rounds of the three are interleaved.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from real_runtime.checkpoint_save import Saver
from real_runtime.executor import Executor
from real_runtime.rank import make_executor
from real_runtime.settings import RunSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import plans

EVERY, ROUNDS, WAYS = 5, 7, ("none", "beside", "waited for")
MODEL = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 4096,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 64,
}  # fmt: skip


def executor_in(folder: Path) -> tuple[Executor, RunSettings]:
    """A model of 14 million parameters, so 167 MB a checkpoint, and settings that keep one."""
    plan = plans.plan_of(plans.problem_of(**MODEL), [[1]])
    settings = RunSettings(
        plan="", data=str(plans.write_tokens(folder)), out="", steps=10**6, keep=1, deadline=600.0
    )
    found = make_executor(plan, settings, 0, torch.device("cpu"))
    assert found is not None
    return found, settings


def round_s(executor: Executor, saver: Saver, way: str, first: int) -> tuple[float, float]:
    """Time of EVERY steps with one checkpoint at the first's end [s], and of its copy [s]."""
    begin, copied = time.monotonic(), 0.0
    for step in range(first, first + EVERY):
        executor.run_step(step)
        if step == first and way != "none":
            copied = saver.begin(step + 1).copy_s
            if way == "waited for":
                saver.finish()
    took = time.monotonic() - begin
    # What is still being written must not slow the next round of another way.
    saver.finish()
    return took, copied


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hetlab-saving-", dir=".") as temporary:
        folder = Path(temporary)
        executor, settings = executor_in(folder)
        saver = Saver(executor, msgspec.structs.replace(settings, keep=1), folder / "all", None)
        step, took, copies = 0, {way: list[float]() for way in WAYS}, list[float]()
        load = os.getloadavg()[0]
        for number in range(ROUNDS + 1):
            for way in WAYS:
                seconds, copied = round_s(executor, saver, way, step)
                step += EVERY
                if number:  # the first round makes buffers and touches memory
                    took[way].append(seconds / EVERY * 1e3)
                    copies += [copied * 1e3] * (copied > 0)
        size = sum(f.stat().st_size for f in (folder / "all").glob("step-*/*")) / 1e6
    print(f"{size:.0f} MB every {EVERY} steps, load average {load:.2f} before")
    for way, times in took.items():
        low, middle, high = np.percentile(times, (25, 50, 75))
        print(f"{way:<12}{middle:8.1f} ms a step ({low:.1f} to {high:.1f}, {ROUNDS} rounds)")
    print(f"copy        {np.median(copies):8.1f} ms a checkpoint")


if __name__ == "__main__":
    main()
