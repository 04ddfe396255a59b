"""Experts balanced from step to step: their layers written out, experts lent by a balancer.

The routing is a table: written down (a trace), or drawn from the run's seed. A controller makes a
lending of it for every step, and says what the ops of the pass ``lend`` amount to.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import msgspec

from sim.cost.collective import places
from sim.errors import InputError
from sim.plan.draft import PlanDraft
from sim.plan.plan import Amount, Call, Table
from sim.problem import Problem
from strategies.base import Space, draft_or_default, fill
from strategies.expert import controllers
from strategies.expert.balancers import balancer_names
from strategies.expert.draft_costs import ExpertLayer, costs_of, expert_layers
from strategies.expert.layer_cost import costs_to_plain
from strategies.expert.link_cost import Topology
from strategies.expert.routing_synthetic import Popularity
from strategies.registry import register

__all__ = ["BALANCED", "Balanced", "BalancedKnobs", "controllers"]

ROUTING, LENT = "routing", "lent"
"""Names of the tables; a table "routing" that the draft has already stays."""


class BalancedKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``balanced``.

    Args:
        balancer: see strategies.expert.balancers; "none" lends nothing.
        slots: experts that a device has room for besides its own, in every layer. With 0 nothing
            is lent and no home changes, so "eplb" is refused.
        period: steps from one search to the next.
        overlap: transfers pass behind the layer before; else the layer waits for them.
        eager: so do those of the first layer, behind what lies before it; else it waits for them,
            as in Pro-Prophet.
        fresh: a step waits for a search on its own counts (blocking only); else it uses the one of
            the step before.
        alpha: of "pro-prophet": a layer is balanced where its fullest device has less than alpha
            mean loads more than its emptiest (eq. 7). The released code has 3, where little is ever
            lent on few devices; the paper names none.
        search_s: [s] that a search takes. The default is what LAER-MoE's planner takes for 64
            devices (0.49 to 1.75 ms, from the figures of its artifact), a stand-in for ours.
        popularity: of the experts, for routing that is drawn from the run's seed. The default is
            calibrated to a trace that LAER-MoE's artifact holds (16 experts, top 4, see
            strategies.expert.routing_calibrate).
        trace: file of counts instead, see strategies.expert.routing_files; "" for none.
    """

    balancer: str = "none"
    slots: Annotated[int, msgspec.Meta(ge=0)] = 2
    period: Annotated[int, msgspec.Meta(ge=1)] = 1
    overlap: bool = True
    eager: bool = False
    fresh: bool = False
    alpha: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    search_s: Annotated[float, msgspec.Meta(ge=0)] = 5e-4
    popularity: Popularity = Popularity(sigma=0.66, phi=0.947, step=0.2, concentration=144.0)
    trace: str = ""


class Balanced:
    """Lend experts where tokens are, for one step at a time."""

    name = "balanced"
    axis = "balance"
    paper = "Wang et al. 2024, arXiv:2411.10003 (Pro-Prophet), and the balancers' own"
    owns = frozenset({"passes", "tables", "amounts", "expert.inlined"})
    adds = owns - {"expert.inlined"}
    builds_on = ("expert",)
    knobs = BalancedKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[BalancedKnobs]:
        """No lending, and three balancers, where experts are spread over replicas."""
        given = draft_or_default(problem, draft)
        why = _refused(problem, given)
        if why:
            return Space((), why)
        return Space(
            (
                BalancedKnobs(),
                BalancedKnobs(balancer="fastermoe", overlap=False, fresh=True),
                BalancedKnobs(balancer="pro-prophet"),
                BalancedKnobs(balancer="spread", eager=True),
                BalancedKnobs(balancer="spread", eager=True, period=4),
            )
        )

    def apply(self, problem: Problem, draft: PlanDraft, knobs: BalancedKnobs) -> PlanDraft:
        """Add the pass, its tables and what a search amounts to.

        Raises:
            InputError: knobs out of range, a draft whose experts are not spread, or a trace of
                other layers.
        """
        given = draft_or_default(problem, draft)
        why = _refused(problem, given) or _misfit(knobs)
        if why:
            raise InputError(
                why, key=self.name, found=str(knobs), expected="another draft or other knobs"
            )
        layers = expert_layers(problem, given)
        costs, relayed = _costs(problem, given, layers, knobs)
        search = _search(problem, given, knobs)
        lends = knobs.balancer != "none" and knobs.slots > 0
        args = {
            "experts": {layer.segment: layer.key for layer in layers},
            "table": LENT,
            "relayed": relayed,
            "slots": knobs.slots if lends else 0,
            "overlap": knobs.overlap,
            "eager": knobs.eager,
            "search": LENT if lends and search else "",
            "fresh": knobs.fresh,
        }
        routing = given.tables.get(ROUTING) or _routing(problem, given, layers, knobs)
        return fill(
            given,
            self.name,
            knobs,
            expert=msgspec.structs.replace(given.expert, inlined=True),
            passes=(*given.passes, Call("lend", 1, args)),
            tables=given.tables | {ROUTING: routing, LENT: _lent(problem, given, knobs, costs)},
            amounts=given.amounts | ({"search": search} if lends and search else {}),
            assumptions=(*given.assumptions, *_assumed(knobs, lends, search is not None)),
        )


def _refused(problem: Problem, draft: PlanDraft) -> str:
    """Why a draft has no experts to balance, "" when it has."""
    blocks = [b for b in problem.model.blocks if b.num_experts]
    if not blocks:
        return "the model has no routed experts"
    if draft.expert.ep == 1:
        return "experts that every replica holds need no balance; spread them with ep"
    if any(t.block == b.name for t in problem.model.times for b in blocks):
        return "blocks with experts that are measured whole cannot be written out"
    return ""


