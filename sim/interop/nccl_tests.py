"""Output of nccl-tests: the table, and the JSON of ``-J``, both as its source of 2025 writes them.

Columns are found by the table's own heading, so that versions without ``redop`` and ``root`` and
with ``error`` for ``#wrong`` read alike. Out of place counts; in place stands in where it is
missing. Times are microseconds; ``size`` is the whole tensor in bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from sim.errors import InputError
from sim.interop.link_records import Transfer, limited, member_transfer

__all__ = ["CollectiveTime", "nccl_from_json", "nccl_from_text", "nccl_transfers", "read_nccl"]

_PROGRAM = re.compile(r"(\w+)_perf\b")
_BYTES_RATE = 1e9


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """One row.

    Args:
        collective: as the program is called without ``_perf``, "" when nothing says it.
        ranks: members. nbytes: [B] of the whole tensor. seconds: [s].
        busbw: [B/s] bus bandwidth as printed.
    """

    collective: str
    ranks: int
    nbytes: float
    seconds: float
    busbw: float


def read_nccl(text: str, collective: str = "") -> tuple[CollectiveTime, ...]:
    """Read either form.

    Args:
        text: of the output. collective: where the output does not name it.

    Raises:
        InputError: malformed; says the line, or the key in a JSON.
    """
    limited(text, "nccl-tests output")
    if text.lstrip().startswith("{"):
        return nccl_from_json(text, collective)
    return nccl_from_text(text, collective)


def nccl_from_text(text: str, collective: str = "") -> tuple[CollectiveTime, ...]:
    """Read the printed table.

    Raises:
        InputError: a row before the heading, a number that is none, wrong results; no row at all.
    """
    columns: dict[str, int] = {}
    ranks, found = 0, []
    for number, line in enumerate(limited(text, "nccl-tests output").splitlines(), 1):
        words = line.split()
        if line.startswith("#"):
            ranks += bool(re.match(r"#\s+Rank\s+\d+\s", line))
            named = _PROGRAM.search(line)
            if named and not collective:
                collective = named.group(1)
            heading = words[1:]
            if heading[:1] == ["size"] and "time" in heading:
                # The first of each name: out of place stands before in place.
                columns = {w: heading.index(w) for w in heading}
        elif words and words[0].isdigit():
            if not columns:
                raise InputError("a row before the heading", line=number, found=line.strip()[:60])
            found.append(_row(words, columns, number, collective, ranks))
    if not found:
        raise InputError(
            "no row of nccl-tests", line=1, expected="# size count type ... and rows below"
        )
    return tuple(found)


def _row(
    words: Sequence[str], columns: dict[str, int], line: int, collective: str, ranks: int
) -> CollectiveTime:
    def number(name: str) -> float:
        at = columns[name]
        try:
            return float(words[at])
        except (IndexError, ValueError):
            raise InputError(
                f"no number for {name}", line=line, found=words[at] if at < len(words) else "",
                expected="a number",
            ) from None  # fmt: skip

    lacking = sorted({"size", "time", "busbw"} - set(columns))
    if lacking:
        raise InputError("the heading lacks a column", line=line, expected=" ".join(lacking))
    wrong = "#wrong" if "#wrong" in columns else ""
    if wrong and words[columns[wrong] : columns[wrong] + 1] != ["N/A"] and number(wrong) > 0:
        raise InputError("the test computed wrong results", line=line, found=f"{number(wrong):g}")
    return CollectiveTime(
        collective=collective, ranks=ranks, nbytes=number("size"), seconds=number("time") * 1e-6,
        busbw=number("busbw") * _BYTES_RATE,
    )  # fmt: skip


def nccl_from_json(text: str, collective: str = "") -> tuple[CollectiveTime, ...]:
    """Read the JSON of ``-J``.

    Raises:
        InputError: no JSON, or a key that is missing or wrong.
    """
    try:
        document = json.loads(limited(text, "nccl-tests output"))
    except json.JSONDecodeError as error:
        raise InputError(
            "no JSON of nccl-tests", line=error.lineno, found=error.msg, expected="JSON"
        ) from None
    results = document.get("results") if isinstance(document, dict) else None
    if not isinstance(results, list) or not results:
        raise InputError("no results", key="results", expected="a list of rows")
    config = document.get("config")
    config = config if isinstance(config, dict) else {}
    devices = config.get("devices")
    ranks = max(
        len(devices) if isinstance(devices, list) else 0,
        _count(config.get("ngpus")) * _count(config.get("nthreads")),
    )
    words = document.get("args")
    named = _PROGRAM.search(str(words[0])) if isinstance(words, list) and words else None
    collective = collective or (named.group(1) if named else "")
    return tuple(_result(r, f"results.{i}", collective, ranks) for i, r in enumerate(results))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _result(row: Any, key: str, collective: str, ranks: int) -> CollectiveTime:
    if not isinstance(row, dict):
        raise InputError("not a row", key=key, found=type(row).__name__, expected="an object")
    way = "out_of_place" if isinstance(row.get("out_of_place"), dict) else "in_place"
    times = row.get(way)
    if not isinstance(times, dict):
        raise InputError("neither out_of_place nor in_place", key=key)

    def number(of: dict[str, Any], name: str, at: str) -> float:
        value = of.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise InputError("not a number", key=f"{at}.{name}", found=repr(value))
        return float(value)

    if times.get("nwrong") is not None and number(times, "nwrong", f"{key}.{way}") > 0:
        raise InputError("the test computed wrong results", key=f"{key}.{way}.nwrong")
    return CollectiveTime(
        collective=collective, ranks=ranks, nbytes=number(row, "size", key),
        seconds=number(times, "time", f"{key}.{way}") * 1e-6,
        busbw=number(times, "bus_bw", f"{key}.{way}") * _BYTES_RATE,
    )  # fmt: skip


def nccl_transfers(rows: Sequence[CollectiveTime]) -> tuple[Transfer, ...]:
    """The messages between neighbours of a ring that rows of one collective stand for.

    Raises:
        InputError: a collective that is no ring, or one rank only.
    """
    return tuple(
        member_transfer(r.collective, r.ranks, r.nbytes, r.seconds)
        for r in rows
        if r.nbytes > 0 and r.seconds > 0
    )
