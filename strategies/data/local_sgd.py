"""Local SGD and DiLoCo: workers take H steps of their own, then exchange the way they went.

A worker is a site, or some consecutive replicas: inside it replicas sum their gradients in every
step. Between workers the difference of the parameters crosses the wire once per round, quantised
if wanted, in fragments in turn and behind the next steps if wanted (streaming DiLoCo). Replicas
that share experts belong to one worker; what a worker updates on its host, it also exchanges and
updates from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec

from sim.errors import InputError
from sim.model.amounts import rank_params
from sim.model.graph import Block
from sim.plan.draft import PlanDraft
from sim.plan.placement import Segment
from sim.plan.plan import Amount, Call
from sim.problem import Problem
from strategies.base import Space, divisors, draft_or_default, fill
from strategies.registry import register

__all__ = ["LOCAL_SGD", "LocalKnobs", "LocalSgd"]

ANCHOR = 4.0
"""[B] per parameter of the shared parameters that a round starts from, and of their momentum."""


class LocalKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``local_sgd``.

    Args:
        inner: [steps] H between two exchanges of a parameter; 0 for none of one's own.
        workers: how many, of equally many replicas; 0 makes every site one.
        bits: per element of an exchange on the wire.
        fragments: of the parameters, exchanged in turn at equal distances within H steps.
        overlap: an exchange runs behind the steps that follow it and is used when the next one
            leaves, H / fragments steps late; otherwise everybody waits for it.
        momentum: the outer update keeps one (Nesterov in DiLoCo).
    """

    inner: int = 0
    workers: int = 0
    bits: Literal[4, 8, 16, 32] = 32
    fragments: int = 1
    overlap: bool = False
    momentum: bool = True


class LocalSgd:
    """Rounds of local steps with an outer update."""

    name = "local_sgd"
    axis = "updates"
    paper = "Douillard et al. 2023, arXiv:2311.08105; streaming: arXiv:2501.18512"
    owns = frozenset({"passes", "barrier", "exact", "reason", "amounts", "data.workers"})
    adds = owns - {"data.workers"}
    knobs = LocalKnobs

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[LocalKnobs]:
        """Rounds of some lengths where the job allows inexact plans; else no rounds at all."""
        given = draft_or_default(problem, draft)
        values = [LocalKnobs()]
        if problem.job.limits.allow_inexact:
            sites = len(_sites(problem, given))
            workers = 0 if sites > 1 else _fewest(given)
            ways = (
                LocalKnobs(workers=workers),
                LocalKnobs(workers=workers, overlap=True),
                LocalKnobs(workers=workers, overlap=True, bits=8, fragments=4),
            )
            values += [msgspec.structs.replace(way, inner=h) for h in (8, 32) for way in ways]
        return Space(tuple(k for k in values if not _refused(problem, given, k)))

    def apply(self, problem: Problem, draft: PlanDraft, knobs: LocalKnobs) -> PlanDraft:
        """Say who is a worker, add the pass and what an exchange amounts to.

        Raises:
            InputError: knobs out of range, or a draft whose replicas cannot step by themselves.
        """
        given = draft_or_default(problem, draft)
        why, near = _refused(problem, given, knobs), _near(knobs)
        if why:
            raise InputError(why, key="local_sgd", found=str(knobs), expected=near)
        if not knobs.inner:
            return fill(given, self.name, knobs)
        workers = _workers(problem, given, knobs)
        states = ANCHOR * (1 + knobs.momentum)
        if knobs.overlap:
            states += knobs.bits / 8 / knobs.fragments
        args = {
            "inner": knobs.inner // knobs.fragments,
            "overlap": knobs.overlap,
            "outer_bytes": states,
        }
        return fill(
            given,
            self.name,
            knobs,
            data=msgspec.structs.replace(given.data, workers=workers),
            passes=(*given.passes, Call("local_steps", 1, args)),
            barrier=not knobs.overlap,
            exact=False,
            reason="; ".join(r for r in (given.reason, _reason(knobs, len(workers))) if r),
            amounts=given.amounts | _amounts(problem, given, knobs),
            assumptions=(*given.assumptions, _STEP.format(args["inner"])),
        )


_STEP = "a step of the plan is {} steps of every worker and one exchange"


def _reason(knobs: LocalKnobs, workers: int) -> str:
    text = f"{workers} workers take {knobs.inner} steps of their own between exchanges"
    if knobs.overlap:
        text += f", which are used {knobs.inner // knobs.fragments} steps late"
    return text + (f", {knobs.bits} bits an element" if knobs.bits < 32 else "")


