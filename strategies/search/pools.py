"""Pools of interchangeable chips, and which chips of a pool a pipeline's cells get."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from sim.errors import InputError
from sim.hardware.machine import Machine, Node

__all__ = ["Pool", "pools_of", "slots", "split_pool"]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Chips of one type, site and kind of node.

    Args:
        name: accelerator, with the site or a number where that alone is not unique.
        accelerator: profile name. site: of all its nodes.
        nodes: (first chip, last chip + 1) of each node, in machine order.
        memory_bytes: [B] physical, per chip.
    """

    name: str
    accelerator: str
    site: str
    nodes: tuple[tuple[int, int], ...]
    memory_bytes: float

    @property
    def num_chips(self) -> int:
        """Chips of all nodes."""
        return sum(b - a for a, b in self.nodes)

    @property
    def chips(self) -> tuple[int, ...]:
        """All chips, in machine order."""
        return tuple(c for a, b in self.nodes for c in range(a, b))


def pools_of(machine: Machine, only: Sequence[str] = ()) -> tuple[Pool, ...]:
    """Group a machine's nodes into pools, largest memory first, then in machine order.

    Args:
        machine: the cluster. only: accelerators that may be used; () for all.

    Raises:
        InputError: ``only`` names an accelerator the machine lacks.
    """
    present = {n.accelerator for n in machine.nodes}
    for name in only:
        if name not in present:
            raise InputError(
                f"{machine.name} has no such accelerator",
                key="accelerators",
                found=name,
                expected=" or ".join(sorted(present)),
            )
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in machine.nodes:
        if not only or node.accelerator in only:
            groups.setdefault(_kind(node), []).append(node)
    found: list[Pool] = []
    names: dict[str, int] = {}
    for nodes in groups.values():
        name = nodes[0].accelerator
        if len({n[0].site for n in groups.values() if n[0].accelerator == name}) > 1:
            name += f"@{nodes[0].site}"
        names[name] = names.get(name, 0) + 1
        found.append(
            Pool(
                name=name if names[name] == 1 else f"{name}#{names[name]}",
                accelerator=nodes[0].accelerator,
                site=nodes[0].site,
                nodes=tuple(n.chips for n in nodes),
                memory_bytes=machine.accelerators[nodes[0].accelerator].memory_bytes,
            )
        )
    return tuple(sorted(found, key=lambda p: -p.memory_bytes))


def _kind(node: Node) -> tuple[object, ...]:
    """What must be equal for two nodes to be interchangeable."""
    size = node.chips[1] - node.chips[0]
    fabric = (node.fabric_rate, node.fabric_latency, node.fabric_curve)
    nics = (node.nics, node.nic_rate, node.nic_latency, node.nic_curve, node.chip_nic)
    return (node.accelerator, node.site, size, fabric, nics)


@lru_cache(maxsize=4096)
def slots(pool: Pool, tp: int) -> tuple[tuple[int, ...], ...]:
    """Places for cells of ``tp`` chips, none across two nodes; chips left over stay idle."""
    return tuple(tuple(range(c, c + tp)) for a, b in pool.nodes for c in range(a, b - tp + 1, tp))


def split_pool(pool: Pool, parts: Sequence[int]) -> tuple[Pool, ...]:
    """Divide a pool into sub-pools of the given numbers of nodes (H2's sub-groups of a type).

    Raises:
        InputError: the numbers do not add up to the pool's nodes.
    """
    if sum(parts) != len(pool.nodes) or min(parts) < 1:
        raise InputError(
            f"the parts must divide the nodes of {pool.name}",
            key="parts",
            found="+".join(map(str, parts)),
            expected=str(len(pool.nodes)),
        )
    found, first = [], 0
    for count in parts:
        nodes = pool.nodes[first : first + count]
        name = f"{pool.name}/{first}-{first + count}"
        found.append(msgspec.structs.replace(pool, name=name, nodes=nodes))
        first += count
    return tuple(found)
