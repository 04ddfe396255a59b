"""Which communication of a plan can share a link, and with how many.

A stream is a directed rank pair or a group: its ops never overlap. A folded wire stands for several
member streams that start and end together. Ops whose links carry no other stream need no flows;
those of a folded wire alone share each link evenly among its members.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import msgspec

from sim.cost.collective import CollectiveCost, places
from sim.cost.prices import FlowSpec
from sim.cost.ways import alone
from sim.hardware.machine import Machine
from sim.hardware.route import path
from sim.plan.graph import OpGraph, Wire
from sim.plan.op import Op
from sim.plan.wiring import Wiring

__all__ = ["Members", "Message", "Streams", "group_message", "pair_message"]


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


class Members(msgspec.Struct, frozen=True):
    """Streams that a wire stands for, the representative first.

    Args:
        keys: identity of each stream. chips: chips of each, in rank order.
    """

    keys: tuple[Hashable, ...]
    chips: tuple[tuple[int, ...], ...]


class Streams:
    """The streams of a graph and the links they use.

    Args:
        graph, wiring, machine: see there. chips: chip per rank, () for rank r on chip r.
        watched: names of links whose rate changes during the run: what crosses them is a flow.
    """

    def __init__(
        self,
        graph: OpGraph,
        wiring: Wiring,
        machine: Machine,
        chips: tuple[int, ...],
        watched: frozenset[str] = frozenset(),
    ) -> None:
        self.watched = frozenset(i for i, x in enumerate(machine.links) if x.name in watched)
        self.graph, self.wiring, self.machine, self.chips = graph, wiring, machine, chips
        self.users: dict[int, set[Hashable]] = defaultdict(set)
        self.bound: dict[int, dict[Hashable, float]] = defaultdict(dict)
        self.uses: list[tuple[Members, Message, list[Counter[int]]]] = []
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
        """Note the links that a message uses in every member stream; returns its number."""
        crossing: list[Counter[int]] = []
        for key, chips in zip(members.keys, members.chips, strict=True):
            order = places(self.machine).in_order(chips) if message.in_order else chips
            for a, b in message.hops:
                links = Counter(path(self.machine, order[a], order[b]).links)
                crossing.append(links)
                for x in links:
                    self.users[x].add(key)
            if message.hops:
                self._note_bound(key, message, crossing[-len(message.hops) :])
        self.uses.append((members, message, crossing))
        return len(self.uses) - 1

    def _note_bound(
        self, key: Hashable, message: Message, crossing: Sequence[Counter[int]]
    ) -> None:
        most: dict[int, float] = defaultdict(float)
        for cap, links in zip(message.caps, crossing, strict=True):
            for x, times in links.items():
                most[x] += cap * times
        for x, cap in most.items():
            self.bound[x][key] = max(self.bound[x].get(key, 0.0), cap)

    def shares(self, number: int) -> bool:
        """Whether some link of the message changes, or carries a stream not the wire's own."""
        members, _, crossing = self.uses[number]
        own = set(members.keys)
        return any(
            x in self.watched or not self.users[x] <= own for links in crossing for x in links
        )

    def _weights(self, number: int) -> list[list[tuple[int, int]]]:
        """Per flow of the representative: (link, member flows of its size that cross it)."""
        _, message, crossing = self.uses[number]
        n = len(message.hops)
        total: Counter[tuple[int, float]] = Counter()
        mine: Counter[tuple[int, float]] = Counter()
        for k, links in enumerate(crossing):
            for x, times in links.items():
                total[x, message.sizes[k % n]] += times
                if k < n:
                    mine[x, message.sizes[k]] += times
        handed: Counter[tuple[int, float]] = Counter()
        found = []
        for k in range(n):
            weights = []
            for x, times in crossing[k].items():
                key = (x, message.sizes[k])
                # Whole numbers that add up to the total over the representative's flows.
                before, after = handed[key], handed[key] + times
                handed[key] = after
                share = total[key] * after // mine[key] - total[key] * before // mine[key]
                weights.append((x, share))
            found.append(weights)
        return found

    def formula(self, number: int) -> float:
        """Return the message's time [s] when only its own members use its links."""
        _, message, _ = self.uses[number]
        if not message.hops:
            return message.private_s
        links = self.machine.links
        load: dict[int, float] = defaultdict(float)
        slowest = max(s / c for s, c in zip(message.sizes, message.caps, strict=True))
        for size, weights in zip(message.sizes, self._weights(number), strict=True):
            for x, members in weights:
                load[x] += size * members
        slowest = max([slowest, *(nbytes / links[x].rate for x, nbytes in load.items())])
        return message.fixed_s + slowest

    def flows(self, number: int) -> tuple[FlowSpec, ...]:
        """Return the message's flows without the links that can never bind; () when none can.

        A link never binds when all streams that may use it together ask for no more than its rate.
        """
        _, message, _ = self.uses[number]
        links = self.machine.links
        found = []
        for k, weights in enumerate(self._weights(number)):
            kept = tuple(
                (x, members)
                for x, members in weights
                if x in self.watched or sum(self.bound[x].values()) > links[x].rate * (1 + 1e-12)
            )
            if kept:
                found.append(FlowSpec(kept, message.sizes[k], message.caps[k]))
        return tuple(found)

    def carried(self, number: int, flows: Sequence[FlowSpec] = ()) -> tuple[tuple[int, float], ...]:
        """Return (link, bytes [B]) that all members put on links, less what ``flows`` put there."""
        _, message, crossing = self.uses[number]
        nbytes: dict[int, float] = defaultdict(float)
        for k, links in enumerate(crossing):
            for x, times in links.items():
                nbytes[x] += message.sizes[k % len(message.hops)] * times
        for flow in flows:
            for x, members in flow.links:
                nbytes[x] -= flow.nbytes * members
        floor = 1e-9 * max(message.sizes, default=0.0)
        return tuple((x, size) for x, size in sorted(nbytes.items()) if size > floor)
