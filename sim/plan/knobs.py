"""What must hold of a draft's knobs one by one, before they are put together."""

from __future__ import annotations

from typing import Any

import msgspec

from sim.errors import InputError
from sim.plan.arguments import misfit
from sim.plan.draft import PlanDraft

__all__ = ["check_knobs"]

PARTS = ("pipeline", "data", "tensor", "expert", "offload")
LEAST = {
    "pipeline.chunks": 1,
    "pipeline.microbatch": 1,
    "pipeline.buffers": 0,
    "data.buffers": 0,
    "expert.ep": 1,
    "offload.parameter_buffers": 1,
    "offload.gradient_buffers": 1,
}
"""Knob -> its least value."""


def check_knobs(draft: PlanDraft) -> None:
    """Check types and ranges of the knobs of every axis and cell.

    Raises:
        InputError: the first one that does not fit, by its path in the draft.
    """
    records: list[tuple[str, msgspec.Struct]] = [(part, getattr(draft, part)) for part in PARTS]
    records += [(f"cells[{i}]", cell) for i, cell in enumerate(draft.cells)]
    for name, record in records:
        wrong = misfit(msgspec.to_builtins(record), type(record))
        if wrong is not None:
            raise InputError(
                f"a knob of {name}: {wrong.message}", key=f"{name}.{wrong.key}",
                found=wrong.found, expected=wrong.expected,
            )  # fmt: skip
    for key, least in LEAST.items():
        part, _, field = key.partition(".")
        _at_least(key, getattr(getattr(draft, part), field), least)
    for r, count in enumerate(draft.data.microbatches):
        _at_least(f"data.microbatches[{r}]", count, 1)
    for i, cell in enumerate(draft.cells):
        _at_least(f"cells[{i}].tp", cell.tp, 1)
        _at_least(f"cells[{i}].cp", cell.cp, 1)
    if draft.data.zero not in range(4):
        raise InputError(
            "unknown ZeRO stage", key="data.zero", found=str(draft.data.zero), expected="0 to 3"
        )


def _at_least(key: str, value: Any, least: int) -> None:
    if value < least:
        raise InputError(
            "a knob below its range", key=key, found=str(value), expected=f"at least {least}"
        )
