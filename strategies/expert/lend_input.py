"""What a plan says to the controller of lent experts, checked before it is used.

A plan is a file that people may edit. Each thing refused here is named by its place in the plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError, PlanError
from sim.plan.numbers import MOST_LATE
from strategies.expert.balancers import balancer_names
from strategies.expert.expert_cost import Products
from strategies.expert.layer_cost import LayerCosts, costs_from_plain, layer_times
from strategies.expert.lending import Lending, Split, checked, static
from strategies.expert.link_cost import Topology
from strategies.expert.pro_prophet import RELEASED_ALPHA
from strategies.expert.routing_input import whole_total

__all__ = [
    "SPLITS",
    "LendParameters",
    "costs_of_layers",
    "counts_of",
    "last_lending",
    "last_turn",
    "parameters",
    "row_of",
]

SPLITS: tuple[Split, ...] = get_args(Split)

Given = TypeVar("Given")
Ints = NDArray[np.int64]
Row = dict[str, Any]
_PARAMETERS = "tables.lent.parameters"
_BROKEN = (ArithmeticError, IndexError, KeyError, TypeError, ValueError)

Whole = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST_LATE)]


class LendParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the controller; see strategies.expert.controllers.lend_experts."""

    balancer: str
    options: dict[str, Any]
    budget: Whole
    period: Annotated[int, msgspec.Meta(ge=1)]
    fresh: bool
    tokens: Annotated[float, msgspec.Meta(gt=0, le=MOST_LATE)]
    state_bytes: Amount
    costs: list[dict[str, Any]]
    layers: dict[str, Whole]
    experts: Whole
    devices: Whole


class _NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a balancer that has none."""


class _ProProphet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alpha: Amount = RELEASED_ALPHA
    excluded: Whole = 0
    scheduled: bool = True


class _Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    search_s: Amount = 0.0
    scheduled: bool = True


_OPTIONS: dict[str, type[msgspec.Struct]] = {"pro-prophet": _ProProphet, "spread": _Spread}


def parameters(stated: Mapping[str, Any]) -> LendParameters:
    """Return the controller's parameters.

    Raises:
        PlanError: one out of its range, an unknown balancer or option, a layer without costs, or a
            balancer that moves experts and has no room to.
    """
    given = _converted(dict(stated), LendParameters, _PARAMETERS)
    if given.balancer not in balancer_names():
        raise PlanError(
            "unknown balancer",
            key=f"{_PARAMETERS}.balancer",
            found=given.balancer,
            expected=" or ".join(balancer_names()),
        )
    if given.balancer == "eplb" and not given.budget:
        raise PlanError(
            "eplb moves experts, so it needs slots",
            key=f"{_PARAMETERS}.budget",
            found="0",
            expected="1 or more, or balancer none",
        )
    _converted(given.options, _OPTIONS.get(given.balancer, _NoOptions), f"{_PARAMETERS}.options")
    for layer, number in given.layers.items():
        if number >= len(given.costs):
            raise PlanError(
                "a layer without costs",
                key=f"{_PARAMETERS}.layers.{layer}",
                found=str(number),
                expected=f"below {len(given.costs)}, one of the costs",
            )
    return given


def _converted(stated: Any, kind: type[Given], where: str) -> Given:
    try:
        return msgspec.convert(stated, kind)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$")
        path = [p for p in re.split(r"[.\[\]`]+", at) if p]
        value: Any = stated
        for part in path:
            if isinstance(value, Mapping):
                value = value.get(part, value)
        raise PlanError(
            "the controller of lent experts refuses a parameter",
            key=".".join([where, *path]),
            found=_shown(value),
            expected=what,
        ) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def costs_of_layers(given: LendParameters, first: bool) -> list[LayerCosts]:
    """Return the costs.

    Args:
        given: the parameters. first: try them, which once in a run is enough.

    Raises:
        PlanError: costs of another form, or of which no time follows.
    """
    found = []
    for number, plain in enumerate(given.costs):
        where = f"{_PARAMETERS}.costs.{number}"
        try:
            costs = costs_from_plain(plain)
            if first:
                _tried(costs, given.devices)
        except (*_BROKEN, msgspec.ValidationError) as error:
            raise PlanError(
                f"no time of a layer follows from these costs: {error}",
                key=where,
                found=_shown(plain),
                expected=f"the costs of a layer of {given.devices or 'its'} devices",
            ) from error
        found.append(costs)
    return found


def _tried(costs: LayerCosts, devices: int) -> None:
    """Price a layer as it stands and one whose experts are everywhere."""
    known = devices
    if isinstance(costs.experts, Products):
        known = costs.experts.start_forward.size
    if isinstance(costs.links, Topology):
        known = costs.links.nodes.size
        links, pair = costs.links.links, costs.links.pair
        if links.min(initial=0) < -1 or pair.min(initial=0) < -1:
            raise ValueError("no such link")
        if links.shape[:2] != (known, known) or pair.shape != (known, known):
            raise ValueError("links of other devices")
    size = known or 2
    if devices not in (0, size):
        raise ValueError(f"costs of {size} devices")
    plain = static(size, size)
    everywhere = msgspec.structs.replace(plain, hosts=np.ones_like(plain.hosts), split="even")
    named = {n: v for n, v in msgspec.structs.asdict(costs).items() if isinstance(v, float)}
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        for lending in (plain, everywhere):
            times = layer_times(costs, np.full((size, size), 1000), lending)
            named |= msgspec.structs.asdict(times)
            for name, number in named.items():
                if not 0 <= number <= MOST_LATE:
                    raise ValueError(f"{name} is {number:g}")


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
            found=" x ".join(map(str, counts.shape)) or _shown(table[layer]),
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
            found=_shown(turn),
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
    except (*_BROKEN, InputError) as error:
        raise PlanError(
            f"the row before is no lending of this layer: {error}",
            key=f"tables.lent.initial.{layer}",
            found=" ".join(sorted(before)),
            expected="no initial row, or one that the controller has written",
        ) from error
    return lending, homes
