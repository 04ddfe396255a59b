"""What the streams of a plan carry.

A stream is a directed rank pair or a group: its ops never overlap. A folded wire stands for several
member streams that start and end together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import msgspec

from sim.cost.collective import CollectiveCost, places
from sim.cost.ways import alone
from sim.hardware.machine import Accelerator, Machine
from sim.hardware.route import path
from sim.plan.graph import OpGraph, Wire
from sim.plan.op import Op
from sim.plan.wiring import Wiring

__all__ = ["Members", "Message", "Streams", "as_run", "group_message", "pair_message"]


_SYNC = ("REDUCE_GRAD", "REDUCE_EXPERT", "UNSHARD", "UNSHARD_B")
_SAME = 1e-12
"""Times this close, relatively, are equal."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What one op of a wire sends.

    Args:
        fixed_s: [s] before and around the bytes. private_s: [s] all of it on links of its own.
        hops: per flow (position of sender, position of receiver) in the stream's list of chips.
        sizes: [B] per flow. caps: [B/s] per flow.
        in_order: the positions count chips in ring order, not in rank order.
        nbytes: [B] for reports: of the message, or the most one chip sends.
    """

    fixed_s: float
    private_s: float
    hops: tuple[tuple[int, int], ...] = ()
    sizes: tuple[float, ...] = ()
    caps: tuple[float, ...] = ()
    in_order: bool = False
    nbytes: float = 0.0

    def alone(self, formula_s: float | None) -> tuple[float, float] | None:
        """Return (fixed part [s], time of the bytes alone [s]) where an overlap must know both.

        Args:
            formula_s: [s] the message's price, None where its bytes are flows.

        Returns:
            None where the bytes take as long alone as the formula or the flows' caps say.
        """
        own = self.private_s - self.fixed_s
        if not self.hops or own <= 0.0:
            return None
        if formula_s is not None:
            differs = own < (formula_s - self.fixed_s) * (1 - _SAME)
        else:
            capped = max(size / cap for size, cap in zip(self.sizes, self.caps, strict=True))
            differs = own > capped * (1 + _SAME)
        return (self.fixed_s, own) if differs else None


def pair_message(machine: Machine, src: int, dst: int, nbytes: float) -> Message:
    """Return the message of a transfer from chip to chip."""
    route = path(machine, src, dst)
    if nbytes <= 0.0 or not route.links:
        return Message(fixed_s=route.latency, private_s=route.latency, nbytes=nbytes)
    cap = alone(route, nbytes)
    return Message(
        fixed_s=route.latency,
        private_s=route.latency + nbytes / cap,
        hops=((0, 1),),
        sizes=(nbytes,),
        caps=(cap,),
        nbytes=nbytes,
    )


def group_message(machine: Machine, chips: Sequence[int], cost: CollectiveCost) -> Message:
    """Return the message of a priced collective over these chips."""
    in_order = cost.kind not in ("all_to_all", "p2p")
    order = places(machine).in_order(chips) if in_order else list(chips)
    at = {chip: k for k, chip in enumerate(order)}
    return Message(
        fixed_s=cost.fixed_s,
        private_s=cost.seconds,
        hops=tuple((at[a], at[b]) for a, b, _ in cost.flows),
        sizes=tuple(nbytes for _, _, nbytes in cost.flows),
        caps=cost.flow_caps,
        in_order=in_order,
        nbytes=cost.nbytes_per_chip,
    )


def as_run(message: Message, kind: str, accelerator: Accelerator) -> Message:
    """Return a group's message as its accelerators run it.

    Args:
        message: at the links' own rates. kind: of the op: sums and gathers over replicas take
            ``sync_cost`` times as long, exchanges ``ep_cost`` times as inside passes, and a BARRIER
            ends with what a step costs besides.
        accelerator: of the members.
    """
    factor = accelerator.sync_cost if kind in _SYNC else 1.0
    factor = accelerator.ep_cost if kind == "ALL_TO_ALL" else factor
    besides = accelerator.step_overhead_s if kind == "BARRIER" else 0.0
    if factor == 1.0 and not besides:
        return message
    return msgspec.structs.replace(
        message,
        fixed_s=message.fixed_s * factor + besides,
        private_s=message.private_s * factor + besides,
        sizes=tuple(nbytes * factor for nbytes in message.sizes),
    )


class Members(msgspec.Struct, frozen=True):
    """Streams that a wire stands for, the representative first.

    Args:
        keys: identity of each stream. chips: chips of each, in rank order.
    """

    keys: tuple[Hashable, ...]
    chips: tuple[tuple[int, ...], ...]


class Streams:
    """The streams of a graph and the messages they carry.

    Args:
        graph, wiring, machine: see there. chips: chip per rank, () for rank r on chip r.
    """

    def __init__(
        self, graph: OpGraph, wiring: Wiring, machine: Machine, chips: tuple[int, ...]
    ) -> None:
        self.graph, self.wiring, self.machine, self.chips = graph, wiring, machine, chips
        self.uses: list[tuple[Members, Message]] = []
        self._actor_of = {graph.classes[a.rank]: a for a in graph.actors}
        self._groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for g, ranks in enumerate(wiring.groups):
            key = (frozenset(wiring.roles[g]), tuple(sorted(graph.classes[r] for r in ranks)))
            self._groups[key].append(g)

    def members(self, wire: Wire, op: Op, channel: int) -> Members:
        """Return the streams that a wire stands for."""
        if wire.kind == "group":
            found = self._groups[wire.roles, wire.classes]
            ranks = [self.wiring.groups[g] for g in found]
            first = ranks.index(wire.group)
            order = [first, *(k for k in range(len(found)) if k != first)]
            streams: list[Hashable] = [("group", found[k], channel) for k in order]
            return Members(tuple(streams), tuple(self._chips(ranks[k]) for k in order))
        assert wire.end is not None
        pairs = [(wire.end.src, wire.end.dst)]
        classes = self.graph.classes
        sender = self._actor_of.get(classes[wire.end.src])
        for rank in sender.ranks if sender is not None else ():
            for end in self.wiring.ends(op, rank):
                same = (classes[end.src], classes[end.dst]) == wire.classes
                if same and end.src == rank and end.what == wire.end.what:
                    pairs.append((end.src, end.dst))
        pairs = list(dict.fromkeys(pairs))
        streams = [("pair", a, b, channel) for a, b in pairs]
        return Members(tuple(streams), tuple(self._chips(p) for p in pairs))

    def _chips(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.chips[r] for r in ranks) if self.chips else tuple(ranks)

    def add(self, members: Members, message: Message) -> int:
        """Note a message that every member stream carries; returns its number."""
        self.uses.append((members, message))
        return len(self.uses) - 1
