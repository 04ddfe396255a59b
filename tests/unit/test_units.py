from __future__ import annotations

import pint
import pytest

from sim.errors import InputError
from sim.units import DIMENSIONS, format_quantity, parse_quantity, unit_names


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("24 GiB", "bytes", 24 * 2**30),
        ("24 GB", "bytes", 24e9),
        ("16KiB", "bytes", 16384),
        ("400 Gb/s", "bytes/s", 50e9),
        ("400 Gbps", "bytes/s", 50e9),
        ("50 GB/s", "bits/s", 400e9),
        ("1 Kib/s", "bytes/s", 128),
        ("312 TFLOP/s", "FLOP/s", 312e12),
        ("2e3 GFLOP", "FLOP", 2e12),
        ("1.5 us", "seconds", 1.5e-6),
        ("1.5 µs", "seconds", 1.5e-6),
        ("2 h", "seconds", 7200),
        ("3.6 USD/h", "USD/s", 1e-3),
        ("0.09 USD/GB", "USD/B", 9e-11),
        ("4Ki", "count", 4096),
        ("4k", "count", 4000),
        ("1_000", "count", 1000),
        (7, "count", 7),
        ("92 %", "fraction", 0.92),
        (0.92, "fraction", 0.92),
        (0, "bytes", 0),
        ("0", "seconds", 0),
    ],
)
def test_reads(text, dimension, value):
    assert parse_quantity(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "dimension", "message"),
    [
        ("24", "bytes", "a number without its unit"),
        (24, "bytes", "a number without its unit"),
        ("24 gib", "bytes", "unknown unit gib; the nearest unit is GiB"),
        ("10 KB", "bytes", "unknown unit KB; the nearest unit is kB or"),
        ("80 Gb", "bytes", "Gb counts bits (b), not bytes (B)"),
        ("80 GB/s", "bytes", "GB/s is a unit of bytes/s, not of bytes"),
        ("25 GB", "bytes/s", "GB is a unit of bytes, not of bytes/s"),
        ("312 TFLOPS", "FLOP/s", "the nearest unit is TFLOP/s"),
        ("-1 s", "seconds", "must not be negative"),
        (-1, "count", "must be finite and not negative"),
        (float("nan"), "count", "must be finite and not negative"),
        ("nan s", "seconds", "not a number and a unit"),
        ("1e999 B", "bytes", "too large"),
        ("1e9999 B", "bytes", "unknown unit"),
        ("1" * 60 + " B", "bytes", "not a number and a unit"),
        (True, "count", "not a quantity"),
        (None, "count", "not a quantity"),
        ("", "count", "not a number and a unit"),
    ],
)
def test_refuses(text, dimension, message):
    with pytest.raises(InputError) as error:
        parse_quantity(text, dimension)
    assert message in error.value.message
    assert error.value.expected.startswith(f"a number and a unit of {dimension}: ")


PINT_BASE = {
    "bytes": "byte",
    "bytes/s": "byte/second",
    "bits/s": "bit/second",
    "seconds": "second",
}
PINT_NAMES = {
    "": "",
    "k": "kilo",
    "M": "mega",
    "G": "giga",
    "T": "tera",
    "P": "peta",
    "E": "exa",
} | {
    "Ki": "kibi",
    "Mi": "mebi",
    "Gi": "gibi",
    "Ti": "tebi",
    "Pi": "pebi",
}
PINT_TIME = {
    "s": "second",
    "ms": "millisecond",
    "us": "microsecond",
    "µs": "microsecond",
    "μs": "microsecond",
    "ns": "nanosecond",
    "min": "minute",
    "h": "hour",
}


def in_words(unit: str) -> str | None:
    """Spell one of our units so that pint cannot misread it (its Gb is a gilbert)."""
    if unit in PINT_TIME:
        return PINT_TIME[unit]
    amount, _, per = unit.partition("/")
    if per not in ("", "s"):
        return None
    for short, long in (("bit", "bit"), ("b", "bit"), ("B", "byte")):
        prefix = amount.removesuffix(short)
        if amount.endswith(short) and prefix in PINT_NAMES:
            return PINT_NAMES[prefix] + long + ("/second" if per else "")
    return None


def test_agrees_with_pint_on_every_unit_both_know():
    registry = pint.UnitRegistry()
    compared = 0
    for dimension, base in PINT_BASE.items():
        for unit in unit_names(dimension):
            words = in_words(unit)
            if words is None:
                assert unit.endswith("bps"), unit
                continue
            want = registry.Quantity(3.0, words).to(base).magnitude
            assert parse_quantity(f"3 {unit}", dimension) == pytest.approx(want, rel=1e-12), unit
            compared += 1
    assert compared > 80


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (24 * 2**30, "bytes", "24 GiB"),
        (50e9, "bytes/s", "50 GB/s"),
        (0, "bytes", "0 B"),
        (1.5e-6, "seconds", "1.5 us"),
        (90.0, "seconds", "90 s"),
        (1e-3, "USD/s", "3.6 USD/h"),
        (0.923, "fraction", "92.3%"),
        (12345678, "count", "1.235e+07"),
        (float("inf"), "seconds", "inf s"),
    ],
)
def test_prints(value, dimension, text):
    assert format_quantity(value, dimension) == text


def test_every_dimension_has_units():
    assert all(unit_names(d) for d in DIMENSIONS)
