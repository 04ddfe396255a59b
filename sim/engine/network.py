"""The network as fluid flows: an event happens only when a rate changes.

Four tiers, chosen per change and counted in ``Network.tiers``:

* *private*: nobody shares a link with the flow: its rate is the smallest of cap and capacities;
* *pooled*: flows that use one and the same link only, with equal caps, share it equally. The link
  counts what a member receives, and nothing is computed anew (virtual time, ``sim.engine.link``);
* *general*: the flows that are connected through shared links are filled from scratch;
* *grown*: more than some hundred connected flows are solved around the change only.

All general changes of one instant are priced by one solve, after every completion and start of
it. Completions wait in one heap; a change of rate voids a flow's earlier entries by version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from msgspec.structs import replace

from sim.engine.checks import check_capacity, check_flow
from sim.engine.kernel import SOLVE, URGENT, Kernel
from sim.engine.link import DONE, SAME_TIME, Flow, Link, LinkUse, Path, PathSpec, Tiers, make_path
from sim.engine.sharing import fill, grow, reach

__all__ = ["LinkUse", "Network", "Tiers"]

#: Flows in a component up to which solving all of it is cheaper than growing from the change.
_SMALL = 256


class Network:
    """Links that share their capacity among flows, max-min fair per member of a flow.

    Args:
        kernel: the clock.
        capacities [B/s]: shape (L,), the capacity of each link; 0 for a link that is down.

    Raises:
        ValueError: a capacity is negative or not finite.
    """

    def __init__(self, kernel: Kernel, capacities: Sequence[float]) -> None:
        self.kernel = kernel
        self._counts = Tiers()
        self._links = [
            Link(kernel, index, check_capacity(index, rate))
            for index, rate in enumerate(capacities)
        ]
        self._paths: dict[tuple[PathSpec, float], Path] = {}
        self._dirty: list[Link] = []
        self._small = _SMALL
        self._finish: list[tuple[float, int, int, Flow]] = []
        self._limit = 1024
        self._armed = inf
        self._mark = 0

    def start(
        self,
        links: PathSpec,
        nbytes: float,
        on_done: Callable[[float], None],
        weight: float = 1,
        cap: float = inf,
    ) -> Flow:
        """Start a flow now; ``on_done(t)`` is called at the time ``t`` [s] of its completion.

        Completions of one instant are announced before anything else happens at that instant. A
        flow of zero bytes is complete at once, on a link that is down too; it is announced in a
        call of its own, never from inside ``start``.

        Args:
            links: the links on the path, either their numbers, or pairs (number, members that cross
                it) where the members of a folded flow are spread over several links. A link named
                twice is used twice. With no link at all only ``cap`` counts.
            nbytes [B]: what each member moves.
            on_done: receives the completion time [s].
            weight: number of equal members this flow stands for; with pairs it is not used.
            cap [B/s]: the most one member moves (window over round trip, endpoint rate).

        Raises:
            ValueError: negative or non-finite ``nbytes``, negative ``cap``, a weight that is not a
                positive whole number.
            IndexError: a link the network does not have.
        """
        path = self._paths.get((links, weight))
        if path is None:
            path = self._paths[links, weight] = make_path(self._links, links, weight)
        if not (0.0 < nbytes < inf and cap >= 0.0):
            check_flow(nbytes, cap)
        kernel, counts = self.kernel, self._counts
        now = kernel._now
        flow = Flow(counts.flows, path, nbytes, cap, on_done, now)
        counts.flows += 1
        if nbytes == 0.0 or (not path and cap == inf):
            flow.done = True
            kernel.call_at(now, self._announce, URGENT, flow)
            return flow
        if len(path) == 1:
            link, members = path[0]
            if link.pooled and (link.cap == cap or not link.queue):
                link.join(flow, members, now)
                return flow
        elif not path:
            self._reprice(flow, cap, now)
            self._arm()
            return flow
        for link, members in path:
            if link.pooled:
                link.unpool(now)
            link.flows[flow] = members
            if not link.dirty:
                self._touch(link)
        return flow

    def set_capacity(self, link: int, rate: float) -> None:
        """Give a link another capacity [B/s] from now on; with 0 the flows on it stand still.

        Raises:
            ValueError: ``rate`` is negative or not finite.
        """
        changed = self._links[link]
        changed.advance(self.kernel._now)
        changed.capacity = check_capacity(link, rate)
        if changed.pooled:
            changed.retune()
        else:
            self._touch(changed)

    def set_cap(self, flow: Flow, cap: float) -> None:
        """Give the members of a flow another cap [B/s] from now on; no effect on a finished flow.

        Raises:
            ValueError: ``cap`` is negative or not a number.
        """
        check_flow(flow.nbytes, cap)
        if flow.done or cap == flow.cap:
            return
        now = self.kernel._now
        flow.cap = cap
        if not flow.path:
            self._reprice(flow, cap, now)
            self._arm()
            return
        first = flow.path[0][0]
        if first.pooled:
            if len(first.queue) == 1:
                first.advance(now)
                first.cap = cap
                first.retune()
                return
            first.unpool(now)
        self._touch(first)

    def stretch(self, flow: Flow, factor: float) -> None:
        """Make what each member of a flow has left ``factor`` (> 0) times as much, if any."""
        now, first = self.kernel._now, flow.path[0][0] if flow.path else None
        if flow.done:
            return
        if first is not None and first.pooled:
            first.unpool(now)
            flow.left *= factor
            self._touch(first)
        else:
            flow.left = factor * flow.left_at(now)
            flow.since = now
            self._reprice(flow, flow.rate, now)
            self._arm()

    def rate(self, flow: Flow) -> float:
        """Return what each member of a flow moves [B/s], as of the last solve; 0 once finished."""
        if flow.done:
            return 0.0
        if flow.path and flow.path[0][0].pooled:
            return flow.path[0][0].rate
        return flow.rate

    @property
    def tiers(self) -> Tiers:
        """How the changes so far were priced."""
        pooled = sum(link.changes for link in self._links)
        return replace(self._counts, pooled=pooled)

    def use(self) -> list[LinkUse]:
        """Return what each link has carried until now, by link number."""
        for link in self._links:
            link.advance(self.kernel._now)
        return [LinkUse(link.index, link.carried, link.busy) for link in self._links]

    def _touch(self, link: Link) -> None:
        """Have the link's component solved at the end of this instant."""
        if not link.dirty:
            link.dirty = True
            if not self._dirty:
                self.kernel.call_at(self.kernel._now, self._solve, SOLVE)
            self._dirty.append(link)

    def _solve(self, _: object) -> None:
        now, tiers = self.kernel._now, self._counts
        dirty, self._dirty = self._dirty, []
        tiers.instants += 1
        before = self._mark
        large: list[Link] = []
        in_large: set[int] = set()
        for seed in dirty:
            seed.dirty = False
            if seed.pooled or seed.seen > before:
                if seed.seen in in_large:
                    large.append(seed)
                continue
            self._mark += 1
            links, flows = reach(seed, self._mark, self._small)
            if len(links) == 1 and (not flows or all(f.cap == flows[0].cap for f in flows)):
                seed.advance(now)
                seed.pool(flows, now)
            elif len(flows) > self._small:
                in_large.add(self._mark)
                large.append(seed)
            else:
                fill(links, flows)
                if len(flows) == 1:
                    tiers.private += 1
                else:
                    tiers.general += 1
                    tiers.general_flows += len(flows)
                self._apply(links, flows, now)
        if large:
            links, flows, self._mark = grow(large, self._mark + 1)
            tiers.grown += 1
            tiers.grown_flows += len(flows)
            self._apply(links, flows, now)
        self._arm()

    def _apply(self, links: list[Link], flows: list[Flow], now: float) -> None:
        for link in links:
            link.advance(now)
            link.load = link.used
        for flow in flows:
            if abs(flow.share - flow.rate) > DONE * flow.share or flow.left == 0.0:
                self._reprice(flow, flow.share, now)

    def _reprice(self, flow: Flow, rate: float, now: float) -> None:
        flow.left = left = flow.left_at(now)
        flow.since = now
        flow.rate = rate
        flow.version += 1
        if left == 0.0:
            heappush(self._finish, (now, flow.id, flow.version, flow))
        elif rate > 0.0:
            heappush(self._finish, (now + left / rate, flow.id, flow.version, flow))

    def _arm(self) -> None:
        """Watch the earliest valid completion, unless something earlier is watched already."""
        finish = self._finish
        if len(finish) > self._limit:
            finish[:] = [entry for entry in finish if entry[2] == entry[3].version]
            heapify(finish)
            self._limit = max(1024, 2 * len(finish))
        while finish and finish[0][2] != finish[0][3].version:
            heappop(finish)
        if finish and finish[0][0] < self._armed:
            self._armed = finish[0][0]
            self.kernel.call_at(self._armed, self._finish_general, URGENT)

    def _finish_general(self, _: object) -> None:
        now = self.kernel._now
        if self._armed != now:
            return
        self._armed = inf
        finish, finished = self._finish, []
        while finish:
            due, _, version, flow = finish[0]
            if version == flow.version:
                ahead = due - now
                if ahead > now * SAME_TIME and ahead * flow.rate > DONE * flow.nbytes:
                    break
                flow.version += 1
                flow.done = True
                for link, _ in flow.path:
                    del link.flows[flow]
                    if not link.dirty:
                        self._touch(link)
                finished.append(flow)
            heappop(finish)
        for flow in sorted(finished):
            flow.on_done(now)
        if not self._dirty:  # otherwise the coming solve does it
            self._arm()

    def _announce(self, flow: Flow) -> None:
        flow.on_done(self.kernel._now)
