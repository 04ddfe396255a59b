"""Quantities as people write them: ``24 GiB``, ``400 Gb/s``, ``312 TFLOP/s``, ``2.5 USD/h``.

The parser is closed: a unit is in the table below or it is refused with the nearest one that is.
``B`` is a byte and ``b`` a bit; ``k`` is 1000 and ``Ki`` 1024; case always counts. Results are SI:
[B], [B/s], [s], [FLOP], [FLOP/s], [USD/s], [USD/B], [W].
"""

from __future__ import annotations

import difflib
import math
import re
from fractions import Fraction
from typing import Literal, get_args

from sim.errors import InputError

__all__ = ["DIMENSIONS", "Dimension", "format_quantity", "parse_quantity", "unit_names"]

Dimension = Literal[
    "bytes",
    "bytes/s",
    "bits/s",
    "seconds",
    "FLOP",
    "FLOP/s",
    "USD/s",
    "USD/B",
    "W",
    "count",
    "fraction",
]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_ALL = _DECIMAL | _BINARY


def _prefixed(units: dict[str, Fraction], prefixes: dict[str, int]) -> dict[str, Fraction]:
    return {p + u: f * scale for u, f in units.items() for p, scale in prefixes.items()}


_BITS = _prefixed({"b": Fraction(1), "bit": Fraction(1)}, _ALL)
_BYTES = _prefixed({"B": Fraction(1)}, _ALL)
_BITS_PER_S = {u + "/s": f for u, f in _BITS.items()} | _prefixed({"bps": Fraction(1)}, _DECIMAL)
_BYTES_PER_S = {u + "/s": f for u, f in _BYTES.items()}
_FLOP = _prefixed({"FLOP": Fraction(1)}, _DECIMAL)

_UNITS: dict[Dimension, dict[str, Fraction]] = {
    "bytes": _BYTES,
    "bytes/s": _BYTES_PER_S | {u: f / 8 for u, f in _BITS_PER_S.items()},
    "bits/s": _BITS_PER_S | {u: f * 8 for u, f in _BYTES_PER_S.items()},
    "seconds": {
        "s": Fraction(1),
        "ms": Fraction(1, 10**3),
        "us": Fraction(1, 10**6),
        "µs": Fraction(1, 10**6),  # U+00B5 micro sign
        "μs": Fraction(1, 10**6),  # U+03BC Greek mu
        "ns": Fraction(1, 10**9),
        "min": Fraction(60),
        "h": Fraction(3600),
    },
    "FLOP": _FLOP,
    "FLOP/s": {u + "/s": f for u, f in _FLOP.items()},
    "USD/s": {"USD/s": Fraction(1), "USD/h": Fraction(1, 3600)},
    "USD/B": {"USD/" + u: 1 / f for u, f in _BYTES.items()},
    "W": _prefixed({"W": Fraction(1)}, _DECIMAL),
    "count": {p: Fraction(f) for p, f in _ALL.items()},
    "fraction": {"": Fraction(1), "%": Fraction(1, 100)},
}

