"""How an emulation begins: its ranks agree on the real length of an emulated second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from real_runtime.cores import usable_cores
from real_runtime.emulate import CALIBRATION, emulation, share_of
from real_runtime.emulate_rank import Board, Emulator
from real_runtime.executor import Executor
from real_runtime.launch import SHARED
from real_runtime.run_log import RunLog
from real_runtime.settings import RunSettings
from sim.errors import UsageError
from sim.problem import Problem

__all__ = ["calibrate", "emulator_of", "kept_up"]


def emulator_of(
    executor: Executor, settings: RunSettings, problem: Problem, folder: Path, log: RunLog
) -> Emulator | None:
    """Return what slows this rank from now on, None where nothing is emulated."""
    if not settings.emulate:
        return None
    what = emulation(executor.plan, problem)
    cores = {c for mine in settings.cores for c in mine} or usable_cores()
    share = share_of(executor.plan.placement.num_ranks, len(cores) or 1)
    board = Board(folder / SHARED, what)
    emulator = Emulator(what, executor.program, board, share, settings.deadline)
    executor.pace = emulator
    log.ideal_s = None  # the chips' peaks are none of this machine's
    return emulator


def calibrate(
    emulator: Emulator, executor: Executor, settings: RunSettings, log: RunLog, done: int
) -> None:
    """After the first steps: find the scale, say it, and shape links from now on.

    Args:
        emulator, executor: of this rank. settings: of the run. log: takes the event.
        done: steps since the run began.

    Raises:
        UsageError: a step would take longer than ranks wait for each other.
    """
    if done != CALIBRATION:
        return
    world = executor.groups.of("world")
    group = executor.groups.handle(world[0]) if world else None
    said = _everyone(emulator.calibration_s(), group)
    scale = sum(real for real, _ in said) / sum(emulated for _, emulated in said)
    step_s = scale * emulator.what.step_s
    if step_s > settings.deadline:
        raise UsageError(
            f"1 emulated second takes {scale:.3g} real ones here and a step {step_s:.0f} s, longer "
            f"than ranks wait for each other; give --deadline, or emulate a smaller job"
        )
    emulator.begin(scale)
    executor.recorder.steps.clear()
    log.write(
        "emulation", cluster=settings.emulate, scale=scale, share=emulator.share,
        fastest=emulator.what.fastest, factors=emulator.what.factors,
        predicted_step_time_s=step_s,
    )  # fmt: skip
    log.say(
        f"1 emulated second lasts {scale:.3g} s here; a step should take {step_s * 1e3:,.1f} ms"
    )


def kept_up(emulator: Emulator, group: dist.ProcessGroup | None) -> dict[str, list[float]]:
    """Return by rank how long passes should have taken [s], and by what share they were late."""
    said = _everyone(emulator.kept_up(), group)
    return {"passes_s": [asked for asked, _ in said], "late": [late for _, late in said]}


def _everyone(
    mine: tuple[float, float], group: dist.ProcessGroup | None
) -> list[tuple[float, float]]:
    """What each rank says."""
    if group is None:
        return [mine]
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said
