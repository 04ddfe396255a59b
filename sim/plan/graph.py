"""The op graph of a plan: every op instance of every actor, with all the orders the rules demand.

Nodes are op instances; a SEND and its RECV are one node, a collective is one node for all members.
Three kinds of edges: a dependency or stream order (finish -> start), and buffer release
(start -> start). Durations are not here: sim.cost prices the nodes, the engine runs them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.errors import PlanError
from sim.plan.deps import resolve
from sim.plan.flat import Flat, flatten
from sim.plan.kinds import MESSAGES
from sim.plan.op import Op
from sim.plan.opgraph import Actor, OpGraph, Wire
from sim.plan.program import Program
from sim.plan.unroll import Template, unroll
from sim.plan.wiring import End, Wiring, is_transfer

__all__ = ["Actor", "OpGraph", "Wire", "build_graph"]

Ints = NDArray[np.int64]
Key = tuple[object, ...]


def build_graph(
    programs: Sequence[Program],
    wiring: Wiring,
    steps: int = 1,
    classes: Sequence[int] | None = None,
    buffers: int = 2,
    blocking: frozenset[int] = frozenset(),
    flats: Sequence[Flat] | None = None,
) -> OpGraph:
    """Build the op graph.

    Args:
        programs: of all ranks. wiring: peers and groups.
        steps: repetitions of ``repeat(steps)``.
        classes: class per rank (from sim.plan.fold); None keeps every rank by itself.
        buffers: receive buffers per directed rank pair; 0 means rendezvous.
        blocking: ranks on which compute blocks the issuer.
        flats: the programs laid out, when that has been done.

    Raises:
        PlanError: the two ends of a transfer or the members of a group list different ops.
    """
    flat = [flatten(p) for p in programs] if flats is None else list(flats)
    return _Builder(programs, flat, wiring, steps, classes, buffers, blocking).build()


class _Family:
    """All instances of one transfer end (or group) of one actor, in list order."""

    __slots__ = ("nodes", "parts")

    def __init__(self) -> None:
        self.parts: list[Ints] = []
        self.nodes = np.zeros(0, np.int64)

    def close(self) -> Ints:
        """Sort the instances gathered so far."""
        self.nodes = self.parts[0] if len(self.parts) == 1 else np.sort(np.concatenate(self.parts))
        return self.nodes


class _Sheet:
    """What the graph needs of a program's static ops, as arrays over them."""

    def __init__(self, flat: Flat, kinds: dict[str, int], streams: dict[str, int]) -> None:
        self.flat = flat
        numbers = [
            (
                op.mb,
                op.part,
                kinds.setdefault(op.kind, len(kinds)),
                streams.setdefault(s, len(streams)),
            )
            for op, s in zip(flat.ops, flat.streams, strict=True)
        ]
        self.columns = np.array(numbers, np.int64).reshape(-1, 4).T


