"""Stale synchronous parallel: how far the senders of a serving rank are, and who must wait.

A sender's clock is the number of its writes that arrived. A PULL is taken up when the clock of its
sender leads that of the slowest other by no more than the slack (Ho et al. 2013, section 2). A
sender that has sent all its writes, or whose chips are lost, holds nobody back: who is gone is
known at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

__all__ = ["Clocks"]


class Clocks:
    """Clocks of the senders of one rank.

    Args:
        slack: [writes] of lead that is allowed. totals: writes that each sender will send.
        death: sender -> [s] when its chips are lost.
    """

    def __init__(self, slack: int, totals: Mapping[int, int], death: Mapping[int, float]) -> None:
        self.slack, self.totals, self.death = slack, totals, death
        self.clock = dict.fromkeys(totals, 0)
        self.held: list[tuple[int, int]] = []

    def wrote(self, sender: int) -> None:
        """A write of the sender has arrived."""
        self.clock[sender] += 1

    def may_go(self, sender: int, now: float) -> bool:
        """Whether the sender's lead is within the slack at ``now`` [s]."""
        slowest = min(
            (
                clock
                for other, clock in self.clock.items()
                if clock < self.totals[other] and now < self.death.get(other, inf)
            ),
            default=inf,
        )
        return self.clock[sender] - slowest <= self.slack

    def released(self, now: float) -> list[tuple[int, int]]:
        """Held (sender, node) that may go at ``now`` [s], lower senders first; forgets them."""
        free = sorted(h for h in self.held if self.may_go(h[0], now))
        self.held = [h for h in self.held if h not in free]
        return free
