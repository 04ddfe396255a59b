"""What a plan says to the controller of lent experts, checked before it is used.

A plan is a file that people may edit. Each thing refused here is named by its place in the plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from sim.errors import PlanError
from sim.plan.numbers import MOST_LATE
from strategies.expert.balancers import balancer_names
from strategies.expert.expert_cost import ExpertTimes, PerToken, Products
from strategies.expert.layer_cost import LayerCosts, costs_from_plain, layer_times
from strategies.expert.lending import static
from strategies.expert.link_cost import Links, MeanBandwidth, Topology
from strategies.expert.pro_prophet import RELEASED_ALPHA

__all__ = ["BROKEN", "LendParameters", "costs_of_layers", "parameters", "shown"]

Given = TypeVar("Given")
_PARAMETERS = "tables.lent.parameters"
BROKEN = (ArithmeticError, IndexError, KeyError, TypeError, ValueError)
"""What arithmetic raises on data of another form."""
_MOST_SLOTS = 2**16

Whole = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST_LATE)]


class LendParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the controller; see strategies.expert.controllers.lend_experts."""

    balancer: str
    options: dict[str, Any]
    budget: Annotated[int, msgspec.Meta(ge=0, le=_MOST_SLOTS)]
    period: Annotated[int, msgspec.Meta(ge=1)]
    fresh: bool
    tokens: Annotated[float, msgspec.Meta(gt=0, le=MOST_LATE)]
    state_bytes: Amount
    costs: list[dict[str, Any]]
    layers: dict[str, Whole]
    experts: Whole
    devices: Whole


class _NoOptions(msgspec.Struct, frozen=True):
    """Of a balancer that has none."""


class _ProProphet(msgspec.Struct, frozen=True):
    alpha: Amount = RELEASED_ALPHA
    excluded: Whole = 0
    scheduled: bool = True


class _Spread(msgspec.Struct, frozen=True):
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
    kind = _OPTIONS.get(given.balancer, _NoOptions)
    for name in set(given.options) - set(kind.__struct_fields__):
        raise PlanError(
            "the balancer has no such option",
            key=f"{_PARAMETERS}.options.{name}",
            found=shown(given.options[name]),
            expected=" or ".join(kind.__struct_fields__) or "no options",
        )
    _converted(given.options, kind, f"{_PARAMETERS}.options")
    for layer, number in given.layers.items():
        if number >= len(given.costs):
            raise PlanError(
                "a layer without costs",
                key=f"{_PARAMETERS}.layers.{layer}",
                found=str(number),
                expected=f"the number, from 0, of one of {len(given.costs)} costs",
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
            found=shown(value),
            expected=what.removeprefix("Expected ").replace("`", ""),
        ) from error


def shown(value: Any) -> str:
    """Return a value as a message shows it, cut where it is long."""
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
        except (*BROKEN, msgspec.ValidationError) as error:
            raise PlanError(
                f"no time of a layer follows from these costs: {error}",
                key=where,
                found=shown(plain),
                expected=f"the costs of a layer of {given.devices or 'its'} devices",
            ) from error
        found.append(costs)
    return found


def _tried(costs: LayerCosts, devices: int) -> None:
    """Price a layer as it stands and one whose experts are everywhere.

    Raises:
        ValueError: and whatever else arithmetic raises.
    """
    links, experts = costs.links, costs.experts
    known = 0
    if isinstance(links, Topology):
        known = links.nodes.size
    elif isinstance(experts, Products):
        known = experts.start_forward.size
    if known and devices not in (0, known):
        raise ValueError(f"costs of {known} devices")
    size = known or 2
    if odd := _odd_links(links, size) or _odd_experts(experts, size):
        raise ValueError(odd)
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
    if not costs.param_bytes:
        raise ValueError("param_bytes is 0")


def _odd_experts(experts: ExpertTimes, size: int) -> str:
    """What is wrong with the experts' times, "" where nothing is."""
    if isinstance(experts, PerToken):
        return "" if min(experts.forward, experts.backward) >= 0 else "a time per token is negative"
    lines, starts = (
        (experts.forward, experts.backward),
        (experts.start_forward, experts.start_backward),
    )
    if any(x.ndim != 3 or x.shape[1:] != (4, size) or not x.size for x in lines):
        return f"experts' products are not lines of {size} devices"
    if any(x.shape != (size,) for x in starts):
        return f"experts do not start on {size} devices"
    return "" if all((x >= 0).all() for x in (*lines, *starts)) else "an expert's time is negative"


def _odd_links(links: Links, size: int) -> str:
    """What is wrong with the links, "" where nothing is."""
    if isinstance(links, MeanBandwidth):
        rates = [links.trans, links.agg, *(rate for _, rate in links.exchange)]
        return "" if links.exchange and min(rates) > 0 else "a rate is missing or not above 0"
    square, number = (size, size), np.arange(links.rates.size)
    shapes = (links.links.shape[:2], links.pair.shape, links.nodes.shape)
    if shapes != (square, square, (size,)) or links.links.ndim != 3:
        return f"links between other than {size} devices"
    crossed, between = links.links[links.links >= 0], links.pair[~np.eye(size, dtype=bool)]
    reasons = {
        "paths that cross other links than have rates": links.rates.ndim != 1
        or not np.array_equal(np.unique(crossed), number),
        "paths of no class": not ((between >= 0) & (between < len(links.classes))).all(),
        "a rate that is not above 0": not (links.rates > 0).all()
        or any(
            c.rate <= 0 or min((min(p) for p in c.curve), default=1) <= 0 for c in links.classes
        ),
        "a latency below 0": any(c.latency < 0 for c in links.classes),
        "no known way for experts": not links.ways
        or bool(set(links.ways) - {"direct", "relay", "chain"}),
        "chunks of less than nothing": links.chunk < 0,
        "no such rail": links.rail.size > 0
        and (
            links.rail.shape != (size, np.unique(links.nodes).size)
            or links.rail.min() < 0
            or links.rail.max() >= size
        ),
    }
    return next((what for what, broken in reasons.items() if broken), "")
