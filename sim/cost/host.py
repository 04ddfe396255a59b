"""Prices of ops on a node's host side: copies over PCIe and work of its processors.

Every chip has one link each way; chips may share a switch; and all chips of a node share its
processors, which are a link too, crossed by the bytes that updates read and write. These links
stand behind the machine's own, and only where a plan uses them. An op whose links nobody else uses
is a formula, otherwise a flow.

Of a class of equal ranks only the representative runs, so links that the same ranks of the same
classes use are one link, which all members of a class on it cross together. ``rank_keys`` says
where that would join ranks that are not equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

import msgspec

from sim.cost.collective import places
from sim.cost.prices import FlowSpec
from sim.cost.work import Work
from sim.errors import InputError
from sim.hardware.machine import Node
from sim.plan.graph import OpGraph
from sim.plan.hashing import renumber
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.spec.job import Job

__all__ = ["HOST_STREAMS", "Host", "HostPrice", "on_host", "update_bytes", "update_seconds"]

HOST_STREAMS = ("d2h", "h2d", "host")
COPIES = ("d2h", "h2d")
ADAM_FLOPS = 16.0
"""[FLOP] per parameter of an Adam step: 3 for each moment, 10 for correction, root and update."""
_DEFAULT = {"d2h": "gradients", "h2d": "parameters"}
_BYTES = ("gradients", "parameters", "states")
"""What a copy of a segment may move, as the op's ``amount`` says."""

Key = tuple[str, int]
"""(what, chip or number of the switch or node)."""


class HostPrice(msgspec.Struct, frozen=True, kw_only=True):
    """Price of an op on the host side.

    Args:
        seconds: [s] alone, or before the flow starts. nbytes: [B] of one rank.
        flows: as in Prices. carried: (link, [B]) of all members apart from the flow.
        slows: (link, share of its rate) that other ops keep while this one runs, or None.
    """

    seconds: float
    nbytes: float
    flows: tuple[FlowSpec, ...] = ()
    carried: tuple[tuple[int, float], ...] = ()
    slows: tuple[int, float] | None = None


def on_host(op: Op) -> bool:
    """True for ops on a copy stream or the host's."""
    return (op.stream or KINDS[op.kind].stream) in HOST_STREAMS


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


