"""``on`` blocks: each message that arrives appends one instance of a block to its rank's list.

Order of arrival decides the order of instances (ties: lower sender, PUSH before PULL); then the
issue rule holds as for listed ops. A SEND in ``on(PULL)`` answers the sender's PULL, which ends
with it. An op that reads ``latest`` depends on the last write appended before it; one that reads
``current`` takes what is written when it starts. Its span records the version it saw. A PULL whose
answer has a slack is handled when its sender's lead is small enough, as if it arrived then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from math import inf

from sim.cost.prices import FlowSpec
from sim.engine.execute import BY_EVENT, Execution
from sim.engine.handled import Handled, Instance
from sim.engine.kernel import NORMAL, PICK
from sim.engine.paced import start_work
from sim.engine.slack import Clocks
from sim.errors import PlanError
from sim.plan.op import Op
from sim.plan.unroll import LOCAL_STREAMS, stream_of
from sim.plan.wiring import Wiring

__all__ = ["Handled", "Messages", "MessagePrice"]

MessagePrice = Callable[[Op, int, int], tuple[float, tuple[FlowSpec, ...]]]
"""(op, rank that runs it, sender of the message) -> fixed seconds and flows."""


class Messages:
    """Delivers the messages of one run; create it before the run starts.

    Args:
        run: the execution. price: of the ops in ``on`` blocks.
        wiring: says which ranks are lost together, None when each is by itself.

    Raises:
        PlanError: a message goes to a rank that has no block for it.
    """

    def __init__(self, run: Execution, price: MessagePrice, wiring: Wiring | None = None) -> None:
        self.run, self.price = run, price
        graph = run.graph
        self.static = graph.num_nodes
        self.handlers = {graph.actors[a].rank: blocks for a, blocks in graph.handlers.items()}
        self.actor = {a.rank: i for i, a in enumerate(graph.actors)}
        self.instances: list[Instance] = []
        self.writes: dict[int, list[int]] = {r: [] for r in self.handlers}
        self.written: dict[int, dict[str, list[int]]] = {r: {} for r in self.handlers}
        self.seen: dict[tuple[int, int], Instance] = {}
        self.tails: dict[tuple[int, str], int] = {}
        self.flows: dict[int, tuple[FlowSpec, ...]] = {}
        self.arrived: list[tuple[int, int, int]] = []
        self.wiring = wiring
        self.clocks: dict[int, Clocks] = {}
        self.totals: dict[int, Counter[int]] = {r: Counter() for r in self.handlers}
        for node, op in enumerate(graph.ops):
            if op.kind not in ("PULL", "PUSH"):
                continue
            end = graph.wires[graph.wire[node]].end
            if end is None or op.kind not in self.handlers.get(end.dst, {}):
                raise PlanError(
                    f"{graph.label(node)} goes to a rank without on({op.kind})", key="programs"
                )
            run.mode[node] = BY_EVENT
            run.begin[node] = self._begin
            self.totals[end.dst][end.src] += op.kind == "PUSH"

    def _begin(self, node: int) -> None:
        """The message leaves; it has arrived when its seconds and flows are over."""
        run = self.run
        flows = run.prices.flows.get(node, ())
        run.kernel.call_at(
            run.kernel.now + run.seconds[node], self._travel, NORMAL, (node, flows, self._arrive)
        )

    def _travel(self, what: tuple[int, tuple[FlowSpec, ...], Callable[[int], None]]) -> None:
        node, flows, arrive = what
        left = [len(flows)]

        def done(t: float) -> None:
            left[0] -= 1
            if left[0] <= 0:
                arrive(node)

        if not flows:
            arrive(node)
        run = self.run
        pace = run.paces.get(run.actor[node]) if run.wire[node] < 0 else None
        for flow in flows:
            if pace is None:
                run.network.start(flow.links, flow.nbytes, done, cap=flow.cap)
            else:
                start_work(run, flow, pace, done)

    def _arrive(self, node: int) -> None:
        graph, run = self.run.graph, self.run
        end = graph.wires[graph.wire[node]].end
        assert end is not None
        if run.survives and not run.survives(node, run.kernel.now):
            return  # its sender is gone
        pull = graph.ops[node].kind == "PULL"
        if not self.arrived:
            run.kernel.call_at(run.kernel.now, self._deliver, PICK)
        self.arrived.append((end.src, int(pull), node))
        if not pull:
            run.finish(node, run.kernel.now)

    def _deliver(self, _: object) -> None:
        """All messages of this instant, in order."""
        batch, self.arrived = sorted(self.arrived), []
        waiting: dict[int, Clocks] = {}
        for sender, pull, node in batch:
            wire = self.run.graph.wires[self.run.graph.wire[node]]
            assert wire.end is not None
            rank = wire.end.dst
            clocks = self._clocks(rank)
            if clocks is not None:
                waiting[rank] = clocks
            if clocks is not None and pull and not clocks.may_go(sender, self.run.kernel.now):
                clocks.held.append((sender, node))
                continue
            self._append(rank, sender, "PULL" if pull else "PUSH", node)
            if clocks is not None and not pull:
                clocks.wrote(sender)
        for rank, clocks in waiting.items():
            self._release((rank, clocks))

    def _release(self, what: tuple[int, Clocks]) -> None:
        rank, clocks = what
        for sender, node in clocks.released(self.run.kernel.now):
            self._append(rank, sender, "PULL", node)

    def _clocks(self, rank: int) -> Clocks | None:
        """Clocks of a rank whose answers have a slack; a loss may let somebody go."""
        if rank not in self.clocks:
            slack = max((op.slack for op in self.handlers[rank].get("PULL", ())), default=-1)
            if slack < 0:
                return None
            death = {w: self._death(w) for w in self.totals[rank]}
            found = self.clocks[rank] = Clocks(slack, self.totals[rank], death)
            for t in sorted(set(death.values()) - {inf}):
                if t >= self.run.kernel.now:
                    self.run.kernel.call_at(t, self._release, PICK, (rank, found))
        return self.clocks[rank]

    def _death(self, sender: int) -> float:
        """When the first chip of a sender's replica is lost [s]."""
        ranks = [sender]
        cell = self.wiring.cell_of.get(sender) if self.wiring is not None else None
        if cell is not None and self.wiring is not None:
            ranks = [r for r, c in self.wiring.cell_of.items() if c.replica == cell.replica]
        return min(self.run.death.get(self.actor.get(r, -1), inf) for r in ranks)

    def _append(self, rank: int, sender: int, message: str, node: int) -> None:
        before: int | None = None
        for op in self.handlers[rank][message]:
            instance = Instance(self._add(op, rank, sender, node), op, rank, sender)
            sources = [before] if before is not None and op.deps is None else []
            writes = self.writes[rank]
            if op.writes:
                read = self.seen.get((rank, sender))
                instance.delay = len(writes) - (self._version(read) if read else 0)
                writes.append(instance.node)
                self.written[rank].setdefault(stream_of(op), []).append(instance.node)
                instance.version = len(writes)
            elif op.reads:
                self.seen[rank, sender] = instance
                if op.reads == "latest":
                    instance.version = len(writes)
                    sources += writes[-1:]
            self.instances.append(instance)
            answers = node if message == "PULL" and op.kind.startswith("SEND") else -1
            self._connect(instance, sources, answers)
            before = instance.node

    def _version(self, read: Instance) -> int:
        """Version a read saw: the one it waited for, or what was written when it started."""
        if read.version < 0:
            run = self.run
            began = run.start[read.node]
            # Writes of one stream end in the order in which they were appended.
            read.version = sum(
                bisect_right(writes, began, key=run.end.__getitem__)
                for writes in self.written[read.rank].values()
            )
        return read.version

    def _add(self, op: Op, rank: int, sender: int, message: int) -> int:
        """A new node at the end of the execution's lists."""
        run = self.run
        seconds, flows = self.price(op, rank, sender)
        local = stream_of(op) in LOCAL_STREAMS
        node = self._blank(
            seconds, BY_EVENT if flows else 0, self.actor[rank], -1 if local else run.wire[message]
        )
        self.flows[node] = flows
        if flows:
            run.begin[node] = self._start_flows
        return node

    def _blank(self, seconds: float, mode: int, actor: int, wire: int) -> int:
        run = self.run
        run.actor.append(actor)
        run.wire.append(wire)
        run.need.append(0)
        run.at.append(run.kernel.now)
        run.start.append(inf)
        run.end.append(inf)
        run.seconds.append(seconds)
        run.after.append(())
        run.gated.append(())
        run.mode.append(mode)
        return len(run.need) - 1

    def _start_flows(self, node: int) -> None:
        run = self.run
        run.kernel.call_at(
            run.kernel.now + run.seconds[node],
            self._travel,
            NORMAL,
            (node, self.flows[node], lambda n: run.finish(n, run.kernel.now)),
        )

    def _connect(self, instance: Instance, sources: list[int], answers: int) -> None:
        run, node = self.run, instance.node
        local = stream_of(instance.op)
        stream = local if local in LOCAL_STREAMS else f"->{instance.sender}"
        tail = self.tails.get((instance.rank, stream))
        self.tails[instance.rank, stream] = node
        for source in {*sources, *([tail] if tail is not None else [])}:
            if run.end[source] < inf:
                run.at[node] = max(run.at[node], run.end[source])
            else:
                run.after[source] = (*run.after[source], node)
                run.need[node] += 1
        if answers >= 0:
            run.after[node] = (*run.after[node], self._end_of(answers))
        if not run.need[node]:
            run.settle([], [node])

    def _end_of(self, pull: int) -> int:
        """A zero-length node behind a reply, whose end is the end of the PULL it answers."""
        run = self.run
        node = self._blank(0.0, BY_EVENT, run.actor[pull], run.wire[pull])
        run.need[node] = 1
        run.begin[node] = lambda _: run.finish(pull, run.kernel.now)
        return node

    def handled(self) -> tuple[Handled, ...]:
        """All instances, in order of appending."""
        run = self.run
        count: dict[int, int] = {}
        found = []
        for i in self.instances:
            if i.op.reads:
                self._version(i)
            index = count[i.rank] = count.get(i.rank, -1) + 1
            found.append(
                Handled(
                    rank=i.rank,
                    sender=i.sender,
                    op=i.op,
                    index=index,
                    ready=run.at[i.node],
                    start=run.start[i.node],
                    end=run.end[i.node] if run.end[i.node] <= run.until else inf,
                    version=i.version,
                    delay=i.delay,
                )
            )
        return tuple(found)
