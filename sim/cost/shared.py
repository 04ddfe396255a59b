"""Which communication of a plan can share a link, and with how many.

Messages whose links carry no other stream need no flows; those of a folded wire alone share each
link evenly among its members. Of a folded wire only the representative runs, so links are folded,
too: links that the same flows cross in the same way are alike, and the flows of all members cross
one of them in place of each. That is exact when all ranks of a class see the same flows; where they
do not, ``rank_keys`` says who differs.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.collective import places
from sim.cost.prices import FlowSpec
from sim.cost.streams import Streams
from sim.hardware.route import path
from sim.plan.hashing import Hashes, dense, mix, renumber, sum_at

__all__ = ["Shared"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Shared:
    """The links under all messages of a plan.

    A flow is a hop of a message in one member stream, an edge a link that a flow crosses.

    Args:
        streams: with all messages added.
        watched: names of links whose rate changes during the run: what crosses them is a flow.
    """

    def __init__(self, streams: Streams, watched: frozenset[str] = frozenset()) -> None:
        self.streams, self.machine = streams, streams.machine
        self.links = self.machine.links
        self._collect()
        self.watched = np.array([self.links[x].name in watched for x in self.used.tolist()], bool)
        self.rate = np.array([self.links[x].rate for x in self.used.tolist()])
        self._count()
        self._fold()

    # -- arrays ---------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Flows and edges of all messages, in order of message, member and hop."""
        where = places(self.machine)
        stream_of: dict[object, int] = {}
        number: list[int] = []
        stream: list[int] = []
        hop: list[int] = []
        ends: list[tuple[int, int]] = []
        routes: list[tuple[int, ...]] = []
        for n, (members, message) in enumerate(self.streams.uses):
            for key, chips in zip(members.keys, members.chips, strict=True):
                order = where.in_order(chips) if message.in_order else chips
                for k, (a, b) in enumerate(message.hops):
                    ends.append((order[a], order[b]))
                    routes.append(path(self.machine, order[a], order[b]).links)
                    hop.append(k)
                count = len(message.hops)
                number += [n] * count
                stream += [stream_of.setdefault(key, len(stream_of))] * count
        self.number, self.hop = np.array(number, np.int64), np.array(hop, np.int64)
        self.stream = np.array(stream, np.int64)
        self.ends = np.array(ends, np.int64).reshape(-1, 2)
        lengths = np.array([len(r) for r in routes], np.int64)
        self.edge_flow = np.repeat(np.arange(len(routes)), lengths)
        self.edge_place = np.arange(len(self.edge_flow)) - np.repeat(
            np.cumsum(lengths) - lengths, lengths
        )
        crossed = np.array([x for r in routes for x in r], np.int64)
        self.used, link = np.unique(crossed, return_inverse=True)
        self.edge_link = link.reshape(-1).astype(np.int64)
        messages = [m for _, m in self.streams.uses]
        self.size, self.cap = np.zeros(len(number)), np.zeros(len(number))
        for n, (first, last) in enumerate(self._slices(self.number)):
            copies = (last - first) // max(len(messages[n].hops), 1)
            self.size[first:last] = np.tile(messages[n].sizes, copies)
            self.cap[first:last] = np.tile(messages[n].caps, copies)

    def _slices(self, numbers: Ints) -> list[tuple[int, int]]:
        """(first, last + 1) of each message in an array that is sorted by message."""
        bounds = np.searchsorted(numbers, np.arange(len(self.streams.uses) + 1)).tolist()
        return list(itertools.pairwise(bounds))

    def _count(self) -> None:
        """Streams on each link, what they may ask of it, and the bytes of each message on it."""
        number, stream = self.number[self.edge_flow], self.stream[self.edge_flow]
        link, many = self.edge_link, len(self.used)
        streams = 1 + int(self.stream.max(initial=0))
        # One row for each (message, stream, link), sorted.
        rows, at = np.unique((number * streams + stream) * many + link, return_inverse=True)
        cap = np.bincount(at.reshape(-1), self.cap[self.edge_flow], minlength=len(rows))
        row_link, row_stream = rows % max(many, 1), rows // max(many, 1) % streams
        row_number = rows // max(many * streams, 1)
        pairs, pair = np.unique(row_link * streams + row_stream, return_inverse=True)
        most = np.zeros(len(pairs))
        np.maximum.at(most, pair.reshape(-1), cap)
        self.bound = np.bincount(pairs // streams, most, minlength=many)
        all_streams = np.bincount(pairs // streams, minlength=many)
        # The same without streams: messages on links, with their bytes.
        on, back = np.unique(number * many + link, return_inverse=True)
        self.on_number, self.on_link = on // max(many, 1), on % max(many, 1)
        self.on_bytes = np.bincount(back.reshape(-1), self.size[self.edge_flow], minlength=len(on))
        own = np.bincount(np.searchsorted(on, row_number * many + row_link), minlength=len(on))
        others = (own < all_streams[self.on_link]) | self.watched[self.on_link]
        self.shared = np.bincount(self.on_number, others, minlength=len(self.streams.uses)).astype(
            bool
        )
        self._on = self._slices(self.on_number)

    # -- folding links --------------------------------------------------------------------------

    def _fold(self) -> None:
        """Colour refinement over links and flows, given the classes of ranks."""
        kinds = np.stack([self.number.astype(np.float64), self.size, self.cap])
        _, kind = np.unique(kinds, axis=1, return_inverse=True)
        own = mix(kind.reshape(-1).astype(np.int64), 1)
        _, rate = np.unique(self.rate, return_inverse=True)
        alone = np.where(self.watched, np.arange(len(self.used)) + len(self.used), rate.reshape(-1))
        first = mix(alone.astype(np.int64), 2)
        links, flows, counts = first, own, (0, 0)
        places_ = self.edge_place.astype(np.uint64) << np.uint64(32)
        while True:
            crossing = mix(links[self.edge_link] + places_, 3)
            flows = mix(own + sum_at(self.edge_flow, crossing, len(own)), 4)
            links = mix(first + sum_at(self.edge_link, flows[self.edge_flow], len(first)), 5)
            (link_class, a), (flow_class, b) = dense(links), dense(flows)
            if (a, b) == counts:
                break
            counts = (a, b)
        self.flow_class, self._hashes = flow_class, flows
        lead = np.full(a, len(self.used), np.int64)
        np.minimum.at(lead, link_class, np.arange(len(self.used)))
        self.leader = lead[link_class]
        pairs, times = np.unique(
            flow_class[self.edge_flow] * len(self.used) + self.edge_link, return_counts=True
        )
        self._times = dict(zip(pairs.tolist(), times.tolist(), strict=True))
        self._flows = self._slices(self.number)
        self._edges = np.searchsorted(self.edge_flow, np.arange(len(own) + 1)).tolist()

    def rank_keys(self) -> tuple[int, ...]:
        """Per rank what its flows look like, when some class holds ranks that differ; else ()."""
        classes = np.array(self.streams.graph.classes, np.int64)
        chips = self.streams.chips
        rank_of = np.full(self.machine.num_chips, -1, np.int64)
        rank_of[np.array(chips[: len(classes)] or range(len(classes)))] = np.arange(len(classes))
        seen: Hashes = np.zeros(len(classes), np.uint64)
        for side, salt in ((0, 6), (1, 7)):
            seen += sum_at(rank_of[self.ends[:, side]], mix(self._hashes, salt), len(classes))
        order = np.lexsort((seen, classes))
        same = classes[order][1:] == classes[order][:-1]
        if not (same & (seen[order][1:] != seen[order][:-1])).any():
            return ()
        return tuple(renumber(seen.tolist()))

    # -- one message ----------------------------------------------------------------------------

    def shares(self, number: int) -> bool:
        """Whether some link of the message changes, or carries a stream not the wire's own."""
        return bool(self.shared[number])

    def formula(self, number: int) -> float:
        """Return the message's time [s] when only its own members use its links."""
        message = self.streams.uses[number][1]
        if not message.hops:
            return message.private_s
        slowest = max(s / c for s, c in zip(message.sizes, message.caps, strict=True))
        first, last = self._on[number]
        busiest = self.on_bytes[first:last] / self.rate[self.on_link[first:last]]
        return message.fixed_s + max(slowest, float(busiest.max(initial=0.0)))

    def flows(self, number: int, every: bool = False) -> tuple[FlowSpec, ...]:
        """Return the message's distinct flows without the links that never bind; () for none left.

        A link never binds when all streams that may use it together ask for no more than its rate.
        With ``every`` such links are kept, so that the network counts all bytes.
        """
        message = self.streams.uses[number][1]
        found: dict[int, FlowSpec | None] = {}
        first = self._flows[number][0]
        for k in range(len(message.hops)):
            flow = first + k
            of_class = int(self.flow_class[flow])
            if of_class in found:
                continue
            weights: dict[int, int] = {}
            for edge in range(self._edges[flow], self._edges[flow + 1]):
                x = int(self.leader[self.edge_link[edge]])
                if every or self.watched[x] or self.bound[x] > self.rate[x] * (1 + 1e-12):
                    weights[x] = self._times[of_class * len(self.used) + x]
            spec = FlowSpec(
                tuple((int(self.used[x]), w) for x, w in weights.items()),
                message.sizes[k],
                message.caps[k],
            )
            found[of_class] = spec if weights else None
        return tuple(spec for spec in found.values() if spec is not None)

    def carried(
        self, number: int, flows: tuple[FlowSpec, ...] = ()
    ) -> tuple[tuple[int, float], ...]:
        """Return (link, bytes [B]) that all members put on links, less what ``flows`` put there."""
        first, last = self._on[number]
        links: list[int] = self.used[self.on_link[first:last]].tolist()
        nbytes: dict[int, Any] = dict(zip(links, self.on_bytes[first:last].tolist(), strict=True))
        for flow in flows:
            for x, members in flow.links:
                nbytes[x] -= flow.nbytes * members
        floor = 1e-9 * max(self.streams.uses[number][1].sizes, default=0.0)
        return tuple((x, size) for x, size in nbytes.items() if size > floor)
