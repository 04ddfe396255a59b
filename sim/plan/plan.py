"""The Plan: placement, lowering calls, amounts and explicit programs; frozen and content-hashed."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from sim.plan.placement import Placement

__all__ = ["FORMAT", "Amount", "Call", "Mathematics", "Plan", "ProgramText", "Table", "plan_hash"]

FORMAT = 1
"""Version of the plan file."""


class Amount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an op does, per microbatch and before any splitting over ranks.

    Args:
        flops: [FLOP]. nbytes: [B] on the wire or of memory traffic. tokens: tokens.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    tokens: float = 0.0


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of the lowering: the generator first, then passes, in order."""

    name: str
    version: int = 1
    args: dict[str, Any] = {}


class Mathematics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What fixes the result of a step.

    Args:
        global_batch: [sequences]. sequence_length: [tokens]. microbatch: [sequences].
        dtype: compute dtype. reduction_dtype: of gradient sums. optimizer: name.
        zero: ZeRO stage: replicas share optimizer states (1), gradients too (2), parameters
            too (3). sequence_parallel: activations split along the sequence.
    """

    global_batch: int = 1
    sequence_length: int = 1
    microbatch: int = 1
    dtype: str = "bf16"
    reduction_dtype: str = "fp32"
    optimizer: str = "adamw"
    zero: int = 0
    sequence_parallel: bool = False


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Late amounts.

    Args:
        origin: "file", "generator" or "controller".
        values: key -> list over steps of a number, a vector over a group's members, or a matrix
            members x members; the last entry holds for all later steps.
            Of origin "file" only.
        generator: registered function that makes the rows from the run's seed. Of origin
            "generator" only; see sim.plan.generators.
        controller: registered function that writes this table from others; inputs: tables it reads,
            "name@d" for the row of d steps before. Of origin "controller" only.
        parameters: of the call of the generator or controller.
        initial: values a read before the first write sees.
    """

    origin: str = "file"
    values: dict[str, list[Any]] = {}
    generator: str = ""
    parameters: dict[str, Any] = {}
    controller: str = ""
    inputs: tuple[str, ...] = ()
    initial: dict[str, Any] = {}


class ProgramText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An explicit program of some ranks, in the text form of sim.plan.program."""

    ranks: tuple[int, ...]
    text: str


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete plan; two executors run it.

    Args:
        name: for people.
        exact: False when the plan changes the mathematics; ``reason`` then says how.
        mathematics, placement: see there.
        lowering: generator, then passes; () when every rank has an explicit program.
        barrier: BARRIER ends each step. buffers: receive buffers per directed rank pair.
        amounts: key -> amount, see sim.plan.lower. tables: late amounts.
        programs: explicit programs, only where they deviate from the lowering.
        problem: the resolved documents, so that the file can be simulated alone.
        problem_hash: of those documents. version: of hetlab.
        assumptions: what was assumed on the way, in words.
        format: version of the file.
    """

    name: str = ""
    exact: bool = True
    reason: str = ""
    mathematics: Mathematics = Mathematics()
    placement: Placement = Placement()
    lowering: tuple[Call, ...] = ()
    barrier: bool = True
    buffers: int = 2
    amounts: dict[str, Amount] = {}
    tables: dict[str, Table] = {}
    programs: tuple[ProgramText, ...] = ()
    problem: dict[str, Any] = {}
    problem_hash: str = ""
    version: str = ""
    assumptions: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def hash(self) -> str:
        """Content hash, see plan_hash."""
        return plan_hash(self)


def plan_hash(plan: Plan) -> str:
    """SHA-256 over the canonical JSON of everything but ``version`` (16 hex digits)."""
    document = msgspec.to_builtins(plan, order="deterministic")
    document.pop("version")
    return hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()[:16]
