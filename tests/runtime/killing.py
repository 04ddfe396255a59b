"""Runs whose ranks are killed at moments drawn from a seed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import plans

from real_runtime.launch import threads_per_rank
from real_runtime.restarts import train
from real_runtime.settings import Recipe, RunSettings
from sim.plan.io import save_plan
from sim.plan.plan import Plan

STEPS, EVERY = 24, 3
STARTING, SAVING = 0.25, 0.4
"""Shares of kills before the first step, and while a checkpoint is being written."""


def settings_of(folder: Path, plan: Plan) -> RunSettings:
    """Settings of a run that writes a checkpoint every three steps."""
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    return RunSettings(
        plan=str(folder / "plan.json"), data=str(plans.write_tokens(folder)),
        out=str(folder / "run"), steps=STEPS, threads=threads_per_rank(plan.placement.num_ranks),
        checkpoint_every=EVERY, deadline=60.0, recipe=Recipe(learning_rate=1e-2, warmup=2),
    )  # fmt: skip


def events_of(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's log."""
    file = run / "events.jsonl"
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def curve(run: Path) -> tuple[list[tuple[float, float]], bool]:
    """(loss, gradient norm) of every step, and whether steps trained twice came out equal."""
    seen: dict[int, list[tuple[float, float]]] = {}
    for e in events_of(run):
        if e["event"] == "step":
            seen.setdefault(e["step"], []).append((e["loss"], e["grad_norm"]))
    assert sorted(seen) == list(range(STEPS)), sorted(seen)
    return [seen[s][-1] for s in range(STEPS)], all(len(set(x)) == 1 for x in seen.values())


class Killer:
    """Ends one rank by SIGKILL in each of the first launches of a run.

    Args:
        run: folder. ranks: of the plan. source: of ranks and moments. kills: launches to hit.

    Attributes:
        hits: (rank, step after which, delay [s], while saving) of every kill; step -1 is while
            starting.
    """

    def __init__(self, run: Path, ranks: int, source: random.Random, kills: int) -> None:
        self.run, self.ranks, self.source, self.kills = run, ranks, source, kills
        self.hits: list[tuple[int, int, float, bool]] = []
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    def _work(self) -> None:
        for launch in range(self.kills):
            rank, kind = self.source.randrange(self.ranks), self.source.random()
            after = -1 if kind < STARTING else self.source.randrange(STEPS - 4)
            saving = STARTING <= kind < STARTING + SAVING
            delay = self.source.uniform(0.0, 2.0 if after < 0 else 0.004 if saving else 0.05)
            while not (self._reached(launch, rank, after) and (not saving or self._saves())):
                if self.over.wait(0.001 if saving else 0.002):
                    return
            self.over.wait(delay)
            pid = self.run / "pids" / str(rank)
            if self.over.is_set() or not pid.is_file():
                return
            os.kill(int(pid.read_text()), signal.SIGKILL)
            self.hits.append((rank, after, delay, saving))

    def _saves(self) -> bool:
        """Whether a checkpoint is half written; the killer looks more often than one lasts."""
        return any((self.run / "checkpoints").glob("step-*.part"))

    def _reached(self, launch: int, rank: int, after: int) -> bool:
        """Whether the launch has trained a step (or, for -1, its rank has begun)."""
        events = events_of(self.run)
        if sum(e["event"] == "restart" for e in events) < launch:
            return False
        pid = self.run / "pids" / str(rank)
        if not pid.is_file() or not pid.read_text():
            return False
        begun = max((i for i, e in enumerate(events) if e["event"] == "restart"), default=-1)
        steps = [e["step"] for e in events[begun + 1 :] if e["event"] == "step"]
        return after < 0 or max(steps, default=-1) >= after


def killed_run(folder: Path, plan: Plan, seed: int, kills: int) -> tuple[list[Any], list[str]]:
    """Train under a killer; return its hits and what the launcher warned of."""
    settings, ranks = settings_of(folder, plan), plan.placement.num_ranks
    warned: list[str] = []
    with Killer(Path(settings.out), ranks, random.Random(seed), kills) as killer:
        train(settings, ranks, kills, lambda line: None, warned.append)
    return killer.hits, warned
