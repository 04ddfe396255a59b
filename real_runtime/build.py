"""Build a rank's stages from the plan: weights, blocks, buckets, optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from real_runtime.buckets import Bucket
from real_runtime.errors import UnsupportedPlanError
from real_runtime.groups import Groups
from real_runtime.model.config import DecoderConfig, read_config
from real_runtime.model.decoder import Decoder
from real_runtime.model.parameters import (
    EMBEDDING,
    ParameterSpec,
    block_specs,
    initial,
    shard_of,
)
from real_runtime.model.weights import Deferral, Weight
from real_runtime.program import RankProgram
from real_runtime.settings import Recipe
from real_runtime.stage import Stage
from real_runtime.update import StageUpdate
from sim.plan.deps import EXPERTS
from sim.plan.placement import Cell
from sim.plan.plan import Plan
from sim.problem import Problem

__all__ = ["build_stages", "specs_of", "vocabulary_rows"]


def vocabulary_rows(plan: Plan, vocab: int) -> int:
    """Rows of the embedding after padding, so that every cell's tp divides them."""
    unit = math.lcm(*(c.tp for c in plan.placement.cells))
    return -(-vocab // unit) * unit


def specs_of(
    plan: Plan, problem: Problem, config: DecoderConfig
) -> dict[int, tuple[ParameterSpec, ...]]:
    """Parameters of every virtual stage, in one order on all ranks."""
    rows = vocabulary_rows(plan, config.shape.vocab)
    found = {}
    for s in plan.placement.stages:
        specs: dict[str, ParameterSpec] = {}
        for block in problem.model.blocks[s.blocks[0] : s.blocks[1]]:
            for spec in block_specs(
                config, block.kind, block.layer, rows, plan.mathematics.sequence_parallel
            ):
                specs[spec.name] = spec
        found[s.stage] = tuple(specs.values())
    return found


class _Builder:
    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        program: RankProgram,
        groups: Groups,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        recipe: Recipe,
        values: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self.plan, self.problem, self.program, self.groups = plan, problem, program, groups
        self.device, self.dtype, self.seed, self.recipe = device, dtype, seed, recipe
        self.values = values
        self.config = read_config(plan.problem["model"], problem.model.name)
        self.specs = specs_of(plan, problem, self.config)
        self.cell: Cell = groups.wiring.cell_of[program.rank]
        self.hosted = sorted(groups.wiring.stages(program.rank))
        self.tied = {
            n.op.stage for n in program.nodes if n.op.kind == "ALL_REDUCE" and n.op.group == "embed"
        }
        self.weights: dict[str, Weight] = {}
        replicas = [c for c in plan.placement.cells if c.stage == self.cell.stage]
        moe = self.config.shape.moe
        self.experts = moe.num_experts if moe else 1
        self.sharded = bool(plan.mathematics.zero) and len(replicas) > 1

    def build(self) -> dict[int, Stage]:
        owned: dict[int, list[Weight]] = {}
        for number in self.hosted:
            owned[number] = []
            for spec in self.specs[number]:
                if not self.groups.ep.holds(spec.expert, self.experts):
                    continue
                if spec.name not in self.weights:
                    self.weights[spec.name] = self._weight(spec)
                    owned[number].append(self.weights[spec.name])
                else:
                    self._check_shared(number)
        return {number: self._stage(number, owned[number]) for number in self.hosted}

    def _check_shared(self, number: int) -> None:
        """A weight that two stages of this rank share is reduced and updated with the first."""
        last = max(
            i for i, n in enumerate(self.program.nodes)
            if n.op.stage == number and n.op.kind in ("B", "W")
        )  # fmt: skip
        first = min(
            i for i, n in enumerate(self.program.nodes)
            if n.op.stage == self.hosted[0] and n.op.kind in ("REDUCE_GRAD", "OPT")
        )  # fmt: skip
        if last > first:
            raise UnsupportedPlanError(
                "a shared weight would be updated before its gradient is whole",
                key="programs",
                found=self.program.nodes[last].op.name,
                expected=f"before {self.program.nodes[first].op.name}",
            )

    def _weight(self, spec: ParameterSpec) -> Weight:
        tp = self.groups.tp
        if self.values is not None:
            full = torch.zeros(spec.padded)
            full[: spec.shape[0]] = self.values[spec.name]
        else:
            full = initial(spec, self.config.std, self.seed)
        data = shard_of(full, spec, tp.index, tp.size).to(self.device, self.dtype).contiguous()
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return Weight(spec, data.clone(), torch.zeros(data.shape, dtype=wide, device=self.device))

    def _stage(self, number: int, owned: list[Weight]) -> Stage:
        segment = next(s for s in self.plan.placement.stages if s.stage == number)
        blocks = self.problem.model.blocks[segment.blocks[0] : segment.blocks[1]]
        deferral = Deferral()
        decoder = Decoder(
            self.config,
            tuple((b.kind, b.layer) for b in blocks),
            self.weights,
            self.groups.tp,
            deferral,
            self.cell.recompute == "selective",
            self.groups.ep,
        )
        embed = self.weights[EMBEDDING] if number in self.tied else None
        buckets = self._buckets(owned, embed)
        kept = [w for w in owned if not self.sharded or self._apart(w, embed)]
        whole = [(w, self._counted(w, embed, number)) for w in kept]
        math = self.plan.mathematics
        return Stage(
            number,
            decoder,
            owned,
            deferral,
            1.0 / (math.global_batch * math.sequence_length),
            blocks[0].kind == "embedding",
            blocks[-1].kind == "head",
            buckets,
            StageUpdate(whole, buckets, math.optimizer, self.recipe),
            embed,
        )

    def _counted(self, weight: Weight, embed: Weight | None, number: int) -> bool:
        """Each element of the model counts once: the first replica's, and of copies the first."""
        copy = weight is embed and number > 0
        own = weight.spec.split is not None or self.groups.tp.index == 0
        replicas = self.groups.ep.size if weight.spec.expert >= 0 else 1
        return self.cell.replica < replicas and own and not copy

    def _spread(self, weight: Weight) -> bool:
        """Whether its gradient is reduced over "edp": an expert that other replicas lack."""
        return weight.spec.expert >= 0 and self.groups.ep.size > 1

    def _buckets(self, owned: list[Weight], embed: Weight | None) -> list[Bucket]:
        """Per gradient group of the rank: a bucket, and an unsharded one for a tied weight."""
        apart = [w for w in owned if self._apart(w, embed)]
        dense = [w for w in owned if w not in apart and not self._spread(w)]
        spread = [w for w in owned if self._spread(w)]
        found = self._role("dp", dense, self.sharded, "")
        found += self._role("dp", [w for w in apart if w is embed], False, "")
        return found + self._role("edp", spread, self.sharded, EXPERTS)

    def _apart(self, weight: Weight, embed: Weight | None) -> bool:
        """Updated whole under ZeRO-1: a tied weight, or experts that only one replica has."""
        alone = self._spread(weight) and not self.groups.of("edp")
        return self.sharded and (weight is embed or alone)

    def _role(self, role: str, weights: list[Weight], sharded: bool, label: str) -> list[Bucket]:
        mine = self.groups.of(role) if weights else []
        found = []
        for k, index in enumerate(mine):
            members = self.groups.members(index)
            found.append(
                Bucket(
                    weights,
                    k,
                    len(mine),
                    self.groups.handle(index),
                    len(members),
                    members.index(self.program.rank),
                    sharded,
                    self.groups.tp.index == 0 and k == 0,
                    label,
                )
            )
        return found


def build_stages(
    plan: Plan,
    problem: Problem,
    program: RankProgram,
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    recipe: Recipe,
    values: Mapping[str, torch.Tensor] | None = None,
) -> dict[int, Stage]:
    """Build the virtual stages that a rank hosts.

    Args:
        plan, problem, program, groups: of the rank. device, dtype: of products and activations.
        seed: of fresh weights. recipe: of the optimizer.
        values: whole parameters by name to begin with, None for fresh ones.

    Raises:
        UnsupportedPlanError: see ``_check_shared`` and ``read_config``.
    """
    builder = _Builder(plan, problem, program, groups, device, dtype, seed, recipe, values)
    return builder.build()
