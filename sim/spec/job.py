"""The job: what fixes the mathematics of a training step, what is wanted, and what must hold."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sim.spec.fields import Count, Doc, Dtype, Fraction, Seconds
from sim.spec.routing import Routed, RoutingDoc, routed_from_doc

__all__ = [
    "DTYPE_BYTES",
    "Job",
    "JobDoc",
    "LimitsDoc",
    "Limits",
    "OptimizerDoc",
    "Pins",
    "PinsDoc",
    "job_from_doc",
]

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""[B] per element as stored; tf32 is fp32 in memory."""

StateDtype = Literal["fp32", "bf16", "fp16"]
OptimizerKind = Literal["adam", "adamw", "sgd"]
Recompute = Literal["none", "selective", "full"]
_STATES: dict[str, int] = {"adam": 2, "adamw": 2, "sgd": 0}


class OptimizerDoc(Doc):
    """The optimizer; ``optimizer: adamw`` is short for ``optimizer: {kind: adamw}``.

    Args:
        kind: update rule. state_dtype: of its moments. momentum: sgd only.
        master_weights: keep an fp32 copy of the parameters; default: yes when they are not fp32.
    """

    kind: OptimizerKind = "adamw"
    state_dtype: StateDtype = "fp32"
    momentum: bool = False
    master_weights: bool | None = None

    @model_validator(mode="after")
    def _momentum(self) -> OptimizerDoc:
        if self.momentum and self.kind != "sgd":
            raise PydanticCustomError(
                "momentum", "{kind} has its own moments", {"kind": self.kind, "expected": "sgd"}
            )
        return self


class LimitsDoc(Doc):
    """What a plan must keep to.

    Args:
        max_memory_fraction: share of an accelerator's memory a plan may be predicted to use.
        max_step_time: [s] or none. allow_inexact: plans that change the mathematics are allowed.
    """

    max_memory_fraction: Fraction = Field(default=0.92, gt=0, le=1)
    max_step_time: Seconds | None = Field(default=None, gt=0)
    allow_inexact: bool = False


class PinsDoc(Doc):
    """Knobs taken out of the search; None leaves them free."""

    tp: Count | None = Field(default=None, ge=1)
    pp: Count | None = Field(default=None, ge=1)
    dp: Count | None = Field(default=None, ge=1)
    ep: Count | None = Field(default=None, ge=1)
    schedule: str | None = None
    recompute: Recompute | None = None
    zero: Literal[0, 1, 2, 3] | None = None
    offload: Literal["auto", "yes", "no"] | None = None


