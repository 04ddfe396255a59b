"""What the lowering passes of offloading take."""

from __future__ import annotations

from sim.plan.arguments import Arguments
from strategies.lowering.updates import Clipping

__all__ = ["NvmeArguments", "SegmentArguments"]


class SegmentArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pass ``segments``, see there."""

    priority: bool = True
    clipping: Clipping = "none"
    whole_steps: bool = False
    masters: bool = True
    experts: tuple[str, ...] = ()


class NvmeArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pass ``nvme``, see there."""

    whole_steps: bool = False
