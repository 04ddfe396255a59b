"""Which ranks of a plan run on which node, and how a process learns its rank. Imports no torch.

torchrun numbers processes node by node. A plan may number its ranks otherwise and leave chips of a
node idle, so the launch passes both orders on; groups, schedule and data then are the plan's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from sim.errors import InputError
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.spec.cluster import ClusterDoc
from sim.spec.load import Source, validate
from sim.spec.runtime import RuntimeDoc

__all__ = ["DEVICES", "RANKS", "Identity", "NodeRanks", "identity", "nodes_of"]

RANKS, DEVICES = "HETLAB_RANKS", "HETLAB_DEVICES"
"""Variables: the plan's rank of each process of the world; the device of each of the node's."""


class NodeRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of one node.

    Args:
        node: index in the machine. kind: profile or description. ranks: of the plan, in order of
            their chips. devices: number of each one's chip in the node. runtime: how they start.
    """

    node: int
    kind: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    runtime: RuntimeDoc


class Identity(msgspec.Struct, frozen=True):
    """Who a process is. Args: rank of the plan, size of the world, device: number on its node."""

    rank: int
    size: int
    device: int


def nodes_of(plan: Plan, problem: Problem) -> tuple[NodeRanks, ...]:
    """Return the nodes that a plan uses; the one with rank 0 comes first.

    Raises:
        InputError: two ranks share a chip, or a chip is none of the machine.
    """
    machine, place = problem.machine, plan.placement
    node_of = {c: n for n in machine.nodes for c in range(*n.chips)}
    chips = place.chips or tuple(range(place.num_ranks))
    mine: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, chip in enumerate(chips):
        node = node_of.get(chip)
        if node is None or chip in mine[node.index]:
            raise InputError(
                "each rank needs a chip of its own", key=f"placement.chips.{rank}",
                found=str(chip), expected=f"one of 0 to {machine.num_chips - 1}, once",
            )  # fmt: skip
        mine[node.index][chip] = rank
    runtimes = _runtimes(problem)
    found = []
    for index, ranks in mine.items():
        if not ranks:
            continue
        node, order = machine.nodes[index], sorted(ranks)
        found.append(
            NodeRanks(
                node=index, kind=node.profile, ranks=tuple(ranks[c] for c in order),
                devices=tuple(c - node.chips[0] for c in order), runtime=runtimes[index],
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda n: min(n.ranks)))


def _runtimes(problem: Problem) -> list[RuntimeDoc]:
    """The runtime block of each node of the machine: the cluster file's own, else its profile's."""
    doc = validate(ClusterDoc, Source(problem.documents["cluster"], "problem.cluster"))
    profiles = {p.name: p.runtime for p in doc.profiles.nodes}
    found: list[RuntimeDoc] = []
    for site in doc.sites:
        for nodes in site.nodes:
            runtime = nodes.runtime or profiles.get(nodes.profile) or RuntimeDoc()
            found += [runtime] * nodes.count
    return found


def identity(env: Mapping[str, str]) -> Identity:
    """Read what torchrun and the launch say about this process."""
    number, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local = int(env.get("LOCAL_RANK", number))
    ranks, devices = (
        [int(x) for x in env[name].split(",")] if env.get(name) else None
        for name in (RANKS, DEVICES)
    )
    return Identity(ranks[number] if ranks else number, size, devices[local] if devices else local)
