"""A machine as a small text tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sim.hardware.machine import Link, Machine, Node
from sim.units import format_quantity

__all__ = ["describe_machine"]


def describe_machine(machine: Machine) -> str:
    """Return sites, islands and runs of equal nodes, then the links between places.

    Rates are per direction: of one chip inside the node, of one NIC, of the whole link between
    places. Ends with what was assumed.

    Args:
        machine: the resolved cluster.
    """
    lines = [f"{machine.name}: {machine.num_chips} chips in {len(machine.nodes)} nodes"]
    sites = [(site, list(nodes)) for site, nodes in groupby(machine.nodes, key=_site)]
    own = {index for node in machine.nodes for index in _ports(node)}
    between = [link for index, link in enumerate(machine.links) if index not in own]
    blocks = [(f"site {site}", _site_lines(machine, site, nodes)) for site, nodes in sites]
    if between:
        blocks.append(("between places", [_link_line(link) for link in between]))
    if machine.assumptions:
        blocks.append(("assumed", list(machine.assumptions)))
    for number, (head, below) in enumerate(blocks):
        last = number == len(blocks) - 1
        lines.append(("└─ " if last else "├─ ") + head)
        lines += [("   " if last else "│  ") + text for text in _branches(below)]
    return "\n".join(lines)


def _site(node: Node) -> str:
    return node.site


def _ports(node: Node) -> list[int]:
    return [index for pair in (*node.chip_links, *node.nic_links) for index in pair]


def _branches(texts: Sequence[str]) -> list[str]:
    last = len(texts) - 1
    return [("└─ " if i == last else "├─ ") + text for i, text in enumerate(texts)]


def _site_lines(machine: Machine, site: str, nodes: list[Node]) -> list[str]:
    """One line per run of equal nodes."""
    lines = []
    for _, run in groupby(nodes, key=lambda n: (n.island, n.profile, n.accelerator, n.nic_rate)):
        group = list(run)
        first, last = group[0], group[-1]
        chip = machine.accelerators[first.accelerator]
        memory = f"{chip.memory_bytes / 1e9:g} GB"
        inside = f", {_rate(first.fabric_rate)} inside" if first.fabric_rate else ""
        nics = f", {first.nics} NIC x {_rate(first.nic_rate)}" if first.nics else ", no NIC"
        island = "" if first.island == site else f"island {first.island}: "
        lines.append(
            f"{island}{len(group)} x {first.profile} "
            f"({first.chips[1] - first.chips[0]} x {chip.name} {memory}{inside}{nics}), "
            f"chips {first.chips[0]}-{last.chips[1] - 1}"
        )
    return lines


def _link_line(link: Link) -> str:
    text = f"{link.name}: {_rate(link.rate)}, {format_quantity(link.latency, 'seconds')}"
    if link.flow_cap:
        text += f", {_rate(link.flow_cap)} per flow"
    if link.price_per_byte:
        text += f", {format_quantity(link.price_per_byte, 'USD/B')}"
    return text


def _rate(value: float) -> str:
    return format_quantity(value, "bytes/s")
