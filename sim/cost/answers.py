"""Prices of messages to ranks with ``on`` blocks, and of what those ranks do.

A rank none of whose block ops runs on a chip's compute stream is a process of its node: parameters
and gradients lie in host memory. Its messages to and from chips of the same node are copies over
PCIe; those of other nodes go through the NICs, the last one straight to or from host memory. A rank
that computes on its chip is sent to like any chip. Answers share links with everything else.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from sim.cost.collective import places
from sim.cost.host import HOST_STREAMS, Host, on_host
from sim.cost.prices import FlowSpec
from sim.cost.shared import Shared
from sim.cost.streams import Members, Streams, pair_message
from sim.cost.work import Work
from sim.errors import InputError
from sim.plan.graph import OpGraph
from sim.plan.op import Op
from sim.plan.unroll import LOCAL_STREAMS, stream_of

__all__ = ["Answers"]

Key = tuple[Op, int, int]
Cost = tuple[float, tuple[FlowSpec, ...]]


class Answers:
    """The ranks of a graph that answer messages.

    Args:
        graph, work: see there.

    Attributes:
        host_uses: (actor, stream) of copies and updates on the host side, for sim.cost.host.
    """

    def __init__(self, graph: OpGraph, work: Work) -> None:
        self.graph, self.work = graph, work
        self.actor = {a.rank: i for i, a in enumerate(graph.actors)}
        self.blocks = {graph.actors[a].rank: b for a, b in graph.handlers.items()}
        self.senders: dict[int, list[int]] = defaultdict(list)
        self.on_host = {
            rank
            for rank, blocks in self.blocks.items()
            if all(stream_of(op) != "compute" for ops in blocks.values() for op in ops)
        }
        for wire in graph.wires:
            end = wire.end
            if end is not None and end.dst in self.blocks and end.src not in self.senders[end.dst]:
                self.senders[end.dst].append(end.src)
        self._node = places(work.problem.machine).node
        self._sent: dict[Key, int] = {}
        self.host_uses = self._host_uses()

    def copied(self, server: int, other: int) -> bool:
        """Whether messages between a rank with blocks and another one are copies over PCIe."""
        chip = self.work.chip
        return server in self.on_host and self._node[chip(server)] == self._node[chip(other)]

    def copy_of(self, op: Op, wire: int) -> Op | None:
        """The copy that stands for a message to a rank of the sender's host, None for others."""
        end = self.graph.wires[wire].end
        if end is None or end.dst not in self.blocks or not self.copied(end.dst, end.src):
            return None
        return msgspec.structs.replace(op, stream="d2h")

    def _host_uses(self) -> set[tuple[int, str]]:
        found: set[tuple[int, str]] = set()
        for rank, blocks in self.blocks.items():
            ops = [op for block in blocks.values() for op in block]
            found |= {(self.actor[rank], stream_of(op)) for op in ops if on_host(op)}
            for sender in self.senders[rank]:
                if self.copied(rank, sender):
                    found |= {(self.actor[sender], stream) for stream in ("d2h", "h2d")}
        return found

    def send(self, streams: Streams) -> None:
        """Note the answers that go over the machine's links, so that their sharing is known.

        Raises:
            InputError: an answer has no amount.
        """
        for rank, blocks in self.blocks.items():
            for op in {op: None for ops in blocks.values() for op in ops}:
                if stream_of(op) in LOCAL_STREAMS:
                    continue
                amount = self.work.amount(op)
                if amount is None:
                    raise InputError(
                        f"no amount for {op.name} of rank {rank}",
                        key="plan.amounts",
                        found=op.amount or "no amount",
                        expected="bytes in the plan's amounts, or stated times",
                    )
                for sender in self.senders[rank]:
                    if self.copied(rank, sender):
                        continue
                    chips = (self.work.chip(rank), self.work.chip(sender))
                    message = pair_message(self.work.problem.machine, *chips, amount.nbytes)
                    members = Members((("pair", rank, sender, op.channel),), (chips,))
                    self._sent[op, rank, sender] = streams.add(members, message)

    def prices(
        self, streams: Streams, shared: Shared, host: Host, contention: bool
    ) -> dict[Key, Cost]:
        """What every op of a block costs, for every sender.

        Args:
            streams: that ``send`` was called with. shared: of them. host: with ``host_uses``.
            contention: False gives every answer links of its own.
        """
        found: dict[Key, Cost] = {}
        for rank, blocks in self.blocks.items():
            for op in {op: None for ops in blocks.values() for op in ops}:
                for sender in self.senders[rank]:
                    number = self._sent.get((op, rank, sender))
                    if number is not None:
                        message = streams.uses[number][1]
                        flows = shared.flows(number, every=True) if contention else ()
                        seconds = message.fixed_s if flows else message.private_s
                        found[op, rank, sender] = (seconds, flows)
                    else:
                        found[op, rank, sender] = self._local(op, rank, sender, host)
        return found

    def _local(self, op: Op, rank: int, sender: int, host: Host) -> Cost:
        """Work of the rank itself, or a copy to the sender."""
        if stream_of(op) not in LOCAL_STREAMS:
            copy = msgspec.structs.replace(op, stream="h2d")
            price = host.price(copy, self.actor[sender])
        elif stream_of(op) in HOST_STREAMS:
            price = host.price(op, self.actor[rank])
        else:
            return self.work.compute(op, rank).seconds, ()
        return price.seconds, price.flows
