"""A model as measured times per block, for planners that have such tables.

Blocks and times may name a range, ``layers.0-23``, which stands for ``layers.0`` ... ``layers.23``.
With ``times_in: ms`` (or s, us) the times are bare numbers in that unit, otherwise they carry one.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from sim.errors import InputError
from sim.spec.fields import Bytes, Count, Doc, Seconds

__all__ = ["MeasuredBlockDoc", "MeasuredDoc", "MeasuredTimeDoc", "expand_range"]

_RANGE = re.compile(r"(.*\.)(\d+)-(\d+)(\..*)?")
_TIMES = ("forward", "input_grad", "weight_grad", "recompute", "update")
MAX_RANGE = 100_000


class MeasuredBlockDoc(Doc):
    """A block, or a range of equal ones.

    Args:
        blocks: name or range. kind: what it is. params: parameters of one block.
        activation: [B] kept for the backward pass per sequence, before tensor parallelism.
        activation_split: tensor parallelism divides it.
        output: elements per token it passes on; the document's ``hidden`` when not given.
        shares: name of a parameter it shares with another block.
    """

    blocks: str = Field(min_length=1)
    kind: Literal["measured", "embedding", "attention", "mlp", "moe", "head", "norm", "conv"] = (
        "measured"
    )
    params: Count = 0
    activation: Bytes = 0.0
    activation_split: bool = True
    output: Count | None = None
    shares: str = ""


class MeasuredTimeDoc(Doc):
    """Times of a block, or of each block of a range.

    Args:
        blocks: name or range. accelerator: profile name. tp: tensor-parallel size.
        microbatch: [sequences]. forward, input_grad, weight_grad, recompute, update: [s];
            ``input_grad`` is the whole backward when ``weight_grad`` is not given, recompute
            defaults to forward. source: where they were measured.
    """

    blocks: str = Field(min_length=1)
    accelerator: str
    tp: Count = Field(default=1, ge=1)
    microbatch: Count = Field(default=1, ge=1)
    forward: Seconds
    input_grad: Seconds
    weight_grad: Seconds = 0.0
    recompute: Seconds | None = None
    update: Seconds = 0.0
    source: str = ""


class MeasuredDoc(Doc):
    """A measured model.

    Args:
        name: for people. sequence_length: [tokens] the times and activations belong to.
        hidden: elements per token between blocks. times_in: unit of bare times.
        blocks: in execution order. times: measured rows. source: default source of the rows.
        notes: for people.
    """

    name: str = Field(min_length=1)
    sequence_length: Count = Field(ge=1)
    hidden: Count = Field(ge=1)
    times_in: Literal["s", "ms", "us"] | None = None
    blocks: tuple[MeasuredBlockDoc, ...] = Field(min_length=1)
    times: tuple[MeasuredTimeDoc, ...] = Field(min_length=1)
    source: str = ""
    notes: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _bare_times(cls, data: Any) -> Any:
        unit = data.get("times_in") if isinstance(data, dict) else None
        rows = data.get("times") if isinstance(data, dict) else None
        if unit not in ("s", "ms", "us") or not isinstance(rows, list):
            return data
        return data | {"times": [_with_unit(row, str(unit)) for row in rows]}


def expand_range(text: str) -> tuple[str, ...]:
    """Return the names a range stands for.

    Raises:
        InputError: the range is empty, or longer than ``MAX_RANGE``.

    >>> expand_range("layers.0-2.mlp"), expand_range("head")
    (('layers.0.mlp', 'layers.1.mlp', 'layers.2.mlp'), ('head',))
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        return (text,)
    head, first, last, tail = (
        match.group(1),
        int(match.group(2)),
        int(match.group(3)),
        match.group(4),
    )
    if not 0 <= last - first < MAX_RANGE:
        raise InputError(
            "an empty or huge range", found=text, expected="first-last with first <= last"
        )
    return tuple(f"{head}{i}{tail or ''}" for i in range(first, last + 1))


def _with_unit(row: Any, unit: str) -> Any:
    if not isinstance(row, dict):
        return row
    return {
        k: f"{v!r} {unit}"
        if k in _TIMES and isinstance(v, (int, float)) and not isinstance(v, bool)
        else v
        for k, v in row.items()
    }
