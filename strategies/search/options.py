"""What a search may choose from: pins, and the knobs of whole plans."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from sim.errors import UsageError
from sim.plan.placement import Recompute
from sim.plan.schedules import SCHEDULES
from sim.problem import Problem
from strategies.recompute.recompute import recompute_modes
from strategies.registry import get
from strategies.search.slab import RECOMPUTE, Knobs

__all__ = [
    "Choices", "FORBIDDEN", "Offload", "choices_of", "fill_share", "knobs_for", "modes_of",
    "screening_knobs", "zero_stages",
]  # fmt: skip

Offload = Literal["auto", "yes", "no"]

FORBIDDEN = {
    "balanced": "experts that are lent to balance their load",
    "local_sgd": "sites that step by themselves",
    "offload": "what lives on hosts",
    "uneven": "unlike shares of microbatches and layers",
}
"""What may be taken out of a search, and what it is in words."""

CHUNKS = (2, 4)
"""Virtual stages per position that interleaving is tried with."""


_SWITCH = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
"""How people write a switch."""


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """Pins of a search; None (or ()) leaves a knob free.

    Args:
        tp, pp, dp, ep, microbatch: sizes; pp counts all stages of the pipeline.
        schedule: name. recompute: mode of every stage. zero: a stage the strategy ``zero`` offers;
            above 1 in offloaded plans only.
        sequence_parallel, split_backward, scatter: switches (see ``Knobs``).
        chunks: virtual stages per position (1 for none but the plain schedules).
        accelerators: types that may be used.
        all_types: every pool takes part (no plan that leaves one idle).
        orders: "memory" for largest memory first only, "all" for every order of the pools, "auto"
            for all orders of up to three pools.
        families: "pipeline" (unlike stages), "replicas" (unlike replicas), "both".
        offload: "auto" looks for offloaded plans when nothing fits otherwise, "yes" lets them
            compete, "no" leaves them out.
        forbid: names of ``FORBIDDEN`` that are left out.
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    recompute: Recompute | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    split_backward: bool | None = None
    scatter: bool | None = None
    chunks: int | None = None
    accelerators: tuple[str, ...] = ()
    all_types: bool = False
    orders: str = "auto"
    families: str = "both"
    offload: Offload = "auto"
    forbid: tuple[str, ...] = ()


def choices_of(problem: Problem, pins: Mapping[str, Any] | None = None) -> Choices:
    """Join the job's pins with those of the call, which win.

    Args:
        problem: whose job. pins: field of ``Choices`` -> value, text or typed.

    Raises:
        UsageError: an unknown field, a value of the wrong type, or one nothing offers.
    """
    merged: dict[str, Any] = {
        name: value
        for name in problem.job.pins.__struct_fields__
        if (value := getattr(problem.job.pins, name)) is not None
    }
    merged.update(pins or {})
    kinds = {f.name: f.type for f in msgspec.structs.fields(Choices)}
    unknown = sorted(set(merged) - set(kinds))
    if unknown:
        raise UsageError(f"no such pin: {unknown[0]}; there are {' '.join(kinds)}")
    found = Choices(**{name: _read_pin(name, v, kinds[name]) for name, v in merged.items()})
    for name in ("tp", "pp", "dp", "ep", "microbatch", "chunks"):
        size = getattr(found, name)
        if size is not None and size < 1:
            raise UsageError(f"--pin {name}={size}: expected 1 or more")
    if found.schedule is not None and found.schedule not in SCHEDULES:
        raise UsageError(f"no such schedule: {found.schedule}; there are {' '.join(SCHEDULES)}")
    _check_zero(found)
    unknown = sorted(set(found.forbid) - set(FORBIDDEN))
    if unknown:
        raise UsageError(f"nothing to forbid: {unknown[0]}; there are {' '.join(FORBIDDEN)}")
    if "offload" in found.forbid:
        if found.offload == "yes":
            raise UsageError("offload is forbidden and offload=yes is pinned")
        found = msgspec.structs.replace(found, offload="no")
    return found


def zero_stages() -> tuple[int, ...]:
    """ZeRO stages that the strategy ``zero`` offers, in rising order."""
    return tuple(sorted(get_args(get_type_hints(get("zero").knobs)["stage"])))


def _check_zero(choices: Choices) -> None:
    if choices.zero is None or choices.zero in (0, 1):
        return
    if choices.zero not in zero_stages():
        offered = " ".join(map(str, zero_stages()))
        raise UsageError(f"no such ZeRO stage: {choices.zero}; there are {offered}")
    if choices.offload == "no":
        raise UsageError(
            f"--pin zero={choices.zero} is planned with offloading only; drop offload=no"
        )


