"""What a step costs: accelerators by the hour, and bytes that leave a site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sim.cost.collective import places
from sim.hardware.machine import Machine

__all__ = ["StepPrice", "egress", "step_price"]


class StepPrice(msgspec.Struct, frozen=True, kw_only=True):
    """Money of one training step.

    Args:
        accelerators: [USD] of the chips for the step's duration. egress: [USD] of priced links.
        tokens: of the step. unpriced: accelerator types whose price is not known, left out.
    """

    accelerators: float
    egress: float
    tokens: float
    unpriced: tuple[str, ...] = ()

    @property
    def per_step(self) -> float:
        """[USD] per step."""
        return self.accelerators + self.egress

    @property
    def per_million_tokens(self) -> float:
        """[USD] per million tokens."""
        return self.per_step / self.tokens * 1e6


def egress(machine: Machine, link_bytes: Sequence[float] | Mapping[int, float]) -> float:
    """Return what bytes on priced links cost [USD].

    Args:
        machine: whose links. link_bytes: [B] per link index, as a sequence or a mapping.
    """
    rows = link_bytes.items() if isinstance(link_bytes, Mapping) else enumerate(link_bytes)
    # Links of the host side come behind the machine's and cost nothing.
    links = machine.links
    return sum(links[x].price_per_byte * nbytes for x, nbytes in rows if x < len(links))


def step_price(
    machine: Machine,
    chips: Sequence[int],
    step_time_s: float,
    tokens: float,
    link_bytes: Sequence[float] | Mapping[int, float] = (),
) -> StepPrice:
    """Return the price of one step.

    Args:
        machine: where. chips: chips that the plan holds, idle or not. step_time_s: [s].
        tokens: per step. link_bytes: [B] per link index of one step.
    """
    where = places(machine)
    total = 0.0
    unpriced: dict[str, None] = {}
    for chip in chips:
        name = machine.nodes[where.node[chip]].accelerator
        price = machine.accelerators[name].price_per_s
        total += price * step_time_s
        if not price:
            unpriced[name] = None
    return StepPrice(
        accelerators=total,
        egress=egress(machine, link_bytes),
        tokens=tokens,
        unpriced=tuple(unpriced),
    )
