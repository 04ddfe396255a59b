"""Balancers of experts behind one interface, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.expert.eplb import eplb
from strategies.expert.fastermoe import fastermoe, fastermoe_release
from strategies.expert.layer_cost import LayerCosts
from strategies.expert.lending import Lending, static
from strategies.expert.pro_prophet import pro_prophet
from strategies.expert.spread import spread

__all__ = ["BALANCERS", "Balancer", "balancer_names", "get_balancer"]

Ints = NDArray[np.int64]


class Balancer(Protocol):
    """Chooses who holds which expert, the same on every rank for the same counts.

    As far as their processors round alike: where they are unlike, one rank should plan for all.
    """

    def __call__(
        self, counts: Ints, costs: LayerCosts, budget: int, previous: Lending | None = None, /
    ) -> Lending:
        """Return a lending.

        Args:
            counts: tokens of each expert from each source, as known when planning, shape (E, S).
            costs: of the layer. budget: copies that each device has room for.
            previous: the lending in use, for those that compare with it.
        """


def _none(
    counts: Ints, costs: LayerCosts, budget: int, previous: Lending | None = None, /
) -> Lending:
    """Plain expert parallelism."""
    return static(*counts.shape)


def _spread(
    counts: Ints, costs: LayerCosts, budget: int, previous: Lending | None = None, /
) -> Lending:
    return spread(counts, costs, budget, previous=previous)


def _afresh(plan: Callable[[Ints, LayerCosts, int], Lending]) -> Balancer:
    """A balancer that looks at nothing but the counts."""

    def planned(
        counts: Ints, costs: LayerCosts, budget: int, previous: Lending | None = None, /
    ) -> Lending:
        return plan(counts, costs, budget)

    return planned


BALANCERS: dict[str, Balancer] = {
    "none": _none,
    "fastermoe": _afresh(fastermoe),
    "fastermoe-release": _afresh(fastermoe_release),
    "pro-prophet": _afresh(pro_prophet),
    "eplb": eplb,
    "spread": _spread,
}
"""Name -> balancer."""


def balancer_names() -> tuple[str, ...]:
    """Return the names, in order of registration."""
    return tuple(BALANCERS)


def get_balancer(name: str) -> Balancer:
    """Return a balancer.

    Raises:
        InputError: no balancer of this name.
    """
    found = BALANCERS.get(name)
    if found is None:
        raise InputError(
            "unknown balancer", key="balancer", found=name, expected=" or ".join(BALANCERS)
        )
    return found