def _amounts(problem: Problem, draft: PlanDraft, knobs: LocalKnobs) -> dict[str, Amount]:
    """Of one fragment of each stage: bytes on the wire, and memory traffic before and after it.

    The way is the shared parameters less the worker's; the outer update reads it, and reads and
    writes shared parameters and momentum and writes the worker's parameters.
    """
    blocks, cuts = problem.model.blocks, draft.pipeline.cuts
    element, own = knobs.bits / 8, float(problem.job.param_bytes)
    shards, ep = max(c.tp for c in draft.cells), draft.expert.ep
    way = ANCHOR + own + element
    outer = element + 2 * ANCHOR * (1 + knobs.momentum) + own

    def params(of: Sequence[Block]) -> float:
        return sum(rank_params(of, shards, ep)) / knobs.fragments

    found = {}
    for stage, (a, b) in enumerate(itertools.pairwise(cuts or (0, len(blocks)))):
        dense, experts = rank_params(blocks[a:b], shards, ep)
        alike = dense if ep > 1 else dense + experts
        found[f"exchange{stage}"] = Amount(nbytes=alike / knobs.fragments * element)
        if ep > 1 and experts:
            found[f"experts{stage}"] = Amount(nbytes=experts / knobs.fragments * element)
        found[f"way{stage}"] = Amount(nbytes=params(blocks[a:b]) * way)
        found[f"outer{stage}"] = Amount(nbytes=params(blocks[a:b]) * outer)
        mine = [s for s in draft.offload.segments if s.stage == stage]
        away = _blocks(blocks, [s for s in mine if "optimizer" in s.offload])
        if away:
            stay = _blocks(blocks, [s for s in mine if "optimizer" not in s.offload])
            back = [s for s in mine if s.offload and "parameters" not in s.offload]
            found[f"way{stage}.chip"] = Amount(nbytes=params(stay) * way)
            found[f"way{stage}.host"] = Amount(nbytes=params(away) * way)
            found[f"exchange{stage}.host"] = Amount(nbytes=params(away) * element)
            found[f"outer{stage}.chip"] = Amount(nbytes=params(stay) * outer)
            found[f"outer{stage}.host"] = Amount(nbytes=params(away) * outer)
            found[f"back{stage}"] = Amount(nbytes=params(_blocks(blocks, back)) * own)
    return found


def _blocks(blocks: Sequence[Block], segments: Sequence[Segment]) -> list[Block]:
    return [b for s in segments for b in blocks[s.blocks[0] : s.blocks[1]]]


def _replica_sites(problem: Problem, draft: PlanDraft) -> list[str]:
    """Site of each replica, "" for one on several."""
    site = [n.site for n in problem.machine.nodes for _ in range(*n.chips)]
    of: dict[int, set[str]] = {}
    for cell in draft.cells:
        of.setdefault(cell.replica, set()).update(site[c] for c in cell.chips)
    return [s.pop() if len(s) == 1 else "" for _, s in sorted(of.items())]


def _sites(problem: Problem, draft: PlanDraft) -> list[int]:
    """Consecutive replicas on one site."""
    return [len(list(run)) for _, run in itertools.groupby(_replica_sites(problem, draft))]


def _fewest(draft: PlanDraft) -> int:
    """Smallest number of workers above one that the replicas divide into."""
    found = [d for d in divisors(1 + max(c.replica for c in draft.cells)) if d > 1]
    return found[0] if found else 0


def _workers(problem: Problem, draft: PlanDraft, knobs: LocalKnobs) -> tuple[int, ...]:
    if not knobs.workers:
        return tuple(_sites(problem, draft))
    replicas = 1 + max(c.replica for c in draft.cells)
    return (replicas // knobs.workers,) * knobs.workers


def _near(knobs: LocalKnobs) -> str:
    if knobs.fragments > 1 and knobs.inner % max(knobs.fragments, 1):
        return f"fragments of {_listed(divisors(max(knobs.inner, 1)))}"
    return "another draft or other knobs"


def _listed(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _refused(problem: Problem, draft: PlanDraft, knobs: LocalKnobs) -> str:
    """Why a draft does not go with the knobs, "" when it does."""
    if knobs.inner < 0 or knobs.workers < 0 or knobs.fragments < 1:
        return "steps and workers are at least 0, fragments at least 1"
    if not knobs.inner:
        return ""
    if knobs.inner % knobs.fragments:
        return "fragments must leave at equal distances within the steps of a round"
    replicas = 1 + max(c.replica for c in draft.cells)
    if knobs.workers and replicas % knobs.workers:
        return f"{knobs.workers} workers do not divide {replicas} replicas"
    if not knobs.workers and "" in _replica_sites(problem, draft):
        return "a replica spans sites, so a site is no worker; say how many workers"
    if not knobs.workers and len(set(_replica_sites(problem, draft))) < len(_sites(problem, draft)):
        return "replicas of a site do not stand next to each other; say how many workers"
    if len(_workers(problem, draft, knobs)) < 2:
        return "one worker has nobody to exchange with; say how many workers"
    if any(n % draft.expert.ep for n in _workers(problem, draft, knobs)):
        return f"groups of {draft.expert.ep} replicas that share experts span workers"
    if draft.data.zero:
        return "ZeRO shares states between replicas that step by themselves"
    return ""


LOCAL_SGD = register(LocalSgd())
