"""What a strategy is: a producer of draft parts, its knobs, and the knobs it owns.

A strategy has two methods. ``space`` lists legal knob values; ``apply`` returns a new draft in
which only the fields that the strategy owns have changed. Fields are named as in ``FIELDS``:
``cells.tp``, ``pipeline.schedule`` ...; two strategies that own the same field do not compose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isqrt
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from sim.plan.draft import (
    CellKnobs,
    DataKnobs,
    ExpertKnobs,
    OffloadKnobs,
    PipelineKnobs,
    PlanDraft,
    TensorKnobs,
)
from sim.problem import Problem

__all__ = [
    "AXES",
    "FIELDS",
    "Space",
    "Strategy",
    "all_chips",
    "changed_fields",
    "divisors",
    "draft_or_default",
    "fill",
    "kept_by_pin",
    "space_of",
]

K = TypeVar("K", bound=msgspec.Struct)

AXES = (
    "tensor",
    "pipeline",
    "data",
    "expert",
    "recompute",
    "partition",
    "balance",
    "offload",
    "updates",
)
"""Order in which strategies apply: later axes may read what earlier ones decided. Axes not listed
come last, in the order given."""

_PARTS = {
    "cells": CellKnobs,
    "pipeline": PipelineKnobs,
    "data": DataKnobs,
    "tensor": TensorKnobs,
    "expert": ExpertKnobs,
    "offload": OffloadKnobs,
}
_LOOSE = ("passes", "tables", "amounts", "barrier", "servers", "exact", "reason")
FIELDS = frozenset(
    [f"{part}.{f}" for part, kind in _PARTS.items() for f in kind.__struct_fields__] + list(_LOOSE)
)
"""Every field of a draft that a strategy may own."""


class Space(msgspec.Struct, Generic[K], frozen=True):
    """Legal knob values, in a fixed order; empty only together with a reason.

    Args:
        values: the knobs. reason: why there are none (or what was pruned), in words.

    Raises:
        ValueError: empty without a reason.
    """

    values: tuple[K, ...]
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.values and not self.reason:
            raise ValueError("an empty knob space needs a reason")

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[K]:
        return iter(self.values)


class Strategy(Protocol[K]):
    """The protocol; see strategies.testing.StrategyContract for what every one must pass.

    Attributes:
        name: unique. axis: one of ``AXES``, or a further word. paper: where it comes from.
        owns: fields of the draft that ``apply`` may change. knobs: the frozen knob record.
        adds: of them those that it adds to and never replaces (optional): two strategies that both
            only add to a field compose.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - documented as an attribute
    @property
    def axis(self) -> str: ...  # noqa: D102
    @property
    def paper(self) -> str: ...  # noqa: D102
    @property
    def owns(self) -> frozenset[str]: ...  # noqa: D102
    @property
    def knobs(self) -> type[K]: ...  # noqa: D102

    def space(self, problem: Problem, draft: PlanDraft | None = None) -> Space[K]:
        """Return the legal knob values, pruned by divisibility and by the job's pins.

        Called before ``apply``, any number of times; must not depend on anything but its arguments.

        Args:
            problem: cluster, model, job. draft: what earlier axes decided; None for nothing yet.
        """
        ...

    def apply(self, problem: Problem, draft: PlanDraft, knobs: K) -> PlanDraft:
        """Return a new draft in which the owned fields are set; ``draft`` is not changed.

        Args:
            problem: as in ``space``. draft: what earlier axes decided. knobs: any value, not only
                one of ``space``.

        Raises:
            InputError: the knobs are illegal here; names the nearest legal values.
        """
        ...


def space_of(values: Iterable[K], reason: str) -> Space[K]:
    """Return the space of these values; ``reason`` is why there are none, if there are none."""
    found = tuple(values)
    return Space(found, "" if found else reason)


def fill(draft: PlanDraft, name: str, knobs: msgspec.Struct, **parts: Any) -> PlanDraft:
    """Return the draft with ``parts`` replaced and the strategy's choice noted for the report.

    Args:
        draft: to start from. name: of the strategy. knobs: its choice. parts: fields of PlanDraft.
    """
    noted = draft.knobs | {name: msgspec.to_builtins(knobs)}
    return msgspec.structs.replace(draft, knobs=noted, **parts)


def changed_fields(before: PlanDraft, after: PlanDraft) -> frozenset[str]:
    """Names of the fields (as in ``FIELDS``) in which two drafts differ.

    Where the number of cells differs, a field of the cells counts as changed when other values
    occur in it than before.
    """
    found = {f for f in _LOOSE if getattr(before, f) != getattr(after, f)}
    for part, kind in _PARTS.items():
        old, new = getattr(before, part), getattr(after, part)
        for field in kind.__struct_fields__:
            if part == "cells":
                of = list if len(old) == len(new) else set
                differs = of(getattr(c, field) for c in old) != of(getattr(c, field) for c in new)
            else:
                differs = getattr(old, field) != getattr(new, field)
            if differs:
                found.add(f"{part}.{field}")
    return frozenset(found)


def all_chips(problem: Problem) -> tuple[CellKnobs, ...]:
    """One cell per chip of the machine, all in stage 0: the grid before any axis has decided."""
    return tuple(
        CellKnobs(stage=0, replica=i, chips=(i,)) for i in range(problem.machine.num_chips)
    )


def draft_or_default(problem: Problem, draft: PlanDraft | None) -> PlanDraft:
    """Return the draft, or a fresh one, with cells."""
    draft = draft or PlanDraft()
    return draft if draft.cells else msgspec.structs.replace(draft, cells=all_chips(problem))


def kept_by_pin(values: Sequence[int], pin: int | None) -> list[int]:
    """Return the values a job's pin leaves, in order; all of them when there is no pin."""
    return [v for v in values if pin is None or v == pin]


def divisors(n: int) -> list[int]:
    """Divisors of n >= 1, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]
