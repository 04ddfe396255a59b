"""Plan files: canonical JSON, versioned, checked on reading; and the pipelining schedule CSV."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sim.errors import PlanError
from sim.plan.plan import FORMAT, Plan

__all__ = ["MAX_PLAN_BYTES", "load_plan", "plan_from_json", "plan_to_json", "save_plan"]

MAX_PLAN_BYTES = 64 * 2**20
"""[B] largest plan file that is read."""


def plan_to_json(plan: Plan) -> bytes:
    """Canonical JSON of a plan, defaults left out of nothing, keys in a fixed order."""
    return msgspec.json.encode(plan, order="deterministic")


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file: beside the target first, then renamed.

    Raises:
        PlanError: the target is a folder or a device, or its folder cannot be written.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        raise PlanError("cannot write a plan there", str(path), expected="a file, or a new name")
    beside = target.with_name(target.name + f".{os.getpid()}.part")
    try:
        beside.write_bytes(plan_to_json(plan) + b"\n")
        beside.replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError("cannot write the plan", str(path), found=reason) from error
    finally:
        beside.unlink(missing_ok=True)


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing, too large, truncated, of a newer version, or not a plan.
    """
    target = Path(path)
    try:
        size = target.stat().st_size
        if size > MAX_PLAN_BYTES:
            raise PlanError(
                "plan file is too large",
                str(path),
                found=f"{size} bytes",
                expected=f"at most {MAX_PLAN_BYTES}",
            )
        data = target.read_bytes()
    except OSError as error:
        raise PlanError(
            "cannot read the plan file", str(path), found=error.strerror or str(error)
        ) from error
    return plan_from_json(data, str(path))


def plan_from_json(data: bytes, source: str = "") -> Plan:
    """Decode a plan.

    Args:
        data: JSON. source: name for messages.

    Raises:
        PlanError: see load_plan.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format > FORMAT:
            raise PlanError(
                "plan of a newer version",
                source,
                key="format",
                found=str(head.format),
                expected=f"at most {FORMAT}; written by hetlab {head.version or 'unknown'}",
            )
        return msgspec.json.decode(data, type=Plan)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise PlanError(f"not a plan: {message}", source, key=where.strip("`.")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        line = data[: _position(str(error), data)].count(b"\n") + 1
        raise PlanError(
            "plan file is truncated or not JSON", source, line, found=str(error)
        ) from error


class _Head(msgspec.Struct):
    format: int = FORMAT
    version: str = ""


def _position(message: str, data: bytes) -> int:
    tail = message.rpartition("byte ")[2].rstrip(")")
    return int(tail) if tail.isdigit() else len(data)
