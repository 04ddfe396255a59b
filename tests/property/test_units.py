from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import InputError
from sim.units import DIMENSIONS, format_quantity, parse_quantity, unit_names

dimensions = st.sampled_from(DIMENSIONS)


@given(dimensions, st.floats(1e-15, 1e25))
def test_printing_then_reading_gives_the_value_back(dimension, value):
    text = format_quantity(value, dimension, digits=17)
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-15)


@given(dimensions, st.data(), st.decimals(0, 10**6, places=3))
def test_a_unit_scales_linearly(dimension, data, number):
    unit = data.draw(st.sampled_from(unit_names(dimension)))
    one = parse_quantity(f"1 {unit}", dimension)
    assert parse_quantity(f"{number} {unit}", dimension) == pytest.approx(float(number) * one)


@given(dimensions, st.text(max_size=12))
def test_any_text_is_read_or_refused_with_what_was_expected(dimension, text):
    try:
        value = parse_quantity(text, dimension)
    except InputError as error:
        assert error.expected and error.message
    else:
        assert value >= 0
