"""Emulation on one rank: passes last longer, messages end when the emulated links let them.

Sleeping is what the emulated chip or link does; nothing waits for another rank by it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from real_runtime.emulate import CALIBRATION, Emulation, Message, Pass, message_key
from real_runtime.issue import Pace
from real_runtime.program import Node, RankProgram
from sim.errors import UsageError

__all__ = ["Board", "Emulator"]


class Board:
    """When links and wires are free and messages over, shared by the ranks through a file.

    Times are of the machine's monotonic clock [s]; zero is long ago.

    Args:
        file: of the run. what: messages, links and wires.
    """

    def __init__(self, file: Path, what: Emulation) -> None:
        messages = sorted(what.messages.values(), key=lambda m: m.number)
        sizes = [1 + len(m.members) for m in messages]
        starts = np.cumsum([what.links + what.wires, *sizes])
        nbytes = 8 * max(int(starts[-1]), 1)
        self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, nbytes)  # new parts are zeros
        cells = np.frombuffer(mmap.mmap(self._file, nbytes), np.float64)
        self._links = cells[: what.links]
        self._wires = cells[what.links : what.links + what.wires]
        self._of = [cells[a:b] for a, b in pairwise(starts.tolist())]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def begin(self, message: Message, rank: int, turn: int, scale: float, now: float) -> None:
        """Note that a rank begins a message; the last of its members takes the links.

        Args:
            message: which. rank: one of its members. turn: number of the step, from 1.
            scale: real seconds of an emulated one. now: [s].
        """
        mine = self._of[message.number]
        with self._alone():
            mine[1 + message.members.index(rank)] = turn
            if (mine[1:] == turn).all():
                mine[0] = self._take(message, scale, now)

    def _take(self, message: Message, scale: float, now: float) -> float:
        """Stand in line for the message's wire, then for its links; return when it is over [s]."""
        ready = max(now, float(self._wires[message.wire])) + scale * message.fixed_s
        over = ready
        for flow in message.flows:
            at = max(ready, *(float(self._links[x]) for x in flow.links))
            for x, busy in zip(flow.links, flow.busy_s, strict=True):
                self._links[x] = at + scale * busy
            over = max(over, at + scale * flow.alone_s)
        self._wires[message.wire] = over
        return over

    def over(self, message: Message, turn: int) -> float:
        """Return when a message is over [s], 0 while one of its members has not begun it."""
        mine = self._of[message.number]
        return float(mine[0]) if (mine[1:] == turn).all() else 0.0


class _Clock:
    """Wall time, own processor time and time spent waiting for a core [s], since some moment."""

    def __init__(self) -> None:
        file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._file = os.open(file, os.O_RDONLY) if file.is_file() else -1
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._wall, self._own, self._queue = time.monotonic(), time.thread_time(), self._queued()

    def read(self) -> tuple[float, float, float]:
        """Return wall, own and queueing time [s]; the last is 0 where the system does not say."""
        wall, own = time.monotonic() - self._wall, time.thread_time() - self._own
        return wall, own, self._queued() - self._queue

    def _queued(self) -> float:
        """[s] that the thread was ready to run and did not: Linux, scheduler/sched-stats.rst."""
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 100, 0).split()[1]) * 1e-9


class Emulator(Pace):
    """Slows one rank down.

    Args:
        what: emulation of the plan. program: of the rank. board: shared by all ranks.
        share: of a core that the rank may use. deadline: [s] that ranks wait for each other.

    Attributes:
        what: see there.
        scale: real seconds of an emulated one; 0 until it is known, and links are not shaped then.
        asked_s, late_s: [s] real time that passes should have taken, and took beyond it because
            the machine was not free.
    """

    def __init__(
        self,
        what: Emulation,
        program: RankProgram,
        board: Board,
        share: float,
        deadline: float = math.inf,
    ) -> None:
        self.what, self.board, self.rank = what, board, program.rank
        self.share, self.deadline, self.scale = share, deadline, 0.0
        self.passes: list[Pass | None] = []
        self.messages: list[Message | None] = []
        places: dict[object, int] = defaultdict(int)
        for node in program.nodes:
            self.passes.append(None if node.on_wire else what.passes[program.rank, node.name])
            self.messages.append(_message(what, node, places) if node.on_wire else None)
        self.asked_s = self.late_s = 0.0
        self.own_s = sum(p.own_s for p in self.passes if p is not None)
        self._steps: list[float] = []
        self._slowed = self._done = self._over = 0.0
        self._clock = _Clock()

    def enter(self, i: int) -> None:
        """A compute op begins."""
        self._clock.start()

    def leave(self, i: int) -> None:
        """A compute op has done its work: last as long as on the emulated chip.

        Raises:
            UsageError: the passes of a step last longer than ranks wait for each other.
        """
        wall, own, queued = self._clock.read()
        op = self.passes[i]
        assert op is not None
        slowed = own * op.factor / self.share
        self._slowed += slowed
        self._done += op.own_s
        if not self.scale and self._slowed > self.deadline:
            # Said before the first peer gives up.
            step_s = self._slowed * max(self.own_s / self._done, 1.0) if self._done else math.inf
            raise UsageError(
                f"the passes of a step take about {step_s:.3g} s here, and ranks wait "
                f"{self.deadline:g} s for each other; give --deadline, or emulate a smaller job"
            )
        # What the op waited for other ranks in exchanges is part of what these take.
        waited = max(wall - own - queued, 0.0)
        left = slowed - own - queued + max(self.scale * op.inner_s - waited, 0.0)
        self.asked_s += slowed
        self.late_s += max(-left, 0.0)
        left -= self._over
        self._over = 0.0
        if left > 0:
            before = time.monotonic()
            time.sleep(left)
            # The next op makes good for a late awakening.
            self._over = time.monotonic() - before - left

    def post(self, i: int, step: int) -> None:
        """A transfer or collective begins."""
        message = self.messages[i]
        if message is not None and self.scale:
            self.board.begin(message, self.rank, step + 1, self.scale, time.monotonic())

    def arrive(self, i: int, step: int) -> None:
        """Its bytes are there: last until the emulated links have brought them."""
        message = self.messages[i]
        if message is not None and self.scale:
            left = self.board.over(message, step + 1) - time.monotonic()
            if left > 0:
                time.sleep(left)

    def end(self) -> None:
        """A step is over."""
        self._steps.append(self._slowed)
        self._slowed = self._done = 0.0

    def calibration_s(self) -> tuple[float, float]:
        """Real and emulated [s] of the rank's compute in a step: their ratio is the scale."""
        return float(np.median(self._steps[1:CALIBRATION])), self.own_s

    def kept_up(self) -> tuple[float, float]:
        """Return ``asked_s``, and ``late_s`` as a share of it."""
        return self.asked_s, self.late_s / self.asked_s if self.asked_s else 0.0

    def begin(self, scale: float) -> None:
        """Shape links from now on; what was late until now does not count."""
        self.scale, self.asked_s, self.late_s = scale, 0.0, 0.0


def _message(what: Emulation, node: Node, places: dict[object, int]) -> Message:
    op, line = node.op, node.wire
    stage = op.stage
    if op.kind.startswith("RECV"):
        stage -= 1 if op.kind.endswith("F") else -1
    key = message_key(line, op.kind, stage, op.mb, places[line])
    if node.group >= 0:
        places[line] += 1
    return what.messages[key]
