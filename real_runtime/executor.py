"""Train one rank: what each kind of op does. When it starts is real_runtime.issue's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points

import torch
import torch.distributed as dist

from real_runtime.data import Batches
from real_runtime.devices import synchronize
from real_runtime.groups import Groups
from real_runtime.issue import Begun, Issuer
from real_runtime.program import Node, RankProgram
from real_runtime.record import Recorder
from real_runtime.reductions import Reductions
from real_runtime.settings import Recipe, learning_rate
from real_runtime.stage import Stage
from real_runtime.support import HANDLERS
from real_runtime.tensors import Boundaries
from sim.plan.plan import Plan

__all__ = ["Executor", "StepResult"]


class StepResult:
    """What a step gave: loss per token, global gradient norm, learning rate, wall time [s]."""

    def __init__(self, loss: float, norm: float, rate: float, seconds: float) -> None:
        self.loss, self.norm, self.rate, self.seconds = loss, norm, rate, seconds


class Executor(Issuer):
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
        # Inside F and B the ranks of a cell exchange on their group, too.
        super().__init__(
            program, groups, plan.buffers, recorder, groups.of("tp"),
            partial(synchronize, device) if recorder.exact else lambda: None,
        )  # fmt: skip
        self.plan, self.stages, self.probe = plan, stages, probe
        self.batches, self.device, self.recipe, self.steps = batches, device, recipe, steps
        self.cell = groups.wiring.cell_of[program.rank]
        self.boundaries = Boundaries(plan, program, groups, dtype, device)
        self.reductions = Reductions(stages, groups, device)
        handlers: dict[str, Callable[[Node], None]] = {
            "F": self._forward,
            "R": lambda n: self.stages[n.op.stage].recompute(n.op.mb),
            "B": lambda n: self._backward(n, False),
            "I": lambda n: self._backward(n, True),
            "W": self._weights,
            "OPT": self._update,
        }
        for entry in entry_points(group=HANDLERS):
            handlers[entry.name] = partial(entry.load(), self)
        self.compute = handlers
        self.communicate: Mapping[str, Callable[[Node], Begun]] = {
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
        self.last_backward = {
            n.op.stage: i for i, n in enumerate(self.nodes) if n.op.kind in ("B", "W")
        }
        self.gradients = [
            i for i, n in enumerate(self.nodes) if n.op.kind in ("REDUCE_GRAD", "ALL_REDUCE")
        ]
        updates = [i for i, n in enumerate(self.nodes) if n.op.kind == "OPT"]
        self.first_update = updates[0] if updates else -1

    def run_step(self, step: int) -> StepResult:
        """Run one step to its end.

        Raises:
            RunError: a peer is gone or silent; names the op that waited.
        """
        self.loss = torch.zeros((), dtype=torch.float64)
        self.result = StepResult(0.0, 0.0, 0.0, 0.0)
        begin = time.monotonic()
        self.issue(step)
        self.result.seconds = time.monotonic() - begin
        return self.result

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
        self._complete(node)

    def _weights(self, node: Node) -> None:
        self.stages[node.op.stage].weight_gradients(node.op.mb)
        self._complete(node)

    def _complete(self, node: Node) -> None:
        if self.last_backward[node.op.stage] == self.at:
            self.stages[node.op.stage].complete_gradients()

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
            self.finish(i)
        if self.probe is not None:
            self.probe(self)
        squares = sum((s.update.squares() for s in self.stages.values()), torch.zeros(()))
        both = torch.stack([self.loss, squares]).double().to(self.device)
        world = self.groups.of("world")
        if world:
            try:
                dist.all_reduce(both, group=self.groups.handle(world[0]))
            except RuntimeError as error:
                raise self.failed(self.nodes[self.at], error) from error
        self.result.loss, self.result.norm = float(both[0]), float(both[1]) ** 0.5
        self.result.rate = learning_rate(self.recipe, self.step_number, self.steps)
