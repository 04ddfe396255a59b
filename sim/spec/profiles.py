"""Profile documents: accelerators, links and nodes, every number with where it comes from.

How a number says that: sim.spec.origins. Field meanings are those of sim.hardware.machine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sim.spec.fields import (
    Bytes,
    Count,
    Doc,
    Dtype,
    Fraction,
    Stated,
    StatedBytes,
    StatedFactor,
    StatedFlopRate,
    StatedFraction,
    StatedPower,
    StatedPricePerByte,
    StatedPriceRate,
    StatedRate,
    StatedSeconds,
)
from sim.spec.hosts import HostDoc, NvmeDoc, PcieDoc, ProcessorDoc, ProcessorsDoc, above_zero
from sim.spec.origins import Origin
from sim.spec.runtime import RuntimeDoc

__all__ = [
    "AcceleratorDoc",
    "AcceleratorNumbers",
    "CurvePoint",
    "HostDoc",
    "LinkDoc",
    "LinkNumbers",
    "NicsDoc",
    "NodeDoc",
    "NodeNumbers",
    "NvmeDoc",
    "PcieDoc",
    "ProcessorDoc",
    "ProcessorsDoc",
    "RoundDoc",
]

Duplex = Literal["full", "half"]
LinkKind = Literal["fabric", "pcie", "nic", "uplink", "wan"]
PeakDtype = Dtype | Literal["int8"]
"""What a peak is of; of int8 it counts operations, and no job computes in it."""


class AcceleratorNumbers(Doc):
    """The numbers of an accelerator, all optional: what a cluster file may override.

    ``power`` [W] is the board's limit; nothing is reckoned with it.
    """

    memory: StatedBytes | None = None
    memory_bandwidth: StatedRate | None = None
    peaks: dict[PeakDtype, StatedFlopRate] | None = None
    gemm_efficiency: StatedFraction | None = None
    gemm_half: StatedFactor | None = None
    attention_efficiency: StatedFraction | None = None
    head_half: StatedFactor | None = None
    keys_half: StatedFactor | None = None
    memory_efficiency: StatedFraction | None = None
    optimizer_efficiency: StatedFraction | None = None
    kernel_overhead: StatedSeconds | None = None
    routing_overhead: StatedSeconds | None = None
    step_overhead: StatedSeconds | None = None
    misaligned: StatedFraction | None = None
    tp_cost: StatedFactor | None = None
    ep_cost: StatedFactor | None = None
    cp_cost: StatedFactor | None = None
    sync_cost: StatedFactor | None = None
    compute_slowdown: StatedFactor | None = None
    comm_slowdown: StatedFactor | None = None
    async_compute: bool | None = None
    context: StatedBytes | None = None
    allocator_gap: StatedFraction | None = None
    power: StatedPower | None = None
    price: StatedPriceRate | None = None
    calibrated: bool | None = None

    @field_validator(
        "gemm_efficiency",
        "attention_efficiency",
        "memory_efficiency",
        "optimizer_efficiency",
        "misaligned",
        "allocator_gap",
    )
    @classmethod
    def _at_most_one(cls, number: Stated | None) -> Stated | None:
        if number is not None and number.value > 1:
            raise PydanticCustomError(
                "share", "a share above 1", {"expected": "0..1, or a percentage up to 100 %"}
            )
        return number

    @field_validator("compute_slowdown", "comm_slowdown")
    @classmethod
    def _at_least_one(cls, number: Stated | None) -> Stated | None:
        if number is not None and number.value < 1:
            raise PydanticCustomError(
                "factor", "a slowdown below 1", {"expected": "a factor of at least 1"}
            )
        return number


class AcceleratorDoc(Origin, AcceleratorNumbers):
    """One accelerator type; memory, its bandwidth and at least one dense peak are required."""

    name: str = Field(min_length=1)
    vendor: str = ""
    sparse: bool = False
    memory: StatedBytes
    memory_bandwidth: StatedRate
    peaks: dict[PeakDtype, StatedFlopRate] = Field(min_length=1)

    @model_validator(mode="after")
    def _dense(self) -> AcceleratorDoc:
        if self.sparse:
            raise PydanticCustomError(
                "sparse_peak",
                "peaks are dense peaks",
                {"expected": "no sparse: true, and the dense figures"},
            )
        return self


class CurvePoint(Doc):
    """One point of a link's size curve. Args: size [B], fraction of the nominal rate reached."""

    size: Bytes
    fraction: Fraction = Field(gt=0, le=1)


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]


