"""One rank of a run, put together: groups, stages, data, executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from real_runtime.build import build_stages
from real_runtime.data import Batches, open_tokens
from real_runtime.devices import pairs_need_groups
from real_runtime.executor import Executor
from real_runtime.groups import Groups
from real_runtime.program import rank_program
from real_runtime.record import Recorder
from real_runtime.settings import RunSettings
from sim.plan.plan import Plan
from sim.plan.wiring import wire
from sim.problem import Problem, problem_from_documents

__all__ = ["DTYPES", "make_executor"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def make_executor(
    plan: Plan,
    settings: RunSettings,
    rank: int,
    device: torch.device,
    problem: Problem | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
    probe: Callable[[Executor], None] | None = None,
) -> Executor | None:
    """Make a rank's executor; every process of the world must call this.

    Args:
        plan: to run. settings: of the run. rank: of this process. device: of its tensors.
        problem: of the plan, when it has been read. values: weights to begin with.
        probe: see Executor.

    Returns:
        The executor, None for a process that is no rank of the plan.
    """
    problem = problem or problem_from_documents(plan.problem)
    wiring = wire(plan.placement)
    pairs = settings.own_pairs or pairs_need_groups(device)
    groups = Groups(plan, wiring, rank, settings.deadline, pairs)
    if rank not in wiring.cell_of:
        return None
    program = rank_program(plan, rank, wiring)
    dtype = DTYPES[settings.dtype]
    stages = build_stages(
        plan, problem, program, groups, device, dtype, settings.seed, settings.recipe, values
    )
    math = plan.mathematics
    vocab = max(b.vocab for b in problem.model.blocks)
    batches = Batches(
        open_tokens(settings.data), vocab, math.sequence_length, math.global_batch, settings.seed
    )
    return Executor(
        plan, program, groups, stages, batches, device, dtype, settings.recipe, settings.steps,
        Recorder(settings.kept_spans), probe,
    )  # fmt: skip
