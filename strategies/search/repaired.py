"""Offloaded plans of a search, and how the search over them went."""

from __future__ import annotations

from collections import Counter

import msgspec

from sim.engine.simulate import Run
from strategies.search.finalists import Contender
from strategies.search.hosted import Shortfall
from strategies.search.relax import Relaxed, Structure
from strategies.search.result import Finalist

__all__ = ["Offloaded", "Repaired"]


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """An offloaded plan that fits.

    Args:
        finalist: with the relaxed estimate, and the time between steps by the engine.
        contender: its draft and structure. run: of its plan, ``STEPS`` steps.
        structure: what was repaired.
    """

    finalist: Finalist
    contender: Contender
    run: Run
    structure: Structure


class Offloaded(msgspec.Struct, kw_only=True):
    """What the search over offloaded plans came to; filled while it runs.

    Attributes:
        found: plans, best first. relaxed: the relaxed searches.
        tried, skipped: structures repaired or found too large, and cut by their bound.
            left: not looked at for want of time.
        refused: why structures cannot be offloaded -> how many. extremes: why the planner did not
            look between all and nothing on the host -> how many drafts.
        short: the smallest shortfall with all layers on the host. stopped: before its end.
        proven: structures of which nothing on the host is faster than the best plan found.
    """

    found: list[Repaired] = []
    relaxed: Relaxed = msgspec.field(default_factory=Relaxed)
    tried: int = 0
    skipped: int = 0
    left: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    extremes: Counter[str] = msgspec.field(default_factory=Counter)
    short: Shortfall | None = None
    stopped: bool = False
    proven: set[bytes] = set()

    @property
    def is_proven(self) -> bool:
        """Whether the best plan is the fastest of its structure."""
        return bool(self.found) and self.found[0].contender.structure in self.proven

    @property
    def notes(self) -> tuple[str, ...]:
        """What was tried and what could not be, in words."""
        words = f"offloading: {self.tried} structure{'s' * (self.tried != 1)} planned"
        words += f", {self.skipped} cut by bounds" if self.skipped else ""
        words += f", {self.left} left for want of time" if self.left else ""
        refused = [f"not offloaded, {n} of them: {why}" for why, n in self.refused.most_common(3)]
        more = []
        if self.found and not self.is_proven:
            more.append("offloading: what lives on the host is not proven best")
        if self.found:
            best = self.found[0].finalist
            steady = best.score / self.found[0].structure.price
            if steady > best.step_time_s * (1 + 1e-6):
                more.append(
                    f"offloading: queues of the host still fill in the steps simulated; steady "
                    f"steps take at least {steady:.4g} s"
                )
        between = [
            f"all layers or none on the host, {n} times: {why}"
            for why, n in self.extremes.most_common(1)
        ]
        return (words, *refused, *between, *more)
