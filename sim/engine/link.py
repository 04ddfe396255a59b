"""Links and flows, and the cheap case of one link shared by equals.

While all flows on a link use no other link and have the same cap, they share it equally and the
link is *pooled*: it keeps one number, the service a member has received so far, and a flow is
finished when that number has grown by its bytes. A start or finish costs O(log n) and recomputes
nothing (virtual time, as in fair queueing; Parekh and Gallager, IEEE/ACM ToN 1(3), 1993). In all
other cases the link only knows who is on it, and ``sim.engine.network`` sets the rates.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf

import msgspec

from sim.engine.kernel import URGENT, Kernel

__all__ = [
    "DONE",
    "SAME_TIME",
    "Flow",
    "Link",
    "LinkUse",
    "Path",
    "PathSpec",
    "Tiers",
    "make_path",
]

#: A flow is finished with less than this part of its bytes left: far above rounding, far below what
#: a result shows. It lets flows that end together end in one instant.
DONE = 1e-12
#: Two times are one instant when they differ by less than this part of the clock.
SAME_TIME = 1e-14
#: A pool counts from zero again when its service exceeds the next flow's bytes by this factor.
_REBASE = 32.0


class LinkUse(msgspec.Struct, frozen=True):
    """What one link did.

    Attributes:
        index: the link's number. nbytes [B]: carried, over all members of all flows.
        busy_s [s]: time during which anything moved on the link.
    """

    index: int
    nbytes: float
    busy_s: float


class Tiers(msgspec.Struct):
    """How the flow changes (starts, finishes, changes of cap or capacity) were priced.

    Attributes:
        flows: flows started.
        instants: solve events; each prices all general changes of one instant.
        private: components of a single flow priced in closed form.
        pooled: starts and finishes priced by virtual time on a single link.
        general: components of two or more flows filled from scratch.
        general_flows: flows in those components, summed over the solves.
        grown, grown_flows: the same for large components, solved around the change only.
    """

    flows: int = 0
    instants: int = 0
    private: int = 0
    pooled: int = 0
    general: int = 0
    general_flows: int = 0
    grown: int = 0
    grown_flows: int = 0


class Link:
    """A directed link or another shared resource, with the flows on it.

    Attributes:
        index: its number in the network.
        capacity [B/s]: what all flows on it share; 0 when it is down.
        flows: weight of every flow on the link, in order of start; empty while ``pooled``.
        load [B/s]: what the link carries since ``since`` [s].
        carried [B], busy [s]: bytes moved, and time with a load above zero, until ``since``.
        pooled: the flows on it use no other link and have one cap, so they share it equally and
            are kept in ``queue`` by the service at which each is finished.
        service [B]: what one member that never left would have received, moved by ``rate`` [B/s].
        members: sum of the weights in ``queue``; ``cap`` [B/s] their common cap.
        armed [s]: when the earliest of the queue is next looked at, by ``on_due``.
        changes: starts and finishes priced while pooled.
        dirty: the network will solve the link's component at the end of this instant.
        held: completions are being announced; the rate is set after the last.
        want, used, seen: scratch of :func:`reach` and :func:`fill`.
    """

    __slots__ = (
        "armed", "busy", "cap", "capacity", "carried", "changes", "dirty", "flows", "held", "index",
        "kernel", "load", "members", "on_due", "pooled", "queue", "rate", "seen", "service",
        "since", "used", "want",
    )  # fmt: skip

    def __init__(self, kernel: Kernel, index: int, capacity: float) -> None:
        self.kernel = kernel
        self.index = index
        self.capacity = capacity
        self.since = kernel.now
        self.load = self.carried = self.busy = 0.0
        self.flows: dict[Flow, float] = {}
        self.dirty = self.held = False
        self.pooled = True
        self.queue: list[tuple[float, int, Flow]] = []
        self.service = self.rate = 0.0
        self.members: float = 0
        self.cap = self.armed = inf
        self.changes = 0
        self.on_due = self._finish
        self.seen = 0
        self.want: float = 0
        self.used = 0.0

    def advance(self, now: float) -> None:
        """Account for the time since the last change at the load held since then."""
        passed = now - self.since
        if passed > 0.0:
            if self.load > 0.0:
                self.carried += self.load * passed
                self.busy += passed
                self.service += self.rate * passed
            self.since = now

    def join(self, flow: Flow, members: float, now: float) -> None:
        """Start a flow on a pooled link; it must have the pool's cap unless the pool is empty."""
        self.advance(now)
        if not self.queue:
            self.cap = flow.cap
            self.service = 0.0
            self.members = 0
        elif self.service > _REBASE * flow.nbytes:
            self.queue = [(end - self.service, number, f) for end, number, f in self.queue]
            heapify(self.queue)
            self.service = 0.0
        heappush(self.queue, (self.service + flow.nbytes, flow.id, flow))
        self.members += members
        self.changes += 1
        if not self.held:
            self.retune()

    def retune(self) -> None:
        """Set the common rate of a pool brought up to now, and watch its earliest completion."""
        if self.held:
            return
        queue = self.queue
        if not queue:
            self.rate = self.load = 0.0
            return
        now = self.since
        end, _, first = queue[0]
        need = end - self.service
        if need <= DONE * first.nbytes + self.rate * now * SAME_TIME:
            due = now  # what ends at this instant ends at the old rate, then comes the new one
        else:
            rate = self.capacity / self.members
            if rate > self.cap:
                rate = self.cap
            self.rate = rate
            self.load = rate * self.members
            if rate == 0.0:
                return
            due = now + need / rate
        if due < self.armed:
            self.armed = due
            self.kernel.call_at(due, self.on_due, URGENT)

    def _finish(self, _: object) -> None:
        now = self.kernel._now
        if self.armed != now:
            return
        self.armed = inf
        self.advance(now)
        queue, service = self.queue, self.service
        slack = self.rate * now * SAME_TIME
        finished = []
        while queue and queue[0][0] - service <= slack + DONE * queue[0][2].nbytes:
            flow = heappop(queue)[2]
            flow.done = True
            self.members -= flow.path[0][1]
            finished.append(flow)
        self.changes += len(finished)
        self.held = True
        for flow in sorted(finished):
            flow.on_done(now)
        self.held = False
        if self.pooled:
            self.retune()

    def pool(self, flows: list[Flow], now: float) -> None:
        """Keep the flows of a link by virtual time from now on."""
        for flow in flows:
            flow.left = flow.left_at(now)
            flow.version += 1
        self.queue = [(flow.left, flow.id, flow) for flow in flows]
        heapify(self.queue)
        self.members = sum(self.flows.values())
        self.cap = flows[0].cap if flows else inf
        self.service = 0.0
        self.flows = {}
        self.pooled = True
        self.armed = inf
        self.retune()

    def unpool(self, now: float) -> None:
        """Keep the flows of a link one by one again; the coming solve sets their rates."""
        self.advance(now)
        for end, _, flow in sorted(self.queue):
            flow.left = end - self.service
            flow.rate = self.rate
            flow.since = now
            flow.left = flow.left_at(now)
            flow.rate = 0.0
            self.flows[flow] = flow.path[0][1]
        self.queue = []
        self.rate = 0.0
        self.armed = inf
        self.pooled = False


