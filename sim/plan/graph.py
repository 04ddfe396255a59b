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
from sim.plan.deps import Flat, flatten, resolve
from sim.plan.op import Op
from sim.plan.program import Program
from sim.plan.unroll import Template, stream_of, unroll
from sim.plan.wiring import End, Wiring, is_collective, is_transfer

__all__ = ["Actor", "OpGraph", "Wire", "build_graph"]

MESSAGES = ("PULL", "PUSH")
"""Transfers to an ``on`` block: they have no listed RECV, the engine delivers them."""

Ints = NDArray[np.int64]


class Actor:
    """A class of ranks that behave alike, run once.

    Attributes:
        rank: the representative. ranks: all members. program: index into the programs.
        first, last: its node interval before SEND and RECV are joined.
    """

    __slots__ = ("first", "last", "program", "rank", "ranks")

    def __init__(self, rank: int, ranks: tuple[int, ...], program: int) -> None:
        self.rank, self.ranks, self.program = rank, ranks, program
        self.first = self.last = 0


class Wire:
    """What a transfer or collective node runs over.

    Attributes:
        kind: "pair" or "group".
        end: representative end of a pair.
        group: representative members. share: of the tensor, or of the stage's parameters.
        classes: class of the sender and receiver (pair), or sorted classes of the members.
        actors: actor indices that take part.
    """

    __slots__ = ("actors", "classes", "end", "group", "kind", "roles", "share")

    def __init__(
        self,
        kind: str,
        end: End | None,
        group: tuple[int, ...],
        share: tuple[int, int],
        classes: tuple[int, ...],
        roles: frozenset[str] = frozenset(),
    ) -> None:
        self.kind, self.end, self.group, self.share = kind, end, group, share
        self.classes, self.roles = classes, roles
        self.actors: set[int] = set()