def _misfit(knobs: BalancedKnobs) -> str:
    if knobs.balancer not in balancer_names():
        return f"no balancer {knobs.balancer}; there are " + " ".join(balancer_names())
    if knobs.fresh and knobs.overlap:
        return "what passes behind the layer before cannot wait for the counts of its own"
    if knobs.balancer == "eplb" and not knobs.slots:
        return "eplb moves experts between devices, so it needs slots"
    return ""


def _copies(problem: Problem, draft: PlanDraft) -> dict[str, int]:
    """Routed copies that each source sends in a layer: of a microbatch, and of a step."""
    block = next(b for b in problem.model.blocks if b.num_experts)
    cp = draft.cells[0].cp
    one = draft.pipeline.microbatch * problem.job.sequence_length * block.top_k // cp
    return {"microbatch": one, "step": one * draft.data.microbatches[0]}


def _costs(
    problem: Problem, draft: PlanDraft, layers: tuple[ExpertLayer, ...], knobs: BalancedKnobs
) -> tuple[dict[str, Any], bool]:
    """Costs of the layers, equal ones once, and whether tokens may change devices on their way."""
    plain: list[dict[str, Any]] = []
    number: dict[str, int] = {}
    relayed = False
    for layer in layers:
        costs = costs_of(problem, draft, layer, knobs.search_s)
        relayed |= isinstance(costs.links, Topology) and costs.links.rail.size > 0
        one = msgspec.json.decode(msgspec.json.encode(costs_to_plain(costs)))
        if one not in plain:
            plain.append(one)
        number[layer.key] = plain.index(one)
    return {"costs": plain, "layers": number}, relayed


def _lent(problem: Problem, draft: PlanDraft, knobs: BalancedKnobs, costs: dict[str, Any]) -> Table:
    block = next(b for b in problem.model.blocks if b.num_experts)
    expert = block.params_experts / block.num_experts / draft.cells[0].tp
    lends = knobs.slots > 0
    return Table(
        origin="controller",
        controller="lend-experts",
        inputs=(ROUTING, f"{LENT}@1"),
        parameters={
            "balancer": knobs.balancer if lends else "none",
            "options": _options(knobs) if lends else {},
            "budget": knobs.slots,
            "period": knobs.period,
            "fresh": knobs.fresh,
            "tokens": float(_copies(problem, draft)["microbatch"]),
            "state_bytes": expert * problem.job.optimizer_bytes,
            "experts": block.num_experts,
            "devices": draft.expert.ep,
            **costs,
        },
    )


def _options(knobs: BalancedKnobs) -> dict[str, Any]:
    """Keywords of the balancers that know of schedules, and of a balance that is good enough."""
    found: dict[str, Any] = {}
    if knobs.balancer in ("pro-prophet", "spread"):
        found["scheduled"] = knobs.overlap
    if knobs.balancer == "pro-prophet":
        found["alpha"] = knobs.alpha
    return found


def _routing(
    problem: Problem, draft: PlanDraft, layers: tuple[ExpertLayer, ...], knobs: BalancedKnobs
) -> Table:
    experts, ep = problem.model.blocks[layers[0].block].num_experts, draft.expert.ep
    keys = [layer.key for layer in layers]
    if not knobs.trace:
        usual = msgspec.structs.asdict(Popularity())
        stated = msgspec.structs.asdict(knobs.popularity)
        numbers = {k: v for k, v in stated.items() if v != usual[k]}
        size = {"experts": experts, "sources": ep, "tokens": _copies(problem, draft)["step"]}
        parameters = {"keys": keys, **size, **numbers}
        return Table(origin="generator", generator="moe-routing", parameters=parameters)
    from strategies.expert.routing import for_sources
    from strategies.expert.routing_files import load_routing

    counts = for_sources(load_routing(knobs.trace), ep).counts
    if counts.shape[1:3] != (len(keys), experts):
        raise InputError(
            "the trace is of another model",
            key="balanced.trace",
            found=f"{counts.shape[1]} layers of {counts.shape[2]} experts",
            expected=f"{len(keys)} layers of {experts} experts",
        )
    return Table(values={key: counts[:, i].tolist() for i, key in enumerate(keys)})


def _search(problem: Problem, draft: PlanDraft, knobs: BalancedKnobs) -> Amount | None:
    """What a search amounts to on the host; None where nothing is known of processors.

    All ranks of a stage on a node search at once, each with its share of the node's processors.
    """
    machine, where = problem.machine, places(problem.machine).node
    beside = Counter((cell.stage, where[c]) for cell in draft.cells for c in cell.chips)
    hosts = [machine.nodes[node].host for _, node in beside]
    if any(h.memory_bytes_per_s <= 0 or h.flops_per_s <= 0 for h in hosts) or not knobs.search_s:
        return None
    rate = min(h.memory_bytes_per_s for h in hosts)
    return Amount(nbytes=knobs.search_s * rate / max(beside.values()))


def _assumed(knobs: BalancedKnobs, lends: bool, searches: bool) -> tuple[str, ...]:
    found = ["every microbatch and every expert-parallel group routes as the step's counts say"]
    if lends and searches:
        found.append(f"a search for where to lend experts takes {1e3 * knobs.search_s:g} ms")
    elif lends:
        found.append("a search for where to lend experts takes no time")
    return tuple(found)


BALANCED = register(Balanced())
