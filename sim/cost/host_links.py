"""Links of the host side: PCIe of every chip, switches, processors and drives of every node.

Every chip has one link each way; chips may share a switch; and all chips of a node share its
processors, which are a link too, crossed by the bytes that updates read and write. Its NVMe drives
are two links, one for reads and one for writes. These links stand behind the machine's own, and
only where a plan uses them.

Of a class of equal ranks only the representative runs, so links that the same ranks of the same
classes use are one link, which all members of a class on it cross together. ``rank_keys`` says
where that would join ranks that are not equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable

from sim.cost.collective import places
from sim.cost.work import Work
from sim.errors import InputError
from sim.hardware.machine import Node
from sim.plan.graph import OpGraph
from sim.plan.hashing import renumber
from sim.spec.job import Job

__all__ = ["COPIES", "DRIVES", "HOST_STREAMS", "HostLinks", "Key", "update_bytes", "update_seconds"]

COPIES = ("d2h", "h2d")
DRIVES = ("nvme_read", "nvme_write")
HOST_STREAMS = (*COPIES, "host", *DRIVES)
_OF_NODE = ("processors", *DRIVES)
ADAM_FLOPS = 16.0
"""[FLOP] per parameter of an Adam step: 3 for each moment, 10 for correction, root and update."""

Key = tuple[str, int]
"""(what, chip or number of the switch or node)."""


def update_bytes(job: Job) -> float:
    """Return what one parameter's update reads and writes [B].

    Gradient read, states and master weight read and written, the parameter written.
    """
    return job.gradient_bytes + 2.0 * job.optimizer_bytes + job.param_bytes


def update_seconds(node: Node, job: Job) -> float:
    """Return what one parameter's update takes on a node's processors [s]: measured, or roofline.

    Raises:
        InputError: nothing is known of the node's processors.
    """
    host = node.host
    if host.update_s > 0:
        return host.update_s
    if not (host.memory_bytes_per_s > 0 and host.flops_per_s > 0):
        raise InputError(
            f"nothing is known of the processors of {node.profile}",
            key="host",
            expected="memory_bandwidth and flops, or update",
        )
    return max(update_bytes(job) / host.memory_bytes_per_s, ADAM_FLOPS / host.flops_per_s)


class HostLinks:
    """The links of the host side under a plan.

    Args:
        graph: whose streams use them. work: chips of its ranks.
        watched: names of links whose rate changes during the run.
        more: (actor, stream) that messages to and from ``on`` blocks use besides the graph's.

    Attributes:
        names, rates: of the links that got a number, [B/s]. lead: what a link looks like -> the
            one that stands for all that look so. users: link -> actor -> its ranks on it.
    """

    def __init__(
        self,
        graph: OpGraph,
        work: Work,
        watched: frozenset[str] = frozenset(),
        more: Collection[tuple[int, str]] = (),
    ) -> None:
        self.graph, self.work, self.watched = graph, work, watched
        self.machine, self.job = work.problem.machine, work.problem.job
        self.first = len(self.machine.links)
        self.names: list[str] = []
        self.rates: list[float] = []
        self._number: dict[Key, int] = {}
        self._node = places(self.machine).node
        uses = {(a, s) for a, s in graph.stream_names if s in HOST_STREAMS} | set(more)
        self.used = sorted(uses)
        self.users: dict[Key, Counter[int]] = defaultdict(Counter)
        for actor, stream in self.used:
            for rank in graph.actors[actor].ranks:
                for key in self.of(stream, rank):
                    self.users[key][actor] += 1
        self.lead: dict[Hashable, Key] = {}
        for key in sorted(self.users):
            self.lead.setdefault(self.signature(key), key)

    def node(self, rank: int) -> Node:
        """Node of a rank's chip."""
        return self.machine.nodes[self._node[self.work.chip(rank)]]

    def of(self, stream: str, rank: int) -> tuple[Key, ...]:
        """Links that a rank's ops on a stream cross."""
        chip, node = self.work.chip(rank), self.node(rank)
        if stream == "host" or stream in DRIVES:
            return (("processors" if stream == "host" else stream, node.index),)
        if node.host.shared_by == 1:
            return ((stream, chip),)
        switch = (chip - node.chips[0]) // node.host.shared_by
        return (stream, chip), (f"{stream} switch", node.chips[0] + switch * node.host.shared_by)

    def rate(self, key: Key) -> float:
        """Rate of a link [B/s]."""
        what, number = key
        if what in _OF_NODE:
            node = self.machine.nodes[number]
            if what == "processors":
                return update_bytes(self.job) / update_seconds(node, self.job)
            return node.host.nvme_read if what == "nvme_read" else node.host.nvme_write
        node = self.machine.nodes[self._node[number]]
        return node.host.shared_rate if what.endswith("switch") else node.pcie_rate

    def signature(self, key: Key) -> Hashable:
        """What a link looks like: equal links of equal users behave alike."""
        what, number = key
        node = self.machine.nodes[number if what in _OF_NODE else self._node[number]]
        both = self.both_ways(number) if what in COPIES else 1.0
        users = tuple(sorted(self.users[key].items()))
        own = self._name(key) if self.watched else ""
        own = own if own in self.watched else ""
        return what, node.pcie_rate, node.host, both, users, own

    def both_ways(self, chip: int) -> float:
        """Share of the rate that H2D copies of a chip keep beside its D2H copies."""
        both = all((stream, chip) in self.users for stream in COPIES)
        return self.machine.nodes[self._node[chip]].host.both_ways if both else 1.0

    def index(self, key: Key) -> int:
        """Number of a link, which gets one with its first use."""
        if key not in self._number:
            self._number[key] = self.first + len(self.names)
            self.names.append(self._name(key))
            self.rates.append(self.rate(key))
        return self._number[key]

    def _name(self, key: Key) -> str:
        """Name of a link, e.g. "node0/chip1/d2h", "node0/switch0/h2d", "node0/processors"."""
        what, number = key
        if what in _OF_NODE:
            return f"node{number}/{what}"
        node = self.machine.nodes[self._node[number]]
        local = number - node.chips[0]
        if what in COPIES:
            return f"node{node.index}/chip{local}/{what}"
        return f"node{node.index}/switch{local // node.host.shared_by}/{what.split()[0]}"

    def rank_keys(self) -> tuple[int, ...]:
        """Per rank what its links look like, when some class holds ranks that differ; else ()."""
        keys: dict[int, tuple[Hashable, ...]] = {}
        apart = False
        for actor, stream in self.used:
            first: tuple[Hashable, ...] | None = None
            for rank in self.graph.actors[actor].ranks:
                mine = tuple(self.signature(k) for k in self.of(stream, rank))
                first = mine if first is None else first
                apart = apart or mine != first
                keys[rank] = (*keys.get(rank, ()), *mine)
        if not apart:
            return ()
        return tuple(renumber(keys.get(r, ()) for r in range(len(self.graph.classes))))

    def binds(self, key: Key) -> bool:
        """Whether a link can hold its users back, or changes its rate."""
        what, number = key
        users = sum(self.users[key].values())
        if self.watched and self._name(key) in self.watched:
            return True
        if what in _OF_NODE:
            return users > 1
        if what in COPIES:
            return what == "h2d" and self.both_ways(number) < 1.0
        node = self.machine.nodes[self._node[number]]
        return users * node.pcie_rate > node.host.shared_rate * (1 + 1e-12)