def _read_pin(name: str, value: Any, kind: Any) -> Any:
    """The value of a pin, typed.

    Raises:
        UsageError: it is not of the knob's type.
    """
    typed = value
    if kind == tuple[str, ...] and isinstance(value, str):
        typed = tuple(part.strip() for part in value.split(","))
    elif kind in (bool, bool | None) and isinstance(value, str):
        typed = _SWITCH.get(value.lower(), value)
    try:
        return msgspec.convert(typed, kind, strict=False)
    except msgspec.ValidationError:
        expected = "a whole number"
        if kind in (bool, bool | None):
            expected = "yes or no"
        elif kind == Recompute | None:
            expected = f"one of {' '.join(get_args(Recompute))}"
        elif kind == Offload:
            expected = f"one of {' '.join(get_args(Offload))}"
        elif kind not in (int, int | None):
            expected = "text"
        several = isinstance(value, str) and "," in value and "=" in value
        hint = "; one knob per --pin: --pin tp=8 --pin pp=2" if several else ""
        raise UsageError(f"--pin {name}={value}: expected {expected}{hint}") from None


def modes_of(problem: Problem, choices: Choices) -> tuple[int, ...]:
    """Codes of the recomputation modes to try, least recomputation first."""
    if choices.recompute is not None:
        return (RECOMPUTE.index(choices.recompute),)
    return tuple(RECOMPUTE.index(m) for m in recompute_modes(problem))


def _allowed(value: Any, pin: Any) -> bool:
    return pin is None or value == pin


def _sequence_parallel(problem: Problem, choices: Choices, tps: frozenset[int]) -> list[bool]:
    measured = any(b.kind == "measured" for b in problem.model.blocks)
    length = problem.job.sequence_length
    legal = max(tps) > 1 and not measured and all(length % tp == 0 for tp in tps)
    return [
        v for v in ([True, False] if legal else [False]) if _allowed(v, choices.sequence_parallel)
    ]


def knobs_for(
    problem: Problem,
    choices: Choices,
    *,
    num_stages: int,
    num_microbatches: int,
    dp: int,
    tps: frozenset[int],
) -> list[Knobs]:
    """All legal knobs of plans of this shape.

    GPipe is left out unless pinned: 1F1B takes the same time and less memory.

    Args:
        problem, choices: what is legal. num_stages, num_microbatches, dp: of the plans.
        tps: tensor-parallel sizes that occur.
    """
    schedules: list[tuple[str, int, bool]] = [("1f1b", 1, False)]
    if num_stages > 1:
        schedules += [("1f1b", 1, True), ("zb-h1", 1, False)]
        schedules += [
            ("interleaved", c, False)
            for c in ((choices.chunks,) if choices.chunks else CHUNKS)
            if c > 1 and num_microbatches % num_stages == 0
        ]
    if choices.schedule == "gpipe":
        schedules = [("gpipe", 1, False)]
    schedules = [
        s
        for s in schedules
        if _allowed(s[0], choices.schedule)
        and _allowed(s[1], choices.chunks)
        and _allowed(s[2], choices.split_backward)
    ]
    if num_stages == 1 and not schedules and choices.schedule:
        # With one stage every schedule is the same order of passes.
        schedules = [("1f1b", 1, False)] if choices.schedule != "interleaved" else []
    zeros = [z for z in ((1, 0) if dp > 1 else (0,)) if _allowed(z, choices.zero)]
    scatters = [False, True] if dp > 1 and num_stages > 1 else [False]
    return [
        Knobs(*s, zero, sp, scatter)
        for s, zero, sp, scatter in itertools.product(
            schedules,
            zeros,
            _sequence_parallel(problem, choices, tps),
            [x for x in scatters if _allowed(x, choices.scatter)],
        )
    ]


def fill_share(options: Sequence[Knobs], forward: float) -> float:
    """Least share of a stage's work that filling and draining cost per stage before the last.

    1 for plain 1F1B and GPipe: F and B of a microbatch both pass. With the weight gradient apart
    only the forward pass is sure to, and with chunks not even that.

    Args:
        options: knobs that plans may have. forward: least share of F in all passes of a layer.
    """
    if any(k.chunks > 1 for k in options):
        return 0.0
    split = any(k.split_backward or k.schedule == "zb-h1" for k in options)
    return forward if split else 1.0


def screening_knobs(options: list[Knobs]) -> Knobs:
    """The knobs to compare structures under: the plain schedule, the least memory."""
    return max(
        options,
        key=lambda k: (
            k.chunks == 1,
            k.zero,
            k.sequence_parallel,
            not k.scatter,
            k.split_backward is False,
            k.schedule == "1f1b",
        ),
    )
