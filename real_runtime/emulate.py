"""What ``hetlab run --emulate`` makes of a plan: how much slower each op, how long each message.

A plan for chips that nobody here has is rehearsed by processes of this machine. One number joins
the two: an emulated second lasts ``scale`` real ones, found in the first steps from the processor
time of the ranks' own passes over the cost model's time for them. It is one for compute and links,
so their ratio stays the emulated cluster's.

* Passes: each takes its processor time times a factor, the cost model's time on the rank's chip
  over that on the plan's fastest chip, and sleeps the rest. So unlike chips keep their ratio, and
  what differs between this processor and the fastest chip stays visible. A CPU quota of a cgroup
  would not do: it stops a rank for tenths of a second and lets it run at full speed in between.
* Ranks that share a core all run at a fraction of it, the same for all.
* Transfers and collectives end no earlier than the cost model says from when the last of their
  members began; those that share links of the cluster stand in line there, across all ranks.

Limits: a message never ends earlier than this machine brings it; links serve one message after the
other where the simulator shares their rate; exchanges inside passes are one delay at the pass's
end; transfers begin between passes, also where a chip would begin them during one; the sum of the
gradient's norm costs nothing; overlap slows neither compute nor links; kinds of ops whose times
stand otherwise to one another here than on the fastest chip, e.g. updates to products, keep that;
memory is this machine's. The scale is measured once, so later load on the machine shows as error,
and as passes that are late. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from real_runtime.resume import read_index
from real_runtime.settings import RunSettings
from sim.cost.prices import Prices
from sim.cost.pricing import price
from sim.engine.simulate import Layout, lay_out, simulate
from sim.errors import InputError, UsageError
from sim.hardware.machine import Accelerator
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem, problem_hash
from sim.report.metrics import pace_of
from sim.report.record import spans_of_run

__all__ = [
    "CALIBRATION", "Emulation", "Flow", "Message", "Pass", "check_emulated", "check_steps",
    "emulation", "message_key", "share_of",
]  # fmt: skip

CALIBRATION = 4
"""Steps that find the scale; links are not shaped in them, and the first does not count."""

Key = tuple[object, ...]


class Pass(msgspec.Struct, frozen=True):
    """A compute op. Args: factor: of its processor time, 1 or more. own_s: emulated [s] of compute.

    inner_s: emulated [s] of the exchanges inside it.
    """

    factor: float
    own_s: float
    inner_s: float


class Flow(msgspec.Struct, frozen=True):
    """Bytes of a message over links that others use, too.

    Args:
        links: positions among the shared ones. busy_s: emulated [s] that each is taken.
        alone_s: emulated [s] that the bytes take with nobody else there.
    """

    links: tuple[int, ...]
    busy_s: tuple[float, ...]
    alone_s: float


class Message(msgspec.Struct, frozen=True):
    """A transfer or collective.

    Args:
        number: of the message. wire: number of what it is in line on. members: ranks.
        fixed_s: emulated [s] before its flows, and all of it where it has none.
    """

    number: int
    wire: int
    members: tuple[int, ...]
    fixed_s: float
    flows: tuple[Flow, ...] = ()


class Emulation(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as it is emulated.

    Args:
        passes: (rank, "program:index") -> what a compute op takes.
        messages: see ``message_key``. links, wires: how many there are.
        fastest: chip type that the factors count from. factors: mean of each rank.
        step_s: emulated [s] of a step, as simulated.
    """

    passes: dict[tuple[int, str], Pass]
    messages: dict[Key, Message]
    links: int
    wires: int
    fastest: str
    factors: tuple[float, ...]
    step_s: float


def check_emulated(plan: Plan, cluster: str) -> str:
    """Return the name of the cluster that is emulated.

    Args:
        plan: to run. cluster: file, or name of a bundled one.

    Raises:
        InputError: the plan was made for another cluster.
    """
    planned = plan.problem["cluster"]
    documents = load_problem(cluster, plan.problem["model"], plan.problem["job"]).documents
    asked, own = problem_hash(documents["cluster"]), problem_hash(planned)
    if asked != own:
        raise InputError(
            "the plan was made for another cluster than is to be emulated", cluster,
            found=f"{planned['name']} {own} in the plan",
            expected=f"{documents['cluster']['name']} {asked}: plan for it",
        )  # fmt: skip
    return str(planned["name"])


def check_steps(settings: RunSettings) -> None:
    """Refuse a run that ends before the scale is known.

    Args:
        settings: of the run, with the checkpoint that it goes on from.

    Raises:
        UsageError: no step is left behind those that find it.
    """
    done = read_index(Path(settings.resume)).steps if settings.resume else 0
    if settings.steps - done > CALIBRATION:
        return
    so_far = f", and {Path(settings.resume).name} has done {done} of them" if done else ""
    raise UsageError(
        f"--emulate needs more than {CALIBRATION} steps, which find its pace{so_far}; give --steps "
        f"of at least {done + CALIBRATION + 1}"
    )


