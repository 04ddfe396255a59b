"""Prices of ops on a node's host side: copies over PCIe, work of its processors, NVMe.

An op whose links (sim.cost.host_links) nobody else uses is a formula, otherwise a flow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable

import msgspec

from sim.cost.host_links import (
    COPIES,
    DRIVES,
    HOST_STREAMS,
    HostLinks,
    update_bytes,
    update_seconds,
)
from sim.cost.prices import FlowSpec
from sim.cost.work import Work
from sim.errors import InputError
from sim.hardware.machine import Node
from sim.plan.graph import OpGraph
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.plan.plan import Amount
from sim.spec.job import Job

__all__ = ["HOST_STREAMS", "Host", "HostPrice", "on_host", "update_bytes", "update_seconds"]

_DEFAULT = {"d2h": "gradients", "h2d": "parameters", "nvme_read": "states", "nvme_write": "states"}
_BYTES = ("gradients", "parameters", "states", "states+parameters")
"""What a copy of a segment may move, as the op's ``amount`` says."""
_HOSTED: dict[str, Callable[[Job], float]] = {
    "gradients": lambda job: job.gradient_bytes,
    "updates": update_bytes,
}
"""What a HOST op goes through, of all that the host updates for its rank, as its ``amount`` says:
[B] per parameter."""


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
    """True for ops on a stream of the host side."""
    return (op.stream or KINDS[op.kind].stream) in HOST_STREAMS


class Host:
    """The host side under a plan.

    Args:
        graph: what is priced. work: amounts of its ops. contention: False gives everybody links of
            their own. watched: names of links whose rate changes during the run.
        more: (actor, stream) that messages to and from ``on`` blocks use besides the graph's.
    """

    def __init__(
        self,
        graph: OpGraph,
        work: Work,
        contention: bool,
        watched: frozenset[str] = frozenset(),
        more: Collection[tuple[int, str]] = (),
    ) -> None:
        self.graph, self.work, self.contention = graph, work, contention
        self.job = work.problem.job
        self.links = HostLinks(graph, work, watched, more)
        self.names, self.rates = self.links.names, self.links.rates
        self.assumptions: dict[str, None] = {}
        self._prices: dict[Hashable, HostPrice] = {}

    def rank_keys(self) -> tuple[int, ...]:
        """Per rank what its links look like, when some class holds ranks that differ; else ()."""
        return self.links.rank_keys()

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
        node = self.links.node(who.rank)
        if stream in COPIES and node.pcie_rate <= 0:
            raise InputError(
                f"{op.name} of rank {who.rank} has no link to host memory",
                key=f"node {node.profile}",
                expected="pcie: with a rate",
            )
        if stream in DRIVES and min(node.host.nvme_read, node.host.nvme_write) <= 0:
            raise InputError(
                f"{op.name} of rank {who.rank} has no drive",
                key=f"node {node.profile}",
                expected="nvme: with read, write and capacity",
            )
        self._assume(node, stream)
        keys = self.links.of(stream, who.rank)
        size = (self._crossed if stream == "host" else self._copied)(op, who.rank) * units
        cap = min(self.links.rate(k) for k in keys)
        slows = None
        if stream == "d2h" and self.contention and self.links.both_ways(keys[0][1]) < 1.0:
            other = self.links.lead[self.links.signature(("h2d", keys[0][1]))]
            slows = (self.links.index(other), self.links.both_ways(keys[0][1]))
        binding = [k for k in keys if self.contention and self.links.binds(k)]
        spread: Counter[int] = Counter()
        for rank in who.ranks:
            for k in self.links.of(stream, rank):
                spread[self.links.index(k)] += 1
        flows: tuple[FlowSpec, ...] = ()
        if binding and size > 0:
            leads = [self.links.lead[self.links.signature(k)] for k in binding]
            links = tuple((self.links.index(k), self.links.users[k][actor]) for k in leads)
            flows = (FlowSpec(links, size, cap),)
            for link, members in links:
                spread[link] -= members
        carried = tuple((x, count * size) for x, count in spread.items() if count > 0 and size > 0)
        seconds = 0.0 if flows else size / cap
        return HostPrice(seconds=seconds, nbytes=size, flows=flows, carried=carried, slows=slows)

    def _assume(self, node: Node, stream: str) -> None:
        texts = [t for t in node.host.assumed if ("CPU" in t) == (stream == "host")]
        if stream in DRIVES:
            texts = ["NVMe reads and writes do not slow each other"]
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
            "states+parameters": self.job.optimizer_bytes + self.job.param_bytes,
        }
        return params * per_param[what]

    def _crossed(self, op: Op, rank: int) -> float:
        """Bytes that keep the processors busy as long as the op does."""
        if op.kind == "OPT":
            return self.work.owned_params(op, rank) * update_bytes(self.job)
        amount, node = self.work.amount(op), self.links.node(rank)
        if amount is None and op.kind == "HOST" and op.amount in _HOSTED:
            per_param = _HOSTED[op.amount](self.job)
            amount = Amount(nbytes=self.work.hosted_params(op, rank) * per_param)
        if amount is None:
            raise InputError(
                f"no time for {op.name} of rank {rank} on a machine",
                key="plan.amounts",
                found=op.amount or "no amount",
                expected="an amount the machine can price, or stated times",
            )
        if op.kind == "APPLY":
            return amount.nbytes
        host = node.host
        if not (host.memory_bytes_per_s > 0 and host.flops_per_s > 0):
            raise InputError(
                f"nothing is known of the processors of {node.profile}",
                key="host",
                expected="memory_bandwidth and flops",
            )
        seconds = max(amount.nbytes / host.memory_bytes_per_s, amount.flops / host.flops_per_s)
        return seconds * self.links.rate(("processors", node.index))
