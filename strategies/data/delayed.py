"""Delayed SGD: gradients that arrive late, at parameter servers or behind a late all-reduce.

The delay is an outcome: workers that pull, compute and push at their own pace on the machine's
links. What a server does with a late gradient by arithmetic (a smaller step, leaving it out) is
no matter of time; ``rule_of`` hands it to the co-simulation.
"""

from __future__ import annotations

import itertools
from math import lcm
from typing import Any

from sim.cost.host_links import update_bytes
from sim.errors import InputError
from sim.model.amounts import rank_params
from sim.model.graph import Block
from sim.plan.draft import PlanDraft
from sim.plan.plan import Amount, Call
from sim.problem import Problem
from strategies.base import Space, draft_or_default, fill
from strategies.data.cosim import Rule
from strategies.data.delayed_knobs import RULES, DelayedKnobs, misplaced
from strategies.registry import register

__all__ = ["DELAYED", "DelayedKnobs", "DelayedSgd", "rule_of"]


def rule_of(
    knobs: DelayedKnobs, rate: float, *, smoothness: float | None = None, compensation: float = 0.04
) -> Rule:
    """The arithmetic of the knobs' rule, for strategies.data.cosim.

    Args:
        knobs: whose rule. rate: eta. smoothness: largest curvature, for "capped".
        compensation: lambda of "compensated"; 0.04 is DC-ASGD's usual order (remembered).
    """
    return Rule(
        rate=rate,
        scaled=knobs.rule == "scaled",
        smoothness=smoothness if knobs.rule == "capped" else None,
        tau_max=knobs.bound if knobs.rule == "capped" else None,
        drop_above=knobs.bound if knobs.rule == "drop" else None,
        compensation=compensation if knobs.rule == "compensated" else 0.0,
    )


class DelayedSgd:
    """Asynchronous SGD on parameter servers, and all-reduce applied late."""

    name = "delayed_sgd"
    axis = "updates"
    paper = "Deng et al. 2023, arXiv:2308.09430"
    owns = frozenset({"passes", "barrier", "servers", "exact", "reason", "amounts"})
    knobs = DelayedKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[DelayedKnobs]:
        """Both variants where the job allows inexact plans; else only what delays nothing."""
        given = draft_or_default(problem, draft)
        values = [DelayedKnobs()]
        if problem.job.limits.allow_inexact:
            values += [DelayedKnobs(tau=tau) for tau in (1, 2, 4)]
            values += [
                DelayedKnobs(variant="server", place=place, shards=shards)
                for place in ("host", "chip")
                for shards in (_parts(given), 2 * _parts(given))
            ]
            values.append(DelayedKnobs(variant="server", rule="ssp", bound=1))
        return Space(tuple(k for k in values if not _refused(problem, given, k)))

    def apply(self, problem: Problem, draft: PlanDraft, knobs: DelayedKnobs) -> PlanDraft:
        """Add the pass, the servers, and what messages and updates amount to.

        Raises:
            InputError: knobs out of range, or a draft that this variant does not carry.
        """
        given = draft_or_default(problem, draft)
        why = _refused(problem, given, knobs)
        if why:
            raise InputError(
                why, key=f"delayed_sgd.{knobs.variant}", expected="another draft or other knobs"
            )
        if knobs.variant == "allreduce":
            if not knobs.tau:
                return fill(given, self.name, knobs)
            late = {"variant": "allreduce", "tau": knobs.tau, "late_gradients": knobs.tau}
            reason = f"every gradient is applied {knobs.tau} steps late"
            return fill(
                given,
                self.name,
                knobs,
                passes=(*given.passes, Call("delayed", 1, late)),
                barrier=False,
                exact=False,
                reason=_why(reason, knobs),
                assumptions=(*given.assumptions, _UNDRAINED.format(tau=knobs.tau)),
            )
        shards = knobs.shards or _parts(given)
        stages = _stages(problem, given)
        servers = _chips(problem, given, knobs, shards * len(stages))
        workers = 1 + max(c.replica for c in given.cells)
        args: dict[str, Any] = {
            "variant": "server",
            "shards": shards,
            "reads": "current" if knobs.current else "latest",
            "remote_optimizer": True,
        }
        if knobs.place == "chip":
            args["stream"] = "compute"
        if knobs.rule == "ssp":
            args["slack"] = knobs.bound
        return fill(
            given,
            self.name,
            knobs,
            passes=(*given.passes, Call("delayed", 1, args)),
            barrier=False,
            servers=servers,
            exact=False,
            reason=_why(
                f"gradients of {workers} workers are applied as they arrive, late by what others "
                "wrote meanwhile",
                knobs,
            ),
            amounts=given.amounts | _amounts(problem, stages, shards),
            assumptions=(*given.assumptions, _HELD),
        )