class JobDoc(Doc):
    """The job as people write it; ``Job`` says what each field means."""

    name: str = "job"
    global_batch: Count = Field(ge=1)
    sequence_length: Count = Field(ge=1)
    dtype: Dtype = "bf16"
    param_dtype: StateDtype | None = None
    gradient_dtype: StateDtype | None = None
    reduction_dtype: StateDtype = "fp32"
    optimizer: OptimizerDoc = OptimizerDoc()
    microbatch: Count | None = Field(default=None, ge=1)
    token_weighting: Literal["tokens", "sequences"] = "tokens"
    flash_attention: bool = True
    dropout: bool = False
    objective: Literal["step_time", "cost"] = "step_time"
    limits: LimitsDoc = LimitsDoc()
    pins: PinsDoc = PinsDoc()
    routing: RoutingDoc | None = None
    notes: tuple[str, ...] = ()

    @field_validator("optimizer", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _divides(self) -> JobDoc:
        if self.microbatch is not None and self.global_batch % self.microbatch:
            legal = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
            near = sorted(sorted(legal, key=lambda n: abs(n - (self.microbatch or 0)))[:2])
            raise PydanticCustomError(
                "microbatch",
                "microbatch {microbatch} does not divide global_batch {batch}",
                {
                    "microbatch": self.microbatch,
                    "batch": self.global_batch,
                    "expected": "e.g. " + " or ".join(map(str, near)),
                },
            )
        return self


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan must keep to.

    Args:
        max_memory_fraction: share (0..1) of device memory. max_step_time_s: [s], 0 means none.
        allow_inexact: plans that change the mathematics may be returned.
    """

    max_memory_fraction: float = 0.92
    max_step_time_s: float = 0.0
    allow_inexact: bool = False


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs taken out of the search: sizes and schedule; None leaves one free.

    ``offload``: "yes", "no" or "auto", see strategies.search.options.Choices.
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    recompute: Recompute | None = None
    zero: int | None = None
    offload: str | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved job.

    Args:
        name: for people. global_batch: [sequences] per step. sequence_length: [tokens].
        dtype: of matrix products and activations. param_dtype: of the parameters they read.
        gradient_dtype: of accumulated gradients. reduction_dtype: of gradient sums across replicas.
        optimizer: update rule. state_dtype: of its moments. num_states: moments per parameter.
        master_weights: an fp32 copy of the parameters is kept.
        token_weighting: what a gradient is averaged over; "tokens" makes uneven replicas equal the
            single-process loss.
        flash_attention: scores never reach memory. dropout: masks are kept for the backward pass.
        objective: what the search minimises. limits, pins: see there.
        routing: of tokens to experts, None where every expert gets as many.
    """

    name: str = "job"
    global_batch: int
    sequence_length: int
    dtype: str = "bf16"
    param_dtype: str = "bf16"
    gradient_dtype: str = "fp32"
    reduction_dtype: str = "fp32"
    optimizer: str = "adamw"
    state_dtype: str = "fp32"
    num_states: int = 2
    master_weights: bool = True
    token_weighting: str = "tokens"
    flash_attention: bool = True
    dropout: bool = False
    objective: str = "step_time"
    limits: Limits = Limits()
    pins: Pins = Pins()
    routing: Routed | None = None

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch * self.sequence_length

    @property
    def param_bytes(self) -> int:
        """Bytes per parameter of the weights the products read [B]."""
        return DTYPE_BYTES[self.param_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter of the accumulated gradient [B]."""
        return DTYPE_BYTES[self.gradient_dtype]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes per parameter of moments and master weights [B]; what ZeRO-1 divides."""
        return self.num_states * DTYPE_BYTES[self.state_dtype] + 4 * self.master_weights

    @property
    def activation_bytes(self) -> int:
        """Bytes per activation element [B]; fp8 training keeps activations in bf16."""
        return 2 if self.dtype == "fp8" else DTYPE_BYTES[self.dtype]


def job_from_doc(doc: JobDoc) -> Job:
    """Resolve a job document: fill the dtypes that follow from others.

    Parameters are kept in the compute dtype (fp8: in bf16, tf32: in fp32), gradients in the
    reduction dtype, and master weights where parameters are not fp32.
    """
    kept = {"fp8": "bf16", "tf32": "fp32"}
    param_dtype = doc.param_dtype or kept.get(doc.dtype, doc.dtype)
    optimizer = doc.optimizer
    master = optimizer.master_weights
    pins = {name: getattr(doc.pins, name) for name in PinsDoc.model_fields}
    return Job(
        name=doc.name,
        global_batch=doc.global_batch,
        sequence_length=doc.sequence_length,
        dtype=doc.dtype,
        param_dtype=param_dtype,
        gradient_dtype=doc.gradient_dtype or doc.reduction_dtype,
        reduction_dtype=doc.reduction_dtype,
        optimizer=optimizer.kind,
        state_dtype=optimizer.state_dtype,
        num_states=_STATES[optimizer.kind] + optimizer.momentum,
        master_weights=param_dtype != "fp32" if master is None else master,
        token_weighting=doc.token_weighting,
        flash_attention=doc.flash_attention,
        dropout=doc.dropout,
        objective=doc.objective,
        limits=Limits(
            max_memory_fraction=doc.limits.max_memory_fraction,
            max_step_time_s=doc.limits.max_step_time or 0.0,
            allow_inexact=doc.limits.allow_inexact,
        ),
        pins=Pins(microbatch=doc.microbatch, **pins),
        routing=routed_from_doc(doc.routing),
    )
