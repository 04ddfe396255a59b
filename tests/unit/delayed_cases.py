"""Machines, problems and plans of the tests of delayed SGD: times chosen, not estimated."""

from __future__ import annotations

from typing import Any

import msgspec

from sim.hardware.machine import HostSide, Machine
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.validate import validate
from sim.problem import Problem
from sim.spec.job import Limits
from strategies.compose import compose
from tests.validation import exercise

PARAMS = 1_000_000
NBYTES = 4.0 * PARAMS
"""[B] of all parameters, and of their gradient."""
UPDATE = 0.25
"""[s] of an update of all parameters on a node's processors."""


def machine_of(
    compute: list[float], *, rate: float = 8e6, update: float = UPDATE, pcie: float = 0.0
) -> Machine:
    """A node for the server, and one for each worker, of one chip each.

    Args:
        compute: [s] of a forward and backward of each worker. rate: [B/s] of every NIC.
        update: [s] of all parameters. pcie: [B/s].
    """
    types = ("server", *(f"t{i}" for i in range(len(compute))))
    plain = exercise.machine(len(types), 1, nic_rate=rate, types=types)
    host = HostSide(update_s=update / PARAMS, both_ways=1.0)
    nodes = tuple(msgspec.structs.replace(n, host=host, pcie_rate=pcie) for n in plain.nodes)
    return msgspec.structs.replace(plain, nodes=nodes)


def problem_of(
    compute: list[float], machine: Machine | None = None, batch: int = 0, **more: Any
) -> Problem:
    """One layer that takes each worker its time; inexact plans are allowed."""
    whole = exercise.FORWARD + exercise.BACKWARD
    speeds = {f"t{i}": whole / s for i, s in enumerate(compute)} | {"server": 1.0}
    model = exercise.model(1, speeds=speeds, params=PARAMS)
    on = machine or machine_of(compute, **more)
    made = exercise.problem(on, model, batch or len(compute))
    job = msgspec.structs.replace(
        made.job,
        param_dtype="fp32",
        gradient_dtype="fp32",
        reduction_dtype="fp32",
        limits=Limits(allow_inexact=True),
    )
    return msgspec.structs.replace(made, job=job)


def plan_of(problem: Problem, chips: tuple[int, ...] | None = None, **knobs: Any) -> Plan:
    """The plan of ``delayed_sgd`` with a worker on every chip but the first."""
    chips = chips or tuple(range(1, problem.machine.num_chips))
    knobs = {"variant": "server"} | knobs
    draft = compose(
        problem,
        [
            ("megatron", {"chips": chips}),
            ("1f1b", {}),
            ("ddp", {}),
            ("partition", {}),
            ("delayed_sgd", knobs),
        ],
    )
    plan = lower(problem, draft)
    validate(plan)
    return plan
