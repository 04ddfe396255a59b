"""Output of perftest (ib_write_bw, ib_send_lat ...): the table, or the JSON of ``--out_json``.

Written for the output of 4.5 and 6.x, as remembered and as other readers of it show.

Bandwidth tests keep many messages in flight. Latency tests print half of a round trip. A table's
heading says its unit: ``Gb/sec`` or ``MB/sec``, where perftest's MB are 2**20 bytes (newer versions
write ``MiB/sec``). The JSON names no unit, so the caller must.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sim.errors import InputError
from sim.interop.link_records import Transfer, limited

__all__ = ["UNITS", "perftest_from_json", "perftest_from_text", "read_perftest"]

UNITS = {"Gb": 1e9 / 8, "MB": 2.0**20, "MiB": 2.0**20}
"""[B/s] of a printed 1."""
_UNIT = re.compile(r"BW average\[(\w+)/sec\]")


def read_perftest(text: str, unit: str = "") -> tuple[Transfer, ...]:
    """Read either form.

    Args:
        text: of the output. unit: of bandwidths in a JSON, a key of ``UNITS``.

    Raises:
        InputError: malformed; says the line, or the key in a JSON.
    """
    if limited(text, "perftest output").lstrip().startswith("{"):
        return perftest_from_json(text, unit)
    return perftest_from_text(text)


def perftest_from_text(text: str) -> tuple[Transfer, ...]:
    """Read the printed table.

    Raises:
        InputError: no heading, an unknown unit, a row that does not fit it.
    """
    at, factor, latency, found = -1, 0.0, False, []
    for number, line in enumerate(limited(text, "perftest output").splitlines(), 1):
        text_line = line.strip()
        if text_line.startswith("#bytes"):
            at, factor, latency = _heading(text_line, number)
        elif text_line[:1].isdigit():
            words = text_line.split()
            if not all(_is_number(w) for w in words):
                continue  # an address or a device's number
            if at < 0:
                raise InputError(
                    "a row before the heading", line=number, found=text_line[:60],
                    expected="#bytes #iterations ...",
                )  # fmt: skip
            if at >= len(words) or float(words[at]) <= 0:
                raise InputError(
                    "a row that does not fit the heading", line=number, found=text_line[:60]
                )
            size, value = float(words[0]), float(words[at])
            found.append(
                Transfer(nbytes=size, seconds=value * 1e-6)
                if latency
                else Transfer(nbytes=size, rate=value * factor)
            )
    if not found:
        raise InputError("no row of perftest", line=1, expected="#bytes #iterations ... and rows")
    return tuple(found)


def _heading(line: str, number: int) -> tuple[int, float, bool]:
    """Column of the value, what a printed 1 is, and whether it is a latency."""
    if "t_typical[usec]" in line:
        return 4, 1e-6, True
    if "t_avg[usec]" in line and "t_min" not in line:  # tests of a duration print no median
        return 2, 1e-6, True
    unit = _UNIT.search(line)
    if unit is None or unit.group(1) not in UNITS:
        raise InputError(
            "a heading of an unknown unit", line=number, found=line[:80],
            expected=" or ".join(f"BW average[{u}/sec]" for u in UNITS) + " or t_typical[usec]",
        )  # fmt: skip
    return 3, UNITS[unit.group(1)], False


def _is_number(word: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", word) is not None


def perftest_from_json(text: str, unit: str = "") -> tuple[Transfer, ...]:
    """Read the JSON of ``--out_json``; ``results`` is one row, or a list of them.

    Raises:
        InputError: no JSON, a missing key, or bandwidths without a unit.
    """
    try:
        document = json.loads(limited(text, "perftest output"))
    except json.JSONDecodeError as error:
        raise InputError(
            "no JSON of perftest", line=error.lineno, found=error.msg, expected="JSON"
        ) from None
    rows = document.get("results") if isinstance(document, dict) else None
    listed = rows if isinstance(rows, list) else [rows]
    found = [row for row in listed if isinstance(row, dict)]
    if not found or len(found) < len(listed):
        raise InputError("no results", key="results", expected="a row, or a list of rows")
    return tuple(_result(row, unit) for row in found)


def _result(row: dict[str, Any], unit: str) -> Transfer:
    size = _number(row, "MsgSize")
    if "t_typical" in row or "t_avg" in row:
        seconds = _number(row, "t_typical" if "t_typical" in row else "t_avg") * 1e-6
        return Transfer(nbytes=size, seconds=seconds)
    rate = _number(row, "BW_average")
    if unit not in UNITS:
        raise InputError(
            "bandwidths of a perftest JSON have no unit", key="results.BW_average",
            found=unit or "none given", expected=" or ".join(UNITS),
        )  # fmt: skip
    return Transfer(nbytes=size, rate=rate * UNITS[unit])


def _number(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise InputError(
            "not a positive number", key=f"results.{name}", found=repr(value), expected="a number"
        )
    return float(value)