_HELD = "a server's memory is counted with one gradient, not with those that wait behind it"
_UNDRAINED = "the last {tau} gradients of a run are not applied: training goes on behind it"


def _why(text: str, knobs: DelayedKnobs) -> str:
    return f"{text} {RULES[knobs.rule]}".strip()


def _parts(draft: PlanDraft) -> int:
    return lcm(*(c.tp for c in draft.cells))


def _stages(problem: Problem, draft: PlanDraft) -> list[tuple[Block, ...]]:
    """Blocks of each virtual stage."""
    blocks = problem.model.blocks
    cuts = draft.pipeline.cuts or (0, len(blocks))
    return [blocks[a:b] for a, b in itertools.pairwise(cuts)]


def _amounts(problem: Problem, stages: list[tuple[Block, ...]], shards: int) -> dict[str, Amount]:
    """Bytes of one part: its gradient and its parameters on the wire, its update in memory."""
    job, found = problem.job, {"request": Amount()}
    for stage, blocks in enumerate(stages):
        params = sum(rank_params(blocks)) / shards
        found[f"gradient{stage}"] = Amount(nbytes=params * job.gradient_bytes)
        found[f"parameters{stage}"] = Amount(nbytes=params * job.param_bytes)
        found[f"update{stage}"] = Amount(nbytes=params * update_bytes(job))
    return found


def _chips(problem: Problem, draft: PlanDraft, knobs: DelayedKnobs, count: int) -> tuple[int, ...]:
    """Chip of each server; those of one node sit beside its chips in turn, for its NICs."""
    if knobs.place == "chip":
        return (knobs.at or _free(problem, draft))[:count]
    nodes = [problem.machine.nodes[n] for n in knobs.at or (0,)]
    found = []
    for k in range(count):
        node, turn = nodes[k % len(nodes)], k // len(nodes)
        first, last = node.chips
        found.append(first + turn % (last - first))
    return tuple(found)


def _free(problem: Problem, draft: PlanDraft) -> tuple[int, ...]:
    used = {c for cell in draft.cells for c in cell.chips}
    return tuple(c for c in range(problem.machine.num_chips) if c not in used)


def _refused(problem: Problem, draft: PlanDraft, knobs: DelayedKnobs) -> str:
    """Why the variant does not carry a draft, "" when it does."""
    replicas = 1 + max(c.replica for c in draft.cells)
    why = misplaced(knobs)
    if why:
        return why
    if knobs.variant == "allreduce":
        if knobs.tau and replicas == 1:
            return "one replica reduces nothing that could be late"
        if knobs.tau and draft.data.zero:
            return "ZeRO gathers what a late update would still change"
        return ""
    if any(c.cp > 1 for c in draft.cells):
        return "context-parallel ranks must add their gradients up before a push"
    if draft.expert.ep > 1:
        return "experts spread over replicas bind the workers to one another"
    if draft.data.zero:
        return "the servers hold the optimizer states; ZeRO has none to share"
    several = len({c.stage for c in draft.cells}) > 1
    if several and any(b.shares for b in problem.model.blocks):
        return "a tied embedding on two positions would be written by two servers"
    return _refused_servers(problem, draft, knobs)


def _refused_servers(problem: Problem, draft: PlanDraft, knobs: DelayedKnobs) -> str:
    shards, parts = knobs.shards or _parts(draft), _parts(draft)
    if shards < 1 or shards % parts:
        return f"{shards} parts do not go into tensor-parallel ranks; take a multiple of {parts}"
    machine = problem.machine
    if knobs.place == "host":
        wrong = [n for n in knobs.at if not 0 <= n < len(machine.nodes)]
        if wrong:
            return f"the machine has no node {wrong[0]}, only 0 to {len(machine.nodes) - 1}"
        used = {c for cell in draft.cells for c in cell.chips}
        for n in set(knobs.at or (0,)):
            node = machine.nodes[n]
            if node.pcie_rate <= 0 and used & set(range(*node.chips)):
                return f"node {n} has workers and no link between them and its host memory"
        return ""
    needed, free = shards * len(_stages(problem, draft)), _free(problem, draft)
    taken = [c for c in knobs.at if c not in free]
    if taken:
        return f"chip {taken[0]} is used by a worker, or not there"
    twice = [c for c in knobs.at if knobs.at.count(c) > 1]
    if twice:
        return f"chip {twice[0]} would have two servers"
    there = len(knobs.at or free)
    if there < needed:
        return f"{needed} servers need chips of their own, {there} are there"
    if len(knobs.at) > needed:
        return f"{len(knobs.at)} chips are named for {needed} servers"
    return ""


DELAYED = register(DelayedSgd())
