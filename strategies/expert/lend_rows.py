"""Rows that the controller of lent experts reads, checked: people may have edited the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError, PlanError
from strategies.expert.lend_input import BROKEN, LendParameters, shown
from strategies.expert.lending import Lending, Split, checked
from strategies.expert.routing_input import whole_total

__all__ = ["SPLITS", "counts_of", "last_lending", "last_turn", "row_of"]

SPLITS: tuple[Split, ...] = get_args(Split)

Ints = NDArray[np.int64]
Row = dict[str, Any]


def row_of(read: Mapping[str, Row], name: str) -> Row:
    """Return the row of an input.

    Raises:
        PlanError: the controller does not read it.
    """
    if name not in read:
        raise PlanError(
            "the controller of lent experts reads two tables",
            key="tables.lent.inputs",
            found=" ".join(read) or "none",
            expected="routing lent@1",
        )
    return read[name]


def counts_of(table: Row, layer: str, given: LendParameters) -> Ints:
    """Return a step's counts of a layer, shape (E, S).

    Raises:
        PlanError: none in the table, no matrix of whole numbers, or one of another size.
    """
    key = f"tables.routing.{layer}"
    if layer not in table:
        raise PlanError(
            "the routing table has no such layer",
            key=key,
            found=" ".join(sorted(table)) or "no layer",
            expected=layer,
        )
    size = (given.experts, given.devices)
    wanted = f"{size[0]} experts x {size[1]} sources" if all(size) else "experts x sources"
    counts = np.asarray(table[layer])
    numbers = counts.dtype.kind in "iuf" and counts.ndim == 2 and counts.size
    if not numbers or (all(size) and counts.shape != size):
        raise PlanError(
            "routing counts of another shape",
            key=key,
            found=" x ".join(map(str, counts.shape)) or shown(table[layer]),
            expected=wanted,
        )
    odd = counts[(counts != np.floor(counts)) | (counts < 0)]
    if odd.size:
        raise PlanError(
            "routing counts are whole numbers",
            key=key,
            found=str(odd[0]),
            expected="whole numbers from 0 up",
        )
    try:
        whole_total(counts)
    except InputError as error:
        raise PlanError(
            error.message, key=key, found=error.found, expected=error.expected
        ) from error
    return counts.astype(np.int64)


def last_turn(before: Row) -> int:
    """Return how many steps before the row before the last search was.

    Raises:
        PlanError: the row does not say.
    """
    turn = before.get("turn")
    if not isinstance(turn, int | float) or turn != int(turn):
        raise PlanError(
            "the row before does not say when the last search was",
            key="tables.lent.initial.turn",
            found=shown(turn),
            expected="a whole number of steps, or no initial row",
        )
    return int(turn)


def last_lending(before: Row, layer: str, size: tuple[int, int]) -> tuple[Lending, Ints]:
    """Return the lending that the row before made, and the experts that changed homes for it.

    Args:
        before: the row, of a run's first step what the plan's table begins with. layer: which.
        size: (E, D).

    Raises:
        PlanError: no such lending.
    """
    try:
        lending = Lending(
            hosts=np.array(before[f"{layer}.hosts"], bool),
            home=np.array(before[f"{layer}.home"], np.int64),
            split=SPLITS[int(before[f"{layer}.split"])],
            slack=float(before[f"{layer}.slack"]),
        )
        homes = np.array(before[f"{layer}.homes"], np.int64)
        if checked(lending).hosts.shape != size or homes.shape != (size[1], size[1]):
            raise ValueError(f"hosts {lending.hosts.shape}, homes {homes.shape}")
    except (*BROKEN, InputError) as error:
        raise PlanError(
            f"the row before is no lending of this layer: {error}",
            key=f"tables.lent.initial.{layer}",
            found=" ".join(sorted(before)),
            expected="no initial row, or one that the controller has written",
        ) from error
    return lending, homes