class OpGraph:
    """See the module. All arrays are over nodes unless said.

    Attributes:
        ops: static op of each node. actor: actor of each node (the sender of a transfer).
        static: position of each node's op in the flat list of its actor's program.
        step: step number. piece: piece index. wire: index into wires, -1 for local ops.
        stream: stream number; stream_names: (actor or -1, name) of each stream.
        dep_src, dep_dst: dependency edges. order_src, order_dst: stream order edges.
        gate_src, gate_dst: the target starts no earlier than the source starts.
        priority: node -> key, for streams that are served by priority.
        actors, wires, classes: see there; classes[rank] is the rank's class.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.actor: Ints = np.zeros(0, np.int64)
        self.static: Ints = self.actor
        self.step: Ints = self.actor
        self.piece: Ints = self.actor
        self.wire: Ints = self.actor
        self.stream: Ints = self.actor
        self.stream_names: list[tuple[int, str]] = []
        self.dep_src = self.dep_dst = self.order_src = self.order_dst = self.actor
        self.gate_src = self.gate_dst = self.actor
        self.priority: dict[int, float] = {}
        self.actors: list[Actor] = []
        self.wires: list[Wire] = []
        self.classes: list[int] = []
        self.steps = 0
        self.handlers: dict[int, dict[str, tuple[Op, ...]]] = {}

    @property
    def num_nodes(self) -> int:
        """Number of op instances."""
        return len(self.ops)

    def label(self, node: int) -> str:
        """The node for people: rank and op."""
        rank = self.actors[self.actor[node]].rank
        return f"rank {rank} {self.ops[node].name} step {self.step[node]}"


def build_graph(
    programs: Sequence[Program],
    wiring: Wiring,
    steps: int = 1,
    classes: Sequence[int] | None = None,
    buffers: int = 2,
    blocking: frozenset[int] = frozenset(),
) -> OpGraph:
    """Build the op graph.

    Args:
        programs: of all ranks. wiring: peers and groups.
        steps: repetitions of ``repeat(steps)``.
        classes: class per rank (from sim.plan.fold); None keeps every rank by itself.
        buffers: receive buffers per directed rank pair; 0 means rendezvous.
        blocking: ranks on which compute blocks the issuer.

    Raises:
        PlanError: the two ends of a transfer or the members of a group list different ops.
    """
    return _Builder(programs, wiring, steps, classes, buffers, blocking).build()


class _Family:
    """All instances of one transfer end (or group) of one actor, in list order."""

    __slots__ = ("nodes", "stream")

    def __init__(self, nodes: list[int], stream: tuple[object, ...]) -> None:
        self.nodes, self.stream = nodes, stream


class _Builder:
    def __init__(
        self,
        programs: Sequence[Program],
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
        self.ops: list[Op] = []
        self.deps: list[Ints] = []
        self.order: list[Ints] = []
        self.extra: list[tuple[int, int]] = []
        self.gates: list[tuple[int, int]] = []
        self.columns: list[Ints] = []
        self.pair_ends: dict[tuple[object, ...], dict[str, list[_Family]]] = defaultdict(
            lambda: {"send": [], "recv": []}
        )
        self.group_ends: dict[tuple[object, ...], list[_Family]] = defaultdict(list)
        self.messages: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self.wire_of: dict[tuple[object, ...], Wire] = {}
        self.streams: dict[tuple[object, ...], list[list[int]]] = defaultdict(list)
        self.templates: dict[tuple[object, ...], Template] = {}

    def build(self) -> OpGraph:
        graph = self.graph
        graph.classes, graph.steps = self.classes, self.steps
        flats = [flatten(p) for p in self.programs]
        program_of = {r: i for i, p in enumerate(self.programs) for r in p.ranks}
        members: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(program_of):
            members[self.classes[rank]].append(rank)
        for ranks in members.values():
            self._add_actor(Actor(ranks[0], tuple(ranks), program_of[ranks[0]]), flats)
        self._join()
        return graph

    # -- one actor ------------------------------------------------------------------------------

    def _add_actor(self, actor: Actor, flats: list[Flat]) -> None:
        flat, rank = flats[actor.program], actor.rank
        ends: dict[int, list[End]] = {}
        groups: dict[int, list[int]] = {}
        pieces = []
        for i, op in enumerate(flat.ops):
            if is_transfer(op):
                ends[i] = self.wiring.ends(op, rank)
                pieces.append(len(ends[i]))
            elif is_collective(op):
                groups[i] = self.wiring.group_indices(op, rank)
                pieces.append(len(groups[i]))
            else:
                pieces.append(1)
        template = self._template(flat, actor.program, tuple(pieces), rank)
        base = len(self.ops)
        actor.first, actor.last = base, base + len(template.static)
        index = len(self.graph.actors)
        self.graph.actors.append(actor)
        if flat.handlers:
            self.graph.handlers[index] = flat.handlers
        self.ops += [flat.ops[s] for s in template.static]
        n = len(template.static)
        self.columns.append(
            np.array([[index] * n, template.step, template.piece, template.static], np.int64)
        )
        self.deps.append(np.array(template.deps, np.int64).reshape(-1, 2) + base)
        self.order.append(np.array(template.order, np.int64).reshape(-1, 2) + base)
        self.graph.priority.update({base + k: v for k, v in template.priority.items()})
        self._add_ends(index, base, flat, template, ends, groups)

    def _template(self, flat: Flat, program: int, pieces: tuple[int, ...], rank: int) -> Template:
        free = rank not in self.blocking
        key = (program, pieces, free)
        if key not in self.templates:
            hosted = self.wiring.stages(rank)
            self.templates[key] = unroll(
                flat, resolve(flat, hosted), list(pieces), self.steps, free
            )
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
        families: dict[tuple[object, ...], tuple[_Family, bool, bool]] = {}
        pair_streams: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for (position, piece), nodes in template.slots.items():
            op = flat.ops[position]
            wire: tuple[object, ...]
            local: tuple[object, ...]
            stream: tuple[object, ...]
            if position in ends:
                end = ends[position][piece]
                sending = op.kind.startswith(("SEND", "PU"))
                wire = ("pair", end.what, self.classes[end.src], self.classes[end.dst], op.channel)
                local = (*wire, end.src, end.dst, end.share, sending)
                stream = ("pair", end.src, end.dst, op.channel)
                if wire not in self.wire_of:
                    kinds = (self.classes[end.src], self.classes[end.dst])
                    self.wire_of[wire] = Wire("pair", end, (), end.share, kinds)
            elif position in groups:
                g = groups[position][piece]
                ranks = self.wiring.groups[g]
                roles = frozenset(self.wiring.roles[g])
                inside = tuple(sorted(self.classes[r] for r in ranks))
                wire = ("group", roles, inside, op.channel)
                local = (*wire, g)
                stream = ("group", g, op.channel)
                sending = True
                if wire not in self.wire_of:
                    self.wire_of[wire] = Wire(
                        "group", None, ranks, self.wiring.shards[g], inside, roles
                    )
            else:
                continue
            self.wire_of[wire].actors.add(index)
            mine = [base + k for k in nodes]
            pair_streams[(*stream, sending)] += mine
            if local in families:
                families[local][0].nodes += mine
            else:
                families[local] = (_Family(mine, stream), sending, position in ends)
        for key, (family, sending, is_pair) in families.items():
            family.nodes.sort()
            wire = key[:5] if is_pair else key[:4]
            if is_pair and self.ops[family.nodes[0]].kind in MESSAGES:
                self.messages[wire] += family.nodes
                continue
            if is_pair:
                self.pair_ends[wire]["send" if sending else "recv"].append(family)
            else:
                self.group_ends[wire].append(family)
        for key, nodes in pair_streams.items():
            nodes.sort()
            self.streams[key[:-1]].append(nodes)
            if key[0] == "pair" and not key[-1]:
                self._buffers(base, template, nodes)

    def _buffers(self, base: int, template: Template, nodes: list[int]) -> None:
        """Receive buffers of one directed pair, seen from the receiver."""
        for k, node in enumerate(nodes):
            if self.buffers == 0:
                before = template.compute_before[node - base]
                if before >= 0:
                    self.extra.append((base + before, node))
                continue
            if k + self.buffers < len(nodes):
                consumer = template.consumer.get(node - base)
                if consumer is None:
                    self.extra.append((node, nodes[k + self.buffers]))
                else:
                    self.gates.append((base + consumer, nodes[k + self.buffers]))

    # -- all actors together --------------------------------------------------------------------

    def _join(self) -> None:
        n = len(self.ops)
        columns = (
            np.concatenate(self.columns, axis=1) if self.columns else np.zeros((4, 0), np.int64)
        )
        alias = np.arange(n)
        wire = np.full(n, -1, np.int64)
        for key, sides in self.pair_ends.items():
            families = sides["send"] + sides["recv"]
            if not sides["send"] or not sides["recv"]:
                self._mismatch(families[0].nodes[0], -1)
            self._alias(families, columns[1], alias, transfer=True)
            wire[families[0].nodes] = self._wire_index(key)
        for key, families in self.group_ends.items():
            self._alias(families, columns[1], alias, transfer=False)
            wire[families[0].nodes] = self._wire_index(key)
        for key, nodes in self.messages.items():
            wire[nodes] = self._wire_index(key)
        chains = [
            np.stack([s[:-1], s[1:]], 1)
            for ss in self.streams.values()
            for s in map(np.array, ss)
            if len(s) > 1
        ]
        order = np.concatenate(
            [*self.order, *chains, np.array(self.extra, np.int64).reshape(-1, 2)]
        )
        deps = np.concatenate(self.deps) if self.deps else np.zeros((0, 2), np.int64)
        gates = np.array(self.gates, np.int64).reshape(-1, 2)
        self._compact(alias, columns, wire, deps, order, gates)

    def _wire_index(self, key: tuple[object, ...]) -> int:
        self.graph.wires.append(self.wire_of[key])
        return len(self.graph.wires) - 1

    def _alias(self, families: list[_Family], steps: Ints, alias: Ints, *, transfer: bool) -> None:
        first = families[0].nodes
        for other in families[1:]:
            same = len(other.nodes) == len(first)
            for a, b in zip(first, other.nodes, strict=False):
                left, right = self.ops[a], self.ops[b]
                names_fit = (
                    left.mb == right.mb and left.part == right.part
                    if transfer
                    else left.kind == right.kind
                )
                if not names_fit or steps[a] != steps[b]:
                    self._mismatch(a, b)
            if not same:
                longer = max(first, other.nodes, key=len)
                self._mismatch(longer[min(len(first), len(other.nodes))], -1)
            alias[other.nodes] = first

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
        graph.ops = [self.ops[k] for k in keep]
        graph.actor, graph.step, graph.piece, graph.static = columns[:, keep]
        graph.wire = wire[keep]
        graph.priority = {int(to[k]): v for k, v in graph.priority.items()}
        graph.dep_src, graph.dep_dst = _edges(deps, to, len(keep))
        graph.order_src, graph.order_dst = _edges(order, to, len(keep))
        graph.gate_src, graph.gate_dst = _edges(gates, to, len(keep))
        self._number_streams(to)

    def _number_streams(self, to: Ints) -> None:
        graph = self.graph
        graph.stream = np.full(graph.num_nodes, -1, np.int64)
        for key, lists in self.streams.items():
            for nodes in lists:
                mine = to[nodes]
                if (graph.stream[mine] < 0).any():
                    graph.stream_names.append((-1, _stream_name(key, self.wiring)))
                    graph.stream[mine[graph.stream[mine] < 0]] = len(graph.stream_names) - 1
        numbers: dict[tuple[int, str], int] = {}
        local = np.flatnonzero(graph.stream < 0)
        for node in local.tolist():
            name = (int(graph.actor[node]), stream_of(graph.ops[node]))
            if name not in numbers:
                numbers[name] = len(graph.stream_names)
                graph.stream_names.append(name)
            graph.stream[node] = numbers[name]


def _stream_name(key: tuple[object, ...], wiring: Wiring) -> str:
    channel = f" channel {key[-1]}" if key[-1] else ""
    if key[0] == "pair":
        return f"{key[1]}->{key[2]}{channel}"
    return "group " + ",".join(map(str, wiring.groups[key[1]])) + channel  # type: ignore[call-overload]


def _edges(edges: Ints, to: Ints, n: int) -> tuple[Ints, Ints]:
    if not len(edges):
        empty = np.zeros(0, np.int64)
        return empty, empty
    src, dst = to[edges[:, 0]], to[edges[:, 1]]
    code = np.unique(src[src != dst] * n + dst[src != dst])
    return code // n, code % n
