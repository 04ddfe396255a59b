"""Synthetic routing from a seed: popular experts, popularity that drifts, sources that differ.

Log popularity of each expert is a base plus an AR(1) process; sources draw their own shares around
it (Dirichlet), and their tokens by those shares (multinomial).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.plan.generators import generator, random_stream
from strategies.expert.routing import Routing

__all__ = ["Popularity", "drawn", "popularity_rows"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Popularity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How uneven the experts of a layer are, and how that changes.

    Args:
        sigma: standard deviation of the base log popularity (normal).
        zipf: exponent of a base by rank, 1/rank**zipf, dealt to the experts at random; instead of
            sigma.
        phi: AR(1) coefficient of the log popularity around its base, per step, 0 to 1. At 1 it is
            a random walk that starts at the base.
        step: standard deviation of what a step adds to the log popularity.
        first_layer: factor on ``step`` in the first layer.
        concentration: of the Dirichlet distribution of a source's shares; 0 makes all alike. A
            share p then varies by sqrt((1 - p) / (p (concentration + 1))) relatively.
        balanced: every source sends every expert equally many tokens, as a forced router does; the
            numbers above are not used.

    Raises:
        InputError: sigma and zipf together, or numbers out of their range.
    """

    sigma: float = 0.0
    zipf: float = 0.0
    phi: float = 0.92
    step: float = 0.0
    first_layer: float = 1.0
    concentration: float = 0.0
    balanced: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        ranges = {
            "sigma": 10.0,
            "zipf": 10.0,
            "phi": 1.0,
            "step": 10.0,
            "first_layer": 1e3,
            "concentration": 1e9,
        }
        for name, most in ranges.items():
            value = getattr(self, name)
            if not 0.0 <= value <= most:
                raise InputError(
                    "a popularity of experts is out of range",
                    key=name,
                    found=f"{value:g}",
                    expected=f"0 to {most:g}",
                )
        if self.sigma and self.zipf:
            raise InputError(
                "a base popularity has one form",
                key="zipf",
                found=f"sigma {self.sigma:g} and zipf {self.zipf:g}",
                expected="one of them",
            )
        if 0.0 < self.concentration < 0.1:
            raise InputError(
                "sources this unlike each have one expert",
                key="concentration",
                found=f"{self.concentration:g}",
                expected="0.1 or more, or 0",
            )


def popularity_rows(
    rng: np.random.Generator,
    popularity: Popularity,
    *,
    layers: int,
    experts: int,
    sources: int,
    tokens: int,
) -> Iterator[Ints]:
    """Yield the counts of one step after another, each of shape (L, E, S).

    Args:
        rng: the stream. popularity: of the experts. layers, experts, sources: L, E, S.
        tokens: that each source sends in each layer and step, k times those of its batch.
    """
    if popularity.balanced:
        yield from _forced(layers, experts, sources, tokens)
    base = _base(rng, popularity, layers, experts)
    step = np.full((layers, 1), popularity.step)
    step[0] *= popularity.first_layer
    phi = popularity.phi
    start = 1.0 / math.sqrt(1.0 - phi * phi) if phi < 1.0 else 0.0
    moved = step * start * rng.standard_normal((layers, experts))
    while True:
        level = base + moved
        share = np.exp(level - level.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        own = np.broadcast_to(share[:, None, :], (layers, sources, experts))
        if popularity.concentration:
            own = rng.standard_gamma(popularity.concentration * own)
            own = own / own.sum(axis=2, keepdims=True)
        yield np.ascontiguousarray(rng.multinomial(tokens, own).transpose(0, 2, 1))
        moved = phi * moved + step * rng.standard_normal((layers, experts))


def drawn(
    *,
    steps: int,
    layers: int,
    experts: int,
    sources: int,
    tokens: int,
    seed: int = 0,
    popularity: Popularity | None = None,
    table: str = "",
    **numbers: Any,
) -> Routing:
    """Draw a run; a shorter one of the same seed is its beginning.

    Args:
        steps, layers, experts, sources: T, L, E, S.
        tokens: that each source sends in each layer and step, k times those of its batch.
        seed: of the stream. popularity: of the experts; or its fields as ``numbers``.
        table: of a plan, for the rows that a run of this seed has there; "" for another stream.

    Raises:
        InputError: nothing to draw, or numbers that mean nothing.
    """
    how = popularity or _popularity(numbers)
    _sizes(steps=steps, layers=layers, experts=experts, sources=sources, tokens=tokens)
    rows = popularity_rows(
        random_stream(seed, *filter(None, (table, "moe-routing"))),
        how,
        layers=layers,
        experts=experts,
        sources=sources,
        tokens=tokens,
    )
    return Routing(np.stack(list(islice(rows, steps))), f"drawn from seed {seed}: {_words(how)}")


@generator("moe-routing")
def _moe_routing(
    rng: np.random.Generator,
    *,
    keys: Sequence[str],
    experts: int,
    sources: int,
    tokens: int,
    **numbers: Any,
) -> Iterator[dict[str, Ints]]:
    """Tokens from every source to every expert of every layer.

    Args:
        rng: the stream. keys: of the layers, in order. experts, sources: E, S.
        tokens: that each source sends in each layer and step, k times those of its batch.
        numbers: of ``Popularity``.

    Yields:
        Key -> counts, shape (E, S).

    Raises:
        ValueError: numbers that mean nothing.
    """
    try:
        how = _popularity(numbers)
        _sizes(layers=len(keys), experts=experts, sources=sources, tokens=tokens)
    except InputError as error:
        raise ValueError(str(error)) from error
    sizes = {"layers": len(keys), "experts": experts, "sources": sources, "tokens": tokens}
    for counts in popularity_rows(rng, how, **sizes):
        yield dict(zip(keys, counts, strict=True))


def _base(rng: np.random.Generator, how: Popularity, layers: int, experts: int) -> Floats:
    normal = rng.standard_normal((layers, experts))
    if how.zipf:
        rank = normal.argsort(axis=1).argsort(axis=1)
        return np.asarray(-how.zipf * np.log1p(rank), np.float64)
    return how.sigma * normal


def _forced(layers: int, experts: int, sources: int, tokens: int) -> Iterator[Ints]:
    whole, rest = divmod(tokens, experts)
    first = np.arange(sources) * rest  # whose turn it is moves on, so that sums are even too
    place = (np.arange(experts)[:, None] - first) % experts
    counts = whole + (place < rest)
    while True:
        yield np.broadcast_to(counts, (layers, experts, sources)).astype(np.int64)


def _popularity(numbers: dict[str, Any]) -> Popularity:
    try:
        return msgspec.convert(numbers, Popularity)
    except msgspec.ValidationError as error:
        raise InputError(
            f"no such popularity of experts: {error}",
            key="routing",
            found=" ".join(sorted(numbers)) or "nothing",
            expected=" ".join(Popularity.__struct_fields__),
        ) from error


def _sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise InputError(
                "nothing can be routed", key=name, found=str(value), expected="1 or more"
            )


def _words(how: Popularity) -> str:
    if how.balanced:
        return "balanced"
    return ", ".join(
        f"{k} {v:g}" for k, v in msgspec.structs.asdict(how).items() if k != "balanced"
    )