def share_of(ranks: int, cores: int) -> float:
    """Return the share of a core that each rank may use.

    As many ranks as share the fullest core may want it at once, and all have the same share, so
    that their speeds keep their ratio.

    >>> share_of(2, 2), share_of(3, 2), share_of(4, 1)
    (1.0, 0.5, 0.25)
    """
    return 1 / -(-ranks // cores)


def emulation(plan: Plan, problem: Problem) -> Emulation:
    """Work out what is emulated of a plan.

    Args:
        plan, problem: that the runtime runs (see ``real_runtime.support``).

    Raises:
        UsageError: a chip takes no time for the whole plan, so nothing can be scaled.
    """
    layout = lay_out(plan, fold=False)
    prices = price(layout.graph, layout.wiring, plan, problem)
    passes, fastest, factors = _passes(layout, prices, plan, problem)
    messages, links, wires = _messages(layout, prices)
    run = simulate(plan, problem, steps=1 if plan.barrier else 8)
    pace = pace_of(spans_of_run(run), barrier=plan.barrier)
    return Emulation(
        passes=passes, messages=messages, links=links, wires=wires, fastest=fastest,
        factors=factors, step_s=pace.step_time_s,
    )  # fmt: skip


def _computed(prices: Prices) -> np.ndarray:
    """Seconds of every node without exchanges inside it, shape (N,)."""
    inner = sum(prices.inner_comm_s.values(), np.zeros(len(prices.seconds)))
    return np.asarray(prices.seconds - inner, np.float64)


def _passes(
    layout: Layout, prices: Prices, plan: Plan, problem: Problem
) -> tuple[dict[tuple[int, str], Pass], str, tuple[float, ...]]:
    """Compute ops, the chip type that takes least for all of them, mean factor of each rank."""
    graph, machine = layout.graph, problem.machine
    local = np.flatnonzero(graph.wire < 0)
    own = _computed(prices)[local]
    chips = plan.placement.chips or range(plan.placement.num_ranks)
    type_of = [n.accelerator for n in machine.nodes for _ in range(*n.chips)]
    kinds = dict.fromkeys(type_of[c] for c in chips)
    took = {}
    for name in kinds:
        same = _all_alike(problem, machine.accelerators[name])
        took[name] = _computed(price(graph, layout.wiring, plan, same, contention=False))[local]
    fastest = min(took, key=lambda name: float(took[name].sum()))
    if not took[fastest].sum() > 0:
        raise UsageError(f"{fastest} takes no time for this plan, so nothing can be emulated")
    some = took[fastest] > 0
    factor = np.ones(len(local))
    factor[some] = own[some] / took[fastest][some]
    # Where another chip is ahead in some op, e.g. in updates, that op sets the pace.
    factor[some] /= factor[some].min()
    inner = sum(prices.inner_comm_s.values(), np.zeros(graph.num_nodes))[local]
    actor = graph.actor[local].tolist()
    ranks = np.array([graph.actors[a].rank for a in actor])
    names = [
        f"{graph.actors[a].program}:{s}"
        for a, s in zip(actor, graph.static[local].tolist(), strict=True)
    ]
    rows = zip(ranks.tolist(), names, factor.tolist(), own.tolist(), inner.tolist(), strict=True)
    passes = {(rank, name): Pass(f, s, i) for rank, name, f, s, i in rows}
    weight = took[fastest]
    mean = [
        float(np.average(factor[ranks == r], weights=weight[ranks == r]))
        for r in range(plan.placement.num_ranks)
    ]
    return passes, fastest, tuple(mean)


def _all_alike(problem: Problem, chip: Accelerator) -> Problem:
    """The same problem with this chip in every place."""
    names = problem.machine.accelerators
    chips = {name: msgspec.structs.replace(chip, name=name) for name in names}
    machine = msgspec.structs.replace(problem.machine, accelerators=chips)
    return msgspec.structs.replace(problem, machine=machine)


def _messages(layout: Layout, prices: Prices) -> tuple[dict[Key, Message], int, int]:
    """Messages by key, and how many shared links and wires there are."""
    graph, wiring = layout.graph, layout.wiring
    links: dict[int, int] = {}
    wires: dict[Key, int] = {}
    seen: dict[Key, int] = defaultdict(int)
    found: dict[Key, Message] = {}
    for node in np.flatnonzero(graph.wire >= 0).tolist():
        op, over = graph.ops[node], graph.wires[graph.wire[node]]
        line: Key
        if over.end is not None:
            members = (over.end.src, over.end.dst)
            line = ("pair", *members, op.channel)
            stage = wiring.stage_of(op, over.end.src)
            key = message_key(line, op.kind, stage, op.mb, 0)
        else:
            members = over.group
            line = ("group", wiring.groups.index(members), op.channel)
            key = message_key(line, op.kind, op.stage, op.mb, seen[line])
            seen[line] += 1
        flows = []
        for flow in prices.flows.get(node, ()):
            at = tuple(links.setdefault(x, len(links)) for x, _ in flow.links)
            busy = tuple(weight * flow.nbytes / prices.link_rates[x] for x, weight in flow.links)
            flows.append(Flow(at, busy, max(flow.nbytes / flow.cap, *busy)))
        found[key] = Message(
            len(found), wires.setdefault(line, len(wires)), members, float(prices.seconds[node]),
            tuple(flows),
        )  # fmt: skip
    return found, len(links), len(wires)


def message_key(line: Key, kind: str, stage: int, mb: int, place: int) -> Key:
    """Return what a message is called by all of its members.

    Args:
        line: the wire, as ``Node.wire``. kind: of the op. stage: that sends, of a transfer.
        mb: its microbatch. place: of a collective in its wire's order.
    """
    if line[0] == "pair":
        return (*line, kind[-1], stage, mb)
    return (*line, place)
