"""Walk a rank's program under the issue rule: op kind -> handler, and when each op starts.

List order is issue order. Compute runs here, one op after another; a transfer or collective starts
when its dependencies are finished and its wire's earlier ops have started, also while later compute
runs, and is waited for where something depends on it. A received tensor takes one of the pair's
buffers from its start to the start of its consumer. Ops of tensor-parallel groups share their group
with the exchanges inside F and B, so they start right before their consumer: all members then use
the group in one order.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points

import torch
import torch.distributed as dist

from real_runtime.data import Batches
from real_runtime.devices import synchronize
from real_runtime.errors import RunError
from real_runtime.groups import Groups
from real_runtime.program import Node, RankProgram
from real_runtime.record import Recorder
from real_runtime.reductions import Reductions
from real_runtime.settings import Recipe, learning_rate
from real_runtime.stage import Stage
from real_runtime.support import HANDLERS
from real_runtime.tensors import Boundaries
from sim.plan.plan import Plan

__all__ = ["Executor", "StepResult"]

Finish = Callable[[], None]


class StepResult:
    """What a step gave: loss per token, global gradient norm, learning rate, wall time [s]."""

    def __init__(self, loss: float, norm: float, rate: float, seconds: float) -> None:
        self.loss, self.norm, self.rate, self.seconds = loss, norm, rate, seconds


class Executor:
    """Runs one rank.

    Args:
        plan, program, groups, stages, batches: of the rank. device: of its tensors.
        dtype: of activations. recipe: of the optimizer. steps: of the whole run.
        recorder: takes spans. probe: called in every step when gradients are whole, before they
            are clipped.
    """

    def __init__(
        self,
        plan: Plan,
        program: RankProgram,
        groups: Groups,
        stages: dict[int, Stage],
        batches: Batches,
        device: torch.device,
        dtype: torch.dtype,
        recipe: Recipe,
        steps: int,
        recorder: Recorder,
        probe: Callable[[Executor], None] | None = None,
    ) -> None:
        self.plan, self.program, self.groups, self.stages = plan, program, groups, stages
        self.batches, self.device, self.recipe, self.steps = batches, device, recipe, steps
        self.recorder, self.probe = recorder, probe
        self.nodes = program.nodes
        self.cell = groups.wiring.cell_of[program.rank]
        self.boundaries = Boundaries(plan, program, groups, dtype, device)
        self.reductions = Reductions(stages, groups, device)
        self.compute: dict[str, Callable[[Node], None]] = {
            "F": self._forward,
            "R": lambda n: self.stages[n.op.stage].recompute(n.op.mb),
            "B": lambda n: self._backward(n, False),
            "I": lambda n: self._backward(n, True),
            "W": self._weights,
            "OPT": self._update,
        }
        for entry in entry_points(group=HANDLERS):
            self.compute[entry.name] = partial(entry.load(), self)
        self.communicate: dict[str, Callable[[Node], tuple[list[dist.Work], Finish]]] = {
            "SEND_F": self.boundaries.send,
            "SEND_B": self.boundaries.send,
            "RECV_F": self.boundaries.receive,
            "RECV_B": self.boundaries.receive,
            "ALL_GATHER": self.boundaries.gather,
            "ALL_REDUCE": self.reductions.embed,
            "REDUCE_GRAD": self.reductions.reduce,
            "UNSHARD": self.reductions.unshard,
            "BARRIER": self.reductions.barrier,
        }
        self._lay_out()

    def _lay_out(self) -> None:
        """What does not change from step to step."""
        self.wires: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self.last_backward: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            if node.op.kind in self.communicate:
                self.wires[node.wire].append(i)
            if node.op.kind in ("B", "W"):
                self.last_backward[node.op.stage] = i
        tp = {("group", i) for i in self.groups.of("tp")}
        self.eager = [w for w in self.wires if w[:2] not in tp]
        self.gradients = [
            i for i, n in enumerate(self.nodes) if n.op.kind in ("REDUCE_GRAD", "ALL_REDUCE")
        ]
        updates = [i for i, n in enumerate(self.nodes) if n.op.kind == "OPT"]
        self.first_update = updates[0] if updates else -1
        # A buffer is freed when the first op that depends on a RECV starts.
        self.frees: dict[int, list[tuple[object, ...]]] = defaultdict(list)
        for node in self.nodes:
            if node.op.kind.startswith("RECV") and node.consumer >= 0:
                self.frees[node.consumer].append(node.wire)

    # -- one step -------------------------------------------------------------------------------

    def run_step(self, step: int) -> StepResult:
        """Run one step to its end.

        Raises:
            RunError: a peer is gone or silent; names the op that waited.
        """
        n = len(self.nodes)
        self.step_number = step
        self.started, self.finished = [False] * n, [False] * n
        self.start, self.end = [0.0] * n, [0.0] * n
        self.ready = [0.0] * n
        self.pending: dict[int, tuple[list[dist.Work], Finish]] = {}
        self.heads = dict.fromkeys(self.wires, 0)
        self.held: dict[tuple[object, ...], int] = defaultdict(int)
        self.at = 0
        self.loss = torch.zeros((), dtype=torch.float64)
        self.result = StepResult(0.0, 0.0, 0.0, 0.0)
        begin = time.monotonic()
        self._advance()
        for i, node in enumerate(self.nodes):
            self.at = i
            if node.op.kind in self.compute:
                for d in node.deps:
                    self._finish(d)
                self._free(i)
                self._compute(i, node)
                self._advance()
        for i in range(n):
            self._finish(i)
        self.result.seconds = time.monotonic() - begin
        self.recorder.step(step, self.start, self.end, self.ready)
        return self.result

    def _compute(self, i: int, node: Node) -> None:
        self.started[i] = True
        self._mark(i)
        self.compute[node.op.kind](node)
        if node.op.kind in ("B", "W") and self.last_backward[node.op.stage] == i:
            self.stages[node.op.stage].complete_gradients()
        if self.recorder.exact:
            synchronize(self.device)
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
                if not all(self.finished[d] for d in self.nodes[i].deps):
                    break
                if self.nodes[i].op.kind.startswith("RECV") and not self._buffer(i, wire):
                    break
                if self.nodes[i].op.kind == "BARRIER":
                    break
                self._begin(i)

    def _buffer(self, i: int, wire: tuple[object, ...]) -> bool:
        """Whether a RECV may take a buffer now; without any it waits for its place in the list."""
        if self.plan.buffers == 0:
            return i <= self.at
        return self.held[wire] < self.plan.buffers

    def _begin(self, i: int) -> None:
        """Start the next op of a wire."""
        node = self.nodes[i]
        self.heads[node.wire] += 1
        self.started[i] = True
        self._mark(i)
        if node.op.kind.startswith("RECV"):
            self.held[node.wire] += 1
        self._free(i)
        try:
            self.pending[i] = self.communicate[node.op.kind](node)
        except RuntimeError as error:
            raise self._failed(node, error) from error

    def _finish(self, i: int) -> None:
        """Wait for an op; start it, and what comes before it on its wire, where needed."""
        if self.finished[i]:
            return
        node = self.nodes[i]
        order = self.wires[node.wire]
        while not self.started[i]:
            j = order[self.heads[node.wire]]
            for d in self.nodes[j].deps:
                self._finish(d)
            if not self.started[j]:
                self._begin(j)
        works, done = self.pending.pop(i)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._failed(node, error) from error
        done()
        self.finished[i], self.end[i] = True, time.monotonic()

    def _failed(self, node: Node, error: RuntimeError) -> RunError:
        group = node.group if node.group >= 0 else (self.groups.of("world") or [-1])[0]
        others = [r for r in self.groups.members(group) if r != self.program.rank]
        who = [node.peer] if node.peer >= 0 else others
        return RunError(
            f"rank {self.program.rank}, step {self.step_number}: {node.op.name} waits for rank "
            f"{' or '.join(map(str, who))}, gone or silent: {str(error).splitlines()[0]}"
        )

    # -- compute --------------------------------------------------------------------------------

    def _forward(self, node: Node) -> None:
        stage, mb = self.stages[node.op.stage], node.op.mb
        targets = None
        if stage.first or stage.last:
            size = self.plan.mathematics.microbatch
            first = size * (sum(self.plan.placement.microbatches[: self.cell.replica]) + mb)
            ids, after = self.batches.microbatch(self.step_number, first, size)
            if stage.last:
                targets = torch.from_numpy(after).to(self.device)
        if stage.first:
            x = torch.from_numpy(ids).to(self.device)
        else:
            x = self.boundaries.take("F", stage.number, mb)
        y = stage.forward(mb, x, targets, node.op.saves != "inputs")
        if not stage.last:
            self.boundaries.put("F", node.op.stage, mb, y)
        elif self.groups.tp.index == 0:
            self.loss += y.double().cpu()

    def _backward(self, node: Node, split: bool) -> None:
        stage, mb = self.stages[node.op.stage], node.op.mb
        gradient = None if stage.last else self.boundaries.take("B", node.op.stage, mb)
        found = stage.backward(mb, gradient, split)
        if found is not None:
            self.boundaries.put("B", node.op.stage, mb, found)

    def _weights(self, node: Node) -> None:
        self.stages[node.op.stage].weight_gradients(node.op.mb)

    def _update(self, node: Node) -> None:
        if self.at == self.first_update:
            self._agree()
        stage = self.stages[node.op.stage]
        clip, norm = self.recipe.clip, self.result.norm
        scale = clip / (norm + 1e-6) if clip and norm > clip else 1.0
        stage.update.step(self.result.rate, scale)
        stage.update.clear(stage.weights)

    def _agree(self) -> None:
        """Sum the loss and the squared gradients over all ranks, once a step before any update."""
        for i in self.gradients:
            self._finish(i)
        if self.probe is not None:
            self.probe(self)
        squares = sum((s.update.squares() for s in self.stages.values()), torch.zeros(()))
        both = torch.stack([self.loss, squares]).double().to(self.device)
        world = self.groups.of("world")
        if world:
            try:
                dist.all_reduce(both, group=self.groups.handle(world[0]))
            except RuntimeError as error:
                raise self._failed(self.nodes[self.at], error) from error
        self.result.loss, self.result.norm = float(both[0]), float(both[1]) ** 0.5
        self.result.rate = learning_rate(self.recipe, self.step_number, self.steps)
