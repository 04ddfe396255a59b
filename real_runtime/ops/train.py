"""The tiny decoder trained by the runtime's own executor: one step, or losses of several."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import torch

from real_runtime.executor import Executor
from real_runtime.ops.cases import CONFIG, Tensors
from real_runtime.ops.check import compared
from real_runtime.ops.records import Alignment, OpResult
from real_runtime.rank import make_executor
from real_runtime.settings import Recipe, RunSettings
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.uniform import uniform
from sim.problem import load_problem

__all__ = ["STEP", "align", "losses_of", "step_check"]

STEP = "decoder_step"
"""Name of the check of a whole step."""
JOB: dict[str, Any] = {"global_batch": 4, "sequence_length": 32, "dtype": "fp32"}
RATE = 3e-3


def _plan() -> Plan:
    problem = load_problem("two_processes", CONFIG, JOB)
    return lower(problem, uniform(problem.model, JOB["global_batch"], [0]))


def _executor(device: str, dtype: str, seed: int, steps: int, seen: Tensors | None) -> Executor:
    settings = RunSettings(
        plan="", data=str(files("real_runtime") / "sample.txt"), out="", steps=steps, dtype=dtype,
        seed=seed, recipe=Recipe(learning_rate=RATE),
    )  # fmt: skip

    def probe(executor: Executor) -> None:
        if seen is not None:
            for stage in executor.stages.values():
                for w in stage.weights:
                    gradient = w.gradient.detach().to("cpu").double()
                    seen[f"gradient of {w.spec.name}"] = gradient.clone()

    executor = make_executor(_plan(), settings, 0, torch.device(device), probe=probe)
    assert executor is not None
    return executor


def _step(device: str, dtype: str, seed: int) -> Tensors:
    seen: Tensors = {}
    executor = _executor(device, dtype, seed, 1, seen)
    result = executor.run_step(0)
    seen["loss"] = torch.tensor(result.loss, dtype=torch.float64)
    for stage in executor.stages.values():
        for w in stage.weights:
            seen[f"updated {w.spec.name}"] = w.data.detach().to("cpu").double()
    return seen


def step_check(device: str, dtype: str, seed: int) -> OpResult:
    """Train one step and compare loss, gradients and updated weights with float64.

    Args:
        device: type of it. dtype: of the runtime. seed: of weights and data.
    """
    expected = _step("cpu", "fp64", seed)
    try:
        found = _step(device, dtype, seed)
    except (RuntimeError, TypeError) as error:
        said = str(error).strip().splitlines()[0]
        return OpResult(op=STEP, device=device, dtype=dtype, ok=False, problem=said)
    return compared(STEP, device, dtype, found, expected)


def losses_of(device: str, dtype: str, seed: int, steps: int) -> tuple[float, ...]:
    """Return the loss of every step of a short training."""
    executor = _executor(device, dtype, seed, steps, None)
    return tuple(executor.run_step(step).loss for step in range(steps))


def align(
    device: str, dtype: str, against: str, reference: tuple[float, ...], seed: int, limit: float
) -> Alignment:
    """Train as long as a reference did and compare the losses.

    Args:
        device, dtype: of the run. against: the other, "device:dtype". reference: its losses.
        seed: of both. limit: of the mean relative error.
    """
    found = losses_of(device, dtype, seed, len(reference))
    error = sum(abs(a - b) / b for a, b in zip(found, reference, strict=True)) / len(reference)
    return Alignment(
        device=device, dtype=dtype, against=against, steps=len(reference), limit=limit,
        mean_relative_error=error if error == error else None, ok=error <= limit,
        losses=found, reference=reference,
    )  # fmt: skip
