"""Where the numbers of a document come from.

A number is written bare (``memory: 80 GiB``) or with its origin (``memory: {value: 80 GiB, source:
..., confidence: high, evidence: found}``). Counts, curves and the choice of a link profile have no
such form: ``origins`` says it of them by key (``origins: {nics.count: {evidence: assumed}}``). What
says nothing of itself is as the document says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from sim.errors import InputError
from sim.spec.fields import Confidence, Doc, Evidence, Stated

__all__ = [
    "Origin",
    "Tag",
    "missing_sources",
    "plain_keys",
    "require_sources",
    "stated_numbers",
    "tags",
]


class Tag(Doc):
    """Where one number comes from; what is left out is as the document says."""

    source: str = ""
    confidence: Confidence | None = None
    evidence: Evidence | None = None


class Origin(Doc):
    """Where a profile comes from.

    Args:
        source: default source of the numbers below. confidence, evidence: likewise.
        date: when the numbers were read or measured. notes: for people.
        stands_in_for: undisclosed part this profile is used in place of, or "".
        origins: key of a count, a curve or a profile's name -> where that comes from.
    """

    source: str = ""
    confidence: Confidence | None = None
    evidence: Evidence | None = None
    date: str = ""
    notes: tuple[str, ...] = ()
    stands_in_for: str = ""
    origins: dict[str, Tag] = {}

    @model_validator(mode="after")
    def _of_something(self) -> Origin:
        known = tuple(plain_keys(self))
        for key in self.origins:
            if key not in known:
                raise PydanticCustomError(
                    "origins",
                    "origins names {key}, which is no count, curve or profile here",
                    {"key": key, "expected": "one of " + ", ".join(known or ("nothing",))},
                )
        return self


def stated_numbers(doc: Doc, prefix: str = "") -> Iterator[tuple[str, Stated]]:
    """Yield (dotted key, number) for every number with an origin in a document."""
    for name in type(doc).model_fields:
        value = getattr(doc, name)
        key = f"{prefix}{name}"
        if isinstance(value, Stated):
            yield key, value
        elif isinstance(value, Doc):
            yield from stated_numbers(value, key + ".")
        elif isinstance(value, dict):
            for k, v in value.items():
                if isinstance(v, Stated):
                    yield f"{key}.{k}", v
                elif isinstance(v, Doc):
                    yield from stated_numbers(v, f"{key}.{k}.")


def plain_keys(doc: Doc, prefix: str = "", *, written: bool = False) -> Iterator[str]:
    """Yield the dotted key of every count, curve and profile name of a document.

    Args:
        doc: a document. prefix: of the keys. written: leave defaults out.
    """
    for name in type(doc).model_fields:
        if written and name not in doc.model_fields_set:
            continue
        value: Any = getattr(doc, name)
        if isinstance(value, Doc) and not isinstance(value, Stated):
            yield from plain_keys(value, f"{prefix}{name}.", written=written)
        elif isinstance(value, dict):
            for k, v in value.items():
                if isinstance(v, Doc) and not isinstance(v, Stated):
                    yield from plain_keys(v, f"{prefix}{name}.{k}.", written=written)
        elif (
            (isinstance(value, int) and not isinstance(value, bool))
            or (name in ("curve", "affinity") and value)
            or (name == "profile" and value)
        ):
            yield f"{prefix}{name}"


def tags(doc: Origin) -> dict[str, Tag]:
    """Key -> where it comes from, for every number, curve and profile name of a document."""
    found: dict[str, Stated | Tag] = dict(stated_numbers(doc))
    found |= dict.fromkeys(plain_keys(doc, written=True), Tag()) | doc.origins
    return {
        key: Tag(
            source=own.source or doc.source,
            confidence=own.confidence or doc.confidence,
            evidence=own.evidence or doc.evidence,
        )
        for key, own in found.items()
    }


def missing_sources(doc: Origin) -> tuple[str, ...]:
    """Return the keys whose number has no source or confidence of its own nor from the document."""
    found = tags(doc)
    return tuple(
        key for key, _ in stated_numbers(doc) if not (found[key].source and found[key].confidence)
    )


def require_sources(doc: Origin, file: str = "") -> None:
    """Refuse a profile in which some number has no origin; bundled profiles must pass.

    Raises:
        InputError: names the first number without a source or a confidence.
    """
    missing = missing_sources(doc)
    if missing:
        raise InputError(
            "a number without source or confidence",
            file=file,
            key=missing[0],
            expected="source and confidence on the number or on the document",
        )