# What format_quantity prints with, largest first.
_PRINT: dict[Dimension, tuple[str, ...]] = {
    "bytes": ("PiB", "TiB", "GiB", "MiB", "KiB", "B"),
    "bytes/s": ("PB/s", "TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
    "bits/s": ("Pb/s", "Tb/s", "Gb/s", "Mb/s", "kb/s", "b/s"),
    "seconds": ("s", "ms", "us", "ns"),
    "FLOP": ("EFLOP", "PFLOP", "TFLOP", "GFLOP", "MFLOP", "kFLOP", "FLOP"),
    "FLOP/s": ("EFLOP/s", "PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "kFLOP/s", "FLOP/s"),
    "USD/s": ("USD/h",),
    "USD/B": ("USD/GB",),
    "W": ("MW", "kW", "W"),
    "count": ("",),
    "fraction": ("%",),
}

# Three exponent digits and forty characters bound the work a hostile number can cause.
_NUMBER = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*(\D?.*)", re.DOTALL)
_MAX_LENGTH = 40


def unit_names(dimension: Dimension) -> tuple[str, ...]:
    """Return every unit accepted for a dimension, "" standing for no unit."""
    return tuple(_UNITS[dimension])


def parse_quantity(text: str | float, dimension: Dimension) -> float:
    """Read a number with its unit.

    A bare number is accepted for "count" and "fraction", and 0 for every dimension; anything else
    needs its unit. Bits are converted where bytes per second are wanted, and the other way round.

    Args:
        text: e.g. "400 Gb/s". dimension: what is wanted.

    Returns:
        The value in SI: [B], [B/s], [b/s] for "bits/s", [s], [FLOP], [FLOP/s], [USD/s], [USD/B],
        [W].

    Raises:
        InputError: not a number, not finite, negative, or a unit of another dimension.

    >>> parse_quantity("400 Gb/s", "bytes/s")
    50000000000.0
    >>> parse_quantity("24 GiB", "bytes") == 24 * 2**30
    True
    """
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise _refuse("not a quantity", text, dimension)
    if not isinstance(text, str):
        if not math.isfinite(text) or text < 0:
            raise _refuse("must be finite and not negative", text, dimension)
        if text and "" not in _UNITS[dimension]:
            raise _refuse("a number without its unit", text, dimension)
        return float(text)
    match = _NUMBER.fullmatch(text.strip())
    if match is None or len(text) > _MAX_LENGTH:
        raise _refuse("not a number and a unit", text, dimension)
    number, unit = match.group(1), match.group(2)
    if number.startswith("-"):
        raise _refuse("must not be negative", text, dimension)
    value = Fraction(number.replace("_", ""))
    if unit == "" and value == 0:
        return 0.0
    scale = _UNITS[dimension].get(unit)
    if scale is None:
        raise _refuse(_why_not(unit, dimension), text, dimension, unit)
    try:
        return float(value * scale)
    except OverflowError:
        raise _refuse("too large", text, dimension) from None


def format_quantity(value: float, dimension: Dimension, digits: int = 4) -> str:
    """Print an SI value with the unit people read most easily.

    Args:
        value: in the SI unit ``parse_quantity`` returns. digits: significant digits; 17 round-trips
            to within one rounding.

    >>> format_quantity(50e9, "bytes/s"), format_quantity(1.5e-6, "seconds")
    ('50 GB/s', '1.5 us')
    """
    unit = _PRINT[dimension][-1]
    for candidate in _PRINT[dimension]:
        if abs(value) >= float(_UNITS[dimension][candidate]):
            unit = candidate
            break
    number = float(Fraction(value) / _UNITS[dimension][unit]) if math.isfinite(value) else value
    separator = "" if unit in ("", "%") else " "
    return f"{number:.{digits}g}{separator}{unit}"


def _why_not(unit: str, dimension: Dimension) -> str:
    if unit == "":
        return "a number without its unit"
    other = next((d for d in DIMENSIONS if unit in _UNITS[d]), None)
    if other is not None:
        return f"{unit} is a unit of {other}, not of {dimension}"
    if dimension == "bytes" and unit in _BITS:
        return f"{unit} counts bits (b), not bytes (B)"
    return f"unknown unit {unit}"


def _nearest(unit: str, dimension: Dimension) -> str:
    names = [u for u in _UNITS[dimension] if u]
    same = [u for u in names if u.lower() == unit.lower()]
    close = same + difflib.get_close_matches(unit, names, n=2, cutoff=0.5)
    return " or ".join(dict.fromkeys(close[:2]))


def _refuse(why: str, text: object, dimension: Dimension, unit: str = "") -> InputError:
    names = [u or "no unit" for u in _UNITS[dimension] if "bit" not in u and not u.startswith("μ")]
    expected = f"a number and a unit of {dimension}: {', '.join(names)}"
    nearest = _nearest(unit, dimension) if unit else ""
    return InputError(
        why + (f"; the nearest unit is {nearest}" if nearest else ""),
        found=str(text)[:80],
        expected=expected,
    )
