"""Offloaded plans as the result of a search: alone where nothing else fits, or in competition."""

from __future__ import annotations

import msgspec

from sim.errors import InfeasibleError
from sim.problem import Problem
from strategies.search.finalists import next_best
from strategies.search.hosted import Shortfall, busiest_stream, hosted_stages
from strategies.search.repaired import Offloaded, Repaired
from strategies.search.result import OffloadFacts, SearchResult

__all__ = ["competing", "rescued", "still_infeasible"]


def rescued(
    problem: Problem,
    state: Offloaded,
    error: InfeasibleError,
    short_bytes: float,
    zero: int | None = None,
) -> SearchResult:
    """The best offloaded plan of a problem on which nothing else fits.

    Args:
        problem: see there. state: with at least one plan. error: why nothing else fits.
        short_bytes: [B] that the closest plan lacks without offloading, 0 if it is not memory.
        zero: pinned stage; above 1 it is only planned here.
    """
    if zero is not None and zero > 1:
        return _result(problem, state, f"ZeRO {zero} is planned here only", state.notes)
    why = "nothing fits without offloading"
    if short_bytes > 0:
        why += f": short by {short_bytes / 1e9:.2f} GB"
    return _result(problem, state, why, (f"without offloading: {error}", *state.notes))


def competing(found: SearchResult, state: Offloaded) -> SearchResult:
    """The better of a plan and the best offloaded one, with the effort of both searches."""
    plain = found.finalists[0]
    if not state.found or state.found[0].finalist.score >= plain.score:
        joined = found
        words = f"none is found that beats {plain.step_time_s:.4g} s"
        notes = (f"offloaded plans: {words}", *state.notes)
    else:
        gain = 100 * (1 - state.found[0].finalist.score / plain.score)
        why = f"{gain:.1f} % better than without offloading ({plain.plan.name})"
        joined = _result(found.problem, state, why, state.notes)
        finalists = sorted((*joined.finalists, *found.finalists), key=lambda f: f.score)
        joined = msgspec.structs.replace(joined, finalists=tuple(finalists))
        notes = joined.notes
    return msgspec.structs.replace(
        joined,
        notes=notes,
        space=found.space + state.relaxed.space,
        evaluated=found.evaluated + state.relaxed.evaluated,
        exact=found.exact + state.relaxed.exact,
        pruned=found.pruned,
        stopped=found.stopped or state.stopped,
    )


def _result(problem: Problem, state: Offloaded, why: str, notes: tuple[str, ...]) -> SearchResult:
    best: Repaired = state.found[0]
    relaxed = state.relaxed
    facts = OffloadFacts(why=why, stages=hosted_stages(best.finalist.plan), proven=state.is_proven)
    played = [(r.finalist, r.contender) for r in state.found]
    return SearchResult(
        problem=problem,
        plan=best.finalist.plan,
        run=best.run,
        finalists=tuple(f for f, _ in played),
        space=relaxed.space,
        evaluated=relaxed.evaluated,
        exact=relaxed.exact,
        pruned={},
        wall_s=0.0,
        bound_s=min(s.bound_s for s in relaxed.structures),
        plan_bound_s=best.structure.bound_s,
        whole=False,
        stopped=state.stopped,
        binding=busiest_stream(best.run),
        next_best=next_best(played),
        offload=facts,
        notes=notes,
        draft=best.contender.draft,
    )


def still_infeasible(error: InfeasibleError, state: Offloaded) -> InfeasibleError:
    """The error when not even offloading fits: what accelerators and hosts lack, or why it cannot.

    Args:
        error: without offloading. state: without a plan.
    """
    if state.short is not None:
        message = (
            f"{error.message}; with all layers on the host the closest ({state.short.plan}) still "
            f"lacks {_lacks(state.short)}"
        )
        host = f"host memory of {state.short.host}" if state.short.host_bytes else ""
        return InfeasibleError(message, " and ".join(t for t in (error.binding, host) if t))
    if state.refused:
        reasons = "; ".join(why for why, _ in state.refused.most_common(2))
        return InfeasibleError(f"{error.message}; not offloaded: {reasons}", error.binding)
    return error


def _lacks(short: Shortfall) -> str:
    parts = []
    if short.chip_bytes:
        parts.append(f"{short.chip_bytes / 1e9:.2f} GB of accelerator memory on {short.chip}")
    if short.host_bytes:
        parts.append(f"{short.host_bytes / 1e9:.2f} GB of host memory on {short.host}")
    return " and ".join(parts)
