"""The host side of a node: processors, PCIe, drives.

How a number says where it comes from: sim.spec.origins.
"""

from __future__ import annotations

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from sim.spec.fields import (
    Count,
    Doc,
    Stated,
    StatedBytes,
    StatedFlopRate,
    StatedFraction,
    StatedPower,
    StatedRate,
    StatedSeconds,
)
from sim.spec.origins import Origin

__all__ = ["HostDoc", "NvmeDoc", "PcieDoc", "ProcessorDoc", "ProcessorsDoc", "above_zero"]


def above_zero(number: Stated | None) -> Stated | None:
    """Refuse a number of 0: elsewhere it would read as "not stated"."""
    if number is not None and number.value <= 0:
        raise PydanticCustomError(
            "positive", "nothing of it", {"expected": "more than 0, or no such key where unknown"}
        )
    return number


class PcieDoc(Doc):
    """The link between host memory and each chip.

    Args:
        rate: [B/s] per direction and chip, of copies from and to pinned memory.
        shared_by: chips behind one switch. shared_rate: [B/s] of that switch's way to the host, per
            direction; None means as much as one chip's.
        both_ways: share of the rate that copies to a chip keep while it copies to the host.
        pinned: host buffers are pinned. pageable: share of the rate that copies reach if not.
    """

    rate: StatedRate
    shared_by: Count = Field(default=1, ge=1)
    shared_rate: StatedRate | None = None
    both_ways: StatedFraction | None = None
    pinned: bool = True
    pageable: StatedFraction | None = None

    _positive = field_validator("rate", "shared_rate")(above_zero)

    @field_validator("both_ways", "pageable")
    @classmethod
    def _share(cls, number: Stated | None) -> Stated | None:
        if number is not None and not 0 < number.value <= 1:
            raise PydanticCustomError(
                "share", "not a share of the rate", {"expected": "above 0, up to 1"}
            )
        return number


class HostDoc(Doc):
    """What a node's processors do, all of it shared by the node's chips.

    Args:
        memory_bandwidth: [B/s] that the optimizer reaches. flops: [FLOP/s] that it reaches.
        update: [s] per parameter of an optimizer step, measured; it replaces the other two.
    """

    memory_bandwidth: StatedRate | None = None
    flops: StatedFlopRate | None = None
    update: StatedSeconds | None = None

    _positive = field_validator("memory_bandwidth", "flops", "update")(above_zero)


class NvmeDoc(Doc):
    """The NVMe drives of a node, all together, shared by its chips.

    Args:
        read, write: [B/s] that large sequential reads and writes reach. capacity: [B].
    """

    read: StatedRate
    write: StatedRate
    capacity: StatedBytes

    _positive = field_validator("read", "write", "capacity")(above_zero)


class ProcessorDoc(Origin):
    """One processor type (one socket), as its data sheet has it.

    Args:
        name: profile name. vendor: maker. cores: of one socket.
        memory_bandwidth: [B/s] nominal. flops: [FLOP/s] nominal, fp32. power: [W].
    """

    name: str = Field(min_length=1)
    vendor: str = ""
    cores: Count = Field(ge=1)
    memory_bandwidth: StatedRate
    flops: StatedFlopRate
    power: StatedPower | None = None

    _positive = field_validator("memory_bandwidth", "flops")(above_zero)


class ProcessorsDoc(Doc):
    """The processors of a node: what stands in for an optimizer's rate is at most theirs.

    Args:
        profile: name of a processor type. sockets: how many.
    """

    profile: str = Field(min_length=1)
    sockets: Count = Field(default=1, ge=1)
