"""Building blocks of documents: a base that refuses unknown keys, quantities, sourced numbers."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, model_validator
from pydantic_core import PydanticCustomError

from sim.errors import InputError
from sim.units import Dimension, parse_quantity

__all__ = [
    "Bytes",
    "Confidence",
    "Count",
    "Doc",
    "Dtype",
    "Evidence",
    "Fraction",
    "Seconds",
    "Stated",
    "StatedBytes",
    "StatedFactor",
    "StatedFlopRate",
    "StatedFraction",
    "StatedPower",
    "StatedPriceRate",
    "StatedPricePerByte",
    "StatedRate",
    "StatedSeconds",
]

Confidence = Literal["high", "medium", "low"]
Evidence = Literal["found", "derived", "remembered", "assumed", "stand-in"]
Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


class Doc(BaseModel):
    """Base of every document: frozen, and an unknown key is refused with the nearest valid one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = [f.alias or name for name, f in cls.model_fields.items()]
        for key in data:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
                raise PydanticCustomError(
                    "unknown_key",
                    "unknown key {key}"
                    + (f"; the nearest valid key is {close[0]}" if close else ""),
                    {"key": key, "expected": "one of " + ", ".join(known)},
                )
        return data


class Stated(Doc):
    """A number with its origin.

    Args:
        value: in SI.
        source: where it was read; "" means "as the document says".
        confidence: how far it can be trusted; None means "as the document says".
        evidence: "found" in the source, "derived" from it, "remembered", "assumed" (nobody
            measured it), or a "stand-in".
        sparse: True for a peak that counts structured sparsity; such peaks are refused.
    """

    value: float
    source: str = ""
    confidence: Confidence | None = None
    evidence: Evidence | None = None
    sparse: bool = False

    @model_validator(mode="after")
    def _dense(self) -> Stated:
        if self.sparse:
            raise PydanticCustomError(
                "sparse_peak",
                "peaks are dense peaks",
                {"expected": "the dense figure, usually half of the sparse one"},
            )
        return self


def _quantity(dimension: Dimension) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        try:
            return parse_quantity(value, dimension)
        except InputError as error:
            raise PydanticCustomError(
                "quantity", "{message}", {"message": error.message, "expected": error.expected}
            ) from None

    return read


def _stated(dimension: Dimension) -> Callable[[Any], Any]:
    read = _quantity(dimension)

    def lift(value: Any) -> Any:
        if isinstance(value, Stated):
            return value
        if isinstance(value, dict):
            return value | {"value": read(value["value"])} if "value" in value else value
        return {"value": read(value)}

    return lift


def _count(value: Any) -> int:
    number = _quantity("count")(value)
    if number != int(number):
        raise PydanticCustomError(
            "count", "not a whole number", {"expected": "a whole number such as 512, 4k or 4Ki"}
        )
    return int(number)


def _write(dimension: Dimension) -> PlainSerializer:
    """Write a quantity in its SI unit, so that reading it again gives the same float."""
    unit = _SI_UNIT[dimension]

    def text(value: float | None) -> Any:
        return value if value is None or not unit else f"{value!r} {unit}"

    def write(number: Any) -> Any:
        if not isinstance(number, Stated):
            return text(number)
        origin = number.model_dump(exclude_defaults=True)
        origin.pop("value")
        return {"value": text(number.value)} | origin if origin else text(number.value)

    return PlainSerializer(write, when_used="json")


_SI_UNIT: dict[Dimension, str] = {
    "bytes": "B",
    "bytes/s": "B/s",
    "seconds": "s",
    "FLOP/s": "FLOP/s",
    "USD/s": "USD/s",
    "USD/B": "USD/B",
    "W": "W",
    "count": "",
    "fraction": "",
}

Bytes = Annotated[float, BeforeValidator(_quantity("bytes")), _write("bytes")]
Seconds = Annotated[float, BeforeValidator(_quantity("seconds")), _write("seconds")]
Fraction = Annotated[float, BeforeValidator(_quantity("fraction"))]
Count = Annotated[int, BeforeValidator(_count)]

StatedBytes = Annotated[Stated, BeforeValidator(_stated("bytes")), _write("bytes")]
StatedSeconds = Annotated[Stated, BeforeValidator(_stated("seconds")), _write("seconds")]
StatedRate = Annotated[Stated, BeforeValidator(_stated("bytes/s")), _write("bytes/s")]
StatedFlopRate = Annotated[Stated, BeforeValidator(_stated("FLOP/s")), _write("FLOP/s")]
StatedFraction = Annotated[Stated, BeforeValidator(_stated("fraction")), _write("fraction")]
StatedFactor = Annotated[Stated, BeforeValidator(_stated("count")), _write("count")]
StatedPriceRate = Annotated[Stated, BeforeValidator(_stated("USD/s")), _write("USD/s")]
StatedPricePerByte = Annotated[Stated, BeforeValidator(_stated("USD/B")), _write("USD/B")]
StatedPower = Annotated[Stated, BeforeValidator(_stated("W")), _write("W")]
