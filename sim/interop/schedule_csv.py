"""The schedule CSV of torch.distributed.pipelining, compute only: one row per pipeline rank.

A cell is stage, kind and microbatch, ``2F0``; an empty cell is an idle slot. It is the format that
``_dump_csv`` and ``_load_csv`` of torch 2.6 and later call "compute_only".
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import msgspec

from sim.errors import InputError
from sim.plan.draft import PipelineKnobs
from sim.plan.passes import expand
from sim.plan.plan import Call, Plan
from sim.plan.program import walk
from sim.plan.schedules import Order, Slot, explicit_order, positions, time_slots

__all__ = [
    "load_schedule_csv",
    "plan_order",
    "save_schedule_csv",
    "schedule_from_csv",
    "schedule_knobs",
    "schedule_to_csv",
]

COMPUTE = ("F", "B", "I", "W")
DEFAULT = PipelineKnobs()


def plan_order(plan: Plan, replica: int = 0) -> Order:
    """Compute ops of one step of a plan, per pipeline position, in list order.

    Args:
        plan: the plan. replica: whose programs.

    Raises:
        InputError: the plan has no such replica, or ops that the format has no cell for.
    """
    order: Order = []
    programs = {r: p for p in expand(plan) for r in p.ranks}
    hosted: dict[int, list[int]] = {}
    for segment in plan.placement.stages:
        hosted.setdefault(segment.cell, []).append(segment.stage)
    for position in range(plan.placement.num_stages):
        try:
            rank = plan.placement.cell(position, replica).ranks[0]
        except KeyError:
            raise InputError(
                "the plan has no such replica",
                key="replica",
                found=str(replica),
                expected=f"0 to {plan.placement.num_replicas - 1}",
            ) from None
        sole = hosted.get(position, [position])
        slots: list[Slot] = []
        for op in walk(programs[rank]):
            if op.kind not in COMPUTE:
                continue
            if op.part >= 0 or op.label or op.mb < 0 or (op.stage < 0 and len(sole) > 1):
                raise InputError(
                    "the pipelining schedule CSV has no cell for this op",
                    found=op.name,
                    expected="stage, kind and microbatch, without part or segment",
                )
            slots.append((op.kind, op.stage if op.stage >= 0 else sole[0], op.mb))
        order.append(slots)
    return order


def schedule_to_csv(plan: Plan, replica: int = 0) -> str:
    """Write the compute order of a plan, laid out in equal time slots.

    Raises:
        InputError: see plan_order.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in time_slots(plan_order(plan, replica)):
        writer.writerow([f"{s[1]}{s[0]}{s[2]}" if s else "" for s in row])
    return text.getvalue()


def save_schedule_csv(plan: Plan, path: str | Path, replica: int = 0) -> None:
    """Write ``schedule_to_csv`` to a file."""
    Path(path).write_text(schedule_to_csv(plan, replica), encoding="utf-8")


def schedule_knobs(text: str, base: PipelineKnobs = DEFAULT, source: str = "") -> PipelineKnobs:
    """Read a schedule CSV into the knobs of the pipeline axis.

    The number of chunks is that of virtual stages per row; which stage stands in which row is as
    the file says. The cuts are left as they are.

    Args:
        text: CSV. base: the other knobs. source: file name for messages.

    Raises:
        InputError: a cell is not a compute op, or the schedule is incomplete or never finishes.
    """
    rows = [
        " ".join(cell.strip() for cell in row if cell.strip())
        for row in csv.reader(io.StringIO(text))
    ]
    while rows and not rows[-1]:
        rows.pop()
    try:
        order = explicit_order(rows)
    except InputError as error:
        line = error.key.removeprefix("schedule").strip(".")
        raise InputError(
            error.message,
            source or "schedule",
            int(line) + 1 if line.isdigit() else 0,
            "",
            error.found,
            error.expected,
        ) from None
    virtual = len(positions(order))
    if virtual % len(rows):
        raise InputError(
            "the rows of a schedule must hold equally many stages",
            source or "schedule",
            found=f"{virtual} stages in {len(rows)} rows",
            expected=f"a multiple of {len(rows)}",
        )
    return msgspec.structs.replace(
        base, schedule="csv", order=tuple(rows), chunks=virtual // len(rows), split_backward=False
    )


def schedule_from_csv(text: str, source: str = "") -> Call:
    """Read a schedule CSV into the generator call of a lowering.

    Raises:
        InputError: see schedule_knobs.
    """
    knobs = schedule_knobs(text, source=source)
    args = {"name": knobs.schedule, "chunks": knobs.chunks, "order": list(knobs.order)}
    return Call("schedule", 1, args)


def load_schedule_csv(path: str | Path, base: PipelineKnobs = DEFAULT) -> PipelineKnobs:
    """Read a schedule CSV file; see schedule_knobs.

    Raises:
        InputError: the file cannot be read, or see schedule_knobs.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("cannot read the schedule", str(path), found=str(error)) from error
    return schedule_knobs(text, base, str(path))
