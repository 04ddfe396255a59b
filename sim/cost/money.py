"""What bytes that leave a site cost; what a step costs in all is sim.report.metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.hardware.machine import Machine

__all__ = ["egress"]


def egress(machine: Machine, link_bytes: Sequence[float] | Mapping[int, float]) -> float:
    """Return what bytes on priced links cost [USD].

    Args:
        machine: whose links. link_bytes: [B] per link index, as a sequence or a mapping.
    """
    rows = link_bytes.items() if isinstance(link_bytes, Mapping) else enumerate(link_bytes)
    # Links of the host side come behind the machine's and cost nothing.
    links = machine.links
    return sum(links[x].price_per_byte * nbytes for x, nbytes in rows if x < len(links))
