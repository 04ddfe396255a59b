"""Lower bounds of step time and memory, in the integers of every pipeline position.

The integer program is arXiv:2503.01890's, as a third-party digest describes it; its rows are ours.
Four kinds of rows hold a step:

* a resource is busy: the chip, each way of copying, the host's processors, of a rank or a node;
* a microbatch goes down the pipeline and back before the next step's first can follow it;
* a layer's gradient leaves, is applied and comes back before the layer's next forward;
* fetches through a ring of buffers hold passes up that are shorter than a copy.

Each is a chain of dependencies, or of ops in the order of one list, from an op to the same op of
the next step; so no steady step is shorter, whatever the order on the streams of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from sim.cost.collective import places
from sim.plan.draft import PlanDraft
from sim.plan.plan import Plan
from sim.problem import Problem
from strategies.offload.autohete import AutoHeteKnobs, own_layers
from strategies.offload.forms import CHECKPOINTED as C
from strategies.offload.forms import OPTIMIZER as S
from strategies.offload.forms import PARAMETERS as P
from strategies.offload.forms import Aux, Bounds, Floats, Form, total
from strategies.offload.limits import limits_on_chip, limits_on_host
from strategies.offload.units import Triple, Units, plan_with, units_of

__all__ = ["bounds_of"]


def bounds_of(problem: Problem, start: PlanDraft, base: AutoHeteKnobs) -> Bounds:
    """Return the bounds of all choices of integers.

    Args:
        problem: see there. start: a complete draft without offloading. base: the other knobs.

    Raises:
        InputError: the draft cannot be offloaded, or not by three integers a position.
    """
    own = own_layers(problem, start)
    units = units_of(problem, start, base)
    leaves = all(len(u.fetches) > n for (s, _), us in units.items() for u in us for n in [own[s]])
    sizes = tuple((n + 1, n + 1 if leaves else 1, n + 1) for n in own)
    plan = plan_with(problem, start, base, [(0, 0, 0)] * len(own))
    times = _Times(plan, problem, base, units, sizes)
    rows = tuple(times.rows())
    return Bounds(
        sizes=sizes,
        layers=own,
        aux=tuple(times.aux),
        times=rows,
        on_chip=tuple(limits_on_chip(problem, start, base, sizes)),
        on_host=tuple(limits_on_host(problem, start, base, sizes)),
    )


class _Times:
    """Rows of a step's time.

    Attributes:
        aux: auxiliaries; of every position "host" and "again" come first.
    """

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        base: AutoHeteKnobs,
        units: dict[tuple[int, int], tuple[Units, ...]],
        sizes: Sequence[Triple],
    ) -> None:
        self.plan, self.problem, self.base = plan, problem, base
        self.units, self.sizes = units, sizes
        self.aux = [Aux(position=s, kind=k) for s in range(len(sizes)) for k in ("host", "again")]
        self.slow: dict[tuple[int, Units], int] = {}

    def rows(self) -> Iterator[Form]:
        """Every row, once for units that are equal."""
        for s, u in dict.fromkeys((s, u) for (s, _), us in self.units.items() for u in us):
            yield from self._busy(s, u)
        yield from self._nodes()
        seen: set[tuple[object, ...]] = set()
        for replica in sorted({r for _, r in self.units}):
            line = [self.units[s, replica][0] for s in range(len(self.sizes))]
            shares = [self._shares(s, replica) for s in range(len(self.sizes))]
            for last in range(len(line)):
                for first in range(last + 1):
                    key = (first, last, shares[first], *line[first : last + 1])
                    if key not in seen:
                        yield from self._chains(line, first, last, shares[first])
                    seen.add(key)

    def _node_of(self, rank: int) -> int:
        chips = self.plan.placement.chips
        return places(self.problem.machine).node[chips[rank] if chips else rank]

    def _shares(self, position: int, replica: int) -> int:
        """Replicas of a position whose updates share a node's processors.

        They start together, behind one reduction, and are bounded together.
        """
        cells = [c for c in self.plan.placement.cells if c.stage == position]
        mine = next(self._node_of(c.ranks[0]) for c in cells if c.replica == replica)
        return sum(self._node_of(c.ranks[0]) == mine for c in cells)

    def _table(self, s: int, axis: int, slope: float) -> Floats:
        return slope * np.arange(self.sizes[s][axis], dtype=np.float64)

    # -- resources ------------------------------------------------------------------------------

    def _busy(self, s: int, u: Units) -> Iterator[Form]:
        left, down = u.leaving[0], u.leaving[1][2]
        host, table = 2 * s, self._table
        again = table(s, C, u.microbatches * u.again)
        yield Form(const=u.before[0], counts={(s, C): again, (s, S): table(s, S, -u.update)})
        yield self._hosted(s, u)
        # Layers with parameters away and updated on the chip: p + min(o, n - p) - o.
        yield Form(
            const=u.before[2],
            counts={(s, P): table(s, P, down), (s, S): table(s, S, left[2] - down)},
            extra={host: down},
        )
        fetches = u.fetch * np.array(u.fetches[: self.sizes[s][P]], np.float64)
        yield Form(const=u.before[3], counts={(s, P): fetches}, extra={host: left[3]})

    def _hosted(self, s: int, u: Units) -> Form:
        return Form(const=u.before[1], counts={(s, S): self._table(s, S, u.leaving[0][1])})

    def _nodes(self) -> Iterator[Form]:
        """Processors of a node work for all its ranks."""
        mine: dict[int, list[Form]] = {}
        for cell in self.plan.placement.cells:
            form = self._hosted(cell.stage, self.units[cell.stage, cell.replica][0])
            for rank in cell.ranks:
                mine.setdefault(self._node_of(rank), []).append(form)
        for forms in mine.values():
            if len(forms) > 1:
                yield total(forms)

    # -- chains ---------------------------------------------------------------------------------

    def _chains(self, line: Sequence[Units], t: int, s: int, shares: int) -> Iterator[Form]:
        """Chains that turn at position t and go as far as position s."""
        u = line[t]
        there = self._there(line, t, s)
        again = self._table(t, C, u.again)
        if t < s:
            # Updates are listed behind the last microbatch's backward of the last layer.
            const = u.trip - u.inner + u.outer + u.layers * u.update
            own = {(t, C): again, (t, S): self._table(t, S, -u.update)}
            yield total((there, Form(const=const, counts=own)))
        if not u.layers:
            return
        # Of t itself the last position has all passes on the way, any other one each way.
        passes = u.microbatches if t == s else 1
        if self.sizes[t][P] > 1:
            turn = np.full(self.sizes[t][P], min(u.down, u.gradient + u.host) + u.fetch)
            turn[0] = 0.0
            own = {(t, C): passes * again, (t, P): turn}
            tail = Form(const=u.layers * u.tail, counts={(t, S): self._table(t, S, -u.tail)})
            turns = total((there, Form(counts=own)))
            yield total((turns, tail, self._slowed(t, u, passes, passes - 1)))
            yield total((turns, self._slowed(t, u, passes, passes)))
        inside = total((there, self._slowed(t, u, passes - 1, passes - 1)))
        for form in self._returns(u, t, s, there.const, shares):
            yield total((msgspec.structs.replace(inside, const=0.0), form))

    def _there(self, line: Sequence[Units], t: int, s: int) -> Form:
        """From the first forward of t's first layer to its last backward, by way of s.

        Of t nothing that depends on its integers.
        """
        if t == s:
            return Form(const=line[t].windows[0] if line[t].layers else 0.0)
        const = line[t].inner + sum(u.trip for u in line[t + 1 : s]) + line[s].whole
        const += sum(u.sent[0] for u in line[t:s]) + sum(u.sent[1] for u in line[t + 1 : s + 1])
        forms = [Form(const=const)]
        for r in range(t + 1, s + 1):
            passes = line[r].microbatches if r == s else 1
            forms.append(Form(counts={(r, C): self._table(r, C, passes * line[r].again)}))
            forms.append(self._slowed(r, line[r], passes, passes))
        return total(forms)

    def _slowed(self, r: int, u: Units, forwards: int, backwards: int) -> Form:
        """How much longer than their compute so many passes of position r are."""
        if self.sizes[r][P] == 1 or not u.layers:
            return Form()
        forward, slow = self._held_up(r, u)
        extra = {slow: float(backwards)} if slow >= 0 and backwards else {}
        return Form(counts={(r, P): forwards * np.maximum(0.0, forward)}, extra=extra)

    def _held_up(self, r: int, u: Units) -> tuple[Floats, int]:
        """How much longer than its compute p fetched layers' forward is; the backward's auxiliary.

        All but the first ``buffers`` copies follow one another behind the first pass.
        """
        p = np.arange(self.sizes[r][P], dtype=np.float64)
        # Under ZeRO-3 a fetch waits for a gather to leave its buffer, and that for a pass.
        rings = 2 if self.plan.mathematics.zero == 3 else 1
        buffers = rings * self.base.parameter_buffers
        forward, backward = (
            np.where(p > buffers, (p - buffers) * u.fetch - (p - 2) * each, 0.0)
            for each in (u.forward, u.backward)
        )
        if backward.max() <= 0:
            return forward, -1
        key = (r, u)
        if key not in self.slow:
            self.slow[key] = len(self.aux)
            table = tuple(backward.tolist())
            self.aux.append(Aux(position=r, kind="slow", again=u.again, table=table))
        return forward, self.slow[key]

    def _returns(self, u: Units, t: int, s: int, there: float, shares: int) -> Iterator[Form]:
        """Gradients leave, are applied and come back before their layers' next forward."""
        n, o = u.layers, np.arange(u.layers + 1.0)
        lead = u.forward if self.base.whole_steps else 0.0
        behind = [
            (u.windows[j] if t == s else there - j * (u.forward + u.backward)) + j * lead
            for j in range(n)
        ]
        # Either the last layer comes first and another is last, or it waits for the next gradient.
        alone = n > 1 and shares == 1 and not self.base.whole_steps
        apart = u.windows[-2] - u.windows[-1] - u.forward if alone else 0.0
        late = max(0.0, min(u.forward, apart))
        back = min(u.up, u.fetch) if self.sizes[t][P] > 1 else u.up
        more = (u.microbatches - 1) * u.again if t == s else 0.0
        again = self._table(t, C, more)
        first = np.array(
            [0.0, *(behind[n - k] + u.gradient + u.host + back for k in range(1, n + 1))]
        )
        yield Form(counts={(t, C): again, (t, S): first}, extra={2 * t + 1: u.again})
        again = again + np.where(np.arange(n + 1) == n, u.again, 0.0)
        for gradient, host, up in (
            (1.0, o * shares, 1.0),
            (o, 1.0, 1.0),
            (1.0, 1.0, o),
        ):
            chain = (
                behind[-1]
                + gradient * u.gradient
                + host * u.host
                + up * back
                + np.where(o > 1, late, 0.0)
            )
            table = np.where(o > 0, chain, 0.0)
            yield Form(counts={(t, C): again, (t, S): table})