PathSpec = tuple[int, ...] | tuple[tuple[int, float], ...]
Path = tuple[tuple[Link, float], ...]


def make_path(links: list[Link], spec: PathSpec, weight: float) -> Path:
    """Return each link of a path, by number, with the members that cross it.

    Raises:
        ValueError: a weight is not a positive whole number.
        IndexError: a link the network does not have.
    """
    members: dict[int, float] = {}
    for entry in spec:
        index, share = entry if isinstance(entry, tuple) else (entry, weight)
        if not 0 < share < inf or share != int(share):  # sums of whole numbers are exact
            raise ValueError(f"weight {share} on link {index} is not a positive whole number")
        if not 0 <= index < len(links):
            raise IndexError(f"link {index} of a network with {len(links)} links")
        members[index] = members.get(index, 0) + share
    return tuple((links[index], count) for index, count in sorted(members.items()))


class Flow:
    """Bytes on their way along a path; made by ``Network.start``, ordered by start.

    Attributes:
        id: its number in order of start.
        path: the links it uses, each with the number of members that cross it.
        nbytes [B]: what each member moves.
        cap [B/s]: the most one member moves.
        left [B], rate [B/s]: of one member, as they stood at ``since`` [s] (not kept up to date
            while the flow sits in the queue of a pooled link).
        version: goes up with each change of rate; a completion computed for another is void.
        done: it has arrived.
        share, seen: scratch of :func:`reach` and :func:`fill`.
    """

    __slots__ = (
        "cap", "done", "id", "left", "nbytes", "on_done", "path", "rate", "seen", "share", "since",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        path: Path,
        nbytes: float,
        cap: float,
        on_done: Callable[[float], None],
        now: float,
    ) -> None:
        self.id = number
        self.path = path
        self.nbytes = self.left = nbytes
        self.cap = cap
        self.on_done = on_done
        self.since = now
        self.rate = self.share = 0.0
        self.version = self.seen = 0
        self.done = False

    def __lt__(self, other: Flow) -> bool:
        return self.id < other.id

    def left_at(self, now: float) -> float:
        """Return what a member has left [B]; 0 when it is due at this very instant.

        Without that a link that goes down at the instant of a completion could hold the last
        rounding error of the flow for ever.
        """
        left = self.left - self.rate * (now - self.since)
        return left if left > DONE * self.nbytes + self.rate * now * SAME_TIME else 0.0