class _Builder:
    def __init__(
        self,
        programs: Sequence[Program],
        flats: list[Flat],
        wiring: Wiring,
        steps: int,
        classes: Sequence[int] | None,
        buffers: int,
        blocking: frozenset[int],
    ) -> None:
        self.programs, self.wiring, self.steps = programs, wiring, steps
        self.buffers, self.blocking = buffers, blocking
        self.num_ranks = 1 + max((r for p in programs for r in p.ranks), default=-1)
        self.classes = list(classes) if classes is not None else list(range(self.num_ranks))
        self.graph = OpGraph()
        self.kinds: dict[str, int] = {}
        self.stream_numbers: dict[str, int] = {}
        self.sheets = [_Sheet(flat, self.kinds, self.stream_numbers) for flat in flats]
        self.ops: list[Op] = []
        self.deps: list[Ints] = []
        self.order: list[Ints] = []
        self.gates: list[Ints] = []
        self.columns: list[Ints] = []
        self.pair_ends: dict[Key, tuple[list[Ints], list[Ints]]] = defaultdict(lambda: ([], []))
        self.group_ends: dict[Key, list[Ints]] = defaultdict(list)
        self.messages: dict[Key, list[Ints]] = defaultdict(list)
        self.wire_of: dict[Key, Wire] = {}
        self.streams: dict[Key, list[Ints]] = defaultdict(list)
        self.templates: dict[Key, Template] = {}

    def build(self) -> OpGraph:
        graph = self.graph
        graph.classes, graph.steps = self.classes, self.steps
        program_of = {r: i for i, p in enumerate(self.programs) for r in p.ranks}
        members: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(program_of):
            members[self.classes[rank]].append(rank)
        for ranks in members.values():
            self._add_actor(Actor(ranks[0], tuple(ranks), program_of[ranks[0]]))
        self._join()
        return graph

    # -- one actor ------------------------------------------------------------------------------

    def _add_actor(self, actor: Actor) -> None:
        sheet, rank = self.sheets[actor.program], actor.rank
        flat = sheet.flat
        ends: dict[int, list[End]] = {}
        groups: dict[int, list[int]] = {}
        for number, op in enumerate(flat.talkers):
            if is_transfer(op):
                ends[number] = self.wiring.ends(op, rank)
            else:
                groups[number] = self.wiring.group_indices(op, rank)
        counts = tuple(len(ends[k] if k in ends else groups[k]) for k in range(len(flat.talkers)))
        template = self._template(flat, actor.program, counts, rank)
        base, n = len(self.ops), len(template.static)
        actor.first, actor.last = base, base + n
        index = len(self.graph.actors)
        self.graph.actors.append(actor)
        if flat.handlers:
            self.graph.handlers[index] = flat.handlers
        self.ops += [flat.ops[s] for s in template.static.tolist()]
        own = np.stack([np.full(n, index), template.step, template.piece, template.static])
        self.columns.append(np.concatenate([own, sheet.columns[:, template.static]]))
        self.deps.append(np.stack([template.dep_src, template.dep_dst]) + base)
        self.order.append(np.stack([template.order_src, template.order_dst]) + base)
        self.graph.priority.update({base + k: v for k, v in template.priority.items()})
        self._add_ends(index, base, flat, template, ends, groups)

    def _template(self, flat: Flat, program: int, counts: tuple[int, ...], rank: int) -> Template:
        free = rank not in self.blocking
        key = (program, counts, free)
        if key not in self.templates:
            pieces = [1 if number < 0 else counts[number] for number in flat.talk]
            hosted = self.wiring.stages(rank)
            self.templates[key] = unroll(flat, resolve(flat, hosted), pieces, self.steps, free)
        return self.templates[key]

    def _add_ends(
        self,
        index: int,
        base: int,
        flat: Flat,
        template: Template,
        ends: dict[int, list[End]],
        groups: dict[int, list[int]],
    ) -> None:
        """Group the actor's transfer and collective instances by wire and by stream."""
        families: dict[tuple[Key, Key], _Family] = defaultdict(_Family)
        lines: dict[tuple[Key, bool], _Family] = defaultdict(_Family)
        for (number, piece), nodes in template.slots.items():
            op = flat.talkers[number]
            sending = number in groups or op.kind.startswith(("SEND", "PU"))
            if number in ends:
                end = ends[number][piece]
                wire, apart, stream = self._pair(op, end, sending)
            else:
                wire, apart, stream = self._group(op, groups[number][piece])
            self.wire_of[wire].actors.add(index)
            families[wire, apart].parts.append(nodes + base)
            lines[stream, sending].parts.append(nodes + base)
        for (wire, apart), family in families.items():
            nodes = family.close()
            if wire[0] == "group":
                self.group_ends[wire].append(nodes)
            elif self.ops[nodes[0]].kind in MESSAGES:
                self.messages[wire].append(nodes)
            else:
                self.pair_ends[wire][not apart[-1]].append(nodes)
        for (stream, sending), line in lines.items():
            self.streams[stream].append(line.close())
            if stream[0] == "pair" and not sending:
                self._buffers(base, template, line.nodes)

    def _pair(self, op: Op, end: End, sending: bool) -> tuple[Key, Key, Key]:
        """(wire, what tells its ends apart, stream) of a piece of a transfer."""
        kinds = (self.classes[end.src], self.classes[end.dst])
        wire = ("pair", end.what, *kinds, op.channel)
        if wire not in self.wire_of:
            self.wire_of[wire] = Wire("pair", end, (), end.share, kinds)
        return wire, (end.src, end.dst, end.share, sending), ("pair", end.src, end.dst, op.channel)

    def _group(self, op: Op, g: int) -> tuple[Key, Key, Key]:
        """(wire, what tells its groups apart, stream) of a collective of a group."""
        ranks, roles = self.wiring.groups[g], frozenset(self.wiring.roles[g])
        inside = tuple(sorted(self.classes[r] for r in ranks))
        wire = ("group", roles, inside, op.channel)
        if wire not in self.wire_of:
            self.wire_of[wire] = Wire("group", None, ranks, self.wiring.shards[g], inside, roles)
        return wire, (g,), ("group", g, op.channel)

    def _buffers(self, base: int, template: Template, nodes: Ints) -> None:
        """Receive buffers of one directed pair, seen from the receiver."""
        if self.buffers == 0:
            before = template.compute_before[nodes - base]
            some = before >= 0
            self.order.append(np.stack([before[some] + base, nodes[some]]))
            return
        held, later = nodes[: -self.buffers], nodes[self.buffers :]
        consumer = template.consumer[held - base]
        used = consumer >= 0
        self.order.append(np.stack([held[~used], later[~used]]))
        self.gates.append(np.stack([consumer[used] + base, later[used]]))

    # -- all actors together --------------------------------------------------------------------

    def _join(self) -> None:
        n = len(self.ops)
        none = np.zeros((2, 0), np.int64)
        columns = np.concatenate([np.zeros((8, 0), np.int64), *self.columns], axis=1)
        alias = np.arange(n)
        wire = np.full(n, -1, np.int64)
        for key, (sends, receives) in self.pair_ends.items():
            if not sends or not receives:
                self._mismatch([*sends, *receives][0][0], -1)
            self._alias([*sends, *receives], columns[[1, 4, 5]], alias)
            wire[sends[0]] = self._wire_index(key)
        for key, families in self.group_ends.items():
            self._alias(families, columns[[1, 6]], alias)
            wire[families[0]] = self._wire_index(key)
        for key, families in self.messages.items():
            wire[np.concatenate(families)] = self._wire_index(key)
        chains = [np.stack([s[:-1], s[1:]]) for ss in self.streams.values() for s in ss]
        order = np.concatenate([none, *self.order, *chains], axis=1)
        deps = np.concatenate([none, *self.deps], axis=1)
        gates = np.concatenate([none, *self.gates], axis=1)
        self._compact(alias, columns, wire, deps, order, gates)

    def _wire_index(self, key: Key) -> int:
        self.graph.wires.append(self.wire_of[key])
        return len(self.graph.wires) - 1

    def _alias(self, families: list[Ints], same: Ints, alias: Ints) -> None:
        """Make the instances of all families those of the first.

        Args:
            families: node numbers. same: what must agree, shape (Q, N). alias: written to.
        """
        first = families[0]
        for other in families[1:]:
            n = min(len(first), len(other))
            wrong = np.flatnonzero((same[:, first[:n]] != same[:, other[:n]]).any(0))
            if len(wrong):
                self._mismatch(first[wrong[0]], other[wrong[0]])
            if len(first) != len(other):
                longer = max(first, other, key=len)
                self._mismatch(longer[n], -1)
            alias[other] = first

    def _mismatch(self, a: int, b: int) -> None:
        def at(node: int) -> str:
            actor = next(x for x in self.graph.actors if x.first <= node < x.last)
            return f"rank {actor.rank} {self.ops[node].name}"

        found = at(b) if b >= 0 else "nothing"
        raise PlanError(
            "two ends of a transfer or two members of a group list different ops",
            key="programs",
            found=f"{at(a)} against {found}",
            expected="the same order at both",
        )

    def _compact(
        self, alias: Ints, columns: Ints, wire: Ints, deps: Ints, order: Ints, gates: Ints
    ) -> None:
        """Drop aliased nodes, renumber and deduplicate the edges."""
        graph, n = self.graph, len(alias)
        keep = np.flatnonzero(alias == np.arange(n))
        number = np.full(n, -1, np.int64)
        number[keep] = np.arange(len(keep))
        to = number[alias]
        graph.ops = [self.ops[k] for k in keep.tolist()]
        graph.actor, graph.step, graph.piece, graph.static = columns[:4, keep]
        graph.wire = wire[keep]
        graph.priority = {int(to[k]): v for k, v in graph.priority.items()}
        graph.dep_src, graph.dep_dst = _edges(deps, to, len(keep))
        graph.order_src, graph.order_dst = _edges(order, to, len(keep))
        graph.gate_src, graph.gate_dst = _edges(gates, to, len(keep))
        self._number_streams(to, columns[7, keep])

    def _number_streams(self, to: Ints, local_stream: Ints) -> None:
        """Streams of pairs and groups first, then those of each rank.

        Args:
            to: new number of every old node. local_stream: number of each node's stream name.
        """
        graph = self.graph
        graph.stream = np.full(graph.num_nodes, -1, np.int64)
        for key, lists in self.streams.items():
            for nodes in lists:
                mine = to[nodes]
                mine = mine[graph.stream[mine] < 0]
                if len(mine):
                    graph.stream[mine] = len(graph.stream_names)
                    graph.stream_names.append((-1, _stream_name(key, self.wiring)))
        local = np.flatnonzero(graph.stream < 0)
        names = list(self.stream_numbers)
        codes, first, which = np.unique(
            graph.actor[local] * len(names) + local_stream[local],
            return_index=True,
            return_inverse=True,
        )
        place = np.empty(len(codes), np.int64)
        place[np.argsort(first)] = np.arange(len(codes)) + len(graph.stream_names)
        graph.stream[local] = place[which.reshape(-1)]
        for code in codes[np.argsort(first)].tolist():
            graph.stream_names.append((code // len(names), names[code % len(names)]))


def _stream_name(key: Key, wiring: Wiring) -> str:
    channel = f" channel {key[-1]}" if key[-1] else ""
    if key[0] == "pair":
        return f"{key[1]}->{key[2]}{channel}"
    return "group " + ",".join(map(str, wiring.groups[key[1]])) + channel  # type: ignore[call-overload]


def _edges(edges: Ints, to: Ints, n: int) -> tuple[Ints, Ints]:
    src, dst = to[edges[0]], to[edges[1]]
    code = np.unique(src[src != dst] * n + dst[src != dst])
    return (code // n, code % n) if n else (code, code)
