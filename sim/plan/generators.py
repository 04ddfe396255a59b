"""Late amounts made from a seed: registered pure functions, each on a random stream of its own.

A generator is a function ``(rng, **parameters)`` that yields one row (key -> value) per step. Rows
are drawn one after another, so a run of more steps begins with the rows of a shorter one. The
stream is named by the run's seed, the table and the generator: a table keeps its rows when another
is added, and two tables with one generator differ.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from sim.errors import PlanError

__all__ = ["GENERATORS", "generated_rows", "generator", "random_stream"]

Values = dict[str, Any]
Generator = Callable[..., Iterator[Values]]

GENERATORS: dict[str, Generator] = {}


def generator(name: str) -> Callable[[Generator], Generator]:
    """Register a pure function ``(rng, **parameters) -> rows`` under a name.

    Raises:
        ValueError: the name is taken.
    """

    def add(function: Generator) -> Generator:
        if GENERATORS.get(name, function) is not function:
            raise ValueError(f"generator {name} is already registered")
        GENERATORS[name] = function
        return function

    return add


def random_stream(seed: int, *names: str) -> np.random.Generator:
    """The random stream of these names: PCG64, started from the SHA-256 of seed and names.

    Streams of other names or another seed are independent of it. Equal for equal arguments, on
    every machine with the same numpy.
    """
    text = json.dumps([seed, *names], ensure_ascii=True).encode()
    entropy = int.from_bytes(hashlib.sha256(text).digest(), "big")
    return np.random.Generator(np.random.PCG64(entropy))


def generated_rows(
    table: str, name: str, parameters: Mapping[str, Any], seed: int, steps: int
) -> list[Values]:
    """Rows of a table that a generator writes, one per step.

    Args:
        table: name of the table. name: of the generator. parameters: of its call.
        seed: of the run. steps: number of rows.

    Raises:
        PlanError: the generator is not registered, refuses its parameters, or ends early.
    """
    where = f"tables.{table}"
    if name not in GENERATORS:
        raise PlanError(
            "a generator of this plan is not installed",
            key=f"{where}.generator",
            found=name or "no name",
            expected=" ".join(sorted(GENERATORS)),
        )
    function, stream = GENERATORS[name], random_stream(seed, table, name)
    try:
        inspect.signature(function).bind(stream, **parameters)
        rows = [_plain(row) for row in islice(function(stream, **parameters), steps)]
    except (TypeError, ValueError, ArithmeticError, MemoryError) as error:
        raise PlanError(
            f"generator {name} refuses its parameters: {error}",
            key=f"{where}.parameters",
            found=" ".join(sorted(parameters)) or "none",
            expected=str(inspect.signature(function)),
        ) from error
    if len(rows) < steps:
        raise PlanError(
            f"generator {name} ends early",
            key=where,
            found=f"{len(rows)} rows",
            expected=f"one per step, {steps}",
        )
    return rows


def _plain(row: Values) -> Values:
    return {k: v.tolist() if isinstance(v, np.ndarray | np.generic) else v for k, v in row.items()}


@generator("lognormal")
def _lognormal(
    rng: np.random.Generator, *, keys: Sequence[str], sigma: float, members: int = 0
) -> Iterator[Values]:
    """Factors of mean 1 whose logarithm has standard deviation sigma: compute that jitters.

    Args:
        rng: the stream. keys: keys of a row. sigma: 0 or more.
        members: entries of each value, one per member of a group; 0 makes it a number.
    """
    shape = (members,) if members else None
    while True:
        yield {k: np.exp(rng.normal(-0.5 * sigma**2, sigma, shape)) for k in keys}


@generator("routing")
def _routing(
    rng: np.random.Generator,
    *,
    keys: Sequence[str],
    members: int,
    tokens: int,
    concentration: float = 1.0,
    nbytes: float = 1.0,
) -> Iterator[Values]:
    """Tokens that the members of an expert-parallel group send one another.

    In every step each key has a popularity of the members (Dirichlet); every member's tokens are
    then spread by it (multinomial).

    Args:
        rng: the stream. keys: of the exchanges; each also gets ``KEY.load``.
        members: of the group. tokens: that each member sends, its own included.
        concentration: of the Dirichlet distribution; small means uneven.
        nbytes: [B] of a token.

    Yields:
        ``KEY`` -> [B] (sender, receiver), and ``KEY.load`` -> tokens each member receives over the
        mean (1 when all receive equally many).
    """
    while True:
        row: Values = {}
        for key in keys:
            share = rng.dirichlet([concentration] * members)
            counts = rng.multinomial(tokens, share, size=members)
            row[key] = counts * nbytes
            row[f"{key}.load"] = counts.sum(0) / tokens
        yield row
