"""The host side of a node: what profiles say of PCIe and processors, and what stands in for it.

Stand-ins, in order of how well they are known:

* ``BOTH_WAYS``: A100 on PCIe 4.0 x16, measured: one way 24.8 to 25 GB/s; with both directions
  active D2H keeps about 24 and H2D falls to about 11 GB/s
  (https://forums.developer.nvidia.com/t/352186). What D2H loses (4 %) is left out.
* ``PAGEABLE``: pinning made the copies of a ZeRO-Offload step about 6 times faster
  (https://github.com/microsoft/DeepSpeed/pull/5301).
* ``MEMORY_RATE``: 130 GB/s reached on DDR4, from which 28 to 32 B per parameter give 0.22 to 0.25 s
  per 1e9 parameters: derived, not measured.
* ``FLOP_RATE``: assumed; Adam's 16 FLOP per parameter are then far below its bytes.

Where a node says which processors it has, neither rate is above what their data sheet has.
"""

from __future__ import annotations

import math

from sim.hardware.machine import HostSide
from sim.spec.profiles import HostDoc, NvmeDoc, PcieDoc

__all__ = ["copy_rate", "host_side"]

BOTH_WAYS = 11.0 / 25.0
PAGEABLE = 1.0 / 6.0
MEMORY_RATE = 130e9
FLOP_RATE = 0.5e12


def copy_rate(pcie: PcieDoc | None) -> float:
    """Return what copies between a chip and host memory reach, one way and alone [B/s]."""
    if pcie is None:
        return 0.0
    pageable = pcie.pageable.value if pcie.pageable is not None else PAGEABLE
    return pcie.rate.value * (1.0 if pcie.pinned else pageable)


def host_side(
    pcie: PcieDoc | None,
    host: HostDoc | None,
    nvme: NvmeDoc | None = None,
    nominal: tuple[float, float] = (math.inf, math.inf),
) -> HostSide:
    """Return a node's host, with what had to be assumed in words.

    Args:
        pcie, host, nvme: of the node's profile or the cluster file; None where neither has it.
        nominal: [B/s], [FLOP/s] of all the node's processors, inf where they are not known.
    """
    assumed = []
    host = host or HostDoc()
    memory_rate, flop_rate = min(MEMORY_RATE, nominal[0]), min(FLOP_RATE, nominal[1])
    if pcie is not None and pcie.both_ways is None:
        assumed.append("H2D copies beside D2H copies keep 44 % of their rate, as on an A100")
    if pcie is not None and not pcie.pinned and pcie.pageable is None:
        assumed.append("pageable copies reach 1/6 of the rate of pinned ones")
    if host.update is None and host.memory_bandwidth is None:
        pace = 32.0 * 1e9 / memory_rate
        assumed.append(
            f"the CPU optimizer reaches {memory_rate / 1e9:.4g} GB/s of host memory "
            f"({pace:.2g} s per 1e9 params)"
        )
    if host.update is None and host.flops is None:
        assumed.append(f"the CPU optimizer reaches {flop_rate / 1e12:.3g} TFLOP/s")
    return HostSide(
        shared_by=pcie.shared_by if pcie is not None else 1,
        shared_rate=_shared_rate(pcie),
        both_ways=pcie.both_ways.value if pcie is not None and pcie.both_ways else BOTH_WAYS,
        memory_bytes_per_s=host.memory_bandwidth.value if host.memory_bandwidth else memory_rate,
        flops_per_s=host.flops.value if host.flops else flop_rate,
        update_s=host.update.value if host.update else 0.0,
        nvme_read=nvme.read.value if nvme is not None else 0.0,
        nvme_write=nvme.write.value if nvme is not None else 0.0,
        nvme_bytes=nvme.capacity.value if nvme is not None else 0.0,
        assumed=tuple(assumed),
    )


def _shared_rate(pcie: PcieDoc | None) -> float:
    if pcie is None or pcie.shared_by == 1:
        return 0.0
    whole = pcie.shared_rate.value if pcie.shared_rate is not None else pcie.rate.value
    return min(whole, copy_rate(pcie) * pcie.shared_by)
