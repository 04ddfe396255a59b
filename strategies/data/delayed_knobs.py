"""Knobs of ``delayed_sgd``, and which of them go together."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["RULES", "DelayedKnobs", "misplaced"]

Variant = Literal["allreduce", "server"]
Place = Literal["host", "chip"]
UpdateRule = Literal["constant", "scaled", "capped", "drop", "compensated", "ssp"]
RULES = {
    "constant": "",
    "scaled": "with the step divided by 1 + delay",
    "capped": "with the step capped for the largest delay",
    "drop": "and are left out beyond a bound",
    "compensated": "and are corrected for the delay",
    "ssp": "and who leads the slowest worker too far waits",
}


class DelayedKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of ``delayed_sgd``.

    Args:
        variant: "allreduce" applies a reduced gradient ``tau`` steps late; "server" lets every
            replica pull, compute and push at its own pace.
        tau: [steps] of the all-reduce variant; 0 is ordinary data parallelism.
        place: servers are processes of nodes, or have chips of their own.
        at: node of each server in turn, or its chip; () for node 0, or the first free chips.
        shards: parts of each stage's parameters, each with its own server; 0 for as few as the
            tensor-parallel sizes admit. A multiple of each of them.
        current: an answer takes the parameters that are written when it starts; otherwise it waits
            until every gradient that arrived before it is applied.
        rule: what a server does with a late gradient; "ssp" (stale synchronous parallel) holds a
            worker back instead while it leads the slowest one by more than ``bound``.
        bound: [updates] of "capped", "drop" and "ssp".
    """

    variant: Variant = "allreduce"
    tau: int = 0
    place: Place = "host"
    at: tuple[int, ...] = ()
    shards: int = 0
    current: bool = False
    rule: UpdateRule = "constant"
    bound: int = 0


_OF_SERVERS = ("place", "at", "shards", "current")


def misplaced(knobs: DelayedKnobs) -> str:
    """Say which knob this variant or rule does not hear or cannot follow, "" for none."""
    rest, bounded = DelayedKnobs(), knobs.rule in ("capped", "drop", "ssp")
    if not bounded and knobs.bound != rest.bound:
        return f"bound = {knobs.bound} says nothing to the rule {knobs.rule}"
    if knobs.bound < 0:
        return f"a bound is at least 0 updates, not {knobs.bound}"
    if knobs.variant == "server":
        late = f"tau = {knobs.tau} is for an all-reduce; the delay of servers is an outcome"
        return late if knobs.tau != rest.tau else ""
    for name in _OF_SERVERS:
        if getattr(knobs, name) != getattr(rest, name):
            return f"{name} = {getattr(knobs, name)} is for servers; an all-reduce has none"
    if knobs.tau < 0:
        return f"a delay is at least 0 steps, not {knobs.tau}"
    if knobs.rule == "ssp":
        return "an all-reduce keeps its replicas in step; ssp is for servers"
    if knobs.rule != "constant" and not knobs.tau:
        return f"rule = {knobs.rule} is for late gradients; with tau = 0 none is"
    if bounded and knobs.tau > knobs.bound:
        lost = "drops every gradient" if knobs.rule == "drop" else "caps for less than the delay"
        return f"a bound of {knobs.bound} below tau = {knobs.tau} {lost}"
    return ""
