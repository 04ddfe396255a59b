"""Price every node of an op graph on a machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from sim.cost.answers import Answers
from sim.cost.assume import cost_assumptions
from sim.cost.cell import INNER_GROUPS
from sim.cost.collective import collective_cost, places
from sim.cost.host import Host, HostPrice, on_host
from sim.cost.prices import Prices
from sim.cost.shared import Shared
from sim.cost.stated import Late, late_units
from sim.cost.streams import Message, Streams, as_run, group_message, pair_message
from sim.cost.traffic import collective_of, transfer_bytes
from sim.cost.ways import Places
from sim.cost.work import Effort, Work
from sim.hardware.machine import Machine
from sim.plan.graph import OpGraph, Wire
from sim.plan.hashing import renumber
from sim.plan.op import Op
from sim.plan.plan import Plan
from sim.plan.wiring import Wiring
from sim.problem import Problem

__all__ = ["group_keys", "price"]


def price(
    graph: OpGraph,
    wiring: Wiring,
    plan: Plan,
    problem: Problem,
    *,
    contention: bool = True,
    late: Late | None = None,
    watched: frozenset[str] = frozenset(),
) -> Prices:
    """Price every node of a graph.

    Compute comes from sim.cost.cell; a transfer takes its path's latency and its bytes; a
    collective is the cheapest way over its group. Bytes become flows when some link on their way
    is used by another stream too, else a formula. Tensor-parallel collectives and expert exchanges
    that the programs do not list are part of the passes and never contend.

    Args:
        graph: what to price. wiring, plan, problem: what it was built from.
        contention: False gives everybody links of their own.
        late: resolved late amounts. A number scales time or bytes; a vector gives compute its own
            entry and a collective the largest; a matrix [B] is an uneven exchange.
        watched: names of links whose rate changes during the run, so that they are never formulas.

    Returns:
        Prices; ``flops`` are of one rank and hold recomputation, ``nbytes`` are of one member.

    Raises:
        InputError: an op has no price on a machine, or a measured table lacks a split.
    """
    work = Work(graph, wiring, plan, problem)
    return _Pricer(graph, work, contention, late, watched).run()


class _Pricer:
    def __init__(
        self,
        graph: OpGraph,
        work: Work,
        contention: bool,
        late: Late | None,
        watched: frozenset[str],
    ) -> None:
        self.graph, self.work, self.late, self.contention = graph, work, late, contention
        self.machine = work.problem.machine
        self.streams = Streams(graph, work.wiring, self.machine, work.placement.chips)
        self.watched = watched
        n = graph.num_nodes
        self.seconds, self.nbytes, self.flops = np.zeros(n), np.zeros(n), np.zeros(n)
        self.inner = np.zeros((len(INNER_GROUPS), n))
        self.local: dict[Hashable, Effort] = {}
        self.sent: dict[Hashable, int] = {}
        self.answers = Answers(graph, work)
        self.host = Host(graph, work, contention, watched, self.answers.host_uses)
        self.hosted: dict[int, HostPrice] = {}

    def run(self) -> Prices:
        graph, late = self.graph, self.late
        actors, wires = graph.actor.tolist(), graph.wire.tolist()
        of_message: dict[int, list[int]] = {}
        for node, op in enumerate(graph.ops):
            key = (op.kind, op.stage, op.label, op.part >= 0, op.recompute, op.group, op.amount)
            amount = late(node) if late is not None and op.ref is not None else None
            copy = self.answers.copy_of(op, wires[node]) if wires[node] >= 0 else None
            if copy or (wires[node] < 0 and on_host(op)):
                units = 1.0 if amount is None else late_units(graph, node, amount)
                self.hosted[node] = self.host.price(copy or op, actors[node], units)
            elif wires[node] < 0:
                effort = self._local(key, op, actors[node])
                units = 1.0 if amount is None else late_units(graph, node, amount)
                self.seconds[node], self.flops[node] = effort.seconds * units, effort.flops * units
                if effort.comm:
                    self.inner[:, node] = np.multiply(effort.comm, units)
            else:
                number = self._send(key, op, node, wires[node], amount)
                of_message.setdefault(number, []).append(node)
        return self._finish(of_message)

    def _local(self, key: Hashable, op: Op, actor: int) -> Effort:
        found = self.local.get((key, actor))
        if found is None:
            rank = self.graph.actors[actor].rank
            found = self.local[key, actor] = self.work.compute(op, rank)
        return found

    def _send(self, key: Hashable, op: Op, node: int, wire: int, amount: Any) -> int:
        frozen = None
        if amount is not None:
            values = np.asarray(amount, np.float64)
            frozen = (values.shape, values.tobytes())
        full = (key, wire, op.channel, frozen)
        number = self.sent.get(full)
        if number is None:
            over = self.graph.wires[wire]
            message = self._message(op, node, over, amount)
            number = self.streams.add(self.streams.members(over, op, op.channel), message)
            self.sent[full] = number
        return number

    def _message(self, op: Op, node: int, wire: Wire, amount: Any) -> Message:
        matrix = np.asarray(amount, np.float64) if amount is not None else None
        uneven = matrix is not None and matrix.ndim == 2
        units = 1.0 if amount is None or uneven else late_units(self.graph, node, amount)
        if wire.kind == "pair":
            assert wire.end is not None
            nbytes = transfer_bytes(self.work, op, wire)
            src, dst = self.work.chip(wire.end.src), self.work.chip(wire.end.dst)
            return pair_message(self.machine, src, dst, nbytes * units)
        chips = [self.work.chip(r) for r in wire.group]
        if uneven:
            assert matrix is not None
            cost = collective_cost(self.machine, "all_to_all", chips, 0.0, matrix=matrix.tolist())
        else:
            rank = self.graph.actors[self.graph.actor[node]].rank
            kind, nbytes = collective_of(self.work, op, wire, rank)
            cost = collective_cost(self.machine, kind, chips, nbytes * units)
        own = self.work.accelerator(self.graph.actors[self.graph.actor[node]].rank)
        return as_run(group_message(self.machine, chips, cost), op.kind, own)

    def _finish(self, of_message: dict[int, list[int]]) -> Prices:
        self.answers.send(self.streams)
        shared = Shared(self.streams, self.watched)
        answers = self.answers.prices(self.streams, shared, self.host, self.contention)
        flows, alone, carried, crossed = {}, {}, {}, {}
        for number, nodes in of_message.items():
            message = self.streams.uses[number][1]
            mine = shared.flows(number) if self.contention and shared.shares(number) else ()
            formula = None
            if mine:
                self.seconds[nodes] = message.fixed_s
                flows.update(dict.fromkeys(nodes, mine))
            else:
                formula = shared.formula(number) if self.contention else message.private_s
                self.seconds[nodes] = formula
            bare = message.alone(formula)
            if bare is not None:
                alone.update(dict.fromkeys(nodes, bare))
            apart = shared.carried(number, mine)
            if apart:
                carried.update(dict.fromkeys(nodes, apart))
                crossed.update(dict.fromkeys(nodes, tuple(x for x, _ in apart)))
            self.nbytes[nodes] = message.nbytes
        for node, found in self.hosted.items():
            self.seconds[node], self.nbytes[node] = found.seconds, found.nbytes
            if found.flows:
                flows[node] = found.flows
            if found.carried:
                carried[node] = found.carried
                crossed[node] = tuple(x for x, _ in found.carried)
        links, host = self.machine.links, self.host
        return Prices(
            seconds=self.seconds,
            flows=flows,
            link_rates=(*(x.rate for x in links), *host.rates),
            link_names=(*(x.name for x in links), *host.names),
            nbytes=self.nbytes,
            flops=self.flops,
            wires=crossed,
            alone=alone,
            carried=carried,
            inner_comm_s={
                role: row for role, row in zip(INNER_GROUPS, self.inner, strict=True) if row.any()
            },
            rank_keys=self._rank_keys(shared),
            slows={k: p.slows for k, p in self.hosted.items() if p.slows is not None},
            answers=answers,
            assumptions=(
                *cost_assumptions(self.work.plan, self.work.problem),
                *host.assumptions,
            ),
        )

    def _rank_keys(self, shared: Shared) -> tuple[int, ...]:
        if not self.contention:
            return ()
        keys = [found for found in (shared.rank_keys(), self.host.rank_keys()) if found]
        return tuple(renumber(zip(*keys, strict=True))) if len(keys) > 1 else (keys or [()])[0]


def group_keys(machine: Machine, wiring: Wiring, chips: Sequence[int] = ()) -> list[Hashable]:
    """Return, per rank, how its groups lie on the machine: what folding must find equal.

    Two groups of a role cost the same when their chips fall into nodes, islands and NICs in the
    same pattern; the pattern is node and island numbered by first appearance, and the NIC. Of a
    rank's cell all counts that decides the time of a pass: the patterns of its tensor-, context-,
    expert-parallel groups, and how many equal groups share their NICs.

    Args:
        machine: where. wiring: groups. chips: chip per rank, () for rank r on chip r.
    """
    where = places(machine)
    num_ranks = 1 + max((*wiring.cell_of, *(r for g in wiring.groups for r in g)), default=-1)
    own: list[set[int]] = [set() for _ in range(num_ranks)]
    of_cell: dict[tuple[int, int], set[int]] = defaultdict(set)
    chip_of = chips or range(num_ranks)
    busy = _nic_users(machine, wiring, chip_of)
    numbers: dict[Hashable, int] = {}
    for g, ranks in enumerate(wiring.groups):
        roles = tuple(sorted(wiring.roles[g]))
        if roles == ("world",):
            continue
        pattern = _pattern(where, where.in_order([chip_of[r] for r in ranks]))
        number = numbers.setdefault((roles, pattern), len(numbers))
        for r in ranks:
            own[r].add(number)
        cell = wiring.cell_of.get(ranks[0])
        if cell is not None and not INNER_ROLES.isdisjoint(roles):
            share = max(busy[cell.stage, r].get(g, 1) for r in roles)
            number = numbers.setdefault((number, share), len(numbers))
            for r in ranks:
                at = wiring.cell_of[r]
                of_cell[at.stage, at.replica].add(number)
    keys: list[Hashable] = []
    cells = {at: tuple(sorted(found)) for at, found in of_cell.items()}
    for r in range(num_ranks):
        cell = wiring.cell_of.get(r)
        whole = cells.get((cell.stage, cell.replica), ()) if cell else ()
        keys.append((tuple(sorted(own[r])), whole))
    return keys


INNER_ROLES = frozenset(INNER_GROUPS)


def _pattern(where: Places, order: Sequence[int]) -> tuple[Hashable, ...]:
    """Per chip in ring order: node, island and NIC by first appearance, the node, the way on."""
    seen: dict[object, int] = {}
    found: list[Hashable] = []
    for chip, after in zip(order, [*order[1:], order[0]], strict=True):
        node = where.machine.nodes[where.node[chip]]
        nic = (node.index, node.nic_of(chip))
        numbers = [seen.setdefault(x, len(seen)) for x in (node.index, node.island, nic)]
        if where.node[after] == node.index:
            found.append((*numbers, node.profile, node.fabric_latency, node.fabric_rate))
        else:
            hop = where.path(chip, after)
            found.append((*numbers, node.profile, hop.latency, hop.rate))
    return tuple(found)


def _nic_users(
    machine: Machine, wiring: Wiring, chip_of: Sequence[int]
) -> dict[tuple[int, str], dict[int, int]]:
    """(stage, role) -> group -> groups of that role on its busiest NIC, where it leaves a node."""
    where = places(machine)
    users: dict[tuple[int, str], dict[tuple[int, int], set[int]]]
    users = defaultdict(lambda: defaultdict(set))
    nics: dict[int, list[tuple[int, int]]] = {}
    for g, ranks in enumerate(wiring.groups):
        cell = wiring.cell_of.get(ranks[0])
        if cell is None or INNER_ROLES.isdisjoint(wiring.roles[g]):
            continue
        nodes = [where.node[chip_of[r]] for r in ranks]
        if len(set(nodes)) < 2:
            continue
        nics[g] = [
            (n, machine.nodes[n].nic_of(chip_of[r])) for n, r in zip(nodes, ranks, strict=True)
        ]
        for role in wiring.roles[g]:
            for nic in nics[g]:
                users[cell.stage, role][nic].add(g)
    found: dict[tuple[int, str], dict[int, int]] = defaultdict(dict)
    for at, by_nic in users.items():
        for g in {g for groups in by_nic.values() for g in groups}:
            found[at][g] = max(len(by_nic[nic]) for nic in nics[g])
    return found
