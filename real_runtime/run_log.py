"""What rank 0 says while a run goes on: events, progress lines, scalars. Imports no torch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.basis import basis_of

__all__ = ["EVENTS", "SCALARS", "RunLog", "StepResult", "mend", "mfu_at", "say"]

EVENTS, SCALARS = "events.jsonl", "tensorboard"
"""In a run's folder: one JSON object a line, and the folder of TensorBoard's files."""
SAY = "hetlab> "
"""Head of lines for people, which the launcher reads."""
PAUSE = 1.0
"""[s] between progress lines at least."""


class StepResult(Protocol):
    """What a step gave: loss per token, global gradient norm, learning rate, wall time [s]."""

    loss: float
    norm: float
    rate: float
    seconds: float


class _Scalars(Protocol):
    """What is needed of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


def say(text: str) -> None:
    """Print a line for people."""
    print(SAY + text, file=sys.stderr, flush=True)  # noqa: T201 - the launcher reads this


def mfu_at(plan: Plan, problem: Problem) -> float | None:
    """Return model FLOPs of a step over the peaks of the plan's chips [s], None where unknown.

    Divided by the time of a step it is the MFU, as in ``sim.report.metrics.rates_of``; measured
    against peaks that somebody only wrote down it may pass 1.

    Args:
        plan: that runs. problem: of it.
    """
    basis = basis_of(plan, problem.machine, problem.model)
    if basis.model_flops_per_step is None or not basis.peak_flops_per_s:
        return None
    return basis.model_flops_per_step / basis.peak_flops_per_s


def mend(events: Path) -> None:
    """Drop the last line of a log where a death cut it off."""
    if events.is_file():
        with events.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


class RunLog:
    """The log of a run; on other ranks than 0 it says nothing.

    Args:
        folder: of the run. rank: of this process. plan, problem: that run. steps: of the run.
        scalars: also write them for TensorBoard.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        plan: Plan,
        problem: Problem,
        steps: int,
        scalars: bool = False,
    ) -> None:
        self.speaks, self.steps = rank == 0, steps
        math = plan.mathematics
        self.tokens = math.global_batch * math.sequence_length
        self.ideal_s = mfu_at(plan, problem) if self.speaks else None
        if self.speaks:
            mend(folder / EVENTS)
        self._file = (folder / EVENTS).open("a") if self.speaks else None
        self._folder = folder / SCALARS if scalars and self.speaks else None
        self._scalars: _Scalars | None = None
        self._shown = 0.0

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, "unix_s": time.time(), **fields}) + "\n")
            self._file.flush()

    def say(self, text: str) -> None:
        """Print a line for people."""
        if self.speaks:
            say(text)

    def step(self, step: int, result: StepResult, memory: float) -> None:
        """Log a step.

        Args:
            step: number. result: of it. memory: [B] that rank 0 has used at most until now.
        """
        if not self.speaks:
            return
        found: dict[str, Any] = {
            "loss": result.loss, "grad_norm": result.norm, "learning_rate": result.rate,
            "seconds": result.seconds, "tokens_per_s": self.tokens / result.seconds,
            "mfu": self.ideal_s / result.seconds if self.ideal_s is not None else None,
            "memory_bytes": memory,
        }  # fmt: skip
        self.write("step", step=step, **found)
        for name, value in found.items() if self._folder is not None else ():
            if value is not None:
                self._writer(step).add_scalar(f"train/{name}", value, step)
        now = time.monotonic()
        if now - self._shown > PAUSE or step == self.steps - 1:
            self._shown = now
            say(self._line(step, found))

    def _line(self, step: int, found: dict[str, Any]) -> str:
        mfu = f"  MFU {found['mfu']:.0%}" if found["mfu"] is not None else ""
        return (
            f"step {step + 1}/{self.steps}  loss {found['loss']:.4f}  "
            f"norm {found['grad_norm']:.3g}  {found['tokens_per_s']:,.0f} tokens/s{mfu}  "
            f"{found['memory_bytes'] / 2**30:.2f} GiB"
        )

    def _writer(self, step: int) -> _Scalars:
        if self._scalars is None:
            from torch.utils.tensorboard import SummaryWriter

            # What an interrupted run wrote of later steps is hidden.
            self._scalars = SummaryWriter(str(self._folder), purge_step=step)
        return self._scalars

    def close(self) -> None:
        """Close the files."""
        if self._scalars is not None:
            self._scalars.close()
        if self._file is not None:
            self._file.close()
