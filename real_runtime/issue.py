"""Issue a rank's program: when each op starts. What an op does is its handler's.

List order is issue order. Compute runs here, one op after another; a transfer or collective starts
when its dependencies are finished and its wire's earlier ops have started, also while later compute
runs, and is waited for where something depends on it. A received tensor takes one of the pair's
buffers from its start to the start of its consumer. Ops of late groups start right before their
consumer: all members then use the group in one order with what handlers do on it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from real_runtime.errors import RunError
from real_runtime.groups import Groups
from real_runtime.program import Node, RankProgram
from real_runtime.record import Recorder

__all__ = ["Begun", "Issuer", "Pace", "Work"]


class Work(Protocol):
    """Something begun: torch's handle of a transfer or collective, or a stand-in."""

    def wait(self) -> object:
        """Return when it is over."""


Begun = tuple[Sequence[Work], Callable[[], None]]
"""What is to be waited for, and what to do then."""


class Pace:
    """What makes ops last longer than they do here: an emulation; this one leaves them alone."""

    def enter(self, i: int) -> None:
        """The compute op at this position begins."""

    def leave(self, i: int) -> None:
        """The compute op has done its work; it ends when this returns."""

    def post(self, i: int, step: int) -> None:
        """The transfer or collective at this position begins."""

    def arrive(self, i: int, step: int) -> None:
        """The transfer or collective is done; it ends when this returns."""

    def end(self) -> None:
        """A step is over."""


class Issuer:
    """Walks one rank's program, step after step.

    Args:
        program, groups: of the rank. buffers: per directed pair, 0 for none (a RECV then waits for
            its place in the list).
        recorder: takes spans. late: indices of groups whose ops start right before their consumer.
        settle: called after each compute op, so that it has a true end.

    Attributes:
        compute, communicate: kind -> handler; one of ``communicate`` begins its op and returns what
            to wait for. at: position of the compute op that runs. step_number: of the step.
        pace: of ops, their own unless something else is put here.
    """

    def __init__(
        self,
        program: RankProgram,
        groups: Groups,
        buffers: int,
        recorder: Recorder,
        late: Collection[int] = (),
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.program, self.groups, self.buffers = program, groups, buffers
        self.recorder, self.settle = recorder, settle
        self.nodes = program.nodes
        self.pace = Pace()
        self.compute: Mapping[str, Callable[[Node], None]] = {}
        self.communicate: Mapping[str, Callable[[Node], Begun]] = {}
        self.wire_of = [node.wire if node.on_wire else () for node in self.nodes]
        self.wires: dict[tuple[object, ...], list[int]] = defaultdict(list)
        # A buffer is freed when the first op that depends on a RECV starts.
        self.frees: dict[int, list[tuple[object, ...]]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            if node.on_wire:
                self.wires[self.wire_of[i]].append(i)
            if node.op.kind.startswith("RECV") and node.consumer >= 0:
                self.frees[node.consumer].append(self.wire_of[i])
        self.eager = [w for w in self.wires if w[0] == "pair" or w[1] not in late]

    def issue(self, step: int) -> None:
        """Run one step to its end.

        Raises:
            RunError: a peer is gone or silent; names the op that waited.
        """
        n = len(self.nodes)
        self.step_number = step
        self.started, self.finished = [False] * n, [False] * n
        self.start, self.end = [0.0] * n, [0.0] * n
        self.ready = [0.0] * n
        self.pending: dict[int, Begun] = {}
        self.heads = dict.fromkeys(self.wires, 0)
        self.held: dict[tuple[object, ...], int] = defaultdict(int)
        self.at = 0
        self._advance()
        for i, node in enumerate(self.nodes):
            self.at = i
            if not node.on_wire:
                for d in node.deps:
                    self.finish(d)
                self._free(i)
                self._compute(i, node)
                self._advance()
        for i in range(n):
            self.finish(i)
        self.pace.end()
        self.recorder.step(step, self.start, self.end, self.ready)

    def _compute(self, i: int, node: Node) -> None:
        self.started[i] = True
        self._mark(i)
        self.pace.enter(i)
        self.compute[node.op.kind](node)
        self.settle()
        self.pace.leave(i)
        self.finished[i], self.end[i] = True, time.monotonic()

    def _mark(self, i: int) -> None:
        self.start[i] = time.monotonic()
        deps = self.nodes[i].deps
        self.ready[i] = min(max((self.end[d] for d in deps), default=self.start[i]), self.start[i])

    def _free(self, i: int) -> None:
        for wire in self.frees.get(i, ()):
            self.held[wire] -= 1

    def _advance(self) -> None:
        """Start what may start, wire by wire in list order."""
        for wire in self.eager:
            order = self.wires[wire]
            while self.heads[wire] < len(order):
                i = order[self.heads[wire]]
                node = self.nodes[i]
                if not all(self.finished[d] for d in node.deps):
                    break
                if node.op.kind.startswith("RECV") and not self._buffer(i, wire):
                    break
                if node.op.kind == "BARRIER":
                    break
                self._begin(i)

    def _buffer(self, i: int, wire: tuple[object, ...]) -> bool:
        """Whether a RECV may take a buffer now; without any it waits for its place in the list."""
        if self.buffers == 0:
            return i <= self.at
        return self.held[wire] < self.buffers

    def _begin(self, i: int) -> None:
        """Start the next op of a wire."""
        node, wire = self.nodes[i], self.wire_of[i]
        self.heads[wire] += 1
        self.started[i] = True
        self._mark(i)
        if node.op.kind.startswith("RECV"):
            self.held[wire] += 1
        self._free(i)
        self.pace.post(i, self.step_number)
        try:
            self.pending[i] = self.communicate[node.op.kind](node)
        except RuntimeError as error:
            raise self.failed(node, error) from error

    def finish(self, i: int) -> None:
        """Wait for an op; start it, and what comes before it on its wire, where needed.

        Raises:
            RunError: a peer is gone or silent.
        """
        if self.finished[i]:
            return
        node, wire = self.nodes[i], self.wire_of[i]
        while not self.started[i]:
            j = self.wires[wire][self.heads[wire]]
            for d in self.nodes[j].deps:
                self.finish(d)
            if not self.started[j]:
                self._begin(j)
        works, done = self.pending.pop(i)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.failed(node, error) from error
        done()
        self.pace.arrive(i, self.step_number)
        self.finished[i], self.end[i] = True, time.monotonic()

    def failed(self, node: Node, error: RuntimeError) -> RunError:
        """Return the error of an op whose peers are gone or silent."""
        group = node.group if node.group >= 0 else (self.groups.of("world") or [-1])[0]
        others = [r for r in self.groups.members(group) if r != self.program.rank]
        who = [node.peer] if node.peer >= 0 else others
        return RunError(
            f"rank {self.program.rank}, step {self.step_number}: {node.op.name} waits for rank "
            f"{' or '.join(map(str, who))}, gone or silent: {str(error).splitlines()[0]}"
        )
