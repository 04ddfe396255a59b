"""Which checkpoint a run goes on from, and whether it is this run's. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from real_runtime.settings import RunSettings
from sim.errors import InputError
from sim.plan.plan import Plan

__all__ = ["STATE", "about", "check_resumable", "newest"]

STATE = "hetlab.json"
"""What a checkpoint says about itself."""


def newest(folder: Path) -> Path | None:
    """Return the complete checkpoint with the most steps, None when there is none."""
    found = [p for p in folder.glob("step-*") if p.suffix != ".part"]
    return max(found, key=lambda p: int(p.name[5:]), default=None)


def about(plan: Plan, settings: RunSettings) -> dict[str, str | int]:
    """What must be equal for a run to go on bit for bit."""
    return {"plan_hash": plan.hash, "seed": settings.seed, "dtype": settings.dtype}


def check_resumable(folder: Path, plan: Plan, settings: RunSettings) -> int:
    """Return the steps that the newest checkpoint of a folder had done.

    Raises:
        InputError: there is none, or it belongs to another plan, seed or dtype, or it has already
            done all steps.
    """
    found = newest(folder)
    if found is None:
        raise InputError("no checkpoint to resume from", str(folder))
    said = json.loads((found / STATE).read_text())
    for key, expected in about(plan, settings).items():
        if said[key] != expected:
            raise InputError(
                "the checkpoint belongs to another run", str(found / STATE), key=key,
                found=str(said[key]), expected=str(expected),
            )  # fmt: skip
    done = int(said["steps"])
    if done >= settings.steps:
        raise InputError(
            "nothing is left to train", str(found), found=f"{done} steps done",
            expected=f"--steps more than {done}",
        )  # fmt: skip
    return done