def _growing(curve: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
    sizes = [point.size for point in curve]
    if sizes != sorted(set(sizes)):
        raise PydanticCustomError(
            "curve", "sizes do not grow", {"expected": "points in strictly growing size"}
        )
    return curve


class RoundDoc(Doc):
    """One message of a collective between neighbours, where it differs from a message alone.

    Args:
        latency: [s] per message and port. curve: reached share of the link's rate by message size.
    """

    latency: StatedSeconds
    curve: tuple[CurvePoint, ...] = Field(min_length=1)

    _sorted = field_validator("curve")(_growing)


class LinkNumbers(Doc):
    """The numbers of a link, all optional: what a cluster file may override.

    Args:
        rate: [B/s] one direction. latency: [s] per message.
        curve: reached share of the rate by message size.
        flow_cap: [B/s] most that one flow gets. price: [USD/B] egress.
        duplex: "half" when both directions share the rate. kind: what it is.
        collectives: of those whose messages differ from one alone.
    """

    rate: StatedRate | None = None
    latency: StatedSeconds | None = None
    curve: tuple[CurvePoint, ...] = ()
    flow_cap: StatedRate | None = None
    price: StatedPricePerByte | None = None
    duplex: Duplex | None = None
    kind: LinkKind | None = None
    collectives: dict[Collective, RoundDoc] = {}

    _sorted = field_validator("curve")(_growing)


class LinkDoc(Origin, LinkNumbers):
    """One link type; its rate is required."""

    name: str = Field(min_length=1)
    rate: StatedRate


def _profile_or_numbers(value: Any) -> Any:
    return {"profile": value} if isinstance(value, str) else value


class LinkUse(LinkNumbers):
    """A link as a node or site uses it: a profile's name, numbers, or a profile with overrides."""

    profile: str = ""

    @model_validator(mode="after")
    def _something(self) -> LinkUse:
        if not self.profile and self.rate is None:
            raise PydanticCustomError(
                "link", "neither a profile nor a rate", {"expected": "profile: NAME, or rate: ..."}
            )
        return self


LinkRef = Annotated[LinkUse, BeforeValidator(_profile_or_numbers)]


class NicsDoc(LinkUse):
    """The NICs of a node.

    Args:
        count: number of NICs. affinity: NIC index of each chip; () spreads the chips evenly.
        nonaffine_rate: [B/s] most that a flow gets through a NIC its chip is not affine to.
    """

    count: Count = Field(default=1, ge=0)
    affinity: tuple[int, ...] = ()
    nonaffine_rate: StatedRate | None = None

    @model_validator(mode="after")
    def _existing(self) -> NicsDoc:
        if any(not 0 <= nic < self.count for nic in self.affinity):
            raise PydanticCustomError(
                "affinity",
                "affinity names a NIC that is not there",
                {"expected": f"indices from 0 to {self.count - 1}"},
            )
        return self


class NodeNumbers(Doc):
    """What a node consists of, all optional: what a cluster file may override or write inline.

    Args:
        accelerator: profile name. chips: accelerators per node.
        fabric: link between the chips of a node, per chip and direction.
        nics: network cards. host_memory: [B]. pcie: link to host memory.
        processors: which ones it has. host: what they reach. nvme: its drives.
        runtime: how processes start on it, for ``hetlab run``.
    """

    accelerator: str | None = None
    chips: Count | None = Field(default=None, ge=1)
    fabric: LinkRef | None = None
    nics: NicsDoc | None = None
    host_memory: StatedBytes | None = None
    pcie: PcieDoc | None = None
    processors: ProcessorsDoc | None = None
    host: HostDoc | None = None
    nvme: NvmeDoc | None = None
    runtime: RuntimeDoc | None = None

    _positive = field_validator("host_memory")(above_zero)


class NodeDoc(Origin, NodeNumbers):
    """One node type; its accelerator and number of chips are required."""

    name: str = Field(min_length=1)
    accelerator: str
    chips: Count = Field(ge=1)
