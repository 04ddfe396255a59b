"""Balancers of experts behind one interface, by name."""

from __future__ import annotations

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


class Balancer(Protocol):
    """Chooses who holds which expert, the same on every rank for the same counts."""

    def __call__(self, counts: NDArray[np.int64], costs: LayerCosts, budget: int, /) -> Lending:
        """Return a lending.

        Args:
            counts: tokens of each expert from each source, as known when planning, shape (E, S).
            costs: of the layer. budget: copies that each device has room for.
        """


def _none(counts: NDArray[np.int64], costs: LayerCosts, budget: int, /) -> Lending:
    """Plain expert parallelism."""
    return static(*counts.shape)


BALANCERS: dict[str, Balancer] = {
    "none": _none,
    "fastermoe": fastermoe,
    "fastermoe-release": fastermoe_release,
    "pro-prophet": pro_prophet,
    "eplb": eplb,
    "spread": spread,
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