class Host:
    """The host side under a plan.

    Args:
        graph: what is priced. work: amounts of its ops. contention: False gives everybody links of
            their own. watched: names of links whose rate changes during the run.
    """

    def __init__(
        self, graph: OpGraph, work: Work, contention: bool, watched: frozenset[str] = frozenset()
    ) -> None:
        self.graph, self.work, self.contention = graph, work, contention
        self.watched = watched
        self.machine, self.job = work.problem.machine, work.problem.job
        self.first = len(self.machine.links)
        self.names: list[str] = []
        self.rates: list[float] = []
        self.assumptions: dict[str, None] = {}
        self._number: dict[Key, int] = {}
        self._prices: dict[Hashable, HostPrice] = {}
        self._node = places(self.machine).node
        uses = {(a, s) for a, s in graph.stream_names if s in HOST_STREAMS}
        self.used = sorted(uses)
        self._users: dict[Key, Counter[int]] = defaultdict(Counter)
        for actor, stream in self.used:
            for rank in graph.actors[actor].ranks:
                for key in self._links(stream, rank):
                    self._users[key][actor] += 1
        self._lead: dict[Hashable, Key] = {}
        for key in sorted(self._users):
            self._lead.setdefault(self._signature(key), key)

    # -- links ----------------------------------------------------------------------------------

    def node(self, rank: int) -> Node:
        """Node of a rank's chip."""
        return self.machine.nodes[self._node[self.work.chip(rank)]]

    def _links(self, stream: str, rank: int) -> tuple[Key, ...]:
        chip, node = self.work.chip(rank), self.node(rank)
        if stream == "host":
            return (("processors", node.index),)
        if node.host.shared_by == 1:
            return ((stream, chip),)
        switch = (chip - node.chips[0]) // node.host.shared_by
        return (stream, chip), (f"{stream} switch", node.chips[0] + switch * node.host.shared_by)

    def _rate(self, key: Key) -> float:
        what, number = key
        if what == "processors":
            node = self.machine.nodes[number]
            return update_bytes(self.job) / update_seconds(node, self.job)
        node = self.machine.nodes[self._node[number]]
        return node.host.shared_rate if what.endswith("switch") else node.pcie_rate

    def _signature(self, key: Key) -> Hashable:
        what, number = key
        node = self.machine.nodes[number if what == "processors" else self._node[number]]
        both = self._both_ways(number) if what in COPIES else 1.0
        users = tuple(sorted(self._users[key].items()))
        own = self._name(key) if self.watched else ""
        own = own if own in self.watched else ""
        return what, node.pcie_rate, node.host, both, users, own

    def _both_ways(self, chip: int) -> float:
        """Share of the rate that H2D copies of a chip keep beside its D2H copies."""
        both = all((stream, chip) in self._users for stream in COPIES)
        return self.machine.nodes[self._node[chip]].host.both_ways if both else 1.0

    def _index(self, key: Key) -> int:
        """Number of a link, which gets one with its first use."""
        if key not in self._number:
            self._number[key] = self.first + len(self.names)
            self.names.append(self._name(key))
            self.rates.append(self._rate(key))
        return self._number[key]

    def _name(self, key: Key) -> str:
        """Name of a link, e.g. "node0/chip1/d2h", "node0/switch0/h2d", "node0/processors"."""
        what, number = key
        if what == "processors":
            return f"node{number}/processors"
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
                mine = tuple(self._signature(k) for k in self._links(stream, rank))
                first = mine if first is None else first
                apart = apart or mine != first
                keys[rank] = (*keys.get(rank, ()), *mine)
        if not apart:
            return ()
        return tuple(renumber(keys.get(r, ()) for r in range(len(self.graph.classes))))

    # -- one op ---------------------------------------------------------------------------------

    def price(self, op: Op, actor: int, units: float = 1.0) -> HostPrice:
        """Return the price of an op of an actor.

        Args:
            op: on one of ``HOST_STREAMS``. actor: who runs it. units: its late amount, 1 without.

        Raises:
            InputError: the node has no host link or the op no amount.
        """
        key = (op.kind, op.stage, op.label, op.amount, op.stream, actor, units)
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._price(op, actor, units)
        return found

    def _price(self, op: Op, actor: int, units: float) -> HostPrice:
        who = self.graph.actors[actor]
        stream = op.stream or KINDS[op.kind].stream
        node = self.node(who.rank)
        if stream in COPIES and node.pcie_rate <= 0:
            raise InputError(
                f"{op.name} of rank {who.rank} has no link to host memory",
                key=f"node {node.profile}",
                expected="pcie: with a rate",
            )
        self._assume(node, stream)
        keys = self._links(stream, who.rank)
        size = (self._copied if stream in COPIES else self._crossed)(op, who.rank) * units
        cap = min(self._rate(k) for k in keys)
        slows = None
        if stream == "d2h" and self.contention and self._both_ways(keys[0][1]) < 1.0:
            other = self._lead[self._signature(("h2d", keys[0][1]))]
            slows = (self._index(other), self._both_ways(keys[0][1]))
        binding = [k for k in keys if self.contention and self._binds(k)]
        spread: Counter[int] = Counter()
        for rank in who.ranks:
            for k in self._links(stream, rank):
                spread[self._index(k)] += 1
        flows: tuple[FlowSpec, ...] = ()
        if binding and size > 0:
            leads = [self._lead[self._signature(k)] for k in binding]
            links = tuple((self._index(k), self._users[k][actor]) for k in leads)
            flows = (FlowSpec(links, size, cap),)
            for link, members in links:
                spread[link] -= members
        carried = tuple((x, count * size) for x, count in spread.items() if count > 0 and size > 0)
        seconds = 0.0 if flows else size / cap
        return HostPrice(seconds=seconds, nbytes=size, flows=flows, carried=carried, slows=slows)

    def _binds(self, key: Key) -> bool:
        """Whether a link can hold its users back, or changes its rate."""
        what, number = key
        users = sum(self._users[key].values())
        if self.watched and self._name(key) in self.watched:
            return True
        if what == "processors":
            return users > 1
        if what in COPIES:
            return what == "h2d" and self._both_ways(number) < 1.0
        node = self.machine.nodes[self._node[number]]
        return users * node.pcie_rate > node.host.shared_rate * (1 + 1e-12)

    def _assume(self, node: Node, stream: str) -> None:
        texts = [t for t in node.host.assumed if ("CPU" in t) == (stream == "host")]
        self.assumptions |= dict.fromkeys(f"{node.profile}: {t}" for t in texts)

    # -- amounts --------------------------------------------------------------------------------

    def _copied(self, op: Op, rank: int) -> float:
        """Bytes of a copy: the plan's amount, or of the op's segment."""
        amount = self.work.amount(op)
        if amount is not None:
            return amount.nbytes
        what = op.amount or _DEFAULT[op.stream or KINDS[op.kind].stream]
        if what not in _BYTES:
            raise InputError(
                f"no amount for {op.name} of rank {rank}",
                key="plan.amounts",
                found=op.amount,
                expected="bytes in the plan's amounts, or one of " + " ".join(_BYTES),
            )
        whole = KINDS[op.kind].memory == "gather"
        params = self.work.held_params(op, rank) if whole else self.work.owned_params(op, rank)
        per_param = {
            "gradients": self.job.gradient_bytes,
            "parameters": self.job.param_bytes,
            "states": self.job.optimizer_bytes,
        }
        return params * per_param[what]

    def _crossed(self, op: Op, rank: int) -> float:
        """Bytes that keep the processors busy as long as the op does."""
        if op.kind == "OPT":
            return self.work.owned_params(op, rank) * update_bytes(self.job)
        amount, node = self.work.amount(op), self.node(rank)
        if amount is None:
            raise InputError(
                f"no time for {op.name} of rank {rank} on a machine",
                key="plan.amounts",
                found=op.amount or "no amount",
                expected="an amount the machine can price, or stated times",
            )
        host = node.host
        if not (host.memory_bytes_per_s > 0 and host.flops_per_s > 0):
            raise InputError(
                f"nothing is known of the processors of {node.profile}",
                key="host",
                expected="memory_bandwidth and flops",
            )
        seconds = max(amount.nbytes / host.memory_bytes_per_s, amount.flops / host.flops_per_s)
        return seconds * self._rate(("processors", node.index))
